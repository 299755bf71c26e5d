"""The sink passage: the fixed text in front of which no document is stored.

KV of a document computed from position 0 carries an attention sink on its own first tokens, which does harm wherever
else that KV is used, and KV computed behind little or monotonous text differs more from what a long prompt gives.
Canonical ingest therefore computes documents behind this passage: two dozen paragraphs of plain prose on as many
subjects. Its KV is computed once per engine (vLLM's prefix cache keeps it) and never becomes part of a prompt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

SINK_TEXT = (Path(__file__).parent / "sink_passage.txt").read_text(encoding="utf-8") + "\n"
LARGEST_SHARE = 4


def sink_tokens(tokenizer: Any, max_model_len: int) -> list[int]:
    """Token ids of the sink passage, or of its end where it would take more than a quarter of `max_model_len`.

    A document follows a finished sentence and a blank line.

    Args:
        tokenizer: anything with `encode(text, add_special_tokens=False) -> list[int]`.
        max_model_len: most tokens the engine takes in one request.
    """
    ids = list(tokenizer.encode(SINK_TEXT, add_special_tokens=False))
    return ids[max(0, len(ids) - max_model_len // LARGEST_SHARE) :]

"""The sink passage: the fixed text in front of which no document is stored.

KV of a document computed from position 0 carries an attention sink on its own first tokens, which does harm wherever
else that KV is used. Canonical ingest therefore computes documents behind this passage. It is one neutral paragraph of
plain prose, repeated to length; its KV is computed once per engine and never becomes part of a prompt.
"""

from __future__ import annotations

from typing import Any

SINK_TEXT = (
    "The following pages were gathered over a number of years and are kept here in the order in which they arrived. "
    "Some of them were written with care and some in haste, some are long and others take up only a few lines. They "
    "speak of places, of people and of the work that is done from one day to the next, and no part of them depends on "
    "another. A reader may begin anywhere, leave out whatever is of no use, and come back to it at a later time. Where "
    "a date or a name is given it is given as it was found. Nothing has been added, and nothing has been taken away."
    "\n\n"
)


def sink_tokens(tokenizer: Any, n_tokens: int = 400) -> list[int]:
    """Token ids of the sink passage, repeated and cut to exactly `n_tokens`.

    The last tokens are those of the paragraph's end, so that a document follows a finished sentence and a blank line.

    Args:
        tokenizer: anything with `encode(text, add_special_tokens=False) -> list[int]`.
        n_tokens: length wanted; 0 gives an empty list.

    Raises:
        ValueError: `n_tokens` is negative.
    """
    if n_tokens < 0:
        raise ValueError(f"n_tokens: found {n_tokens}, expected 0 or more")
    paragraph = list(tokenizer.encode(SINK_TEXT, add_special_tokens=False))
    repeats = -(-n_tokens // len(paragraph))
    return (paragraph * repeats)[len(paragraph) * repeats - n_tokens :]

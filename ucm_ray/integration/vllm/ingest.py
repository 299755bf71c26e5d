"""Canonical ingest with vLLM's offline `LLM`: store documents behind the sink passage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm import tqdm
from vllm import SamplingParams

from ucm_ray.blend.sink import sink_tokens


def ingest_prompt(token_ids: Sequence[int], sink_ids: Sequence[int]) -> tuple[list[int], dict[str, Any]]:
    """Prompt and `kv_transfer_params` of the request that stores a document; for any client of an engine."""
    return [*sink_ids, *token_ids], {"ucm": {"ingest_from": len(sink_ids), "blend": False, "save": True}}


def ingest_documents(llm: Any, documents: Sequence[str | Sequence[int]], cache_salt: str | None = None,
                     progress: bool = True) -> list[int]:
    """Compute and store documents (texts or token ids); what is stored already is skipped by the engine.

    Interrupted, it can be called again: only what is missing is stored. Returns the tokens of each document. Raises
    ValueError for an empty document or one that does not fit behind the sink passage.
    """
    tokenizer = llm.get_tokenizer()
    longest = llm.llm_engine.model_config.max_model_len
    sink_ids = sink_tokens(tokenizer, longest)
    limit = longest - len(sink_ids) - 1
    texts = [tokenizer.encode(doc, add_special_tokens=False) if isinstance(doc, str) else list(doc)
             for doc in documents]
    for number, ids in enumerate(texts):
        if not 0 < len(ids) <= limit:
            raise ValueError(f"document {number} has {len(ids)} tokens, expected 1 to {limit}")
    with tqdm(total=len(texts), desc="ingest", unit="document", disable=not progress) as bar:
        for ids in texts:
            prompt, params = ingest_prompt(ids, sink_ids)
            sampling = SamplingParams(max_tokens=1, temperature=0, extra_args={"kv_transfer_params": params})
            request: dict[str, Any] = {"prompt_token_ids": prompt}
            if cache_salt:
                request["cache_salt"] = cache_salt
            llm.generate([request], sampling, use_tqdm=False)
            bar.update()
    return [len(ids) for ids in texts]

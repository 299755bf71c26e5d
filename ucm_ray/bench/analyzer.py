"""`ucm-ray bench analyzer`: time and memory of finding stored chunks in a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

CHUNK_TOKENS = 64
CHUNKS_PER_SOURCE = 16
VOCABULARY = 49_152
_BATCH = 50_000


def main(
    prompt_tokens: Annotated[int, typer.Option(min=1024, help="Tokens of the prompt.")] = 32_768,
    chunks: Annotated[int, typer.Option(min=1000, help="Stored chunks of 64 tokens.")] = 1_000_000,
    repeat: Annotated[int, typer.Option(min=3, help="Timed calls for each prompt; the median counts.")] = 15,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Analyse prompts against many stored chunks and against a hundredth of them.

    Prompts: stored documents in another order, every other 1,024 tokens new, all new, and one token repeated (which is
    stored too, in many chunks). `ms` is the slowest prompt's; `bytes_per_chunk` is beyond the token ids.
    """
    from ucm_ray.bench import report

    small, large = max(1000, chunks // 100), chunks
    rows, sizes = [], {}
    for stored in dict.fromkeys((small, large)):
        index, prompts = build(stored, prompt_tokens)
        sizes[stored] = index.memory_bytes(tokens=False)
        for name, prompt in prompts.items():
            rows.append(_measure(index, stored, name, prompt, repeat))
        del index
    at_large = {row["prompt"]: row["ms"] for row in rows if row["chunks"] == large}
    at_small = {row["prompt"]: row["ms"] for row in rows if row["chunks"] == small}
    result = {
        "prompt_tokens": prompt_tokens,
        "chunks": large,
        "ms": max(at_large.values()),
        "bytes_per_chunk": sizes[large] / large,
        "bytes_per_anchor": sizes[large] / large / (CHUNK_TOKENS // 16),
        "slowdown_from_a_hundredth": max(at_large.values()) / max(at_small.values()),
        "half_prompt_ratio": max(row["ms"] / row["half_ms"] for row in rows if row["chunks"] == large),
        "rows": rows,
    }
    report.table(rows)
    typer.echo(
        f"{prompt_tokens} tokens against {large} chunks: {result['ms']:.2f} ms; "
        f"{result['bytes_per_anchor']:.1f} bytes an anchor beyond the token ids; "
        f"{result['slowdown_from_a_hundredth']:.2f} times the time against {small} chunks"
    )
    report.write_json(json_path, result)


def build(num_chunks: int, prompt_tokens: int):
    """(index of `num_chunks` chunks, prompts by name). The same text on every machine."""
    import numpy as np

    from ucm_ray.blend.chunk import ChunkRecord
    from ucm_ray.blend.index import ChunkIndex

    random = np.random.default_rng(0)
    repeated = 17
    special = [
        ChunkRecord(f"{number:032x}", _ended(np.full(CHUNK_TOKENS, repeated, np.int32), number, random), "f" * 32,
                    number * CHUNK_TOKENS)
        for number in range(CHUNK_TOKENS - 16)
    ]
    index = ChunkIndex()
    index.add(special)
    documents = []
    for token_ids, records in _records(num_chunks - len(special), random):
        index.add(records)
        if sum(map(len, documents)) < prompt_tokens:
            documents.append(token_ids)
    stored = np.concatenate(documents)[:prompt_tokens]
    document_tokens = CHUNKS_PER_SOURCE * CHUNK_TOKENS
    pieces = [stored[start : start + document_tokens] for start in range(0, stored.size, document_tokens)]
    reused = np.concatenate([pieces[number] for number in random.permutation(len(pieces))])
    reused = np.resize(reused, prompt_tokens)
    new = random.integers(0, VOCABULARY, prompt_tokens).astype(np.int32)
    mixed = np.where(np.arange(prompt_tokens) // document_tokens % 2 == 0, reused, new)
    return index, {"reused": reused, "half new": mixed, "all new": new,
                   "one token repeated": np.full(prompt_tokens, repeated, np.int32)}


def _ended(token_ids, count: int, random):
    """The same tokens with `count` others at the end."""
    if count:
        token_ids[-count:] = random.integers(0, VOCABULARY, count)
    return token_ids


def _records(count: int, random) -> Iterator[tuple]:
    """Random documents, in batches: (token ids of the batch, one ChunkRecord for each chunk)."""
    import numpy as np

    from ucm_ray.blend.chunk import ChunkRecord

    for first in range(0, count, _BATCH):
        size = min(_BATCH, count - first)
        token_ids = random.integers(0, VOCABULARY, (size, CHUNK_TOKENS), dtype=np.int32)
        keys = random.bytes(16 * size).hex()
        yield token_ids.ravel(), [
            ChunkRecord(keys[32 * number : 32 * number + 32], token_ids[number],
                        f"{(first + number) // CHUNKS_PER_SOURCE:032x}",
                        (first + number) % CHUNKS_PER_SOURCE * CHUNK_TOKENS)
            for number in range(size)
        ]


def _measure(index, stored: int, name: str, prompt, repeat: int) -> dict:
    from ucm_ray.bench import report
    from ucm_ray.blend.analyzer import ChunkAnalyzer

    analyzer = ChunkAnalyzer()
    found = analyzer.analyze(prompt, index)
    half = prompt[: len(prompt) // 2]
    return {
        "chunks": stored,
        "prompt": name,
        "reused_tokens": sum(chunk.num_tokens for chunk in found if chunk.matched),
        "ms": 1e3 * report.median(report.time_calls(lambda: analyzer.analyze(prompt, index), repeat)),
        "half_ms": 1e3 * report.median(report.time_calls(lambda: analyzer.analyze(half, index), repeat)),
    }

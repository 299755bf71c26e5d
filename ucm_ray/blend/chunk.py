"""What the analysis of a prompt finds: chunks (spans of the prompt) and runs (spans with one source)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np


class ChunkType(Enum):
    """FULL_MATCH: every token of the span agrees; PARTIAL_MATCH: at least `min_match_ratio` of them."""

    FULL_MATCH = "full_match"
    PARTIAL_MATCH = "partial_match"
    NO_MATCH = "no_match"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The span [start_idx, end_idx) of a prompt and the part of one stored chunk that holds KV for it."""

    start_idx: int
    end_idx: int
    chunk_type: ChunkType
    source_block_id: str | None = None
    """Key of the stored chunk."""
    source_position: int | None = None
    """Position that the token at `start_idx` had when its KV was computed."""
    source_offset: int = 0
    """Index, inside the stored chunk, of the token at `start_idx`."""
    source_id: str | None = None
    """Sequence in which the KV was computed."""
    mismatched: tuple[int, ...] = ()
    """Prompt positions inside the span whose token differs: always recomputed."""
    context_key: str = ""
    """`keys.context_key` of all that stood before the *stored chunk*; empty if unknown."""

    @property
    def num_tokens(self) -> int:
        return self.end_idx - self.start_idx

    @property
    def matched(self) -> bool:
        return self.chunk_type is not ChunkType.NO_MATCH

    @property
    def delta(self) -> int:
        """Position now minus source position."""
        if self.source_position is None:
            raise ValueError(f"chunk [{self.start_idx}, {self.end_idx}) has no source")
        return self.start_idx - self.source_position


class ChunkRecord(NamedTuple):
    """One stored chunk, as the index knows it."""

    key: str
    token_ids: np.ndarray
    """int32 [num_tokens]"""
    source_id: str
    source_position: int
    context_key: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A maximal span [start, end) of a prompt whose KV comes from consecutive positions of one source.

    `exact` runs stood behind exactly the same tokens at the same positions when they were computed: their KV is what
    full prefill would give, and no policy recomputes any of it.
    """

    start: int
    end: int
    source_id: str
    delta: int
    exact: bool = False

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


def clip_chunk(chunk: Chunk, start: int, end: int) -> Chunk | None:
    """The part of a chunk inside [start, end), or None. A partial match that loses its mismatches becomes full."""
    new_start, new_end = max(chunk.start_idx, start), min(chunk.end_idx, end)
    if new_start >= new_end:
        return None
    if (new_start, new_end) == (chunk.start_idx, chunk.end_idx):
        return chunk
    if not chunk.matched:
        return Chunk(new_start, new_end, ChunkType.NO_MATCH)
    skipped = new_start - chunk.start_idx
    mismatched = tuple(position for position in chunk.mismatched if new_start <= position < new_end)
    return Chunk(
        new_start, new_end, ChunkType.PARTIAL_MATCH if mismatched else ChunkType.FULL_MATCH, chunk.source_block_id,
        chunk.source_position + skipped, chunk.source_offset + skipped, chunk.source_id, mismatched, chunk.context_key,
    )

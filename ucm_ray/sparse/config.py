"""Parameters of ESA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

FALLBACKS = ("last", "local", "dense")


class Budget(NamedTuple):
    """Which of a request's blocks are read: `[0, init)`, `num_middle` of `[init, local_start)`, `[local_start, n)`.

    Up to `num_lexical` of the middle ones are those that repeat the last tokens.
    """

    init: int
    local_start: int
    num_middle: int
    num_lexical: int


@dataclass(frozen=True)
class EsaConfig:
    """The first seven keys are the seed's, and so are their defaults, but for the local window: the seed's 2 blocks are
    256 tokens on the accelerators it was written for, and so are 8 of 32.

    Attributes:
        sparse_ratio: share of the middle blocks (neither init nor local) that are read, at least one of them.
        local_window_sz: blocks at the end that are always read, the one being filled included (that one even with 0).
        init_window_sz: blocks at the start that are always read (attention sinks).
        min_blocks: a request of at most this many blocks is read densely.
        retrieval_stride: a new selection every so many decode steps.
        retrieval_workers, retrieval_cache_size: threads and blocks of the local retrieval worker.
        retrieval_dtype: what representations are kept in.
        representation: how blocks are scored, see `ucm_ray.retrieval.representations`.
        static_share: share of the middle budget, the lexical blocks aside, given once and for good to the blocks that
            the last prompt queries attended to; representations are blind to tokens that everything attends to.
        prompt_window: how many of the last prompt queries are asked.
        lexical_blocks: of the middle budget, at most that many blocks (and at most half) are chosen anew in every step:
            those that hold what followed earlier occurrences of the last tokens, see `lexical.followers`.
        drift_cosine: select early when a request's queries have turned away from those it was selected with, that is,
            when their cosine (mean over layers) falls below this; 0 never does.
        deadline_ms: how long a step waits for an answer it needs.
        fallback: what replaces an answer that is late or lost: the last selection, local scoring, or dense attention.
        per_head: select for every KV head by itself, where the attention backend can read that way.
        min_saved_bytes: read densely while the blocks left out of a step hold less KV than this, over all layers and
            requests: narrowing costs a fixed time per step, which too small a saving does not pay for.
    """

    sparse_ratio: float = 0.3
    local_window_sz: int = 8
    init_window_sz: int = 1
    min_blocks: int = 4
    retrieval_stride: int = 5
    retrieval_workers: int = 4
    retrieval_cache_size: int = 10000
    retrieval_dtype: str = "bfloat16"
    representation: str = "cumulant"
    static_share: float = 0.65
    prompt_window: int = 32
    lexical_blocks: int = 8
    drift_cosine: float = 0.0
    deadline_ms: float = 5.0
    fallback: str = "last"
    per_head: bool = True
    min_saved_bytes: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("sparse_ratio", 0.0, 1.0),
            ("static_share", 0.0, 1.0),
            ("drift_cosine", 0.0, 1.0),
            ("local_window_sz", 0, None),
            ("init_window_sz", 0, None),
            ("min_blocks", 0, None),
            ("retrieval_stride", 1, None),
            ("prompt_window", 1, None),
            ("deadline_ms", 0.0, None),
            ("min_saved_bytes", 0, None),
            ("lexical_blocks", 0, None),
        ):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                expected = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ValueError(f"ESA.{name}: found {value!r}, expected {expected}")
        if self.fallback not in FALLBACKS:
            raise ValueError(f"ESA.fallback: found {self.fallback!r}, expected one of {FALLBACKS}")

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> EsaConfig:
        """From a mapping that may hold the keys of other components too. Raises ValueError for impossible values."""
        own = config.get("ucm_sparse_config", {}).get("ESA") if "ucm_sparse_config" in config else config
        return cls(**{field.name: own[field.name] for field in fields(cls) if (own or {}).get(field.name) is not None})

    def budget(self, num_blocks: int, ratio: float) -> Budget | None:
        """What to read of a request of `num_blocks` blocks (the one being filled included); None means everything."""
        init = min(self.init_window_sz, num_blocks)
        local_start = max(init, num_blocks - max(1, self.local_window_sz))
        middle = local_start - init
        if ratio >= 1.0 or num_blocks <= self.min_blocks or middle < 2:
            return None
        num_middle = max(1, math.ceil(middle * ratio))
        if num_middle >= middle:
            return None
        return Budget(init, local_start, num_middle, min(self.lexical_blocks, num_middle // 2))

    def first_sparse_position(self, num_dense_tokens: int, ratio: float, block_size: int) -> int | None:
        """The first token, at or after `num_dense_tokens`, that may be decoded sparsely; None if there is none."""
        if ratio >= 1.0:
            return None
        # a middle of m blocks is narrowed if ceil(m * ratio) < m; start a little low for the sake of rounding
        middle = max(2, math.floor(1.0 / (1.0 - ratio)) - 1)
        fixed = self.init_window_sz + max(1, self.local_window_sz)
        num_blocks = max(self.min_blocks + 1, fixed + middle, num_dense_tokens // block_size + 1)
        while self.budget(num_blocks, ratio) is None:
            num_blocks += 1
        return max(num_dense_tokens, (num_blocks - 1) * block_size)

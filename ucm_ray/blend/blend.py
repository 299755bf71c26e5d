"""The seed's `Blend`: selective recompute around one attention layer, for frameworks that call the two hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from ucm_ray.blend import recompute_engine
from ucm_ray.blend.chunk import Chunk, ChunkType
from ucm_ray.sparse.base import UcmSparseBase, UcmSparseRole


class RequestMeta(Protocol):
    """What `Blend` reads of a request's metadata."""

    position_mapping: dict[int, int]
    recompute_ranges: list[tuple[int, int]]


class Blend(UcmSparseBase):
    """Repairs attention outputs at the positions that a request's metadata names.

    `bind_request_metas` before a step; then per layer `attention_begin`, the caller's kernel, `attention_finished`.
    Registered caches are `[2, num_positions, num_kv_heads, head_dim]` per layer, position 0 first; without them the key
    and value handed to `attention_begin` are taken for the whole sequence.
    """

    def __init__(self, role: UcmSparseRole, config: Mapping[str, Any] | None = None):
        super().__init__(role, dict(config or {}))
        self.recompute_engine = recompute_engine
        self.recompute_boundary = int(self.config.get("recompute_boundary", 2))
        if self.recompute_boundary < 0:
            raise ValueError(f"recompute_boundary: found {self.recompute_boundary}, expected at least 0")
        self.kv_caches: list[torch.Tensor] = []
        self._request_metas: Mapping[str, RequestMeta] = {}
        self._mask: torch.Tensor | None = None
        self._query: torch.Tensor | None = None
        self._key_value: tuple[torch.Tensor, torch.Tensor] | None = None

    def bind_request_metas(self, metas: Mapping[str, RequestMeta]) -> None:
        self._request_metas = metas

    def attention_begin(self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                        metadata: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value as they are. `metadata` has `request_id` and `seq_len`."""
        self._mask = None
        meta = self._request_metas.get(metadata.request_id)
        if meta is not None and meta.recompute_ranges:
            self._mask = recompute_mask(meta.recompute_ranges, metadata.seq_len).to(query.device)
            self._query, self._key_value = query, (key, value)
        return query, key, value

    def attention_finished(self, layer_idx: int, output: torch.Tensor) -> torch.Tensor:
        """The output, with exact causal attention at the positions to recompute."""
        if self._mask is None or not bool(self._mask.any()):
            return output
        if self.kv_caches:
            cache = self.kv_caches[layer_idx]
            key, value = cache[0], cache[1]
        else:
            key, value = self._key_value
        start = self._mask.shape[0] - output.shape[0]
        repaired = self.recompute_engine.recompute_attention(
            query=self._query, key=key, value=value, recompute_mask=self._mask[start:], original_output=output,
            query_start=start,
        )
        self._mask = self._query = self._key_value = None
        return repaired

    def boundary_ranges(self, chunks: Iterable[Chunk]) -> list[tuple[int, int]]:
        """First and last `recompute_boundary` tokens of every matched chunk, merged: the seed's recompute ranges.

        Unlike the seed it does so for full matches too, which are out of their context just as well.
        """
        ranges = []
        for chunk in chunks:
            if chunk.chunk_type is not ChunkType.NO_MATCH:
                size = min(self.recompute_boundary, chunk.num_tokens)
                ranges += [(chunk.start_idx, chunk.start_idx + size), (chunk.end_idx - size, chunk.end_idx)]
        return merge_ranges(ranges)


def recompute_mask(ranges: Iterable[tuple[int, int]], seq_len: int) -> torch.Tensor:
    """bool `[seq_len]`, True inside the ranges."""
    mask = torch.zeros(seq_len, dtype=torch.bool)
    for start, end in ranges:
        mask[max(start, 0) : max(end, 0)] = True
    return mask


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, disjoint, without empty ones; touching ranges become one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged

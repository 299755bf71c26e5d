"""Attention over a sparse block table with the kernels vLLM already has, one class per backend.

All layers of a group share one metadata object of vLLM's: it is never changed, rows are taken out of it into new ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs

from ucm_ray.integration.vllm.paged_kv import CpuPagedKV, PagedKV
from ucm_ray.sparse.esa import SparseView


@dataclass
class _DenseRows:
    """The rows of a batch that read everything, as a batch of their own."""

    tokens: torch.Tensor  # int64 [num_tokens]
    metadata: Any


class SparseKernel(ABC):
    """Runs one layer: sparse rows over the view's table, the others over their own blocks."""

    per_head: bool  # whether each KV head can have a table of its own

    def __init__(self) -> None:
        self._attn_metadata: Any = None
        self._dense: _DenseRows | None = None
        self._schedule: torch.Tensor | None = None
        self._schedule_for: torch.Tensor | None = None

    @abstractmethod
    def attend(self, impl, layer, query, kv_cache, attn_metadata, output, view: SparseView) -> None:
        """query, output: `[num_tokens, num_heads, head_dim]`; the batch's padding, if any, is left alone."""

    def _dense_rows(self, attn_metadata, view: SparseView) -> _DenseRows | None:
        """Once a step: all layers share the rows."""
        if attn_metadata is self._attn_metadata:
            return self._dense
        self._attn_metadata, self._dense = attn_metadata, None
        num_rows = attn_metadata.seq_lens.shape[0]
        sparse = set(view.rows)
        rows = [row for row in range(num_rows) if row not in sparse]
        if rows and not view.is_whole_batch:
            starts = attn_metadata.query_start_loc.tolist()
            rows = [row for row in rows if starts[row + 1] > starts[row]]
        if rows and not view.is_whole_batch:
            tokens = [token for row in rows for token in range(starts[row], starts[row + 1])]
            lengths = torch.tensor([0] + [starts[row + 1] - starts[row] for row in rows], dtype=torch.int32)
            device = attn_metadata.seq_lens.device
            index = torch.tensor(rows, device=device)
            seq_lens = attn_metadata.seq_lens[index]
            metadata = replace(
                attn_metadata,
                num_actual_tokens=len(tokens),
                max_query_len=int(lengths.max()),
                query_start_loc=lengths.cumsum(0).int().to(device),
                seq_lens=seq_lens,
                max_seq_len=int(seq_lens.max()),
                block_table=attn_metadata.block_table[index],
            )
            self._dense = _DenseRows(torch.tensor(tokens, device=device), metadata)
        return self._dense


class CpuSparseKernel(SparseKernel):
    """vLLM's CPU attention. Its cache is head-major, so seen as `[num_blocks * num_kv_heads, 1, block_size, 2 *
    head_dim]` every KV head of every request is a row of its own, with its own block table."""

    per_head = True

    def attend(self, impl, layer, query, kv_cache, attn_metadata, output, view: SparseView) -> None:
        dense = self._dense_rows(attn_metadata, view)
        num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        groups = view.block_table.shape[0] // len(view.rows)
        heads = num_kv_heads // groups
        paged = kv_cache.view(num_blocks * groups, heads, block_size * 2, impl.head_size)
        if view.is_whole_batch:
            rows = query[: len(view.rows)].reshape(-1, impl.num_heads // groups, impl.head_size)
            result = output[: len(view.rows)].view_as(rows)
        else:
            rows = query[view.tokens].view(-1, impl.num_heads // groups, impl.head_size)
            result = torch.empty_like(rows)
        starts, schedule = self._scheduled(impl, layer, view, heads, query.dtype)
        self._run(impl, layer, rows, paged, result, starts, view.seq_lens, view.block_table, schedule)
        if not view.is_whole_batch:
            output[view.tokens] = result.view(len(view.rows), impl.num_heads, impl.head_size).view_as(
                output[view.tokens]
            )
        if dense is not None:
            self._attend_dense(impl, layer, query, kv_cache, output, dense)

    def _attend_dense(self, impl, layer, query, kv_cache, output, dense: _DenseRows) -> None:
        metadata = dense.metadata
        num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        if metadata.scheduler_metadata is self._attn_metadata.scheduler_metadata:
            metadata.scheduler_metadata = _schedule(
                impl, layer, metadata.seq_lens, metadata.query_start_loc, impl.num_heads, num_kv_heads, query.dtype
            )
        rows = query[dense.tokens]
        result = torch.empty_like(rows)
        paged = kv_cache.view(num_blocks, num_kv_heads, block_size * 2, impl.head_size)
        self._run(
            impl,
            layer,
            rows,
            paged,
            result,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.scheduler_metadata,
        )
        output[dense.tokens] = result.view_as(output[dense.tokens])

    def _scheduled(self, impl, layer, view: SparseView, heads: int, dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """How the kernel splits the work, once a step: the tables of all layers have the same lengths."""
        if view.seq_lens is not self._schedule_for:
            self._schedule_for = view.seq_lens
            self._starts = torch.arange(len(view.seq_lens) + 1, dtype=torch.int32)
            groups = len(view.seq_lens) // len(view.rows)
            self._schedule = _schedule(impl, layer, view.seq_lens, self._starts, impl.num_heads // groups, heads, dtype)
        return self._starts, self._schedule

    @staticmethod
    def _run(impl, layer, query, paged, output, starts, seq_lens, block_table, schedule) -> None:
        key_cache, value_cache = paged.chunk(2, dim=2)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=impl.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=impl.logits_soft_cap,
            scheduler_metadata=schedule,
            s_aux=None,
        )


def _schedule(impl, layer, seq_lens, starts, num_heads: int, num_kv_heads: int, dtype) -> torch.Tensor:
    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=impl.head_size,
        seq_lens=seq_lens,
        dtype=dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=layer.isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )


class FlashSparseKernel(SparseKernel):
    """FlashAttention keeps the heads of a token together: one table per row, shared by its heads."""

    per_head = False

    def attend(self, impl, layer, query, kv_cache, attn_metadata, output, view: SparseView) -> None:
        from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

        dense = self._dense_rows(attn_metadata, view)
        num_rows = len(view.rows)
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=query.device)
        sparse = replace(
            attn_metadata,
            num_actual_tokens=num_rows,
            max_query_len=1,
            query_start_loc=starts,
            seq_lens=view.seq_lens,
            max_seq_len=view.max_seq_len,
            block_table=view.block_table,
            scheduler_metadata=None,
        )
        parts = [(view.tokens, sparse)]
        if dense is not None:
            parts.append((dense.tokens, replace(dense.metadata, scheduler_metadata=None)))
        for tokens, metadata in parts:
            rows = query[tokens]
            result = torch.empty_like(output[tokens])
            FlashAttentionImpl.forward(impl, layer, rows, rows, rows, kv_cache, metadata, result)
            output[tokens] = result


def kernel_for(paged: PagedKV) -> SparseKernel:
    """The kernel for this KV layout."""
    return CpuSparseKernel() if isinstance(paged, CpuPagedKV) else FlashSparseKernel()

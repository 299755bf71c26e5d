"""Move KV between stored chunks and the paged cache: rotate keys on the way in, copy exact KV on the way out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ucm_ray.blend.position import PositionCorrector
from ucm_ray.integration.vllm.blend_task import BlendTask, Piece
from ucm_ray.integration.vllm.paged_kv import PagedKV
from ucm_ray.store.base import ChunkMeta


class Placer:
    """Works for every layout and device, with torch alone."""

    def __init__(self, paged: PagedKV, corrector: PositionCorrector) -> None:
        self.paged, self.corrector = paged, corrector

    def place(self, task: BlendTask, pieces: list[Piece]) -> None:
        """Rotate and write pieces of `task`, all layers, and note what its policy needs to know about them."""
        kv = torch.cat([piece.kv for piece in pieces], dim=2).to(self.paged.device)
        positions = np.concatenate([np.arange(piece.chunk.start_idx, piece.chunk.end_idx) for piece in pieces])
        deltas = np.repeat([piece.chunk.delta for piece in pieces], [piece.chunk.num_tokens for piece in pieces])
        keys = self.corrector.rotate(kv[:, 0], torch.from_numpy(positions - deltas), torch.from_numpy(positions))
        slots = slots_of(task.meta.block_ids, positions, self.paged.block_size).to(self.paged.device)
        for layer in range(len(self.paged.names)):
            self.paged.write(layer, slots, keys[layer], kv[layer, 1])
        at = torch.from_numpy(positions - task.plan.start)
        if task.value_norm is not None:
            task.value_norm[:, at] = kv[:, 1].float().norm(dim=-1).mean(-1).cpu()
        if task.reused_keys is not None:
            task.reused_keys[at] = keys[task.policy.check_layer].float().cpu()

    def copy_out(self, block_ids: np.ndarray, chunks: list[tuple[int, ChunkMeta]], rank: int, world_size: int):
        """Yield `(meta of this rank, kv)` for chunks at the given positions of a sequence."""
        positions = np.concatenate([np.arange(start, start + meta.num_tokens) for start, meta in chunks])
        slots = slots_of(block_ids, positions, self.paged.block_size).to(self.paged.device)
        paged = self.paged
        kv = torch.empty(len(paged.names), 2, len(positions), paged.num_kv_heads, paged.head_dim, dtype=paged.dtype)
        for layer in range(len(paged.names)):
            key, value = paged.read(layer, slots)
            kv[layer, 0], kv[layer, 1] = key, value
        begin = 0
        for _, meta in chunks:
            end = begin + meta.num_tokens
            yield replace(meta, rank=rank, world_size=world_size), kv[:, :, begin:end].contiguous()
            begin = end


def slots_of(block_ids: np.ndarray, positions: np.ndarray, block_size: int) -> torch.Tensor:
    """int64 slots of `positions` of a sequence whose blocks are `block_ids`."""
    return torch.from_numpy(block_ids[positions // block_size] * block_size + positions % block_size)


def make_placer(paged: PagedKV, corrector: PositionCorrector) -> Placer:
    return Placer(paged, corrector)

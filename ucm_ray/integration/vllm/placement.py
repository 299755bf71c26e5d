"""Move KV between stored chunks and the paged cache: rotate keys on the way in, copy exact KV on the way out."""

from __future__ import annotations

import numpy as np
import torch

from ucm_ray.blend.position import PositionCorrector
from ucm_ray.integration.vllm.blend_task import BlendTask, Piece
from ucm_ray.integration.vllm.paged_kv import PagedKV

GROUP_TOKENS = 1024  # placed at once: more gains nothing and would need memory in proportion to the plan


class Placer:
    """Works for every layout and device, with torch alone."""

    def __init__(self, paged: PagedKV, corrector: PositionCorrector) -> None:
        self.paged, self.corrector = paged, corrector

    def place(self, task: BlendTask, pieces: list[Piece]) -> None:
        """Rotate and write pieces of `task`, all layers, and note what its policy needs to know about them."""
        for group in groups_of(pieces, GROUP_TOKENS):
            self._place(task, group)
        if self.paged.device.type == "cuda":
            # the pieces' host memory is given to somebody else once they are dropped
            torch.cuda.current_stream(self.paged.device).synchronize()

    def _place(self, task: BlendTask, pieces: list[Piece]) -> None:
        # each from its own page-locked memory, without a copy on the host
        kv = torch.cat([piece.kv.to(self.paged.device, non_blocking=True) for piece in pieces], dim=2)
        positions = np.concatenate([np.arange(piece.chunk.start_idx, piece.chunk.end_idx) for piece in pieces])
        deltas = np.repeat([piece.chunk.delta for piece in pieces], [piece.chunk.num_tokens for piece in pieces])
        keys = self.corrector.rotate(kv[:, 0], torch.from_numpy(positions - deltas), torch.from_numpy(positions),
                                     in_place=True)
        slots = slots_of(task.meta.block_ids, positions, self.paged.block_size).to(self.paged.device)
        for layer in range(len(self.paged.names)):
            self.paged.write(layer, slots, keys[layer], kv[layer, 1])
        at = torch.from_numpy(positions - task.plan.start)
        if task.value_norm is not None:
            task.value_norm[:, at] = kv[:, 1].float().norm(dim=-1).mean(-1).cpu()
        if task.reused_keys is not None:
            task.reused_keys[at] = keys[task.policy.check_layer].float().cpu()

    def copy_in(self, block_ids: np.ndarray, start: int, kv: torch.Tensor) -> None:
        """Write what `copy_out` took to the positions it was taken from."""
        kv = kv.to(self.paged.device)
        positions = np.arange(start, start + kv.shape[2])
        slots = slots_of(block_ids, positions, self.paged.block_size).to(self.paged.device)
        for layer in range(len(self.paged.names)):
            self.paged.write(layer, slots, kv[layer, 0], kv[layer, 1])

    def copy_out(self, block_ids: np.ndarray, start: int, out: torch.Tensor) -> None:
        """Fill `out`, host memory `[num_layers, 2, num_tokens, num_kv_heads, head_dim]`, with the KV of a sequence's
        tokens from position `start` on. Raises ValueError for a shape that is not this cache's."""
        paged = self.paged
        num_tokens = out.shape[2]
        expected = (len(paged.names), 2, num_tokens, paged.num_kv_heads, paged.head_dim)
        if tuple(out.shape) != expected or out.dtype != paged.dtype:
            raise ValueError(f"a chunk is {tuple(out.shape)} {out.dtype}, this cache's are {expected} {paged.dtype}")
        paged.copy_out(slots_of(block_ids, np.arange(start, start + num_tokens), paged.block_size), out)


def groups_of(pieces: list[Piece], max_tokens: int) -> list[list[Piece]]:
    """Pieces in their order, in groups of at most `max_tokens` tokens or of one piece."""
    groups: list[list[Piece]] = []
    total = max_tokens
    for piece in pieces:
        total += piece.chunk.num_tokens
        if total > max_tokens:
            groups.append([])
            total = piece.chunk.num_tokens
        groups[-1].append(piece)
    return groups


def slots_of(block_ids: np.ndarray, positions: np.ndarray, block_size: int) -> torch.Tensor:
    """int64 slots of `positions` of a sequence whose blocks are `block_ids`."""
    return torch.from_numpy(block_ids[positions // block_size] * block_size + positions % block_size)


def make_placer(paged: PagedKV, corrector: PositionCorrector) -> Placer:
    return Placer(paged, corrector)

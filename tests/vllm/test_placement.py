"""Stored KV on its way into the paged cache: turned, written, and in groups of bounded size."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.vllm.test_paged_kv import DIM, HEADS, SIZE, layer_of
from ucm_ray.blend.chunk import Chunk, ChunkType
from ucm_ray.blend.position import PositionCorrector
from ucm_ray.integration.vllm import placement
from ucm_ray.integration.vllm.blend_task import Piece
from ucm_ray.integration.vllm.paged_kv import paged_kv_for

LAYERS, CHUNK, NUM_CHUNKS = 2, 48, 30
CORRECTOR = PositionCorrector({"rope_theta": 10000.0, "head_dim": DIM})


class Watching(PositionCorrector):
    """Remembers how many tokens were turned at once."""

    def __init__(self) -> None:
        super().__init__({"rope_theta": 10000.0, "head_dim": DIM})
        self.sizes: list[int] = []

    def rotate(self, keys, *args, **kwargs):
        self.sizes.append(keys.shape[-3])
        return super().rotate(keys, *args, **kwargs)


def pieces_of(count: int) -> list[Piece]:
    """Chunks side by side from position 5 on, each from a place of its own; every other one is part of a larger."""
    generator = torch.Generator().manual_seed(0)
    pieces = []
    for index in range(count):
        start = 5 + index * CHUNK
        chunk = Chunk(start, start + CHUNK, ChunkType.FULL_MATCH, f"{index}", 7 + 100 * index, 0, "s")
        kv = torch.randn(LAYERS, 2, CHUNK + 8, HEADS, DIM, generator=generator)[:, :, 8 * (index % 2) :]
        pieces.append(Piece(chunk, kv[:, :, :CHUNK]))
    return pieces


@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN"])
def test_a_long_plan_is_placed_in_groups_and_each_piece_where_it_belongs(backend):
    blocks = -(-(5 + NUM_CHUNKS * CHUNK) // SIZE) + 1
    layers = {str(layer): layer_of(torch.zeros(blocks, HEADS, SIZE, 2 * DIM), backend) for layer in range(LAYERS)}
    paged, corrector, pieces = paged_kv_for(layers), Watching(), pieces_of(NUM_CHUNKS)
    before = [piece.kv.clone() for piece in pieces]
    span = NUM_CHUNKS * CHUNK
    task = SimpleNamespace(
        meta=SimpleNamespace(block_ids=np.arange(blocks)[::-1].copy()), plan=SimpleNamespace(start=5),
        value_norm=torch.zeros(LAYERS, span), reused_keys=torch.zeros(span, HEADS, DIM),
        policy=SimpleNamespace(check_layer=1))
    placement.make_placer(paged, corrector).place(task, pieces)
    assert sum(corrector.sizes) == span and max(corrector.sizes) <= placement.GROUP_TOKENS < span
    for piece, stored in zip(pieces, before, strict=True):
        assert torch.equal(piece.kv, stored), "the store's own memory was changed"
        chunk = piece.chunk
        positions = np.arange(chunk.start_idx, chunk.end_idx)
        slots = placement.slots_of(task.meta.block_ids, positions, SIZE)
        moved = CORRECTOR.correct_kv(stored, torch.from_numpy(positions - chunk.delta), torch.from_numpy(positions))
        for layer in range(LAYERS):
            key, value = paged.read(layer, slots)
            assert torch.equal(key, moved[layer, 0]) and torch.equal(value, moved[layer, 1])
        at = positions - 5
        assert torch.equal(task.reused_keys[at], moved[1, 0])
        assert torch.allclose(task.value_norm[:, at], moved[:, 1].norm(dim=-1).mean(-1))


def test_a_piece_larger_than_a_group_is_a_group_of_its_own():
    sizes = [[piece.chunk.num_tokens for piece in group] for group in placement.groups_of(pieces_of(4), 40)]
    assert sizes == [[CHUNK]] * 4
    assert [len(group) for group in placement.groups_of(pieces_of(5), 2 * CHUNK)] == [2, 2, 1]
    assert placement.groups_of([], 40) == []

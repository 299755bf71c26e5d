from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.blend.test_analyzer import words
from ucm_ray.blend import Blend, Chunk, ChunkAnalyzer, ChunkRecord, ChunkType, PositionCorrector
from ucm_ray.blend.blend import merge_ranges
from ucm_ray.blend.recompute_engine import recompute_attention
from ucm_ray.sparse import UcmSparseRole

TOKENS, HEADS, KV_HEADS, DIM = 50, 6, 2, 16


def tensors(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(TOKENS, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))


def dense(query, key, value):
    """Causal attention of the whole sequence, `[tokens, heads, dim]`."""
    repeat = HEADS // KV_HEADS
    q, k, v = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def mask_of(*positions):
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[list(positions)] = True
    return mask


@pytest.mark.parametrize("positions", [range(TOKENS), [0], [49], [3, 4, 5, 20, 33, 34, 49], []])
def test_recomputed_rows_equal_dense_causal_attention(positions):
    query, key, value = tensors()
    mask = mask_of(*positions)
    stale = torch.randn(TOKENS, HEADS, DIM)
    repaired = recompute_attention(query, key, value, mask, stale)
    torch.testing.assert_close(repaired[mask], dense(query, key, value)[mask], atol=1e-5, rtol=1e-5)
    assert torch.equal(repaired[~mask], stale[~mask])


@pytest.mark.parametrize("position", [0, 7, 30, 49])
def test_a_recomputed_token_is_unaffected_by_any_kv_after_it(position):
    query, key, value = tensors()
    mask, stale = mask_of(position), torch.zeros(TOKENS, HEADS, DIM)
    before = recompute_attention(query, key, value, mask, stale)
    key[position + 1 :], value[position + 1 :] = float("nan"), float("nan")
    assert torch.equal(recompute_attention(query, key, value, mask, stale), before)
    key, value = key.nan_to_num(0.0), value.nan_to_num(0.0)
    value[position] += 1
    assert not torch.equal(recompute_attention(query, key, value, mask, stale), before)


def test_scattered_rows_do_not_see_keys_of_their_future():
    """A kernel's bottom-right aligned causal mask over packed rows would let row 3 see keys up to 46."""
    query, key, value = tensors()
    mask, stale = mask_of(3, 20, 49), torch.zeros(TOKENS, HEADS, DIM)
    together = recompute_attention(query, key, value, mask, stale)
    for position in (3, 20, 49):
        alone = recompute_attention(query, key, value, mask_of(position), stale)
        torch.testing.assert_close(together[position], alone[position])


def test_rows_may_begin_behind_position_0():
    query, key, value = tensors()
    mask, stale = torch.ones(20, dtype=torch.bool), torch.zeros(20, HEADS, DIM)
    repaired = recompute_attention(query[30:], key, value, mask, stale, 30)
    torch.testing.assert_close(repaired, dense(query, key, value)[30:], atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_fit_are_named():
    query, key, value = tensors()
    with pytest.raises(ValueError, match="recompute_mask"):
        recompute_attention(query, key, value, torch.ones(3, dtype=torch.bool), query)
    with pytest.raises(ValueError, match="row 49 needs 50"):
        recompute_attention(query, key[:40], value[:40], mask_of(49), query)
    with pytest.raises(ValueError, match="key, value"):
        recompute_attention(query, key[:, :1].repeat(1, 4, 1), value, mask_of(1), query)


@pytest.mark.parametrize("registered", [True, False])
def test_the_hooks_repair_the_output_of_a_layer(registered):
    query, key, value = tensors()
    blend = Blend(UcmSparseRole.BOTH, {"blend_chunk_size": 64, "recompute_boundary": 2})
    if registered:
        blend.register_kv_caches([torch.zeros(2, TOKENS, KV_HEADS, DIM), torch.stack((key, value))])
    blend.bind_request_metas({"r": SimpleNamespace(recompute_ranges=[(4, 7), (40, 41)], position_mapping={})})
    begun = blend.attention_begin(1, query, key, value, SimpleNamespace(request_id="r", seq_len=TOKENS))
    assert all(found is given for found, given in zip(begun, (query, key, value), strict=True))
    stale = torch.zeros(TOKENS, HEADS, DIM)
    repaired = blend.attention_finished(1, stale)
    mask = mask_of(4, 5, 6, 40)
    torch.testing.assert_close(repaired[mask], dense(query, key, value)[mask], atol=1e-5, rtol=1e-5)
    assert torch.equal(repaired[~mask], stale[~mask])
    blend.attention_begin(1, query, key, value, SimpleNamespace(request_id="other", seq_len=TOKENS))
    assert blend.attention_finished(1, stale) is stale


def test_boundary_ranges_of_full_and_partial_matches():
    chunks = [Chunk(0, 10, ChunkType.FULL_MATCH, "a", 0), Chunk(10, 13, ChunkType.PARTIAL_MATCH, "b", 0),
              Chunk(13, 20, ChunkType.NO_MATCH), Chunk(20, 21, ChunkType.FULL_MATCH, "c", 0)]
    assert Blend(UcmSparseRole.BOTH).boundary_ranges(chunks) == [(0, 2), (8, 13), (20, 21)]
    assert merge_ranges([(5, 5), (3, 4), (1, 3)]) == [(1, 4)]
    with pytest.raises(ValueError, match="recompute_boundary: found -1"):
        Blend(UcmSparseRole.BOTH, {"recompute_boundary": -1})


def test_the_seeds_calls_run_as_written():
    extra_config = {"store_pipeline": "Cache|Posix", "blend_chunk_size": 64, "min_match_ratio": 0.8,
                    "position_correction": True, "recompute_boundary": 2, "rope_theta": 10000.0, "head_dim": 128}
    analyzer = ChunkAnalyzer(chunk_size=extra_config.get("blend_chunk_size", 64),
                             min_match_ratio=extra_config.get("min_match_ratio", 0.8))
    blend = Blend(UcmSparseRole.BOTH, extra_config)
    corrector = PositionCorrector(extra_config)
    cached = words(1, 64)
    token_ids = np.concatenate((words(2, 9), cached)).tolist()
    chunks = analyzer.analyze(token_ids, [ChunkRecord("a" * 32, cached, "b" * 32, 3)])
    (chunk,) = [chunk for chunk in chunks if chunk.chunk_type in [ChunkType.FULL_MATCH, ChunkType.PARTIAL_MATCH]]
    assert (chunk.start_idx, chunk.end_idx, chunk.source_block_id, chunk.source_position) == (9, 73, "a" * 32, 3)
    kv_data = torch.randn(2, 64, 4, 128)
    moved = corrector.correct_kv(
        kv_data,
        source_positions=torch.arange(chunk.source_position, chunk.source_position + (chunk.end_idx - chunk.start_idx)),
        target_positions=torch.arange(chunk.start_idx, chunk.end_idx),
    )
    assert moved.shape == kv_data.shape and not torch.equal(moved, kv_data)
    assert blend.role is UcmSparseRole.BOTH and blend.recompute_engine.recompute_attention

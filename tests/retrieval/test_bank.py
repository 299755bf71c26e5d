"""The packed kernels answer what brute force answers; the bank keeps blocks, lists and bytes in order."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.retrieval.conftest import GEOMETRY, make_query, make_stats
from ucm_ray.retrieval import Geometry, PackedQuery, representation_names
from ucm_ray.retrieval.bank import BlockBank
from ucm_ray.retrieval.scorers import TorchScorer


def brute_force(geometry, stats, query, k, start, stop, per_head):
    """Blocks of one request per (layer, group), by `BlockRepresentation.score` and a plain sort."""
    stored = geometry.pack(stats).permute(3, 1, 0, 2, 4).float()
    scores = geometry.method.score(query, stored)
    scores = scores if per_head else scores.sum(1, keepdim=True)
    rows = scores[..., start:stop].flatten(0, 1).tolist()
    return [sorted(start + i for i in sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]) for row in rows]


def whole_numbers(shape, seed):
    """Small integers, so that every sum is exact and there are many ties."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32))


def rows_of(answer, index):
    return [[int(b) for b in row if b >= 0] for layer in answer.blocks[index] for row in layer]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(representation_names()), st.sampled_from(["float32", "bfloat16", "float16"]), st.booleans(),
       st.integers(0, 40), st.integers(0, 45), st.integers(0, 5), st.integers(0, 2 ** 20), st.booleans())
def test_packed_answer_equals_brute_force_with_ties(name, dtype, per_head, blocks, k, start, seed, on_torch):
    # head_dim 4 makes 1/sqrt(head_dim) and all products exact in float32.
    geometry = Geometry(2, 3, 4, name, dtype)
    stats = whole_numbers((geometry.method.num_stats, 2, max(blocks, 1), 3, 4), seed)[:, :, :blocks]
    query = whole_numbers((1, 2, 6, 4), seed + 1)
    bank = BlockBank(geometry, 64 * geometry.record_bytes, num_threads=2)
    if on_torch:
        bank._scorer = TorchScorer(geometry, bank.num_slots, "cpu")
    keys = [f"block {i}" for i in range(blocks)]
    bank.upsert(keys, geometry.pack(stats))
    bank.append("r", keys)
    stop = max(start, blocks - 1)
    answer = bank.answer(PackedQuery.build(["r"], query, geometry, k, start, stop, per_head))
    assert rows_of(answer, 0) == brute_force(geometry, stats, query[0], k, start, stop, per_head)
    assert answer.candidates.tolist() == [max(0, min(stop, blocks) - start)]


def test_threads_and_block_order_do_not_change_a_bit():
    stats, keys = make_stats(301), [f"b{i}" for i in range(301)]
    answers = []
    for threads, order in ((1, range(301)), (3, range(300, -1, -1))):
        bank = BlockBank(GEOMETRY, 2 ** 20, num_threads=threads)
        for at in order:
            bank.upsert([keys[at]], GEOMETRY.pack(stats[:, :, at:at + 1]))
        for request in range(5):
            bank.append(f"r{request}", keys[request:])
        names = [f"r{request}" for request in range(5)]
        answers.append(bank.answer(PackedQuery.build(names, make_query(5), GEOMETRY, 40)))
    assert np.array_equal(answers[0].blocks, answers[1].blocks)
    assert np.array_equal(answers[0].scores, answers[1].scores)


def test_requests_of_any_length_share_one_call():
    stats, keys = make_stats(200), [f"b{i}" for i in range(200)]
    bank = BlockBank(GEOMETRY, 2 ** 20)
    bank.upsert(keys, GEOMETRY.pack(stats))
    spans = {"long": (0, 200), "short": (7, 9), "one": (5, 6), "empty": (0, 0)}
    for name, (begin, end) in spans.items():
        bank.append(name, keys[begin:end])
    query = make_query(5)
    answer = bank.answer(PackedQuery.build([*spans, "unknown"], query, GEOMETRY, [30, 30, 30, 30, 30]))
    assert answer.candidates.tolist() == [200, 2, 1, 0, 0]
    for index, (begin, end) in enumerate(spans.values()):
        expected = brute_force(GEOMETRY, stats[:, :, begin:end], query[index], 30, 0, end - begin, False)
        assert rows_of(answer, index) == expected
    assert rows_of(answer, 4) == [[], [], []]


def test_blocks_appended_before_their_representation_arrives_count_once_it_does():
    bank = BlockBank(GEOMETRY, 2 ** 16)
    bank.append("r", ["a", "b"])
    query = PackedQuery.build(["r"], make_query(1), GEOMETRY, 5)
    assert bank.answer(query).candidates.tolist() == [0]
    bank.upsert(["b"], GEOMETRY.pack(make_stats(1)))
    answer = bank.answer(query)
    assert answer.candidates.tolist() == [1] and rows_of(answer, 0) == [[1], [1], [1]]


def test_least_recently_used_blocks_give_way_and_are_missing_then():
    bank = BlockBank(GEOMETRY, 4 * GEOMETRY.record_bytes)
    records = GEOMETRY.pack(make_stats(6))
    bank.upsert(["a", "b", "c", "d"], records[:4])
    bank.append("r", ["a", "b"])
    query = PackedQuery.build(["r"], make_query(1), GEOMETRY, 5)
    bank.answer(query)
    assert bank.upsert(["e", "f"], records[4:]) == (2, 0, 0)
    assert bank.missing(["a", "b", "c", "d", "e", "f"]) == ["c", "d"]
    assert bank.answer(query).candidates.tolist() == [2]
    bank.evict(["a"])
    assert bank.answer(query).candidates.tolist() == [1]
    bank.upsert(["a"], records[:1])
    assert bank.answer(query).candidates.tolist() == [2]


def test_a_slot_that_changed_hands_is_not_scored_for_its_old_owner():
    bank = BlockBank(GEOMETRY, GEOMETRY.record_bytes)
    records = GEOMETRY.pack(make_stats(2))
    bank.upsert(["a"], records[:1])
    bank.append("r", ["a"])
    bank.upsert(["b"], records[1:])
    assert bank.answer(PackedQuery.build(["r"], make_query(1), GEOMETRY, 1)).candidates.tolist() == [0]


def test_recently_used_blocks_are_protected_and_what_does_not_fit_is_refused():
    now = [100.0]
    bank = BlockBank(GEOMETRY, 2 * GEOMETRY.record_bytes, protect_s=5.0, clock=lambda: now[0])
    records = GEOMETRY.pack(make_stats(3))
    bank.upsert(["a", "b"], records[:2])
    assert bank.upsert(["c"], records[2:]) == (0, 0, 1)
    now[0] += 6
    assert bank.upsert(["c"], records[2:]) == (1, 0, 0)
    assert bank.stats()["evicted"] == 1 and bank.stats()["refused"] == 1


def test_equal_keys_are_stored_once():
    bank = BlockBank(GEOMETRY, 2 ** 16)
    records = GEOMETRY.pack(make_stats(2))
    assert bank.upsert(["a", "b"], records) == (2, 0, 0)
    assert bank.upsert(["b", "a"], records) == (0, 2, 0)
    assert bank.stats()["blocks"] == 2


def test_records_read_back_are_the_ones_written():
    bank = BlockBank(GEOMETRY, 2 ** 16)
    records = GEOMETRY.pack(make_stats(3))
    bank.upsert(["a", "b", "c"], records)
    found, read = bank.read(["c", "x", "a"])
    assert found == ["c", "a"] and torch.equal(read, records[[2, 0]])
    assert bank.read(["x"])[1].shape == (0, *GEOMETRY.record_shape)


def test_lists_not_heard_of_expire():
    now = [0.0]
    bank = BlockBank(GEOMETRY, 2 ** 16, clock=lambda: now[0])
    bank.append("old", ["a"])
    now[0] = 50
    bank.append("new", ["a"])
    now[0] = 100
    assert bank.expire(60) == 1 and bank.request_ids() == ["new"]


def test_positions_must_ascend():
    bank = BlockBank(GEOMETRY, 2 ** 16)
    bank.append("r", ["a", "b"], np.array([3, 5]))
    with pytest.raises(ValueError, match="expected 1 ascending numbers above 5"):
        bank.append("r", ["c"], np.array([5]))
    bank.append("r", ["b", "c"], np.array([5, 6]), skip_known=True)
    assert bank.request_keys("r") == ["a", "b", "c"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(value):
    stats, query = make_stats(2), make_query(1)
    stats[0, 0, 0, 0, 0] = value
    with pytest.raises(ValueError, match="stats hold 1 NaN or infinite values"):
        GEOMETRY.pack(stats)
    query[0, 0, 0, 0] = value
    with pytest.raises(ValueError, match="query holds .* NaN or infinite values"):
        PackedQuery.build(["r"], query, GEOMETRY, 1)


def test_what_overflows_float16_is_refused():
    with pytest.raises(ValueError, match="as float16"):
        Geometry(3, 2, 8, "cumulant", "float16").pack(make_stats(1) * 1e6)


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"stats has shape .* expected \[2, 3, num_blocks, 2, 8\]"):
        GEOMETRY.pack(torch.zeros(1, 3, 5, 2, 8))
    with pytest.raises(ValueError, match=r"query has shape .* expected \[1, 3, num_heads, 8\]"):
        PackedQuery.build(["r"], torch.zeros(1, 2, 4, 8), GEOMETRY, 1)
    with pytest.raises(ValueError, match="head_dim is 7, expected an even number"):
        BlockBank(Geometry(1, 1, 7), 1000)
    with pytest.raises(ValueError, match="retrieval dtype is 'int4'"):
        BlockBank(Geometry(1, 1, 8, "mean", "int4"), 1000)
    with pytest.raises(ValueError, match="expected at least one block"):
        BlockBank(GEOMETRY, 10)

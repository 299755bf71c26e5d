"""The local worker: the seed's call, the packed call, futures."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from tests.retrieval.conftest import GEOMETRY, make_query, make_stats
from ucm_ray.retrieval import (
    PackedQuery,
    RetrievalWorker,
    Source,
    compute_similarity,
    select_top_k_blocks,
)


@pytest.fixture
def blocks():
    return {f"hash {i}": torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(40)}


@pytest.fixture
def worker(blocks):
    worker = RetrievalWorker({"retrieval_workers": 2, "dtype": "float32"}, load_block_repr=blocks.get)
    yield worker
    worker.close()


def seed_answer(query, blocks, k):
    scores = compute_similarity(query, torch.stack(blocks))
    return select_top_k_blocks(scores, k, 2, len(blocks))


def test_submit_retrieval_answers_as_the_seed_does(worker, blocks):
    query = torch.randn(8, 16)
    future = worker.submit_retrieval("r", query, list(blocks), 12)
    assert future.result(30) == seed_answer(query, list(blocks.values()), 12)
    assert future.done() and future.source is Source.EXACT


def test_a_request_may_grow_shrink_and_change(worker, blocks):
    query, names = torch.randn(4, 16), list(blocks)
    for some in (names[:10], names[:30], names[5:20], names[:1], []):
        expected = seed_answer(query, [blocks[name] for name in some], 6) if some else []
        assert worker.submit_retrieval("r", query, some, 6).result(30) == expected


def test_several_layers_are_answered_at_once():
    layered = {f"hash {i}": torch.randn(1, 3, 4, 16) for i in range(20)}
    worker = RetrievalWorker({"dtype": "float32"}, load_block_repr=layered.get)
    query = torch.randn(3, 4, 16)
    chosen = worker.submit_retrieval("r", query, list(layered), 8).result(30)
    for layer in range(3):
        assert chosen[layer] == seed_answer(query[layer], [block[0, layer] for block in layered.values()], 8)
    worker.close()


def test_the_cache_is_a_bounded_lru_and_reloads(blocks):
    loads = []
    worker = RetrievalWorker({"retrieval_cache_size": 16, "dtype": "float32"},
                             load_block_repr=lambda key: loads.append(key) or blocks[key])
    query, names = torch.randn(4, 16), list(blocks)
    for some in (names[:16], names[8:24], names[8:24], names[:8]):
        assert worker.submit_retrieval("r", query, some, 6).result(30) == seed_answer(
            query, [blocks[name] for name in some], 6)
    assert loads == names[:24] + names[:8] and worker.stats()["blocks"] == 16
    with pytest.raises(ValueError, match=r"has 40 blocks, expected at most retrieval_cache_size \(16\)"):
        worker.submit_retrieval("r", query, names, 6).result(30)
    worker.close()


def test_many_threads_get_right_answers(worker, blocks):
    names, wrong = list(blocks), []

    def ask(seed):
        for turn in range(20):
            some = names[(seed + turn) % 10:(seed + turn) % 10 + 20]
            query = torch.randn(4, 16)
            if worker.submit_retrieval(f"r{seed}", query, some, 9).result(30) != seed_answer(
                    query, [blocks[name] for name in some], 9):
                wrong.append((seed, turn))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("hashes, query, k, error, match", [
    (["nobody has this"], torch.zeros(4, 16), 3, KeyError, "'nobody has this' is not stored"),
    (["hash 1"], torch.zeros(5, 16), 3, ValueError, "5 query heads cannot be grouped onto 4 KV heads"),
    (["hash 1"], torch.full((4, 16), float("nan")), 3, ValueError, "NaN or infinite"),
    (["hash 1"], torch.zeros(4, 16), -1, ValueError, "k is -1"),
    (["hash 1"], torch.zeros(16), 1, ValueError, "query_repr has shape"),
])
def test_errors_arrive_in_the_future_and_name_what_is_wrong(worker, hashes, query, k, error, match):
    worker.submit_retrieval("ok", torch.zeros(4, 16), ["hash 0"], 1).result(30)
    with pytest.raises(error, match=match):
        worker.submit_retrieval("r", query, hashes, k).result(30)
    assert worker.submit_retrieval("ok", torch.zeros(4, 16), ["hash 0"], 1).result(30) == [0]


def test_futures_can_be_awaited_and_call_back(worker, blocks):
    called = threading.Event()

    async def ask():
        futures = [worker.submit_retrieval(f"r{i}", torch.ones(4, 16), list(blocks), 5) for i in range(4)]
        futures[0].add_done_callback(lambda future: called.set())
        return await asyncio.gather(*futures)

    answers = asyncio.run(ask())
    assert len(answers) == 4 and all(answer == answers[0] for answer in answers)
    assert called.wait(10)


def test_packed_queries_answer_all_layers_and_requests():
    worker = RetrievalWorker(geometry=GEOMETRY)
    keys = [f"b{i}" for i in range(50)]
    worker.publish(keys, make_stats(50), {"a": keys[:30], "b": keys[20:]})
    worker.publish([], None, {"a": keys[30:35]})
    query = PackedQuery.build(["a", "b"], make_query(2), GEOMETRY, [5, 9], start=1, stop=[33, -1], per_head=True)
    answer = worker.submit(query).result(30)
    assert answer.is_exact and answer.blocks.shape == (2, 3, 2, 9) and answer.candidates.tolist() == [32, 29]
    assert all(len(answer.selected(0, layer, head)) == 5 for layer in range(3) for head in range(2))
    worker.forget(["a"])
    assert worker.submit(query).result(30).candidates.tolist() == [0, 29]
    assert np.array_equal(worker.submit(query).result(30).blocks[1], answer.blocks[1])
    worker.close()


def test_another_geometry_is_refused():
    worker = RetrievalWorker(geometry=GEOMETRY)
    with pytest.raises(ValueError, match=r"stats has shape"):
        worker.publish(["a"], torch.zeros(1, 3, 1, 2, 8))
    with pytest.raises(ValueError, match="retrieval_workers is 0, expected >= 1"):
        RetrievalWorker({"retrieval_workers": 0})
    worker.close()

"""The client's logic over shards that are threads of this process: placement, merging, deadlines, fallbacks, recovery.

The same behaviour over real actors, with real kills, is in `test_pool.py`.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.retrieval_shard import RetrievalShard
from tests.retrieval.conftest import GEOMETRY, make_query, make_stats
from ucm_ray.retrieval import PackedQuery, RetrievalWorker, Source, kernels, lane
from ucm_ray.retrieval.client import Membership, PoolLink, RetrievalClient, ShardLink
from ucm_ray.retrieval.placement import hash_names, place

KEYS = [f"block {i}" for i in range(80)]
LISTS = {"a": KEYS[:50], "b": KEYS[30:], "one": KEYS[7:8]}


class ThreadShard(ShardLink):
    """A shard with a thread of its own, which can be killed (it comes back empty), frozen and cut off."""

    def __init__(self, shard_id, capacity_bytes=2 ** 20):
        self.shard_id = shard_id
        self._capacity_bytes = capacity_bytes
        self._thread = ThreadPoolExecutor(1)
        self.running = threading.Event()
        self.running.set()
        self.reachable = True
        self.kill()

    def kill(self):
        self.shard = RetrievalShard(self._capacity_bytes, device="cpu", protect_s=0.0)

    def call(self, method, args, num_returns, done):
        shard = self.shard

        def work():
            self.running.wait()
            if not self.reachable or shard is not self.shard:
                done(ConnectionError(f"{self.shard_id} is gone"))
                return
            try:
                result = getattr(shard, method)(*args)
            except Exception as error:
                done(error)
            else:
                done([result] if num_returns == 1 else result)

        self._thread.submit(work)

    def wait(self, method, args, timeout_s):
        if not self.reachable or not self.running.wait(timeout_s):
            raise TimeoutError(self.shard_id)
        return self._thread.submit(getattr(self.shard, method), *args).result(timeout_s)


class ThreadPool(PoolLink):
    """A pool of such shards."""

    def __init__(self, num_shards, **options):
        self.version = 1
        self.shards = [ThreadShard(f"shard {i}", **options) for i in range(num_shards)]
        self.moves = {}

    def membership(self, timeout_s):
        return Membership(self.version, tuple(self.shards))

    def resize(self, num_shards):
        self.shards = [*self.shards, *(ThreadShard(f"shard {i}") for i in range(len(self.shards), num_shards))]
        self.shards = self.shards[:num_shards]
        self.version += 1

    def adopted(self, client_id, version):
        self.moves[client_id] = version


@pytest.fixture
def start():
    """`start(num_shards, ...)` returns (pool, client that published LISTS)."""
    clients, pools = [], []

    def begin(num_shards, capacity_bytes=2 ** 20, **options):
        pools.append(ThreadPool(num_shards, capacity_bytes=capacity_bytes))
        options = {"geometry": GEOMETRY, "deadline_s": 20.0, **options}
        clients.append(RetrievalClient(pools[-1], **options))
        clients[-1].publish(KEYS, make_stats(len(KEYS)), LISTS)
        return pools[-1], clients[-1]

    yield begin
    for pool in pools:
        for shard in pool.shards:
            shard.running.set()
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def unsharded():
    worker = RetrievalWorker(geometry=GEOMETRY)
    worker.publish(KEYS, make_stats(len(KEYS)), LISTS)
    yield worker
    worker.close()


def ask(k=9, seed=1, **options):
    return PackedQuery.build(list(LISTS), make_query(len(LISTS), seed), GEOMETRY, k, **options)


def same(answer, expected):
    return (np.array_equal(answer.blocks, expected.blocks) and np.array_equal(answer.scores, expected.scores)
            and np.array_equal(answer.candidates, expected.candidates))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 60), st.integers(0, 4), st.booleans(), st.integers(0, 1000), st.booleans(),
       st.booleans())
def test_sharded_equals_unsharded_to_the_bit(num_shards, k, begin, per_head, seed, ties, use_lane):
    stats = make_stats(len(KEYS), seed)
    stats = stats.sign() if ties else stats
    client = RetrievalClient(ThreadPool(num_shards), geometry=GEOMETRY, deadline_s=20.0, use_lane=use_lane)
    worker = RetrievalWorker(geometry=GEOMETRY)
    for retriever in (client, worker):
        retriever.publish(KEYS, stats, LISTS)
    query = make_query(len(LISTS), seed)
    query = PackedQuery.build(list(LISTS), query.sign() if ties else query, GEOMETRY, k, begin, 47, per_head)
    future = client.submit(query)
    assert same(future.result(30), worker.submit(query).result(30)) and future.source is Source.EXACT
    client.close()
    worker.close()


def test_a_request_that_grows_is_answered_over_all_its_blocks(start):
    _, client = start(3)
    worker = RetrievalWorker(geometry=GEOMETRY)
    for count in range(1, len(KEYS), 7):
        more = {"r": KEYS[count - 1:count + 6]}
        stats = make_stats(len(KEYS))[:, :, count - 1:count + 6]
        for retriever in (client, worker):
            retriever.publish(more["r"], stats, more)
        query = PackedQuery.build(["r"], make_query(1, count), GEOMETRY, 6)
        future = client.submit(query)
        assert same(future.result(30), worker.submit(query).result(30)) and future.source is Source.EXACT
    worker.close()


def test_the_seeds_call_works_on_a_pool(start):
    _, client = start(2)
    local = RetrievalWorker(geometry=GEOMETRY)
    local.publish(KEYS, make_stats(len(KEYS)))
    query = make_query(1)[0]
    for some in (KEYS[:20], KEYS[:40], KEYS[5:9], []):
        future = client.submit_retrieval("s", query, some, 8)
        assert future.result(30) == local.submit_retrieval("s", query, some, 8).result(30)
        assert future.source is Source.EXACT
    local.close()


@pytest.mark.parametrize("fallbacks, source", [
    (("local", "last", "dense"), Source.LOCAL), (("last", "dense"), Source.LAST), (("dense",), Source.DENSE)])
def test_a_frozen_shard_delays_nobody_past_the_deadline(start, unsharded, fallbacks, source):
    pool, client = start(2, fallbacks=fallbacks, deadline_s=2.0)
    query = ask()
    expected = unsharded.submit(query).result(30)
    first = client.submit(query)
    assert same(first.result(30), expected) and first.source is Source.EXACT
    pool.shards[1].running.clear()
    for _ in range(3):
        begin = time.monotonic()
        future = client.submit(query)
        answer = future.result(30)
        assert time.monotonic() - begin < 2.0
        assert future.source is source and answer.source(0) is source and "shard 1" in future.reason
        if source is Source.DENSE:
            assert (answer.blocks == -1).all()
        else:
            assert np.array_equal(answer.blocks, expected.blocks)
    pool.shards[1].running.set()
    client.wait_ready(20)
    assert same(client.submit(query).result(30), expected)


def test_the_last_selection_is_clipped_to_what_is_asked(start):
    pool, client = start(2, fallbacks=("last",), deadline_s=1.0)
    full = client.submit(ask(k=20)).result(30)
    pool.shards[0].running.clear()
    answer = client.submit(ask(k=4, start=10, stop=40)).result(30)
    chosen = answer.selected(0, 0)
    best = sorted(zip(-full.scores[0, 0, 0], full.blocks[0, 0, 0], strict=True))
    assert chosen == sorted([int(block) for _, block in best if 10 <= block < 40][:4])
    assert answer.source(2) is Source.LAST and answer.selected(2, 0) == []


def test_a_shard_that_lost_its_blocks_is_noticed_and_filled_again(start, unsharded):
    pool, client = start(3)
    expected = unsharded.submit(ask()).result(30)
    pool.shards[1].kill()
    future = client.submit(ask())
    assert same(future.result(30), expected) and future.source is Source.LOCAL
    client.wait_ready(20)
    future = client.submit(ask())
    assert same(future.result(30), expected) and future.source is Source.EXACT


def test_only_requests_with_missing_blocks_fall_back(start, unsharded):
    pool, client = start(2)
    expected = unsharded.submit(ask()).result(30)
    assert client.submit(ask()).result(30).is_exact
    for shard in pool.shards:
        shard.shard.evict([KEYS[40]])  # held by "a" and "b", not by "one"
    answer = client.submit(ask()).result(30)
    assert [answer.source(i) for i in range(3)] == [Source.LOCAL, Source.LOCAL, Source.EXACT]
    assert same(answer, expected)
    client.wait_ready(20)


def test_a_pool_too_small_for_the_blocks_answers_by_fallback(start, unsharded):
    _, client = start(2, capacity_bytes=10 * GEOMETRY.record_bytes)
    future = client.submit(ask())
    assert same(future.result(30), unsharded.submit(ask()).result(30)) and future.source is Source.LOCAL
    assert "blocks are not on their shards" in future.reason


def test_without_a_copy_blocks_come_from_their_owner():
    stats = make_stats(len(KEYS))
    pool = ThreadPool(2)
    client = RetrievalClient(pool, {"retrieval_cache_size": 4}, geometry=GEOMETRY, deadline_s=20.0,
                             load_block_repr=lambda key: stats[:, :, KEYS.index(key)])
    client.publish(KEYS, stats, LISTS)
    assert client.submit(ask()).result(30).is_exact
    pool.shards[0].kill()
    future = client.submit(ask())
    future.result(30)
    assert future.source is Source.LAST
    client.wait_ready(20)
    assert client.submit(ask()).result(30).is_exact
    client.close()


@pytest.mark.parametrize("sizes", [(2, 3), (4, 2), (1, 4), (3, 1)])
def test_resizing_loses_no_answer_and_moves_only_what_it_must(start, unsharded, sizes):
    pool, client = start(sizes[0])
    client.wait_ready()
    expected = unsharded.submit(ask()).result(30)
    before = {shard.shard_id: set(KEYS) - set(shard.shard.missing(KEYS)[1]) for shard in pool.shards}
    pool.resize(sizes[1])
    end = time.monotonic() + 20
    sources = set()
    while pool.moves.get(client.client_id) != pool.version and time.monotonic() < end:
        future = client.submit(ask())
        assert same(future.result(30), expected)
        sources.add(future.source)
    future = client.submit(ask())
    assert same(future.result(30), expected) and sources | {future.source} == {Source.EXACT}
    owner = place(hash_names(KEYS), hash_names([shard.shard_id for shard in pool.shards]))
    for index, shard in enumerate(pool.shards):
        held = set(KEYS) - set(shard.shard.missing(KEYS)[1])
        mine = {key for key, at in zip(KEYS, owner, strict=True) if at == index}
        assert mine <= held and held - before.get(shard.shard_id, set()) <= mine


def test_publishing_while_shards_die_loses_nothing(start):
    pool, client = start(3)
    worker = RetrievalWorker(geometry=GEOMETRY)
    stats = make_stats(200, 5)
    for step in range(40):
        keys = [f"step {step} {i}" for i in range(5)]
        for retriever in (client, worker):
            retriever.publish(keys, stats[:, :, 5 * step:5 * step + 5], {"grows": keys})
        if step % 10 == 3:
            pool.shards[step % 3].kill()
        query = PackedQuery.build(["grows"], make_query(1, step), GEOMETRY, 11)
        assert same(client.submit(query).result(30), worker.submit(query).result(30))
    client.wait_ready(20)
    future = client.submit(query)
    assert same(future.result(30), worker.submit(query).result(30)) and future.source is Source.EXACT
    worker.close()


def test_a_forgotten_request_may_begin_again(start):
    _, client = start(2)
    client.forget(["a"])
    assert client.submit(ask()).result(30).candidates.tolist() == [0, 50, 1]
    client.publish([], None, {"a": KEYS[60:70]})
    future = client.submit(ask())
    assert future.result(30).candidates.tolist() == [10, 50, 1] and future.source is Source.EXACT


def test_clients_share_blocks_but_not_requests():
    pool = ThreadPool(2)
    clients = [RetrievalClient(pool, geometry=GEOMETRY, deadline_s=20.0) for _ in range(2)]
    stats = make_stats(len(KEYS))
    clients[0].publish(KEYS, stats, {"r": KEYS[:10]})
    clients[1].publish(KEYS, stats, {"r": KEYS[10:40]})
    query = PackedQuery.build(["r"], make_query(1), GEOMETRY, 5)
    assert [client.submit(query).result(30).candidates.tolist() for client in clients] == [[10], [30]]
    assert sum(shard.shard.info()["blocks"] for shard in pool.shards) == len(KEYS)
    for client in clients:
        client.close()


def test_placement_is_even_and_adding_a_shard_moves_only_to_it():
    keys = hash_names([f"key {i}" for i in range(20000)])
    names = [f"shard-{i}" for i in range(5)]
    four, five = place(keys, hash_names(names[:4])), place(keys, hash_names(names))
    assert np.bincount(four).min() > 4600 and np.bincount(five).min() > 3600
    assert set(five[four != five]) == {4}
    with pytest.raises(ValueError, match="there are 0 shards"):
        place(keys, hash_names([]))


def test_more_queries_at_once_than_a_lane_has_slots(start, unsharded):
    pool, client = start(2)
    client.submit(ask()).result(30)
    for shard in pool.shards:
        shard.running.clear()
    futures = [client.submit(ask(seed=seed)) for seed in range(20)]
    for shard in pool.shards:
        shard.running.set()
    for seed, future in enumerate(futures):
        assert same(future.result(30), unsharded.submit(ask(seed=seed)).result(30)) and future.source is Source.EXACT
    assert sorted(client._lane._free) == list(range(lane.NUM_SLOTS))


def test_a_slot_is_not_used_again_while_a_late_shard_may_write_to_it(start):
    pool, client = start(2, deadline_s=0.5)
    client.submit(ask()).result(30)
    pool.shards[0].running.clear()
    late = client.submit(ask(seed=2))
    assert late.result(30) and late.source is Source.LOCAL
    assert len(client._lane._free) == lane.NUM_SLOTS - 1
    pool.shards[0].running.set()
    end = time.monotonic() + 20
    while len(client._lane._free) < lane.NUM_SLOTS and time.monotonic() < end:
        time.sleep(0.01)
    assert len(client._lane._free) == lane.NUM_SLOTS


def test_memory_that_is_not_the_lane_is_not_joined(tmp_path):
    shared = lane.Lane()
    _, path, token = shared.invitation
    assert lane.join(path, token) is not None
    assert lane.join(path, b"x" * 16) is None and lane.join(str(tmp_path / "none"), token) is None
    shared.close()


def test_nothing_is_compiled_once_a_bank_exists(start):
    start(1)
    before = [len(kernel.signatures) for kernel in (kernels.answer_rows, kernels.merge_rows)]
    _, client = start(2)
    for per_head in (False, True):
        assert client.submit(ask(per_head=per_head)).result(30).is_exact
        assert client.submit(ask(k=[1, 2, 3], start=[0, 1, 2], stop=[9, 8, 7], per_head=per_head)).result(30).is_exact
    assert [len(kernel.signatures) for kernel in (kernels.answer_rows, kernels.merge_rows)] == before


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="expected fallbacks out of local, last, dense"):
        RetrievalClient(ThreadPool(1), fallbacks=("guess",))


def test_blocks_that_shards_refuse_for_ever_are_an_error_in_the_log_once(caplog):
    """A pool that another model has filled first."""
    pool = ThreadPool(2)
    first, second = (RetrievalClient(pool, geometry=geometry, deadline_s=5.0, fallbacks=("local",))
                     for geometry in (GEOMETRY, GEOMETRY._replace(dtype="float32")))
    try:
        first.publish(KEYS, make_stats(len(KEYS)), {"a": KEYS})
        first.wait_ready()
        with caplog.at_level("ERROR", "ucm_ray.retrieval.client"):
            second.publish(KEYS, make_stats(len(KEYS)), {"b": KEYS})
            deadline_s = time.monotonic() + 20
            while not caplog.records and time.monotonic() < deadline_s:
                time.sleep(0.02)
            time.sleep(0.5)
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 1 and "float32" in said[0] and "bfloat16" in said[0], said
        assert second.submit(PackedQuery.build(["b"], make_query(1), second.bank.geometry, 3)).result(
            10).source(0) is Source.LOCAL
    finally:
        first.close()
        second.close()

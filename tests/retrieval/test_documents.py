"""Named blocks of applications: the actor that owns them, and its pool, when parts of them die."""

import os
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.retrieval.conftest import GEOMETRY, make_query, make_stats

NAMESPACE = "retrieval-tests"


@pytest.fixture(scope="module")
def documents(ray_local):
    """`documents(method, ...)` asks an owner with two shards; `.actor` is its handle, `.pool()` its pool."""
    from actors.retrieval_documents import connect_documents
    from actors.retrieval_pool import PoolSettings, stop_pool

    name = f"pool-{uuid.uuid4().hex[:8]}"
    actor = connect_documents(name, NAMESPACE, GEOMETRY, PoolSettings(shards=2, capacity_bytes=2**18, device="cpu"))

    def ask(method, *arguments):
        return ray_local.get(getattr(actor, method).remote(*arguments), timeout=90)

    ask.actor, ask.pool = actor, lambda: ray_local.get_actor(name, namespace=NAMESPACE)
    yield ask
    ray_local.kill(actor)
    stop_pool(name, NAMESPACE)


def test_while_the_pool_starts_other_callers_are_answered(monkeypatch):
    """It may take a minute to learn that the cluster has no room."""
    from actors import retrieval_documents
    from ucm_ray.retrieval.client import RetrievalError

    starting, go_on = threading.Event(), threading.Event()

    def start_pool(*_):
        starting.set()
        assert go_on.wait(30)
        raise RetrievalError("no room")

    monkeypatch.setattr(retrieval_documents, "start_pool", start_pool)
    owner = retrieval_documents.RetrievalDocuments("pool", NAMESPACE, tuple(GEOMETRY), {})
    with ThreadPoolExecutor(2) as threads:
        stuck = threads.submit(owner.upsert, "a", "x", make_stats(2).numpy(), False)
        assert starting.wait(30)
        try:
            assert threads.submit(owner.info, "a").result(10)["blocks"] == 0
            with pytest.raises(retrieval_documents.Refused):
                threads.submit(owner.evict, "a", ["x"]).result(10)
        finally:
            go_on.set()
        with pytest.raises(retrieval_documents.Refused, match="no room"):
            stuck.result(30)


def test_an_application_ends_its_own_pools_and_no_others(ray_local):
    from actors.retrieval_documents import connect_documents
    from actors.retrieval_pool import PoolSettings, end_pools, own_namespace, start_pool

    settings = PoolSettings(capacity_bytes=2**18, device="cpu", num_cpus=0.0)
    base = f"base-{uuid.uuid4().hex[:6]}"
    old, new, http, other = (own_namespace(base, *told) for told in (
        ("app", "engine", "mean"), ("app", "engine", "cumulant"), ("app", "http"), ("app-b", "engine", "mean")))
    assert len({old, new, http, other}) == 4 and old == own_namespace(base, "app", "engine", "mean")

    def living():
        return {found["namespace"] for found in ray_local.util.list_named_actors(all_namespaces=True)
                if found["namespace"].startswith(base)}

    def wait_for(expected):
        deadline_s = time.monotonic() + 30
        while living() != expected:
            assert time.monotonic() < deadline_s, living()
            time.sleep(0.1)

    for namespace in (old, new, other):
        start_pool(settings, namespace=namespace)
    owner = connect_documents("retrieval-http", http, GEOMETRY, settings)
    ray_local.get(owner.upsert.remote("a", "x", make_stats(2).numpy(), False), timeout=90)
    assert living() == {old, new, http, other}
    end_pools(base, "app", "engine", keep=new)
    wait_for({new, http, other})
    end_pools(base, "app")
    wait_for({other})
    end_pools(base, "app-b")
    wait_for(set())


def best_blocks(stats, query, k):
    scores = GEOMETRY.method.score(query, stats).sum(1)
    return scores.topk(k).indices.sort().values.tolist()


def refusal(ask, *arguments):
    """Status of the refusal of a call."""
    from ray.exceptions import RayTaskError

    with pytest.raises(RayTaskError) as error:
        ask(*arguments)
    return error.value.cause.status


def shards(ray, documents):
    return [info for info in ray.get(documents.pool().info.remote(), timeout=30)["shards"].values() if info]


def test_what_the_owner_cannot_hold_is_refused_and_changes_nothing(documents):
    room = documents("info", "a")["capacity_blocks"]
    documents("upsert", "a", "x", make_stats(room - 1).numpy(), False)
    assert refusal(documents, "upsert", "b", "y", make_stats(2).numpy(), False) == 507
    assert refusal(documents, "upsert", "a", "x", make_stats(2).numpy(), True) == 507
    assert refusal(documents, "upsert", "a", "z", np.zeros((1, 2, 3, 4, 5), np.float32), False) == 400
    assert documents("upsert", "a", "x", make_stats(room).numpy(), False) == room  # in the place of the old ones
    assert refusal(documents, "evict", "b", ["x"]) == 404
    assert refusal(documents, "evict", "a", ["x", "y"]) == 404 and documents("info", "a")["blocks"] == room
    documents("evict", "a", ["x"])


def test_evicted_blocks_leave_the_shards(ray_local, documents):
    documents("upsert", "a", "x", make_stats(40).numpy(), False)
    documents("upsert", "a", "y", make_stats(15, seed=3).numpy(), False)
    assert documents("top_k", "a", "x", make_query(1)[0].numpy(), 5, 0, None, False)["candidates"] == 40
    assert sum(info["blocks"] for info in shards(ray_local, documents)) == 55
    assert documents("evict", "a", ["x", "x"]) == (1, 40)
    deadline_s = time.monotonic() + 20
    while sum(info["blocks"] for info in shards(ray_local, documents)) != 15:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert documents("info", "a")["blocks"] == 15 and documents("info", "b")["blocks"] == 0


def test_a_killed_shard_changes_no_answer(ray_local, documents):
    stats, query = make_stats(60), make_query(1)[0]
    documents("upsert", "a", "x", stats.numpy(), False)
    expected = best_blocks(stats, query, 7)
    os.kill(shards(ray_local, documents)[0]["pid"], signal.SIGKILL)
    sources, deadline_s = [], time.monotonic() + 60
    while not sources or sources[-1] != "exact" or len(sources) < 5:
        found = documents("top_k", "a", "x", query.numpy(), 7, 0, None, False)
        assert [layer[0] for layer in found["blocks"]] == expected and found["candidates"] == 60
        sources.append(found["source"])
        assert time.monotonic() < deadline_s, sources
        time.sleep(0.05)


def test_a_killed_owner_comes_back_empty(ray_local, documents):
    from ray.exceptions import RayActorError, RayTaskError

    documents("upsert", "a", "x", make_stats(5).numpy(), False)
    ray_local.kill(documents.actor, no_restart=False)
    query, deadline_s = make_query(1)[0].numpy(), time.monotonic() + 60
    while True:
        try:
            documents("top_k", "a", "x", query, 3, 0, None, False)  # the killed one may still answer
        except RayTaskError as error:
            assert error.cause.status == 404
            break
        except RayActorError:
            pass  # between the two
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert documents("upsert", "a", "x", make_stats(5).numpy(), False) == 5
    assert documents("top_k", "a", "x", query, 9, 0, None, False)["candidates"] == 5

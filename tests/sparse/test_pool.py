"""ESA asking shards that are real Ray actors, which are then killed or frozen."""

import importlib.util
import logging
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from ucm_ray.sparse import UcmSparseRole
from ucm_ray.sparse.esa import ESA

_spec = importlib.util.spec_from_file_location("esa_paged", Path(__file__).with_name("paged.py"))
paged = sys.modules.setdefault("esa_paged", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(paged)
NAMESPACE = "esa-tests"
DEADLINE_MS = 300.0


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    started = not ray.is_initialized()  # other tests of this process may share theirs
    if started:
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100 * 2**20,
        )
    yield ray
    if started:
        ray.shutdown()


@pytest.fixture
def shards(ray):
    """`shards(fallback)`: a cache decoded by ESA over two shards, and a function that kills both."""
    from actors.retrieval_pool import PoolSettings, start_pool, stop_pool
    from ucm_ray.retrieval.client import RetrievalClient

    name = f"esa-{uuid.uuid4().hex[:8]}"
    clients = []

    def start(fallback: str, **config):
        pool = start_pool(
            PoolSettings(shards=2, capacity_bytes=8 * 2**20, device="cpu"), name=name, namespace=NAMESPACE
        )

        def connect(geometry):
            fallbacks = ("local",) if fallback == "local" else ()
            client = RetrievalClient.connect(
                namespace=NAMESPACE, pool=name, geometry=geometry, deadline_s=DEADLINE_MS / 1e3, fallbacks=fallbacks
            )
            clients.append(client)
            return client

        config = {"local_window_sz": 2, "fallback": fallback, "deadline_ms": DEADLINE_MS, **config}
        esa = ESA(UcmSparseRole.WORKER, config, connect)
        cache = paged.Paged(esa)
        clients[0].wait_ready()

        def kill():
            for _, handle in ray.get(pool.membership.remote())[1]:
                ray.kill(handle, no_restart=True)
            ray.kill(pool, no_restart=True)
            time.sleep(0.5)

        return cache, kill

    yield start
    for client in clients:
        client.close()
    stop_pool(name, NAMESPACE)


def decode(cache, steps: int) -> bool:
    """Decode; whether all outputs were exactly dense. No step may take longer than its deadline and some slack."""
    is_dense = True
    for _ in range(steps):
        begun = time.perf_counter()
        _, sparse, dense = cache.step({"a": 1})
        assert time.perf_counter() - begun < 2 * DEADLINE_MS / 1e3 + 1.0
        is_dense = is_dense and all(torch.equal(one, other) for one, other in zip(sparse, dense, strict=True))
    return is_dense


def test_shards_select_what_this_process_would_select(shards):
    cache, _ = shards("dense", static_share=0.0, retrieval_stride=1)
    local = paged.Paged(ESA(UcmSparseRole.WORKER, {"local_window_sz": 2, "static_share": 0.0, "retrieval_stride": 1}))
    for each in (cache, local):
        each.start("a", 60)
        each.step({"a": 60})
        each.step({"a": 1})
    # a process' own worker answers in the step itself, shards by the next one: let them
    state = cache.esa.state("a")
    if state.pending is not None:
        state.pending.future.result(10)
        cache.esa._receive(state)
    remote, here = (each.esa.state("a").selection.middle.sort(-1).values for each in (cache, local))
    assert torch.equal(remote, here)
    assert cache.esa.state("a").usage.fallbacks == 0


def test_shards_killed_before_a_request_give_dense_tokens(shards):
    cache, kill = shards("dense")
    kill()
    cache.start("a", 60)
    cache.step({"a": 60})
    assert decode(cache, 6)
    assert cache.esa.state("a").usage.fallbacks > 0


@pytest.mark.parametrize("fallback", ["last", "local"])
def test_shards_killed_during_decode_leave_it_sparse_and_counted(shards, fallback):
    cache, kill = shards(fallback, retrieval_stride=2)
    cache.start("a", 60)
    cache.step({"a": 60})
    assert not decode(cache, 3)
    before = cache.esa.state("a").usage
    kill()
    decode(cache, 12)
    after = cache.esa.state("a").usage
    assert after.fallbacks > before.fallbacks and after.sparse_steps == before.sparse_steps + 12

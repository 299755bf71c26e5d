"""One Ray cluster for all tests of this room, and small blocks to put into it."""

import logging
import uuid

import pytest
import torch

from ucm_ray.retrieval import Geometry

GEOMETRY = Geometry(num_layers=3, num_kv_heads=2, head_dim=8, representation="cumulant", dtype="bfloat16")


@pytest.fixture(scope="module")
def ray_local():
    """Ray on this machine, once a file: other rooms start a Ray of another kind. Shards mostly wait: more CPUs than
    are."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
             object_store_memory=200 * 2 ** 20, namespace="retrieval-tests")
    yield ray
    ray.shutdown()


@pytest.fixture
def pool(ray_local):
    """`pool(shards=2, ...)` starts a pool and returns (handle, name); all are stopped after the test."""
    from actors.retrieval_pool import PoolSettings, start_pool, stop_pool

    names = []

    def start(**settings):
        name = f"pool-{uuid.uuid4().hex[:8]}"
        names.append(name)
        settings = {"capacity_bytes": 8 * 2 ** 20, "device": "cpu", **settings}
        return start_pool(PoolSettings(**settings), name=name, namespace="retrieval-tests"), name

    yield start
    for name in names:
        stop_pool(name, "retrieval-tests")


@pytest.fixture
def connect(ray_local):
    """`connect(pool_name, ...)` returns a client; all are closed after the test."""
    from ucm_ray.retrieval.client import RetrievalClient

    clients = []

    def start(name, **options):
        options = {"geometry": GEOMETRY, "deadline_s": 2.0, **options}
        clients.append(RetrievalClient.connect(namespace="retrieval-tests", pool=name, **options))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


def make_stats(num_blocks: int, seed: int = 0, geometry: Geometry = GEOMETRY) -> torch.Tensor:
    """Statistics of random blocks, `[num_stats, num_layers, num_blocks, num_kv_heads, head_dim]`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.num_layers, num_blocks, 4, geometry.num_kv_heads, geometry.head_dim)
    keys = torch.randn(shape, generator=generator)
    return geometry.method.compute(keys)


def make_query(num_requests: int, seed: int = 1, geometry: Geometry = GEOMETRY, group_size: int = 2) -> torch.Tensor:
    """Random query vectors, `[num_requests, num_layers, num_heads, head_dim]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_requests, geometry.num_layers, geometry.num_kv_heads * group_size, geometry.head_dim,
                       generator=generator)

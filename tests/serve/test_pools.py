"""Which retrieval pools a service asks for."""

import asyncio
from types import SimpleNamespace

import pytest

from ucm_ray.config import parse_settings
from ucm_ray.serve import engine, retrieval
from ucm_ray.serve.app import engine_kwargs

GPU_SHARED = {"engine": {"device": "cpu"}, "esa": {"enabled": True},
              "retrieval": {"backend": "ray", "num_gpus": 0.05, "max_shards": 1}}


@pytest.fixture
def started(monkeypatch):
    """`started(settings, model)`: what an engine is told, after starting (namespace, settings) in `started.pools`."""
    pools, ended = [], []
    monkeypatch.setattr(engine, "start_pool", lambda settings, namespace: pools.append((namespace, settings)))
    monkeypatch.setattr(engine, "end_pools", lambda *arguments, keep: ended.append((*arguments, keep)))

    def start(changes, model="model", app="app"):
        raw = {name: section | changes.get(name, {}) for name, section in GPU_SHARED.items()}
        kwargs = engine_kwargs(parse_settings(raw))
        return kwargs | engine.start_retrieval(kwargs, model, app)

    start.pools, start.ended = pools, ended
    return start


def test_another_model_representation_or_setting_means_another_pool(started, tmp_path):
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    started({})
    started({"esa": {"sparse_ratio": 0.5}})
    assert started.pools[0] == started.pools[1]
    for changes in ({"esa": {"representation": "mean"}}, {"esa": {"retrieval_dtype": "float16"}},
                    {"retrieval": {"capacity_bytes": 2**20}}, {"engine": {"tensor_parallel_size": 2}}):
        started(changes)
    started({}, model="other")
    started({}, app="other")
    started({}, model=tmp_path)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4}')
    started({}, model=tmp_path)
    names = [namespace for namespace, _ in started.pools[1:]]
    assert len(set(names)) == len(names) == 9 and all(name.startswith("ucm_ray-") for name in names)
    assert started.ended[-1] == ("ucm_ray", "app", "engine", names[-1])


def test_the_engine_is_told_where_its_pool_is(started):
    told = started({})["kv_transfer_config"]["kv_connector_extra_config"]
    assert told["retrieval"]["namespace"] == started.pools[0][0] and told["ucm_sparse_config"]["ESA"]
    assert parse_settings({"kv_connector_extra_config": told}).retrieval.namespace == started.pools[0][0]
    assert started.pools[0][1].num_gpus == 0.05


def test_without_a_pool_nothing_is_started_or_ended(started):
    kwargs = started({"retrieval": {"backend": "local"}})
    assert started.pools == started.ended == []
    assert kwargs["kv_transfer_config"]["kv_connector_extra_config"]["retrieval"]["namespace"] == "ucm_ray"


def test_the_pool_behind_http_leaves_the_gpu_to_the_engines(monkeypatch):
    asked = []
    monkeypatch.setattr(retrieval, "connect_documents", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(retrieval, "end_pools", lambda *_, keep: None)
    monkeypatch.setattr(retrieval.serve, "get_replica_context", lambda: SimpleNamespace(app_name="app"))

    class Cache:
        async def engine(self):
            return {"namespace": {"kv_layout": "layers=2,kv_heads=1,head_dim=8"}}

        async def namespace(self, salt):
            return "ab" * 16

    for changes in ({}, {"dtype": "float16"}):
        settings = parse_settings(GPU_SHARED | {"retrieval": GPU_SHARED["retrieval"] | changes})
        asyncio.run(retrieval.RetrievalService(settings, Cache())._connect())
    (_, first, geometry, pool), (_, second, _, _) = asked
    assert (pool.num_gpus, pool.device, pool.max_shards) == (0.0, "cpu", 1) and geometry.dtype == "float32"
    assert first != second

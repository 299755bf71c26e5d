"""Replicas scale on ongoing requests and bring nodes with them, on Ray's fake multi-node autoscaling cluster.

The deployment has the options our builder gives an engine (autoscaling, placement group) around a class that waits:
what is tested is that these options scale, not an engine.
"""

import asyncio
import time

import pytest
import ray
from ray import serve
from ray.cluster_utils import AutoscalingCluster

from ucm_ray.config import load_settings
from ucm_ray.serve.app import llm_config

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]


@pytest.fixture
def cluster():
    """A head with room for Serve alone; workers come when somebody needs four CPUs."""
    cluster = AutoscalingCluster(
        head_resources={"CPU": 2},
        worker_node_types={"engine": {"resources": {"CPU": 4}, "node_config": {}, "min_workers": 0, "max_workers": 2}},
        idle_timeout_minutes=0.1)
    cluster.start()
    ray.init("auto", log_to_driver=False, logging_level="ERROR")
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def wait_for(check, timeout_s: float = 240) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.5)


def test_load_brings_replicas_and_nodes_and_they_go_again(cluster, model_dir):
    settings = load_settings(overrides={
        "model": str(model_dir), "engine.device": "cpu", "service.min_replicas": 0, "service.max_replicas": 2,
        "service.target_ongoing_requests": 2, "service.replica_cpus": 4})
    config = llm_config(settings)
    options = dict(config.deployment_config)
    scaling = options.pop("autoscaling_config") | {
        "initial_replicas": 0, "upscale_delay_s": 1, "downscale_delay_s": 3, "metrics_interval_s": 0.5,
        "look_back_period_s": 2}
    options.pop("request_router_config", None)

    class Waits:
        async def __call__(self) -> str:
            await asyncio.sleep(10)
            return "done"

    deployment = serve.deployment(Waits, name="engine", autoscaling_config=scaling,
                                  placement_group_bundles=config.placement_group_config["bundles"], **options)
    handle = serve.run(deployment.bind(), name="scaling", route_prefix=None)

    def replicas() -> int:
        state = serve.status().applications["scaling"].deployments["engine"].replica_states
        return state.get("RUNNING", 0)

    assert (nodes(), replicas()) == (1, 0)
    pending = [handle.remote() for _ in range(8)]
    wait_for(lambda: replicas() == 2 and nodes() == 3)
    assert [answer.result(timeout_s=240) for answer in pending] == ["done"] * 8
    wait_for(lambda: replicas() == 0)
    wait_for(lambda: nodes() == 1)

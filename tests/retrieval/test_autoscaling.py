"""The pool follows stored bytes and queue time, and asks Ray for nodes when it needs them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
import ray

from actors.retrieval_pool import PoolSettings, shards_wanted

ROOT = Path(__file__).parents[2]


def info(referenced=0, queue_ms=0.0):
    return {"referenced_bytes": referenced, "queue_ms": queue_ms}


@pytest.mark.parametrize("infos, refused, wanted", [
    ([info(0)], 0, 1),
    ([info(79)], 0, 1),
    ([info(81)], 0, 2),                          # above target_fill of 100 bytes
    ([info(90), info(90), info(90)], 0, 4),
    ([info(10), info(10), info(10)], 0, 1),      # would fit into one
    ([info(10)], 3, 2),                          # blocks were refused
    ([info(10), info(0, queue_ms=9)], 0, 3),     # queries wait too long
    ([info(1000)], 0, 5),                        # not beyond max_shards
])
def test_how_many_shards_a_load_needs(infos, refused, wanted):
    settings = PoolSettings(min_shards=1, max_shards=5, capacity_bytes=100, target_fill=0.8, target_queue_ms=5)
    assert shards_wanted(settings, infos, refused) == wanted


@pytest.mark.parametrize("settings, match", [
    ({"min_shards": 3, "max_shards": 2}, "min_shards is 3 and max_shards 2"),
    ({"shards": 0}, "shards is 0"),
    ({"shards": 9, "autoscale": True}, "shards is 9, expected 1 to 4"),
    ({"target_fill": 0}, "target_fill 0"),
])
def test_settings_that_cannot_be_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        PoolSettings(**settings).check()


class FakeNodesCluster:
    """Ray's fake multi-node autoscaling cluster: nodes are processes, and exist only once somebody needs them.

    `ray.cluster_utils.AutoscalingCluster` is the same, but begins and ends with `ray stop --force`, which kills every
    other Ray on the machine, and misses a file in Ray's wheel. So: the same node provider, on a port and in a folder of
    its own, and only processes that carry our mark are killed.
    """

    def __init__(self, folder: Path, worker_resources: dict[str, float], max_workers: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        self._mark = f"UCM_RAY_TEST_CLUSTER={uuid.uuid4().hex}"
        self._folder = tempfile.mkdtemp(prefix="ray")  # short: Ray puts sockets there
        name, value = self._mark.split("=")
        environment = {key: text for key, text in os.environ.items() if not key.startswith("RAY_")}
        self.environment = environment | {
            name: value, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
        config = folder / "cluster.yaml"
        config.write_text(json.dumps({
            "cluster_name": "fake", "max_workers": max_workers, "idle_timeout_minutes": 0.1, "upscaling_speed": 10,
            "provider": {
                "type": "external", "gcs_address": self.address, "use_node_id_as_ip": True,
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "disable_node_updaters": True, "disable_launch_config_check": True},
            # What Ray's providers have defaults for, and external ones must name.
            "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [], "rsync_exclude": [],
            "rsync_filter": [], "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
            "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
            "file_mounts_sync_continuously": False,
            "head_node_type": "ray.head.default",
            "available_node_types": {
                "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
                "worker": {"resources": worker_resources, "node_config": {}, "min_workers": 0,
                           "max_workers": max_workers}}}))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}",
                   f"--autoscaling-config={config}", "--num-cpus=2", "--include-dashboard=false",
                   f"--temp-dir={self._folder}", f"--object-store-memory={100 * 2 ** 20}"]
        started = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        if started.returncode:
            self.stop()
            raise RuntimeError(started.stdout[-2000:] + started.stderr[-2000:])

    def stop(self):
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
            except (OSError, ValueError):
                continue  # it ended meanwhile, or is not ours to read
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture
def fake_nodes(tmp_path):
    cluster = FakeNodesCluster(tmp_path, {"CPU": 1, "shard": 1, "object_store_memory": 80 * 2 ** 20}, 3)
    yield cluster
    cluster.stop()


SCENARIO = """
import logging, sys, time, ray
from actors.retrieval_pool import PoolSettings, start_pool
from tests.retrieval.conftest import GEOMETRY, make_query, make_stats
from ucm_ray.retrieval import PackedQuery, Source
from ucm_ray.retrieval.client import RetrievalClient

ray.init(sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
settings = PoolSettings(shards=1, min_shards=1, max_shards=3, capacity_bytes=100 * GEOMETRY.record_bytes, device="cpu",
                        num_cpus=0.1, resources={"shard": 1}, autoscale=True, cooldown_s=3.0, interval_s=0.5)
pool = start_pool(settings, namespace="scaling", wait_s=120)
client = RetrievalClient.connect(namespace="scaling", geometry=GEOMETRY, deadline_s=5.0)
keys = [f"k{i}" for i in range(150)]
client.publish(keys, make_stats(150), {"r": keys})
query = PackedQuery.build(["r"], make_query(1), GEOMETRY, 9)

def until(count):
    end = time.monotonic() + 100
    while time.monotonic() < end:
        future = client.submit(query)
        answer = future.result(30)
        assert future.source in (Source.EXACT, Source.LOCAL), future.reason
        if len(client.stats()["shards"]) == count and future.source is Source.EXACT:
            return
        time.sleep(0.1)
    raise TimeoutError((count, client.stats(), ray.get(pool.info.remote())))

until(2)
nodes = sum(node["Alive"] and "shard" in node["Resources"] for node in ray.nodes())
assert nodes >= 2, nodes
print("grew to 2 shards", flush=True)
client.forget(["r"])
client.publish([], None, {"r": keys[:20]})
until(1)
print("shrank to 1 shard", flush=True)
"""


def test_the_cluster_adds_nodes_for_a_pool_that_fills_up(fake_nodes):
    """A shard needs a node of its own here, and there are none until Ray's autoscaler starts them."""
    found = subprocess.run([sys.executable, "-c", SCENARIO, fake_nodes.address], capture_output=True, text=True,
                           timeout=280, cwd=ROOT, env=fake_nodes.environment)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    assert "grew to 2 shards" in found.stdout and "shrank to 1 shard" in found.stdout

"""The pool follows stored bytes and queue time, and asks Ray for nodes when it needs them."""

import subprocess
import sys
from pathlib import Path

import pytest

from actors.retrieval_pool import PoolSettings, shards_wanted
from tests.fake_nodes import FakeNodesCluster

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

"""The directory as an actor: killed and restarted; and two nodes with folders of their own."""

import os
import signal

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from actors.chunk_directory import RAY_NAMESPACE, DirectorySubscriber, directory_name, start_directory
from actors.peer_store import start_source
from tests.serve.conftest import eventually
from tests.serve.test_chunk_directory import OTHER, SPACE, keys, meta_and_kv
from ucm_ray.store.factory import UcmConnectorFactory


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, as far as Ray can tell."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 10**8})
    nodes.add_node(num_cpus=1, resources={"second": 1}, object_store_memory=10**8)
    ray.init(address=nodes.address, namespace=RAY_NAMESPACE, log_to_driver=False, logging_level="ERROR")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def store_config(folder, **extra) -> dict:
    return {"storage_backends": str(folder), "store_pipeline": "Cache|Posix", "cache_capacity_bytes": 2**20,
            "posix_capacity_bytes": 2**24} | extra


def test_a_killed_directory_comes_back_with_everything_and_its_subscribers_notice(cluster, tmp_path):
    config = store_config(tmp_path / "shared")
    store = UcmConnectorFactory.create_connector(config, 0)
    store.save(*meta_and_kv(1))
    directory = start_directory(config)
    assert ray.get(directory.ping.remote(), timeout=120)
    known: set[str] = set()
    subscriber = DirectorySubscriber(
        lambda namespace, records: known.update(record.key for record in records),
        lambda namespace, gone: known.difference_update(gone),
        connect=lambda: ray.get_actor(directory_name(config), namespace=RAY_NAMESPACE), wait_s=0.5, retry_s=0.1)
    subscriber.start()
    eventually(lambda: known == set(keys(1)))
    ray.get(directory.pin.remote(SPACE, keys(1)))

    epoch = ray.get(directory.epoch.remote())
    os.kill(ray.get(directory.ping.remote()), signal.SIGKILL)
    store.save(*meta_and_kv(2))  # while nobody looks
    assert known == set(keys(1)), "a look-up lost what it knew because the directory is away"
    eventually(lambda: known == set(keys(1, 2)), 120)
    assert subscriber.epoch != epoch
    chunks = {chunk["key"]: chunk["pinned"] for chunk in ray.get(directory.chunks.remote(SPACE))[1]}
    assert chunks == {keys(1)[0]: True, keys(2)[0]: False}
    ray.get(directory.delete.remote(SPACE, keys(1)))
    eventually(lambda: known == set(keys(2)))
    subscriber.close()
    store.close()
    ray.kill(directory)


@ray.remote(num_cpus=0)
class Engine:
    """What an engine does with its store, on whatever node it runs."""

    def __init__(self, config):
        self.node = ray.get_runtime_context().get_node_id()
        start_source(config, self.node, refresh_s=0.05)
        self.store = UcmConnectorFactory.create_connector(config, 0)

    def node_id(self):
        return self.node

    def save(self, number, value):
        meta, kv = meta_and_kv(number)
        return self.store.save(meta, torch.full_like(kv, value))

    def load(self, namespace, number):
        found = self.store.load(namespace, keys(number)[0])
        return None if found is None else (found[0], found[1].numpy().copy())

    def on_disk(self, number):
        return bool(self.store.posix.lookup(SPACE, keys(number))[0])

    def stats(self):
        return self.store.stats()["Peers"]


def test_a_chunk_of_one_node_is_reused_on_another_with_a_folder_of_its_own(cluster, tmp_path):
    configs = [store_config(tmp_path / f"node{number}", store_pipeline="Cache|Peers", directory="two-nodes")
               for number in range(2)]
    directory = start_directory(configs[0])
    one = Engine.options(resources={"node:__internal_head__": 0.001}).remote(configs[0])
    two = Engine.options(resources={"second": 0.1}).remote(configs[1])
    first_node, second_node = ray.get([one.node_id.remote(), two.node_id.remote()], timeout=240)
    assert first_node != second_node

    assert ray.get(one.save.remote(1, 7.0))
    assert eventually(lambda: ray.get(directory.owners.remote(SPACE, keys(1)))[0], 60) == [first_node]
    meta, kv = ray.get(two.load.remote(SPACE, 1))
    assert (meta.key, meta.source_id, meta.source_position) == (keys(1)[0], "cc" * 16, 400)
    assert np.all(kv == 7.0) and ray.get(two.stats.remote())["peer_hits"] == 1
    assert ray.get(two.on_disk.remote(1)), "the chunk was not kept where it was used"
    eventually(lambda: set(ray.get(directory.owners.remote(SPACE, keys(1)))[0]) == {first_node, second_node})

    assert ray.get(two.load.remote(OTHER, 1)) is None, "a chunk crossed namespaces"
    assert ray.get(two.load.remote(SPACE, 9)) is None

    assert ray.get(directory.pin.remote(SPACE, keys(1))) == 1
    files = [tmp_path / f"node{number}" / ".store" / "directory_pins.json" for number in range(2)]
    eventually(lambda: all(file.exists() and keys(1)[0] in file.read_text() for file in files))

    ray.get(directory.delete.remote(SPACE, keys(1)))
    eventually(lambda: not any(keys(1)[0] in file.read_text() for file in files))
    eventually(lambda: not ray.get(one.on_disk.remote(1)) and not ray.get(two.on_disk.remote(1)))
    ray.kill(directory)


def test_chunks_that_only_a_dead_node_had_leave_the_directory(cluster, tmp_path):
    config = store_config(tmp_path / "mortal", store_pipeline="Cache|Peers", directory="mortal-node")
    directory = start_directory(config)
    ray.get(directory.epoch.remote(), timeout=120)  # it runs, and not on the node that dies
    node = cluster.add_node(num_cpus=1, resources={"mortal": 1}, object_store_memory=10**8)
    engine = Engine.options(resources={"mortal": 0.1}).remote(config)
    assert ray.get(engine.save.remote(1, 7.0), timeout=240)
    eventually(lambda: ray.get(directory.owners.remote(SPACE, keys(1)))[0], 60)
    cluster.remove_node(node)
    eventually(lambda: not ray.get(directory.owners.remote(SPACE, keys(1)))[0], 90)
    assert ray.get(directory.chunks.remote(SPACE))[0] == 0
    ray.kill(directory)

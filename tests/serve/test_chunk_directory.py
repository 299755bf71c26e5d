"""The directory without Ray: versions, bounded memory, following a store, and what a subscriber makes of it."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch

from actors import peer_store
from actors.chunk_directory import ChunkDirectory, ChunkTable, DirectoryRecord, DirectorySubscriber, directory_name
from ucm_ray.store.base import ChunkMeta
from ucm_ray.store.factory import UcmConnectorFactory

SPACE, OTHER = "aa" * 16, "bb" * 16


def record(number: int, source: str = "cc" * 16, context: str = "canonical") -> DirectoryRecord:
    tokens = np.arange(number, number + 16, dtype=np.int32)
    return DirectoryRecord(f"{number:032x}", tokens, source, 400 + number, "", context, 1000, float(number))


def keys(*numbers: int) -> list[str]:
    return [f"{number:032x}" for number in numbers]


def meta_and_kv(number: int, namespace: str = SPACE, **extra) -> tuple[ChunkMeta, torch.Tensor]:
    meta = ChunkMeta(key=f"{number:032x}", namespace=namespace, token_ids=np.arange(16) + number, source_id="cc" * 16,
                     source_position=400, num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32",
                     context="canonical", **extra)
    return meta, torch.zeros(meta.shape)


class Copy:
    """A subscriber's view, without its thread."""

    def __init__(self):
        self.chunks: dict[str, set[str]] = {}
        self.subscriber = DirectorySubscriber(self._add, self._remove, connect=lambda: None)

    def _add(self, namespace, records):
        self.chunks.setdefault(namespace, set()).update(one.key for one in records)

    def _remove(self, namespace, gone):
        self.chunks[namespace] -= set(gone)

    def follow(self, table: ChunkTable):
        answer = table.since(self.subscriber.epoch, self.subscriber.version)
        self.subscriber.apply(answer)
        return answer


def test_a_subscriber_that_follows_versions_knows_what_the_directory_knows():
    table, copy = ChunkTable(), Copy()
    generator = np.random.default_rng(0)
    for _ in range(200):
        space = SPACE if generator.random() < 0.5 else OTHER
        number = int(generator.integers(0, 40))
        action = generator.random()
        if action < 0.6:
            table.add(space, [record(number), record(number + 1)])
        elif action < 0.9:
            table.remove(space, keys(number))
        else:
            table.pin(space, keys(number), generator.random() < 0.7)
        if generator.random() < 0.3:
            copy.follow(table)
    copy.follow(table)
    for space in (SPACE, OTHER):
        assert copy.chunks[space] == set(table.keys(space))
        assert set(table.pins().get(space, [])) <= copy.chunks[space]


def test_changes_are_sent_once_and_only_the_new_ones():
    table, copy = ChunkTable(), Copy()
    copy.follow(table)
    table.add(SPACE, [record(1)])
    assert [change.operation for change in copy.follow(table).changes] == ["add"]
    table.add(SPACE, [record(1), record(2)])
    answer = copy.follow(table)
    assert [one.key for one in answer.changes[0].records] == keys(2)
    assert copy.follow(table).changes == []


def test_a_subscriber_too_far_behind_gets_everything_and_keeps_no_ghosts():
    table, copy = ChunkTable(log_length=5), Copy()
    table.add(SPACE, [record(1), record(2)])
    copy.follow(table)
    for number in range(10, 30):
        table.add(SPACE, [record(number)])
    table.remove(SPACE, keys(1))
    assert copy.follow(table).snapshot is not None
    assert copy.chunks[SPACE] == set(table.keys(SPACE)) and keys(1)[0] not in copy.chunks[SPACE]


def test_a_restarted_directory_replaces_what_subscribers_knew():
    before, after, copy = ChunkTable(), ChunkTable(), Copy()
    before.add(SPACE, [record(1), record(2)])
    copy.follow(before)
    after.add(SPACE, [record(2), record(3)])
    copy.follow(after)
    assert copy.chunks[SPACE] == set(keys(2, 3))


def test_memory_is_bounded_and_pinned_chunks_are_not_forgotten():
    table = ChunkTable(max_chunks=10)
    table.add(SPACE, [record(0)])
    table.pin(SPACE, keys(0), True)
    for number in range(1, 50):
        table.add(SPACE, [record(number)])
    assert len(table) == 10 and table.forgotten == 40
    assert table.keys(SPACE) == keys(0, *range(41, 50))


def test_a_chunk_of_two_nodes_is_gone_when_both_have_lost_it():
    table = ChunkTable()
    table.add(SPACE, [record(1)], node="one")
    table.add(SPACE, [record(1)], node="two")
    assert table.nodes(SPACE, keys(1)[0]) == {"one", "two"}
    assert table.remove(SPACE, keys(1), node="one") == []
    assert table.remove(SPACE, keys(1), node="two") == keys(1)


def test_a_key_named_twice_is_removed_once_and_subscribers_hear_of_it():
    table, copy = ChunkTable(), Copy()
    table.add(SPACE, [record(1), record(2)])
    copy.follow(table)
    assert table.pin(SPACE, keys(2, 2), True) == keys(2)
    assert table.remove(SPACE, keys(1, 1, 2)) == keys(1, 2)
    assert [change.keys for change in copy.follow(table).changes if change.operation == "remove"] == [
        tuple(keys(1, 2))]
    assert not copy.chunks[SPACE]


@pytest.fixture
def store_config(tmp_path):
    return {"storage_backends": str(tmp_path / "store"), "store_pipeline": "Cache|Posix",
            "cache_capacity_bytes": 2**20, "posix_capacity_bytes": 2**24}


@pytest.fixture
def engine_store(store_config):
    store = UcmConnectorFactory.create_connector(store_config, 0)
    yield store
    store.close()


def ask(coroutine):
    return asyncio.run(coroutine)


def test_the_directory_finds_what_engines_store_and_deletes_it_in_the_shared_folder(store_config, engine_store):
    engine_store.save(*meta_and_kv(1))
    directory = ChunkDirectory(store_config, refresh_s=3600)
    engine_store.save(*meta_and_kv(2))
    engine_store.save(*meta_and_kv(3, OTHER))
    ask(directory.reread())
    total, page = ask(directory.chunks(SPACE))
    assert total == 2 and {chunk["key"] for chunk in page} == set(keys(1, 2))
    assert ask(directory.stats(SPACE))["bytes"] == 2 * meta_and_kv(1)[0].payload_bytes
    assert ask(directory.delete(SPACE, keys(1, 7))) == 1
    assert engine_store.posix.lookup(SPACE, keys(1, 2)).tolist() == [False, True]
    assert ask(directory.clear(SPACE)) == 1
    assert ask(directory.chunks(OTHER))[0] == 1, "another namespace lost its chunk"


def test_a_chunk_deleted_and_stored_again_between_two_looks_is_found(store_config, engine_store):
    engine_store.save(*meta_and_kv(1))
    directory = ChunkDirectory(store_config, refresh_s=3600)
    assert ask(directory.delete(SPACE, keys(1))) == 1
    engine_store.save(*meta_and_kv(1))
    ask(directory.reread())
    assert ask(directory.chunks(SPACE))[0] == 1


def test_deleting_a_key_twice_in_one_request_counts_it_once(store_config, engine_store):
    engine_store.save(*meta_and_kv(1))
    directory = ChunkDirectory(store_config, refresh_s=3600)
    before = ask(directory.changes())
    assert ask(directory.delete(SPACE, keys(1, 1))) == 1
    assert [change.operation for change in ask(directory.changes(before.epoch, before.version)).changes] == ["remove"]


def test_a_chunk_that_an_engine_evicted_leaves_the_directory(store_config, engine_store):
    engine_store.save(*meta_and_kv(1))
    directory = ChunkDirectory(store_config, refresh_s=3600)
    engine_store.delete(SPACE, keys(1))
    ask(directory.reread())
    assert ask(directory.chunks(SPACE))[0] == 0


def test_pins_and_chunks_survive_a_restart(store_config, engine_store):
    for number in (1, 2):
        engine_store.save(*meta_and_kv(number))
    directory = ChunkDirectory(store_config, refresh_s=3600)
    assert ask(directory.pin(SPACE, keys(1))) == 1
    again = ChunkDirectory(store_config, refresh_s=3600)
    described = {chunk["key"]: chunk["pinned"] for chunk in ask(again.chunks(SPACE))[1]}
    assert described == {keys(1)[0]: True, keys(2)[0]: False}


def pinned_in(directory: ChunkDirectory) -> dict[str, bool]:
    return {chunk["key"]: chunk["pinned"] for chunk in ask(directory.chunks(SPACE))[1]}


def test_a_deleted_chunk_that_is_stored_again_is_not_pinned_and_may_be_evicted(store_config, engine_store):
    engine_store.save(*meta_and_kv(1))
    directory = ChunkDirectory(store_config, refresh_s=3600)
    ask(directory.pin(SPACE, keys(1)))
    folder = engine_store.posix.folders[0]
    assert folder.pins.all() == {(SPACE, keys(1)[0])}
    ask(directory.delete(SPACE, keys(1)))
    ask(directory.reread())
    engine_store.save(*meta_and_kv(1))
    ask(directory.reread())
    assert pinned_in(directory) == {keys(1)[0]: False} and not folder.pins.all()
    assert not ask(directory.stats())["pinned"]


def test_pins_outlive_a_folder_that_cannot_be_read_for_a_while(store_config, engine_store, tmp_path):
    for number in (1, 2, 3):
        engine_store.save(*meta_and_kv(number))
    directory = ChunkDirectory(store_config, refresh_s=3600)
    ask(directory.pin(SPACE, keys(1)))
    (tmp_path / "store" / SPACE).rename(tmp_path / "away")
    ask(directory.reread())
    assert ask(directory.chunks(SPACE))[0] == 0
    (tmp_path / "away").rename(tmp_path / "store" / SPACE)
    ask(directory.reread())
    assert pinned_in(directory) == dict(zip(keys(1, 2, 3), (True, False, False), strict=True))
    ask(directory.pin(SPACE, keys(2)))
    again = ChunkDirectory(store_config, refresh_s=3600)
    assert pinned_in(again) == dict(zip(keys(1, 2, 3), (True, True, False), strict=True))
    assert ask(again.pin(SPACE, keys(1), False)) == 1 and not ask(again.pin(SPACE, keys(9)))


def test_clearing_a_namespace_takes_back_pins_of_chunks_that_are_not_there(store_config, engine_store):
    engine_store.save(*meta_and_kv(1))
    directory = ChunkDirectory(store_config, refresh_s=3600)
    ask(directory.pin(SPACE, keys(1)))
    engine_store.delete(SPACE, keys(1))
    ask(directory.reread())
    ask(directory.clear(SPACE))
    engine_store.save(*meta_and_kv(1))
    ask(directory.reread())
    assert pinned_in(directory) == {keys(1)[0]: False}


def test_documents_are_the_chunks_of_one_ingested_sequence(store_config):
    directory = ChunkDirectory()
    ask(directory.add(SPACE, [record(1), record(2), record(3, "dd" * 16), record(4, "ee" * 16, "request")]))
    total, page = ask(directory.documents(SPACE))
    assert total == 2
    assert [(one["id"], one["num_chunks"], one["num_tokens"]) for one in page] == [
        ("cc" * 16, 2, 32), ("dd" * 16, 1, 16)]


def test_waiting_for_changes_ends_when_there_is_one(store_config):
    async def scenario():
        directory = ChunkDirectory()
        first = await directory.changes()
        waiting = asyncio.create_task(directory.changes(first.epoch, first.version, wait_s=10))
        await asyncio.sleep(0.05)
        await directory.add(SPACE, [record(1)])
        return await asyncio.wait_for(waiting, 1)

    assert len(ask(scenario()).changes) == 1


def test_one_store_has_one_directory(tmp_path):
    assert directory_name({"storage_backends": str(tmp_path)}) == directory_name({"storage_backends": [str(tmp_path)]})
    assert directory_name({"storage_backends": "/a"}) != directory_name({"storage_backends": "/b"})


class Reply:
    """What a call to an actor gives: its result, or what it raised."""

    def __init__(self, method, arguments):
        self.result, self.error = None, None
        try:
            result = method(*arguments)
            self.result = ask(result) if asyncio.iscoroutine(result) else result
        except Exception as error:
            self.error = error

    def get(self, timeout: float | None = None):
        if self.error is not None:
            raise self.error
        return self.result


class Handle:
    """An actor's handle without Ray: the caller runs the method at once."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        method = getattr(self._actor, name)
        call = SimpleNamespace(remote=lambda *arguments: Reply(method, arguments))
        call.options = lambda **_: call
        return call


class Nodes:
    """Nodes with folders of their own, their sources and the directory; `dead` is what Ray says of them."""

    def __init__(self, root):
        self._root = root
        self.sources: dict[str, peer_store.ChunkSource] = {}
        self.dead: set[str] = set()
        self.stores = []
        self.restart_directory()

    def restart_directory(self):
        self.directory = ChunkDirectory(sources=peer_store.Sources("d"), refresh_s=3600)

    def config(self, node: str, **extra) -> dict:
        return {"storage_backends": str(self._root / node), "store_pipeline": "Cache|Posix", "directory": "d",
                "cache_capacity_bytes": 2**20, "posix_capacity_bytes": 2**24} | extra

    def store(self, node: str, **extra):
        """An engine's store on a node."""
        config = self.config(node, **extra)
        self.stores.append(UcmConnectorFactory.create_connector(
            config, config.get("rank", 0), config.get("world_size", 1)))
        return self.stores[-1]

    def engine_elsewhere(self, **extra):
        """A store that has nothing but what the nodes give it."""
        return self.store("here", store_pipeline="Cache|Peers", **extra)

    def start_source(self, node: str, **extra):
        self.sources[node] = peer_store.ChunkSource(self.config(node, **extra), node, "d", refresh_s=3600)

    def kill_source(self, node: str):
        self.sources.pop(node)._store.close()

    def report(self, *nodes: str):
        for node in nodes:
            self.sources[node]._report(Handle(self.directory))

    def find(self, directory: str, node: str) -> Handle:
        if node not in self.sources:
            raise ValueError(f"no actor of {node}")
        return Handle(self.sources[node])


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    nodes = Nodes(tmp_path)
    monkeypatch.setattr(ray, "get", Reply.get)
    monkeypatch.setattr(ray, "nodes", lambda: [
        {"NodeID": node, "Alive": node not in nodes.dead} for node in {*nodes.sources, *nodes.dead}])
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    monkeypatch.setattr(peer_store, "connect_directory", lambda name: Handle(nodes.directory))
    monkeypatch.setattr(peer_store, "find_source", nodes.find)
    yield nodes
    for store in nodes.stores:
        store.close()


def test_a_pin_holds_in_the_folder_of_the_node_that_has_the_chunk_and_survives_restarts(nodes):
    store = nodes.store("one")
    for number in (1, 2):
        store.save(*meta_and_kv(number))
    nodes.start_source("one")
    assert ask(nodes.directory.pin(SPACE, keys(1))) == 1
    nodes.kill_source("one")
    nodes.restart_directory()
    store.posix.folders[0].free_disk(2**20)
    assert store.posix.lookup(SPACE, keys(1, 2)).tolist() == [True, False]
    nodes.start_source("one")
    assert pinned_in(nodes.directory) == {keys(1)[0]: True}


def test_every_copy_of_a_pinned_chunk_is_pinned_until_it_is_unpinned_or_deleted(nodes):
    stores = [nodes.store(node) for node in ("one", "two")]
    pins = [store.posix.folders[0].pins for store in stores]
    pinned = {(SPACE, keys(1)[0])}
    stores[0].save(*meta_and_kv(1))
    nodes.start_source("one")
    nodes.start_source("two")
    ask(nodes.directory.pin(SPACE, keys(1)))
    stores[1].save(*meta_and_kv(1))
    nodes.report("two")
    assert [one.all() for one in pins] == [pinned, pinned]
    assert ask(nodes.directory.pin(SPACE, keys(1), False)) == 1
    assert [one.all() for one in pins] == [set(), set()]
    ask(nodes.directory.pin(SPACE, keys(1)))
    assert ask(nodes.directory.delete(SPACE, keys(1))) == 1
    assert [one.all() for one in pins] == [set(), set()]
    assert not any(store.posix.lookup(SPACE, keys(1))[0] for store in stores)


def test_a_dead_node_does_not_hide_the_living_one_that_has_the_chunk_too(nodes):
    for node in ("one", "two"):
        nodes.store(node).save(*meta_and_kv(1))
        nodes.start_source(node)
    nodes.kill_source("one")
    assert ask(nodes.directory.owners(SPACE, keys(1))) == [["one", "two"]]
    store = nodes.engine_elsewhere()
    meta, _ = store.load(SPACE, keys(1)[0])
    assert meta.key == keys(1)[0]
    numbers = store.stats()["Peers"]
    assert (numbers["peer_errors"], numbers["peer_hits"]) == (1, 1)


def test_what_only_a_dead_node_had_is_not_listed_as_stored(nodes):
    for node, numbers in (("one", (1, 2)), ("two", (2, 3))):
        store = nodes.store(node)
        for number in numbers:
            store.save(*meta_and_kv(number))
        nodes.start_source(node)
    ask(nodes.directory.pin(SPACE, keys(1, 2)))
    before = ask(nodes.directory.changes())
    ask(nodes.directory.reread())
    assert ask(nodes.directory.chunks(SPACE))[0] == 3, "a living node lost its chunks"
    nodes.kill_source("one")
    nodes.dead.add("one")
    ask(nodes.directory.reread())
    assert pinned_in(nodes.directory) == {keys(2)[0]: True, keys(3)[0]: False}
    assert ask(nodes.directory.owners(SPACE, keys(1, 2, 3))) == [[], ["two"], ["two"]]
    changes = ask(nodes.directory.changes(before.epoch, before.version)).changes
    assert [(change.operation, change.keys) for change in changes] == [("remove", tuple(keys(1)))]


def test_every_tensor_parallel_rank_fetches_its_own_half(nodes):
    for rank in range(2):
        meta, kv = meta_and_kv(1, rank=rank, world_size=2)
        assert nodes.store("one", rank=rank, world_size=2).save(meta, torch.full_like(kv, rank))
    nodes.start_source("one", world_size=2)
    for rank in range(2):
        meta, kv = nodes.engine_elsewhere(rank=rank, world_size=2).load(SPACE, keys(1)[0])
        assert meta.rank == rank and torch.all(kv == rank)

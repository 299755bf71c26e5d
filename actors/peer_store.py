"""Chunks of other nodes, where every node keeps its own folder: fetched from the owning node's actor, then kept.

Each node runs one `ChunkSource`, which tells the directory what its folder holds and hands chunks out; KV travels
through Ray's object store. `store_pipeline: "Cache|Peers"` makes an engine's store a folder that fills itself from the
others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from actors.chunk_directory import (
    RAY_NAMESPACE,
    DirectoryRecord,
    DirectorySubscriber,
    connect_directory,
    directory_name,
)
from ucm_ray.store.base import ChunkMeta, StoredChunk
from ucm_ray.store.factory import StageContext, UcmConnectorFactory, register_stage, roots_and_capacity
from ucm_ray.store.follower import StoreFollower, pause_s
from ucm_ray.store.kept_pins import KeptPins
from ucm_ray.store.pipeline import Pipeline
from ucm_ray.store.posix import PosixStage

logger = logging.getLogger("ucm_ray.peers")

SOURCE_NAME = "ucm_chunk_source"
_FETCH_TIMEOUT_S = 5.0
_MEMORY_S = 1.0


class ChunkSource:
    """The actor of one node. A thread reports the folder's changes; calls answer with chunks.

    `node` is the node's id, under which others find it.
    """

    def __init__(self, store_config: dict[str, Any], node: str, directory: str, refresh_s: float = 0.25):
        self._node, self._directory_name = node, directory
        self._config = store_config
        self._stores: dict[int, Pipeline] = {}  # by rank: every tensor-parallel rank has files of its own
        self._stores_lock = threading.Lock()
        self._store = self._of_rank(0)
        self._pins = KeptPins(self._store.posix)
        self._follower = StoreFollower(self._store.posix)
        self._held: dict[str, dict[str, DirectoryRecord]] = {}
        self._epoch = ""
        self._report(connect_directory(directory))
        threading.Thread(target=self._follow, args=(refresh_s,), name="ucm-chunk-source", daemon=True).start()

    def fetch(self, namespace: str, key: str, rank: int = 0) -> tuple[ChunkMeta, np.ndarray] | None:
        """Meta and KV of one rank, bytes as uint8 [payload_bytes]; None if it is not here any more."""
        chunk = self._of_rank(rank).load(namespace, key)
        if chunk is None:
            return None
        meta, kv = chunk
        return meta, kv.contiguous().view(-1).view(torch.uint8).numpy()

    def delete(self, namespace: str, keys: list[str]) -> int:
        self.unpin(namespace, keys)
        deleted = self._store.delete(namespace, keys)
        # stored again before the folder is read again, it looks as if it had never gone
        self._follower.doubt(namespace, keys)
        return deleted

    def pin(self, namespace: str, keys: list[str]) -> None:
        """Until taken back, whoever writes to this folder and whatever is restarted."""
        self._pins.set(namespace, keys, True)

    def unpin(self, namespace: str, keys: list[str]) -> None:
        self._pins.set(namespace, keys, False)

    def _of_rank(self, rank: int) -> Pipeline:
        with self._stores_lock:
            if rank not in self._stores:
                self._stores[rank] = UcmConnectorFactory.open_files(self._config, rank)
            return self._stores[rank]

    def _follow(self, refresh_s: float) -> None:
        took_s = 0.0
        while True:
            time.sleep(pause_s(refresh_s, took_s))
            begun_s = time.monotonic()
            try:
                self._report(connect_directory(self._directory_name))
            except Exception as error:  # the directory restarts by itself; it is told everything then
                logger.info("the chunk directory is not told (%s), trying again", type(error).__name__)
                self._epoch = ""
            took_s = time.monotonic() - begun_s

    def _report(self, directory: Any) -> None:
        import ray

        added, removed = self._follower.changes()
        new = {name: [DirectoryRecord.from_meta(meta) for meta in metas] for name, metas in added.items()}
        for namespace, records in new.items():
            self._held.setdefault(namespace, {}).update({record.key: record for record in records})
        for namespace, keys in removed.items():
            for key in keys:
                self._held.get(namespace, {}).pop(key, None)
        epoch = ray.get(directory.epoch.remote(), timeout=_FETCH_TIMEOUT_S)
        if epoch != self._epoch:  # a new directory knows nothing of us
            new, removed = {name: list(held.values()) for name, held in self._held.items()}, {}
        for namespace, records in new.items():
            pinned = self._pins.among(namespace, [record.key for record in records])
            ray.get(directory.add.remote(namespace, records, self._node, pinned), timeout=_FETCH_TIMEOUT_S)
        for namespace, keys in removed.items():
            ray.get(directory.remove.remote(namespace, keys, self._node), timeout=_FETCH_TIMEOUT_S)
        self._epoch = epoch


def source_name(directory: str, node: str) -> str:
    return f"{SOURCE_NAME}_{directory.rsplit('_', 1)[-1]}_{node}"


def start_source(store_config: dict[str, Any], node: str, refresh_s: float = 0.25) -> Any:
    """The handle of a node's source, started there if it is not running. Ray restarts it whenever it dies."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    directory = directory_name(store_config)
    return ray.remote(ChunkSource).options(
        name=source_name(directory, node), namespace=RAY_NAMESPACE, lifetime="detached", get_if_exists=True,
        max_restarts=-1, max_concurrency=4, num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    ).remote(store_config, node, directory, refresh_s)


def find_source(directory: str, node: str) -> Any:
    """The handle of a node's source. Raises ValueError if there is none."""
    import ray

    return ray.get_actor(source_name(directory, node), namespace=RAY_NAMESPACE)


class Sources:
    """The nodes and their sources, as their directory sees them."""

    def __init__(self, directory: str):
        self._directory = directory

    def tell(self, node: str, request: str, namespace: str, keys: list[str]) -> None:
        """Ask a node to "delete", "pin" or "unpin" chunks; does not wait. A node that is gone has lost them anyway."""
        try:
            source = find_source(self._directory, node)
        except ValueError:
            logger.info("node %s is gone: %s of %d chunks does not reach it", node, request, len(keys))
            return
        # a source that is being restarted hears of it afterwards
        getattr(source, request).options(max_task_retries=-1).remote(namespace, keys)

    def dead_nodes(self) -> set[str]:
        """A machine that comes back is another node to Ray: what is here never lives again."""
        import ray

        return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


class PeerStage(PosixStage):
    """This node's folder; what is missing in it is fetched from a node that has it.

    Only `load` goes over the network, from the store's reading threads, at most `_FETCH_TIMEOUT_S` for every node that
    is said to have the chunk; if none of them answers it is a miss.
    """

    name = "Peers"

    def __init__(self, store_config: Mapping[str, Any], *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._directory_name = directory_name(dict(store_config))
        self._directory: Any = None
        self._missing: dict[tuple[str, str], float] = {}
        self._subscriber: DirectorySubscriber | None = None
        self._heard: dict[str, tuple[dict[str, DirectoryRecord], set[str]]] = {}
        self._heard_lock = threading.Lock()

    def elsewhere(self, namespace: str) -> tuple[list[DirectoryRecord], set[str]]:
        """What the cluster has stored in a namespace, and what is gone, since this was asked last. Never waits."""
        if self._subscriber is None:
            self._subscriber = DirectorySubscriber(
                self._hear_of, self._hear_no_more_of, connect=lambda: connect_directory(self._directory_name))
            self._subscriber.start()
        with self._heard_lock:
            records, gone = self._heard.pop(namespace, ({}, set()))
        return list(records.values()), gone

    def close(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()
        super().close()

    def _hear_of(self, namespace: str, new: list[DirectoryRecord]) -> None:
        with self._heard_lock:
            records, gone = self._heard.setdefault(namespace, ({}, set()))
            records.update({record.key: record for record in new})
            gone.difference_update(records)

    def _hear_no_more_of(self, namespace: str, keys: list[str]) -> None:
        with self._heard_lock:
            records, gone = self._heard.setdefault(namespace, ({}, set()))
            for key in keys:
                records.pop(key, None)
            gone.update(keys)

    def load(self, namespace: str, key: str) -> StoredChunk | None:
        chunk = super().load(namespace, key)
        if chunk is not None:
            return chunk
        # what nobody had a moment ago is not asked for again at once
        if time.monotonic() - self._missing.get((namespace, key), -_MEMORY_S) < _MEMORY_S:
            return None
        chunk = self._fetch(namespace, key)
        if chunk is None:
            if len(self._missing) > 10_000:
                self._missing.clear()
            self._missing[namespace, key] = time.monotonic()
            self.counters.add("peer_misses")
            return None
        self.counters.add("peer_hits")
        self.counters.add("peer_bytes", chunk[0].payload_bytes)
        self.save(*chunk)
        return chunk

    def _fetch(self, namespace: str, key: str) -> StoredChunk | None:
        import ray

        try:
            self._directory = self._directory or connect_directory(self._directory_name)
            here = ray.get_runtime_context().get_node_id()
            owners = ray.get(self._directory.owners.remote(namespace, [key]), timeout=_FETCH_TIMEOUT_S)[0]
        except Exception as error:  # without the directory there is this node's folder
            self._directory = None
            self.counters.add("peer_errors")
            logger.info("chunk %s is not looked for on other nodes: %s", key, type(error).__name__)
            return None
        for node in owners:
            if not node or node == here:
                continue
            try:
                source = find_source(self._directory_name, node)
                found = ray.get(source.fetch.remote(namespace, key, self.rank), timeout=_FETCH_TIMEOUT_S)
                if found is not None and self._is_ours(found[0], namespace, key):
                    return found[0], _tensor(*found)
            except Exception as error:  # a lost node costs time, never a request: the next one may live
                self.counters.add("peer_errors")
                logger.info("chunk %s cannot be fetched from node %s: %s", key, node, type(error).__name__)
        return None

    def _is_ours(self, meta: ChunkMeta, namespace: str, key: str) -> bool:
        return (meta.namespace, meta.key, meta.rank, meta.world_size) == (namespace, key, self.rank, self.world_size)


def _tensor(meta: ChunkMeta, payload: np.ndarray) -> torch.Tensor:
    """A copy: what comes out of the object store is read-only and pinned there."""
    return torch.from_numpy(payload.copy()).view(meta.torch_dtype).view(meta.shape)


@register_stage("Peers")
def _peers(context: StageContext) -> PeerStage:
    roots, capacity_bytes = roots_and_capacity(context.config)
    return PeerStage(context.config, roots, capacity_bytes, context.rank, context.world_size, context.pool)

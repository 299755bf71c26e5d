"""Which chunks the cluster has stored: one actor that knows, and threads that keep every engine's copy up to date.

The directory holds no KV: per chunk its token ids, where its KV was computed, its size, its pin and the nodes that have
it. It only repeats what the store's headers say: a restarted directory reads the store again under a new epoch, and
subscribers replace what they knew. Nobody who serves a request ever waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ucm_ray.store import Pipeline, UcmConnectorFactory
from ucm_ray.store.base import ChunkMeta
from ucm_ray.store.follower import StoreFollower, pause_s
from ucm_ray.store.kept_pins import KeptPins

if TYPE_CHECKING:
    from actors.peer_store import Sources

logger = logging.getLogger("ucm_ray.directory")

ACTOR_NAME = "ucm_chunk_directory"
RAY_NAMESPACE = "ucm_ray"
_POLL_S = 0.05
_NODES_S = 2.0  # between two questions to Ray which nodes are dead


class DirectoryRecord(NamedTuple):
    """What travels to subscribers; the first five fields are those of `ucm_ray.blend.ChunkRecord`."""

    key: str
    token_ids: np.ndarray
    source_id: str
    source_position: int
    context_key: str
    context: str
    num_bytes: int
    created_s: float

    @classmethod
    def from_meta(cls, meta: ChunkMeta) -> DirectoryRecord:
        """`num_bytes` counts the KV of all tensor-parallel ranks."""
        return cls(meta.key, meta.token_ids, meta.source_id, meta.source_position, meta.context_key, meta.context,
                   meta.payload_bytes * meta.world_size, meta.created_s)


class Change(NamedTuple):
    """One step from a version of the directory to the next."""

    version: int
    operation: str  # "add" or "remove"
    namespace: str
    records: tuple[DirectoryRecord, ...] = ()
    keys: tuple[str, ...] = ()


@dataclass
class Changes:
    """Answer to a subscriber. `snapshot` (everything, by namespace) instead of changes when it is too far behind."""

    epoch: str
    version: int
    changes: list[Change] = field(default_factory=list)
    snapshot: dict[str, list[DirectoryRecord]] | None = None


def _locked(method: Callable) -> Callable:
    """The table is changed by the actor's calls and by the thread that follows the store."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return guarded


@dataclass
class _Entry:
    record: DirectoryRecord
    nodes: set[str]


class ChunkTable:
    """The directory without Ray: entries by namespace and key, a bounded log of versioned changes.

    When `max_chunks` are known, the oldest one that is not pinned is forgotten (not deleted): it is then no longer
    reused until it is saved or the store is read again.
    """

    def __init__(self, max_chunks: int = 1_000_000, log_length: int = 10_000):
        self.epoch = uuid.uuid4().hex
        self.version = 0
        self._max_chunks = max_chunks
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._by_namespace: dict[str, OrderedDict[str, _Entry]] = {}
        self._pins: dict[str, set[str]] = {}
        self._nodes: set[str] = set()  # that were said to have something
        self._log: deque[Change] = deque(maxlen=log_length)
        self._lock = threading.RLock()
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._entries)

    @_locked
    def add(self, namespace: str, records: Iterable[DirectoryRecord], node: str = "",
            pinned: Iterable[str] = ()) -> int:
        """Returns how many were new. `pinned` are the keys whose pins the owner of the files has kept."""
        new = []
        self._nodes.add(node)
        table = self._by_namespace.setdefault(namespace, OrderedDict())
        for record in records:
            known = table.get(record.key)
            if known is not None:
                known.nodes.add(node)
                continue
            table[record.key] = self._entries[(namespace, record.key)] = _Entry(record, {node})
            new.append(record)
        if new:
            self._append("add", namespace, records=tuple(new))
        self.pin(namespace, pinned, True)
        self._forget_surplus()
        return len(new)

    @_locked
    def remove(self, namespace: str, keys: Iterable[str], node: str | None = None) -> list[str]:
        """Remove chunks, or only one node's copies. Returns the keys that nobody has any more."""
        gone = []
        table = self._by_namespace.get(namespace, {})
        for key in dict.fromkeys(keys):  # a key named twice is gone once
            entry = table.get(key)
            if entry is None:
                continue
            entry.nodes = entry.nodes - {node} if node is not None else set()
            if not entry.nodes:
                gone.append(key)
        self._drop(namespace, gone)
        return gone

    @_locked
    def known_nodes(self) -> set[str]:
        return set(self._nodes)

    @_locked
    def remove_node(self, node: str) -> int:
        """Remove all copies of a node. Returns how many chunks nobody has any more."""
        self._nodes.discard(node)
        theirs = {namespace: [key for key, entry in table.items() if node in entry.nodes]
                  for namespace, table in self._by_namespace.items()}
        return sum(len(self.remove(namespace, keys, node)) for namespace, keys in theirs.items())

    @_locked
    def pin(self, namespace: str, keys: Iterable[str], pinned: bool) -> list[str]:
        """Pin or unpin known chunks. Returns the keys whose state changed."""
        pins = self._pins.setdefault(namespace, set())
        table = self._by_namespace.get(namespace, {})
        known = [key for key in dict.fromkeys(keys) if key in table and (key in pins) != pinned]
        (pins.update if pinned else pins.difference_update)(known)
        return known

    @_locked
    def is_pinned(self, namespace: str, key: str) -> bool:
        return key in self._pins.get(namespace, ())

    @_locked
    def pins(self) -> dict[str, list[str]]:
        return {namespace: sorted(keys) for namespace, keys in self._pins.items() if keys}

    @_locked
    def keys(self, namespace: str) -> list[str]:
        return list(self._by_namespace.get(namespace, ()))

    @_locked
    def namespaces(self) -> list[str]:
        return [namespace for namespace, table in self._by_namespace.items() if table]

    @_locked
    def get(self, namespace: str, key: str) -> DirectoryRecord | None:
        entry = self._by_namespace.get(namespace, {}).get(key)
        return entry.record if entry else None

    @_locked
    def nodes(self, namespace: str, key: str) -> set[str]:
        entry = self._by_namespace.get(namespace, {}).get(key)
        return set(entry.nodes) if entry else set()

    @_locked
    def records(self, namespace: str) -> list[DirectoryRecord]:
        return [entry.record for entry in self._by_namespace.get(namespace, {}).values()]

    @_locked
    def since(self, epoch: str, version: int) -> Changes:
        """What happened after `version` of `epoch`, or everything."""
        answer = Changes(self.epoch, self.version)
        oldest = self._log[0].version if self._log else self.version + 1
        if epoch != self.epoch or version < oldest - 1:
            answer.snapshot = {namespace: self.records(namespace) for namespace in self.namespaces()}
        elif version < self.version:
            answer.changes = [change for change in self._log if change.version > version]
        return answer

    def _append(self, operation: str, namespace: str, records: tuple = (), keys: tuple = ()) -> None:
        self.version += 1
        self._log.append(Change(self.version, operation, namespace, records, keys))

    def _drop(self, namespace: str, keys: Sequence[str]) -> None:
        if not keys:
            return
        table = self._by_namespace[namespace]
        for key in keys:
            del table[key], self._entries[(namespace, key)]
        self._pins.get(namespace, set()).difference_update(keys)
        self._append("remove", namespace, keys=tuple(keys))

    def _forget_surplus(self) -> None:
        surplus = len(self._entries) - self._max_chunks
        if surplus <= 0:
            return
        victims: dict[str, list[str]] = {}
        for namespace, key in self._entries:
            if not self.is_pinned(namespace, key):
                victims.setdefault(namespace, []).append(key)
                surplus -= 1
                if not surplus:
                    break
        for namespace, keys in victims.items():
            self.forgotten += len(keys)
            self._drop(namespace, keys)


class ChunkDirectory:
    """The actor. Its methods are coroutines, so that hundreds of waiting subscribers cost nothing.

    `store_config` is the connector's: a shared folder is followed, whoever writes to it, and chunks are deleted in it.
    None where every node has its own folder: then `ChunkSource` actors report what they hold, and `sources` reaches
    them to delete and pin there.
    """

    def __init__(self, store_config: dict[str, Any] | None = None, max_chunks: int = 1_000_000, refresh_s: float = 0.25,
                 sources: Sources | None = None):
        self._table = ChunkTable(max_chunks)
        self._sources = sources
        self._store: Pipeline | None = None
        self._follower: StoreFollower | None = None
        self._pins: KeptPins | None = None
        self._started_s = time.time()
        if store_config is not None:
            self._store = UcmConnectorFactory.open_files(store_config)
            self._pins = KeptPins(self._store.posix)
            self._follower = StoreFollower(self._store.posix)
            self._apply_store()
            self._start("ucm-store-follower", self._apply_store, refresh_s)
        elif sources is not None:
            self._start("ucm-node-follower", self._drop_dead_nodes, max(refresh_s, _NODES_S))

    async def add(self, namespace: str, records: list[DirectoryRecord], node: str = "",
                  pinned: Sequence[str] = ()) -> int:
        """`pinned` are the keys whose pins the node has kept. Returns how many chunks nobody had before."""
        new = self._table.add(namespace, records, node, pinned)
        if self._sources is not None:
            # every copy of a pinned chunk is pinned: the node of the first one may die
            kept = set(pinned)
            loose = [one.key for one in records if one.key not in kept and self._table.is_pinned(namespace, one.key)]
            if loose:
                await asyncio.to_thread(self._sources.tell, node, "pin", namespace, loose)
        return new

    async def remove(self, namespace: str, keys: list[str], node: str | None = None) -> int:
        """Chunks that vanished by themselves (evicted, or found damaged), from one node or from all."""
        return len(self._table.remove(namespace, keys, node))

    async def delete(self, namespace: str, keys: list[str]) -> int:
        """Delete chunks everywhere: the shared files now, every engine's copy when its subscriber hears of it."""
        keys = list(dict.fromkeys(keys))
        if self._store is not None:
            # a pin left behind would hold the same text when it is stored again
            await asyncio.to_thread(self._pins.set, namespace, keys, False)
            await asyncio.to_thread(self._store.delete, namespace, keys)
            # stored again before the folder is read again, it looks as if it had never gone
            self._follower.doubt(namespace, keys)
        await self._tell_nodes("delete", namespace, keys)
        return len(self._table.remove(namespace, keys))

    async def clear(self, namespace: str) -> int:
        absent = self._pins.of(namespace) if self._pins is not None else []
        return await self.delete(namespace, self._table.keys(namespace) + absent)

    async def pin(self, namespace: str, keys: list[str], pinned: bool = True) -> int:
        """Returns how many chunks' state changed; unknown ones are ignored."""
        keys = [key for key in keys if self._table.get(namespace, key) is not None]
        if self._pins is not None:
            await asyncio.to_thread(self._pins.set, namespace, keys, pinned)
        changed = self._table.pin(namespace, keys, pinned)
        # not only those that changed: pinning again repairs what a node has not heard
        await self._tell_nodes("pin" if pinned else "unpin", namespace, keys)
        return len(changed)

    async def _tell_nodes(self, request: str, namespace: str, keys: list[str]) -> None:
        if self._sources is None:
            return
        by_node: dict[str, list[str]] = {}
        for key in keys:
            for node in self._table.nodes(namespace, key):
                by_node.setdefault(node, []).append(key)
        for node, theirs in by_node.items():
            await asyncio.to_thread(self._sources.tell, node, request, namespace, theirs)

    async def chunks(self, namespace: str, offset: int = 0, limit: int = 100,
                     source_id: str | None = None) -> tuple[int, list[dict[str, Any]]]:
        """`(how many there are, one page of them)` as plain dictionaries without token ids."""
        records = self._table.records(namespace)
        if source_id is not None:
            records = [record for record in records if record.source_id == source_id]
        return len(records), [self._describe(namespace, record) for record in records[offset:offset + limit]]

    async def chunk(self, namespace: str, key: str) -> dict[str, Any] | None:
        record = self._table.get(namespace, key)
        if record is None:
            return None
        return self._describe(namespace, record) | {"token_ids": record.token_ids.tolist()}

    async def documents(self, namespace: str, offset: int = 0, limit: int = 100) -> tuple[int, list[dict[str, Any]]]:
        """Ingested sequences: chunks of canonical context, grouped by the sequence their KV was computed in."""
        grouped: dict[str, list[DirectoryRecord]] = {}
        for record in self._table.records(namespace):
            if record.context == "canonical":
                grouped.setdefault(record.source_id, []).append(record)
        page = list(grouped.items())[offset:offset + limit]
        return len(grouped), [self._describe_document(namespace, name, records) for name, records in page]

    async def stats(self, namespace: str | None = None) -> dict[str, Any]:
        """Numbers of one namespace, or of everything."""
        names = [namespace] if namespace is not None else self._table.namespaces()
        records = [record for name in names for record in self._table.records(name)]
        return {
            "chunks": len(records),
            "tokens": sum(len(record.token_ids) for record in records),
            "bytes": sum(record.num_bytes for record in records),
            "pinned": sum(len(self._table.pins().get(name, ())) for name in names),
            "version": self._table.version,
            "epoch": self._table.epoch,
            "uptime_s": time.time() - self._started_s,
        } | ({} if namespace is not None else {"namespaces": len(names), "forgotten": self._table.forgotten})

    async def owners(self, namespace: str, keys: list[str]) -> list[list[str]]:
        """Per key the nodes that have it; the empty name is a folder every node sees."""
        return [sorted(self._table.nodes(namespace, key)) for key in keys]

    async def changes(self, epoch: str = "", version: int = 0, wait_s: float = 0.0) -> Changes:
        """Changes after `version`; waits up to `wait_s` for the first one."""
        deadline_s = time.monotonic() + wait_s
        while epoch == self._table.epoch and version == self._table.version and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return self._table.since(epoch, version)

    async def reread(self) -> None:
        """Look at the shared folder, or for dead nodes, now rather than at the next turn."""
        if self._follower is not None:
            await asyncio.to_thread(self._apply_store)
        elif self._sources is not None:
            await asyncio.to_thread(self._drop_dead_nodes)

    async def epoch(self) -> str:
        """Changes whenever the directory starts anew."""
        return self._table.epoch

    async def ping(self) -> int:
        """The actor's process id."""
        return os.getpid()

    def _start(self, name: str, look: Callable[[], None], refresh_s: float) -> None:
        threading.Thread(target=self._follow, args=(look, refresh_s), name=name, daemon=True).start()

    def _follow(self, look: Callable[[], None], refresh_s: float) -> None:
        took_s = 0.0
        while True:
            time.sleep(pause_s(refresh_s, took_s))
            begun_s = time.monotonic()
            try:
                look()
            except Exception:
                logger.exception("looking for what is stored failed; it is tried again")
            took_s = time.monotonic() - begun_s

    def _apply_store(self) -> None:
        added, removed = self._follower.changes()
        for namespace, metas in added.items():
            pinned = self._pins.among(namespace, [meta.key for meta in metas])
            self._table.add(namespace, [DirectoryRecord.from_meta(meta) for meta in metas], pinned=pinned)
        for namespace, keys in removed.items():
            self._table.remove(namespace, keys)

    def _drop_dead_nodes(self) -> None:
        # what only a dead node had must not be taken for stored: nobody would compute it anew
        for node in self._table.known_nodes() & self._sources.dead_nodes():
            logger.warning("node %s is dead, and with it %d chunks", node, self._table.remove_node(node))

    def _describe(self, namespace: str, record: DirectoryRecord) -> dict[str, Any]:
        return {
            "key": record.key,
            "document": record.source_id if record.context == "canonical" else None,
            "source_position": record.source_position,
            "num_tokens": len(record.token_ids),
            "num_bytes": record.num_bytes,
            "context": record.context,
            "pinned": self._table.is_pinned(namespace, record.key),
            "nodes": sorted(node for node in self._table.nodes(namespace, record.key) if node),
            "created_s": record.created_s,
        }

    def _describe_document(self, namespace: str, name: str, records: list[DirectoryRecord]) -> dict[str, Any]:
        return {
            "id": name,
            "num_tokens": sum(len(record.token_ids) for record in records),
            "num_chunks": len(records),
            "num_bytes": sum(record.num_bytes for record in records),
            "pinned": all(self._table.is_pinned(namespace, record.key) for record in records),
            "created_s": min(record.created_s for record in records),
        }


def directory_name(store_config: dict[str, Any]) -> str:
    """The actor's name: engines and ingresses of one store meet at one directory, those of another at another."""
    if store_config.get("directory"):
        return f"{ACTOR_NAME}_{store_config['directory']}"
    backends = store_config["storage_backends"]
    folders = [backends] if isinstance(backends, str) else list(backends)
    told = json.dumps([str(Path(folder).expanduser()) for folder in folders])
    return f"{ACTOR_NAME}_{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def start_directory(store_config: dict[str, Any], max_chunks: int = 1_000_000, num_cpus: float = 0.0) -> Any:
    """The handle of a store's directory, started if it is not there. Ray restarts it whenever it dies."""
    import ray

    own_folders = "Peers" in store_config.get("store_pipeline", "")
    name = directory_name(store_config)
    sources = None
    if own_folders:
        from actors.peer_store import Sources

        sources = Sources(name)
    return ray.remote(ChunkDirectory).options(
        name=name, namespace=RAY_NAMESPACE, lifetime="detached", get_if_exists=True, max_restarts=-1,
        max_concurrency=1000, num_cpus=num_cpus,
    ).remote(None if own_folders else store_config, max_chunks, sources=sources)


class DirectorySubscriber(threading.Thread):
    """Keeps a local copy of the directory current; one thread per engine or ingress.

    `on_add(namespace, records)` and `on_remove(namespace, keys)` are called from this thread only, never concurrently.
    While the directory is away the copy stays as it is; when it comes back under another epoch, only differences are
    passed on. `connect` returns the actor's handle and may raise until there is one.
    """

    def __init__(self, on_add: Callable[[str, list[DirectoryRecord]], None],
                 on_remove: Callable[[str, list[str]], None], *,
                 connect: Callable[[], Any], wait_s: float = 5.0, retry_s: float = 0.5):
        super().__init__(name="ucm-directory-subscriber", daemon=True)
        self._on_add, self._on_remove = on_add, on_remove
        self._connect = connect
        self._wait_s, self._retry_s = wait_s, retry_s
        self._known: dict[str, set[str]] = {}
        self._stopped = threading.Event()
        self.epoch, self.version = "", 0
        self.synchronised = threading.Event()
        self.last_contact_s = 0.0

    def run(self) -> None:
        import ray

        actor = None
        while not self._stopped.is_set():
            try:
                actor = actor or self._connect()
                answer = ray.get(actor.changes.remote(self.epoch, self.version, self._wait_s),
                                 timeout=self._wait_s + 10)
            except SystemExit:  # how Ray ends a wait when this process leaves the cluster
                return
            except Exception as error:  # whatever is wrong with the directory, requests go on without it
                if self.synchronised.is_set() or not self.last_contact_s:
                    logger.info("chunk directory does not answer (%s), asking again", type(error).__name__)
                self.synchronised.clear()
                actor = None
                self._stopped.wait(self._retry_s)
                continue
            self.last_contact_s = time.time()
            self.apply(answer)
            self.synchronised.set()

    def close(self) -> None:
        """Stop; the thread ends at the latest when the pending question is answered."""
        self._stopped.set()

    def apply(self, answer: Changes) -> None:
        if answer.snapshot is not None:
            self._apply_snapshot(answer)
        for change in answer.changes:
            known = self._known.setdefault(change.namespace, set())
            if change.operation == "add":
                known.update(record.key for record in change.records)
                self._on_add(change.namespace, list(change.records))
            else:
                known.difference_update(change.keys)
                self._on_remove(change.namespace, list(change.keys))
        self.epoch, self.version = answer.epoch, answer.version

    def _apply_snapshot(self, answer: Changes) -> None:
        for namespace in set(self._known) | set(answer.snapshot):
            records = answer.snapshot.get(namespace, [])
            known, now = self._known.get(namespace, set()), {record.key for record in records}
            if gone := known - now:
                self._on_remove(namespace, sorted(gone))
            if new := [record for record in records if record.key not in known]:
                self._on_add(namespace, new)
            self._known[namespace] = now


def connect_directory(name: str) -> Any:
    """The directory's handle, joining the running cluster first where this process has not. Raises without either."""
    import ray

    if not ray.is_initialized():
        ray.init(address="auto", namespace=RAY_NAMESPACE, log_to_driver=False, logging_level="ERROR")
    return ray.get_actor(name, namespace=RAY_NAMESPACE)

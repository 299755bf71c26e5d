"""What the scheduler knows of the store: one chunk index per namespace, kept up to date without waiting for a disk."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from ucm_ray.blend.chunk import ChunkRecord
from ucm_ray.blend.index import ChunkIndex
from ucm_ray.store.base import ChunkMeta
from ucm_ray.store.posix import PosixStage

logger = logging.getLogger("ucm_ray.blend")

MAX_NAMESPACES = 256
BATCH = 4096


class ChunkCatalogue:
    """Indexes of the namespaces this engine's requests use.

    The index of a namespace is read from the store when the namespace is first seen, by a thread; until then a look-up
    finds what is there already. The same thread looks for chunks other engines wrote or removed under the same root.
    """

    def __init__(self, posix: PosixStage | None, refresh_s: float, anchor_tokens: int = 16) -> None:
        self._posix, self._refresh_s, self._anchor_tokens = posix, refresh_s, anchor_tokens
        self._indexes: OrderedDict[str, ChunkIndex] = OrderedDict()
        self._shelves: dict[tuple[str, str], int] = {}  # namespace, folder -> modification time when last read
        self._on_disk: dict[tuple[str, str], set[str]] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._generation = 0  # goes up when everything is forgotten: what was being read then is void
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        if posix is not None:
            self._thread = threading.Thread(target=self._follow, name="ucm-catalogue", daemon=True)
            self._thread.start()

    def index(self, namespace: str, wait_s: float = 0.0) -> ChunkIndex:
        """The index of a namespace. A new one may wait up to `wait_s` for the first reading of the store."""
        with self._lock:
            index = self._indexes.get(namespace)
            known = index is not None
            if index is None:
                index = self._indexes[namespace] = ChunkIndex(self._anchor_tokens)
                index.read_once = threading.Event()
                while len(self._indexes) > MAX_NAMESPACES:
                    self._forget(next(iter(self._indexes)))
            self._indexes.move_to_end(namespace)
        if not known and self._posix is not None:
            self._wake.set()
            index.read_once.wait(wait_s)
        return index

    def _forget(self, namespace: str) -> None:
        del self._indexes[namespace]
        for table in (self._shelves, self._on_disk):
            for key in [key for key in table if key[0] == namespace]:
                del table[key]

    def add(self, metas: Iterable[ChunkMeta]) -> None:
        by_namespace: dict[str, list[ChunkRecord]] = {}
        for meta in metas:
            by_namespace.setdefault(meta.namespace, []).append(record_of(meta))
        for namespace, records in by_namespace.items():
            index = self._indexes.get(namespace)
            if index is not None:
                self._update(index, add=records)

    def _update(self, index: ChunkIndex, add: list[ChunkRecord] | None = None, remove: Iterable[str] = (),
                generation: int | None = None) -> bool:
        """An index has one writer at a time; readers need no lock. False if everything was forgotten meanwhile."""
        with self._writing:
            if generation is not None and generation != self._generation:
                return False
            if add:
                index.add([record for record in add if record.key not in index])
            index.remove([key for key in remove if key in index])
            return True

    def remove(self, namespace: str, keys: Iterable[str]) -> None:
        index = self._indexes.get(namespace)
        if index is not None:
            self._update(index, remove=keys)

    def clear(self, clear_store: Callable[[], object] | None = None) -> None:
        """Empty every index; `clear_store` removes the files, so that nobody reads their names in between."""
        with self._lock, self._writing:
            self._generation += 1
            if clear_store is not None:
                clear_store()
            for index in self._indexes.values():
                index.clear()
            self._shelves.clear()
            self._on_disk.clear()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    # ---- following the store's folders

    def _follow(self) -> None:
        while not self._closed:
            for namespace in list(self._indexes):
                index = self._indexes.get(namespace)
                if index is None or self._closed:
                    continue
                try:
                    self._read(namespace, index)
                except Exception:
                    logger.exception("reading the list of stored chunks failed; it is tried again")
                index.read_once.set()
            self._wake.wait(self._refresh_s)
            self._wake.clear()

    def _read(self, namespace: str, index: ChunkIndex) -> None:
        """Read headers of files in folders that changed since; names alone tell what is new and what is gone."""
        generation = self._generation
        for folder in self._posix.folders:
            base = folder.root / namespace
            for shelf in _subfolders(base):
                key = (namespace, shelf)
                modified = _modified_ns(shelf)
                # a folder changed within the clock's resolution is read once more
                if modified is None or (self._shelves.get(key) == modified and time.time_ns() - modified > 2_000_000_000):
                    continue
                suffix = f".{self._posix.rank}of{self._posix.world_size}.kv"
                names = {name[: -len(suffix)] for name in _names(shelf) if name.endswith(suffix)}
                before = self._on_disk.get(key, set())
                if not (self._add_new(namespace, index, names - before, generation)
                        and self._update(index, remove=before - names, generation=generation)):
                    return
                self._on_disk[key], self._shelves[key] = names, modified
        elsewhere = getattr(self._posix, "elsewhere", None)
        if elsewhere is not None:  # folders of other nodes, of which the chunk directory tells
            records, gone = elsewhere(namespace)
            index.remove([name for name in gone if name in index])
            index.add([ChunkRecord(*record[:5]) for record in records if record.key not in index])

    def _add_new(self, namespace: str, index: ChunkIndex, names: set[str], generation: int) -> bool:
        batch: list[ChunkRecord] = []
        for name in sorted(names):
            if name in index:
                continue
            header = self._posix.load_header(namespace, name)
            if header is not None:
                batch.append(record_of(header.meta))
            if len(batch) == BATCH:
                self._update(index, add=batch, generation=generation)
                batch = []
        return self._update(index, add=batch, generation=generation)


def record_of(meta: ChunkMeta) -> ChunkRecord:
    return ChunkRecord(meta.key, meta.token_ids, meta.source_id, meta.source_position, meta.context_key)


def _subfolders(base) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(base) if entry.is_dir()]
    except OSError:
        return []


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _modified_ns(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None

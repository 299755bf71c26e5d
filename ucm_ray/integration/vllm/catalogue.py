"""What the scheduler knows of the store: one chunk index per namespace, kept up to date without waiting for a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator

from ucm_ray.blend.chunk import ChunkRecord
from ucm_ray.blend.index import ChunkIndex
from ucm_ray.store.base import ChunkMeta
from ucm_ray.store.follower import StoreFollower
from ucm_ray.store.posix import PosixStage

logger = logging.getLogger("ucm_ray.blend")

MAX_NAMESPACES = 256
FIRST_READ_S = 0.25  # requests of a new namespace wait that long for its list of stored chunks, then take what is there


class ChunkCatalogue:
    """Indexes of the namespaces this engine's requests use.

    The index of a namespace is read from the store when the namespace is first seen, by a thread; until then a look-up
    finds what is there already. The same thread looks for chunks other engines wrote or removed under the same root;
    namespaces it has never read come first.
    """

    def __init__(self, posix: PosixStage | None, refresh_s: float, anchor_tokens: int = 16) -> None:
        self._posix, self._refresh_s, self._anchor_tokens = posix, refresh_s, anchor_tokens
        self._indexes: OrderedDict[str, ChunkIndex] = OrderedDict()
        self._unread: deque[str] = deque()
        self._follower = StoreFollower(posix) if posix is not None else None
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._generation = 0  # goes up when everything is forgotten: what was being read then is void
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None
        if posix is not None:
            self._thread = threading.Thread(target=self._follow, name="ucm-catalogue", daemon=True)
            self._thread.start()

    def index(self, namespace: str) -> ChunkIndex:
        """The index of a namespace, as far as it has been read."""
        with self._lock:
            index = self._indexes.get(namespace)
            known = index is not None
            if index is None:
                index = self._indexes[namespace] = ChunkIndex(self._anchor_tokens)
                index.read_once, index.since_s = threading.Event(), time.monotonic()
                while len(self._indexes) > MAX_NAMESPACES:
                    self._forget(next(iter(self._indexes)))
            self._indexes.move_to_end(namespace)
        if not known and self._posix is not None:
            self._unread.append(namespace)
            self._wake.set()
        return index

    def is_ready(self, namespace: str) -> bool:
        """Whether a look-up would find what was stored before the namespace was first seen, or need not wait for it
        any longer. If not, ask again in the next engine step: nobody else is kept waiting meanwhile."""
        index = self.index(namespace)
        return self._posix is None or index.read_once.is_set() or time.monotonic() - index.since_s > FIRST_READ_S

    def _forget(self, namespace: str) -> None:
        del self._indexes[namespace]
        if self._follower is not None:
            self._follower.forget(namespace)

    def add(self, metas: Iterable[ChunkMeta], replace: bool = False) -> None:
        """`replace`: what is known of these keys is wrong."""
        by_namespace: dict[str, list[ChunkRecord]] = {}
        for meta in metas:
            by_namespace.setdefault(meta.namespace, []).append(record_of(meta))
        for namespace, records in by_namespace.items():
            index = self._indexes.get(namespace)
            if index is not None:
                self._update(index, add=records, replace=replace)

    def _update(self, index: ChunkIndex, add: list[ChunkRecord] | None = None, remove: Iterable[str] = (),
                generation: int | None = None, replace: bool = False) -> bool:
        """An index has one writer at a time; readers need no lock. False if everything was forgotten meanwhile."""
        with self._writing:
            if generation is not None and generation != self._generation:
                return False
            if add:
                index.add(add if replace else [record for record in add if record.key not in index])
            index.remove([key for key in remove if key in index])
            return True

    def remove(self, namespace: str, keys: Iterable[str]) -> None:
        """Forget chunks that could not be loaded, until the store is seen to hold them all the same."""
        index = self._indexes.get(namespace)
        if index is not None:
            self._update(index, remove=keys)
            if self._follower is not None:
                self._follower.doubt(namespace, keys)

    def clear(self, clear_store: Callable[[], object] | None = None) -> None:
        """Empty every index; `clear_store` removes the files, so that nobody reads their names in between."""
        with self._lock, self._writing:
            self._generation += 1
            if clear_store is not None:
                clear_store()
            for index in self._indexes.values():
                index.clear()
            if self._follower is not None:
                self._follower.forget()

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    # ---- following the store's folders

    def _follow(self) -> None:
        while not self._closed:
            for namespace in self._in_turn():
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

    def _in_turn(self) -> Iterator[str]:
        """Every namespace; those that were never read before all others, those that come meanwhile, too."""
        known = list(self._indexes)
        while self._unread or known:
            yield self._unread.popleft() if self._unread else known.pop(0)

    def _read(self, namespace: str, index: ChunkIndex) -> None:
        generation = self._generation
        for change in self._follower.changes_of(namespace, index.__contains__):
            records = [record_of(meta) for meta in change.added]
            if not self._update(index, add=records, remove=change.removed, generation=generation):
                return
        elsewhere = getattr(self._posix, "elsewhere", None)
        if elsewhere is not None:  # folders of other nodes, of which the chunk directory tells
            records, gone = elsewhere(namespace)
            self._update(index, add=[ChunkRecord(*record[:5]) for record in records], remove=gone)


def record_of(meta: ChunkMeta) -> ChunkRecord:
    return ChunkRecord(meta.key, meta.token_ids, meta.source_id, meta.source_position, meta.context_key)

"""Stage "Cache": chunks in host memory, least recently used out first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from threading import RLock
from typing import NamedTuple

import numpy as np
import torch

from ucm_ray.store.base import ChunkMeta, KVStage, StoredChunk
from ucm_ray.store.buffers import BufferPool
from ucm_ray.store.chunk_file import payload_view

# what a chunk costs beside its KV: meta, token ids, dictionary entry
_OVERHEAD_BYTES = 2048


class _Entry(NamedTuple):
    meta: ChunkMeta
    kv: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.meta.payload_bytes + self.meta.token_ids.nbytes + _OVERHEAD_BYTES


class CacheStage(KVStage):
    """Host memory of this process, at most `capacity_bytes`; a tensor still in use elsewhere outlives its eviction."""

    name = "Cache"

    def __init__(self, capacity_bytes: int, pool: BufferPool | None = None) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.pool = pool or BufferPool(256 * 2**20)
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._pins: Counter[tuple[str, str]] = Counter()
        self._bytes = 0
        self._lock = RLock()

    def lookup(self, namespace: str, keys: Sequence[str]) -> np.ndarray:
        with self._lock:
            return np.fromiter(((namespace, key) in self._entries for key in keys), dtype=bool, count=len(keys))

    def load(self, namespace: str, key: str) -> StoredChunk | None:
        with self._lock:
            entry = self._entries.get((namespace, key))
            if entry is not None:
                self._entries.move_to_end((namespace, key))
        self.counters.add("misses" if entry is None else "hits")
        return None if entry is None else (entry.meta, entry.kv)

    def save(self, meta: ChunkMeta, kv: torch.Tensor) -> bool:
        with self._lock:
            here = self._entries.get((meta.namespace, meta.key))
        if here is not None and here.meta.origin == meta.origin:
            return True
        copy, view = self.pool.tensor(meta.shape, meta.torch_dtype)
        # numpy copies on this thread alone; torch would wake its whole team of threads beside the engine's
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(payload_view(kv.contiguous()), np.uint8))
        return self.adopt(meta, copy)

    def adopt(self, meta: ChunkMeta, kv: torch.Tensor) -> bool:
        """Keep this very tensor, which nobody will write to any more. False if it does not fit."""
        if tuple(kv.shape) != meta.shape or kv.dtype != meta.torch_dtype:
            return False
        entry = _Entry(meta, kv)
        with self._lock:
            self._drop((meta.namespace, meta.key))
            gone = self._make_room(entry.num_bytes)
            fits = self._bytes + entry.num_bytes <= self.capacity_bytes
            if fits:
                self._entries[meta.namespace, meta.key] = entry
                self._bytes += entry.num_bytes
        for namespace, key in gone:
            self.evicted(namespace, [key])
        return fits

    def _make_room(self, num_bytes: int) -> list[tuple[str, str]]:
        if num_bytes > self.capacity_bytes:
            return []
        gone = []
        for name in list(self._entries):
            if self._bytes + num_bytes <= self.capacity_bytes:
                break
            if not self._pins[name]:
                self._drop(name)
                gone.append(name)
        return gone

    def _drop(self, name: tuple[str, str]) -> bool:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= entry.num_bytes
        return entry is not None

    def delete(self, namespace: str, keys: Sequence[str]) -> int:
        with self._lock:
            return sum(self._drop((namespace, key)) for key in keys)

    def clear(self, namespace: str | None = None) -> int:
        with self._lock:
            return sum(self._drop(name) for name in list(self._entries) if namespace in (None, name[0]))

    def pin(self, namespace: str, keys: Sequence[str]) -> None:
        with self._lock:
            self._pins.update((namespace, key) for key in keys)

    def unpin(self, namespace: str, keys: Sequence[str]) -> None:
        with self._lock:
            for name in ((namespace, key) for key in keys):
                if self._pins[name] <= 1:
                    del self._pins[name]
                else:
                    self._pins[name] -= 1

    def touch(self, namespace: str, keys: Sequence[str]) -> None:
        with self._lock:
            for name in ((namespace, key) for key in keys):
                if name in self._entries:
                    self._entries.move_to_end(name)

    def scan(self, namespace: str) -> Iterator[ChunkMeta]:
        with self._lock:
            metas = [entry.meta for name, entry in self._entries.items() if name[0] == namespace]
        yield from metas

    def namespaces(self) -> list[str]:
        with self._lock:
            return sorted({namespace for namespace, _ in self._entries})

    def stats(self) -> dict:
        with self._lock:
            sizes = {"chunks": len(self._entries), "bytes": self._bytes, "capacity_bytes": self.capacity_bytes}
        return {**sizes, **self.counters}

    def close(self) -> None:
        self.clear()

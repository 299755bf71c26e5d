"""Stages one behind the other, and what runs in the background: saving, prefetching, loading many at once."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Condition, Lock

import numpy as np
import torch

from ucm_ray.store.base import ChunkMeta, KVStage, StoredChunk
from ucm_ray.store.buffers import BufferPool
from ucm_ray.store.cache import CacheStage
from ucm_ray.store.layers import LayerReader
from ucm_ray.store.posix import PosixStage
from ucm_ray.store.threads import run_anywhere, run_when_idle

logger = logging.getLogger("ucm_ray.store")

_CLOSE_TIMEOUT_S = 30.0
_BUFFERS_READY = 4  # for the chunks of the engine's next step


class Pipeline(KVStage):
    """`stages` from fast to slow, "Cache|Posix" by default. A chunk found further back is kept in front as well.

    All work on files happens on threads of the pipeline, or of the caller of `load`, `load_many` and `save`: nothing
    else waits for a disk. `namespace` is where `load_sync`, which has no such argument, looks.
    """

    name = "Pipeline"

    def __init__(self, stages: Sequence[KVStage], io_threads: int = 4, save_queue_bytes: int = 256 * 2**20,
                 namespace: str | None = None, pool: BufferPool | None = None) -> None:
        super().__init__()
        self._pool = pool or BufferPool(save_queue_bytes)
        self.stages = list(stages)
        self.namespace = namespace
        self.io_threads = io_threads
        self.save_queue_bytes = save_queue_bytes
        self._readers = ThreadPoolExecutor(io_threads, "ucm-store-read", initializer=run_anywhere)
        # Writing is waiting for the disk: a second chunk can be prepared while the first one is forced out. But beside
        # an engine on these very processors two threads cost it more than one, which keeps up with it as well.
        self._writer = ThreadPoolExecutor(2 if self._pool.pin_memory else 1, "ucm-store-write",
                                          initializer=run_when_idle)
        self._queued_bytes = 0
        self._queued = 0
        self._queue = Condition()
        # what is being read, and the future that others wait on if there are any
        self._loading: dict[tuple[str, str], Future[StoredChunk | None] | None] = {}
        self._loading_lock = Lock()
        self._removals = 0
        self._clears: Counter[str | None] = Counter()  # by namespace, None: of everything
        for stage in self.stages[:-1]:
            stage.on_evict.append(lambda namespace, keys: self.counters.add("demotions", len(keys)))
        self.stages[-1].on_evict.append(self._vanished)

    @property
    def cache(self) -> CacheStage | None:
        return next((stage for stage in self.stages if isinstance(stage, CacheStage)), None)

    @property
    def posix(self) -> PosixStage | None:
        return next((stage for stage in self.stages if isinstance(stage, PosixStage)), None)

    def _vanished(self, namespace: str, keys: list[str]) -> None:
        for stage in self.stages[:-1]:
            stage.delete(namespace, keys)
        self.evicted(namespace, keys)

    # reading

    def lookup(self, namespace: str, keys: Sequence[str]) -> np.ndarray:
        """bool `[len(keys)]`. With several ranks a chunk counts only where all of them can load it."""
        last = self.stages[-1]
        if getattr(last, "world_size", 1) > 1:
            return last.lookup(namespace, keys)
        found = np.zeros(len(keys), dtype=bool)
        for stage in self.stages:
            missing = np.flatnonzero(~found)
            if not len(missing):
                break
            found[missing] = stage.lookup(namespace, [keys[index] for index in missing])
        return found

    def load(self, namespace: str, key: str) -> StoredChunk | None:
        """See `KVStage.load`. Several threads that want the same chunk read it once."""
        chunk = self._from_front(namespace, key)
        if chunk is not None:
            return chunk
        name = (namespace, key)
        with self._loading_lock:
            first = name not in self._loading
            if first:
                self._loading[name] = None
            elif self._loading[name] is None:
                self._loading[name] = Future()
            others = self._loading[name]
        if not first:
            return others.result()
        chunk = None
        try:
            chunk = self._from_behind(namespace, key)
        finally:
            with self._loading_lock:
                others = self._loading.pop(name)
            if others is not None:
                others.set_result(chunk)
        return chunk

    def _from_front(self, namespace: str, key: str) -> StoredChunk | None:
        chunk = self.stages[0].load(namespace, key) if len(self.stages) > 1 else None
        if chunk is not None:
            for stage in self.stages[1:]:
                stage.touch(namespace, [key])
        return chunk

    def _from_behind(self, namespace: str, key: str) -> StoredChunk | None:
        removals = self._removals
        for depth, stage in enumerate(self.stages):
            if depth == 0 and len(self.stages) > 1:
                continue
            chunk = stage.load(namespace, key)
            if chunk is None:
                continue
            for front in self.stages[:depth]:
                # what was deleted while it was read must not come back
                if removals == self._removals:
                    front.adopt(*chunk) if isinstance(front, CacheStage) else front.save(*chunk)
            return chunk
        return None

    def load_many(self, namespace: str, keys: Sequence[str]) -> list[StoredChunk | None]:
        """`load` of every key, in order, on all reading threads and the calling one."""
        results: list[StoredChunk | None] = [None] * len(keys)
        todo: deque[int] = deque()
        for index, key in enumerate(keys):
            results[index] = self._from_front(namespace, key)
            if results[index] is None:
                todo.append(index)

        def work() -> None:
            while True:
                try:
                    index = todo.popleft()
                except IndexError:
                    return
                results[index] = self.load(namespace, keys[index])

        helpers = [self._readers.submit(work) for _ in range(min(self.io_threads, len(todo)) - 1)]
        work()
        for helper in helpers:
            # one that has not started has nothing left to do
            if not helper.cancel():
                helper.result()
        return results

    def prefetch(self, namespace: str, keys: Sequence[str]) -> Future[dict[str, bool]]:
        """Bring chunks into host memory. The future says for each key whether it could be loaded."""
        result: Future[dict[str, bool]] = Future()
        here: dict[str, bool] = {}
        keys = list(dict.fromkeys(keys))
        pending = [len(keys)]
        lock = Lock()

        def work(key: str) -> None:
            loaded = False
            try:
                loaded = self.load(namespace, key) is not None
            finally:
                with lock:
                    here[key] = loaded
                    pending[0] -= 1
                    last = not pending[0]
                if last:
                    result.set_result(here)

        for key in keys:
            self._readers.submit(work, key)
        if not keys:
            result.set_result(here)
        return result

    def layers(self, namespace: str, keys: Sequence[str], read_ahead: int = 2) -> LayerReader:
        """Iterate over the layers of several chunks while the next `read_ahead` layers are being read."""
        return LayerReader(self, namespace, keys, read_ahead, self._readers)

    def load_sync(self, block_ids: Sequence[str], offset: int = 0, namespace: str | None = None
                  ) -> torch.Tensor | None:
        """KV of consecutive chunks in one tensor `[num_layers, 2, num_tokens, num_kv_heads, head_dim]`.

        `offset` is the source position to start at: tokens that stood before it in the first chunk are left out. None
        if a chunk cannot be loaded. The tensor may be shared with the cache: do not write into it.
        """
        chunks = self.load_many(namespace or self._only_namespace(), block_ids)
        if not chunks or any(chunk is None for chunk in chunks):
            return None
        skip = min(max(0, offset - chunks[0][0].source_position), chunks[0][0].num_tokens)
        first = chunks[0][1][:, :, skip:]
        return first if len(chunks) == 1 else torch.cat([first, *(kv for _, kv in chunks[1:])], dim=2)

    def _only_namespace(self) -> str:
        if self.namespace is not None:
            return self.namespace
        found = self.namespaces()
        if len(found) != 1:
            raise ValueError(f"the store holds {len(found)} namespaces, expected one, or `namespace` to be given")
        return found[0]

    def scan(self, namespace: str) -> Iterator[ChunkMeta]:
        return self.stages[-1].scan(namespace)

    def namespaces(self) -> list[str]:
        return self.stages[-1].namespaces()

    # writing

    def save(self, meta: ChunkMeta, kv: torch.Tensor) -> bool:
        """Save in all stages; the last one's answer counts. Returns when the file is on the disk."""
        return self._save(meta, kv, lambda stage: stage.save(meta, kv))

    def _save_given(self, meta: ChunkMeta, kv: torch.Tensor, generation: int) -> bool:
        """`save` of a tensor that is the store's own: host memory keeps it instead of a copy. What was given before
        the store was cleared does not come back."""
        if generation != self._generation(meta.namespace):
            return False
        kv = kv.contiguous()
        saved = self._save(
            meta, kv, lambda stage: stage.adopt(meta, kv) if isinstance(stage, CacheStage) else stage.save(meta, kv))
        if generation != self._generation(meta.namespace):  # cleared while it was written
            self.delete(meta.namespace, [meta.key])
            return False
        self._pool.prepare(meta.shape, meta.torch_dtype, _BUFFERS_READY)
        return saved

    def _generation(self, namespace: str) -> int:
        return self._clears[None] + self._clears[namespace]

    def _save(self, meta: ChunkMeta, kv: torch.Tensor, save_in_front: Callable[[KVStage], bool]) -> bool:
        if self.stages[-1].holds(meta):
            # the copy that is there stays in front as well: stages must not differ in the source of a chunk
            self.counters.add("duplicates")
            return True
        for stage in self.stages[:-1]:
            save_in_front(stage)
        return self.stages[-1].save(meta, kv)

    def buffer(self, meta: ChunkMeta) -> torch.Tensor:
        """Host memory for the KV of a chunk, content undefined: to be filled and given to `save_async`."""
        return self._pool.tensor(meta.shape, meta.torch_dtype)[0]

    def save_async(self, meta: ChunkMeta, kv: torch.Tensor) -> Future[bool]:
        """Save at the lowest priority. `kv` is the store's from now on: whoever still has it only reads it.

        If more than `save_queue_bytes` are waiting the chunk is refused, False at once: saving never holds up anybody.
        """
        with self._queue:
            if self._queued_bytes + meta.payload_bytes > self.save_queue_bytes:
                self.counters.add("save_refused")
                refused: Future[bool] = Future()
                refused.set_result(False)
                return refused
            self._queued += 1
            self._queued_bytes += meta.payload_bytes
        future = self._writer.submit(self._save_given, meta, kv, self._generation(meta.namespace))
        future.add_done_callback(lambda _: self._saved(meta.payload_bytes))
        return future

    def _saved(self, num_bytes: int) -> None:
        with self._queue:
            self._queued -= 1
            self._queued_bytes -= num_bytes
            self._queue.notify_all()

    def has_room(self, num_bytes: int) -> bool:
        """Whether `save_async` would take a chunk of that size now."""
        with self._queue:
            return self._queued_bytes + num_bytes <= self.save_queue_bytes

    def flush(self, timeout_s: float | None = None) -> bool:
        with self._queue:
            return self._queue.wait_for(lambda: not self._queued, timeout_s)

    # both

    def _each(self, call: Callable[[KVStage], int]) -> int:
        return max(call(stage) for stage in self.stages)

    def delete(self, namespace: str, keys: Sequence[str]) -> int:
        self._removals += 1
        return self._each(lambda stage: stage.delete(namespace, keys))

    def clear(self, namespace: str | None = None) -> int:
        self._removals += 1
        self._clears[namespace] += 1
        return self._each(lambda stage: stage.clear(namespace))

    def pin(self, namespace: str, keys: Sequence[str]) -> None:
        for stage in self.stages:
            stage.pin(namespace, keys)

    def unpin(self, namespace: str, keys: Sequence[str]) -> None:
        for stage in self.stages:
            stage.unpin(namespace, keys)

    def stats(self) -> dict:
        """The pipeline's own numbers, and one dictionary per stage under its name."""
        with self._queue:
            queue = {"save_queue": self._queued, "save_queue_bytes": self._queued_bytes}
        return {**queue, **self.counters, **{stage.name: stage.stats() for stage in self.stages}}

    def close(self) -> None:
        """Finish what was accepted for saving, for at most half a minute, and stop the threads."""
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        if not self.flush(_CLOSE_TIMEOUT_S):
            logger.warning("%d chunks were not saved within %.0f s of closing", self._queued, _CLOSE_TIMEOUT_S)
        self._writer.shutdown(wait=time.monotonic() < deadline_s, cancel_futures=True)
        self._readers.shutdown(wait=True, cancel_futures=True)
        for stage in self.stages:
            stage.close()

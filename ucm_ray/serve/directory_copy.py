"""A copy of the chunk directory that is asked without any network: one index per namespace, kept by a subscriber."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from actors.chunk_directory import DirectoryRecord, DirectorySubscriber
from ucm_ray.blend.chunk import ChunkRecord
from ucm_ray.blend.index import ChunkIndex
from ucm_ray.keys import SOURCE_PREFIX
from ucm_ray.serve.residency import PromptChunk, Residency


class DirectoryCopy:
    """What this process knows of the stored chunks; behind the directory by about one call. `residency` is told who
    computed each of them."""

    def __init__(self, connect: Callable[[], Any], anchor_tokens: int, residency: Residency):
        self._anchor_tokens, self._residency = anchor_tokens, residency
        self._indexes: dict[str, ChunkIndex] = {}
        # namespaces without chunks share it: whoever asks with a new salt every time must cost no memory
        self._nothing = ChunkIndex(anchor_tokens)
        self._sizes: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._lock = Lock()
        self.subscriber = DirectorySubscriber(self._add, self._remove, connect=connect)
        self.subscriber.start()

    def index(self, namespace: str) -> ChunkIndex:
        """What is known now. Ask again for what comes later: a namespace has an index only while it has chunks."""
        with self._lock:
            return self._indexes.get(namespace, self._nothing)

    def num_bytes(self, namespace: str, key: str) -> int:
        """Bytes of a chunk's KV; 0 if unknown."""
        return self._sizes.get((namespace, key), 0)

    @property
    def synchronised(self) -> bool:
        """Whether the directory answered the last question."""
        return self.subscriber.synchronised.is_set()

    def close(self) -> None:
        self.subscriber.close()

    def _add(self, namespace: str, records: list[DirectoryRecord]) -> None:
        with self._lock:
            if namespace not in self._indexes:
                self._indexes[namespace] = ChunkIndex(self._anchor_tokens)
            index = self._indexes[namespace]
        index.add(ChunkRecord(*record[:5]) for record in records)
        self._sizes.update({(namespace, record.key): record.num_bytes for record in records})
        for record in sorted(records, key=lambda record: record.created_s):
            chunk = PromptChunk(record.key, len(record.token_ids), record.num_bytes)
            self._residency.put(record.source_id[:SOURCE_PREFIX], [chunk])

    def _remove(self, namespace: str, keys: list[str]) -> None:
        for key in keys:
            self._sizes.pop((namespace, key), None)
        with self._lock:
            index = self._indexes.get(namespace)
            if index is not None:
                index.remove(keys)
                if not len(index):
                    del self._indexes[namespace]

"""Reading chunks layer by layer, ahead of whoever uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import TYPE_CHECKING

import torch

from ucm_ray.store.base import ChunkMeta, StoredChunk
from ucm_ray.store.posix import OpenChunk

if TYPE_CHECKING:
    from ucm_ray.store.pipeline import Pipeline


class LayerReader:
    """Iterates once over layers: one list `[len(keys)]` of KV `[2, num_tokens, num_kv_heads, head_dim]` per layer.

    Each layer is verified on its own. A chunk that turns out bad is None from that layer on, and in `failed`: what was
    already used of it has to be recomputed. `metas` holds None for chunks that were missing from the start.
    """

    def __init__(self, pipeline: Pipeline, namespace: str, keys: Sequence[str], read_ahead: int,
                 readers: Executor) -> None:
        self.failed: set[str] = set()
        self._read_ahead = max(1, read_ahead)
        self._readers = readers
        self._keys = list(keys)
        posix = pipeline.posix
        in_memory = [stage for stage in pipeline.stages if stage is not posix]
        self._chunks: list[StoredChunk | None] = []
        self._files: list[OpenChunk | None] = []
        for key in self._keys:
            chunk = next((found for stage in in_memory if (found := stage.load(namespace, key))), None)
            self._chunks.append(chunk)
            self._files.append(posix.open_chunk(namespace, key) if chunk is None and posix else None)
        self.metas: list[ChunkMeta | None] = [
            chunk[0] if chunk else file.meta if file else None
            for chunk, file in zip(self._chunks, self._files, strict=True)]
        self.failed |= {key for key, meta in zip(self._keys, self.metas, strict=True) if meta is None}
        self.num_layers = min((meta.num_layers for meta in self.metas if meta), default=0)

    def __iter__(self) -> Iterator[list[torch.Tensor | None]]:
        ahead: deque[list[Future[torch.Tensor | None] | None]] = deque()
        try:
            for layer in range(min(self._read_ahead, self.num_layers)):
                ahead.append(self._request(layer))
            for layer in range(self.num_layers):
                futures = ahead.popleft()
                if layer + self._read_ahead < self.num_layers:
                    ahead.append(self._request(layer + self._read_ahead))
                yield [self._take(index, layer, future) for index, future in enumerate(futures)]
        finally:
            wait([future for futures in ahead for future in futures if future])
            self.close()

    def _request(self, layer: int) -> list[Future[torch.Tensor | None] | None]:
        return [self._readers.submit(file.read_layer, layer) if file else None for file in self._files]

    def _take(self, index: int, layer: int, future: Future[torch.Tensor | None] | None) -> torch.Tensor | None:
        if self._chunks[index] is not None:
            return self._chunks[index][1][layer]
        if future is None:
            return None
        kv = future.result()
        if kv is None:
            self.failed.add(self._keys[index])
        return None if self._keys[index] in self.failed else kv

    def close(self) -> None:
        """Close the files; an iteration does it at its end."""
        files, self._files = self._files, [None] * len(self._files)
        for file in files:
            if file is not None:
                file.close()

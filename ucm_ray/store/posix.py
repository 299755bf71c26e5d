"""Stage "Posix": chunks as files in one or several folders."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from ucm_ray.store.base import ChunkMeta, KVStage, StoredChunk, is_hex_name
from ucm_ray.store.buffers import BufferPool
from ucm_ray.store.chunk_file import (
    BadChunkFile,
    Header,
    largest_file_bytes,
    read_header,
    read_layer,
    read_payload,
    write_chunk,
)
from ucm_ray.store.shared_folder import SharedFolder

logger = logging.getLogger("ucm_ray.store")

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_RETRY_S = 60.0
# a use is noted on the file at most this often: the order of eviction needs no more
_TOUCH_INTERVAL_S = 5.0
_TOUCHES_KEPT = 100_000


class OpenChunk:
    """An open file whose layers are read one by one; it stays readable though the file is removed or replaced."""

    def __init__(self, stage: PosixStage, handle: int, header: Header) -> None:
        self.meta = header.meta
        self._stage, self._handle, self._header = stage, handle, header

    def read_layer(self, layer: int) -> torch.Tensor | None:
        """KV `[2, num_tokens, num_kv_heads, head_dim]`; None, counted, and the file removed, if it is not good."""
        stage, meta = self._stage, self.meta
        try:
            try:
                return read_layer(self._handle, self._header, layer, stage.pool)
            except BadChunkFile as error:
                path = stage.folder_of(meta.key).path(meta.namespace, meta.key, stage.rank)
                stage.discard(path, self._handle, meta.namespace, meta.key, error)
        except OSError as error:  # of the removal too
            stage.counters.add("read_errors")
            logger.warning("a layer of chunk %s cannot be read: %s", meta.key, error)
        return None

    def close(self) -> None:
        os.close(self._handle)


class PosixStage(KVStage):
    """Files of `rank` of `world_size` under `roots`; a chunk's folder follows from its key.

    A full or broken disk first evicts, then turns saving off for a minute with one line in the log.
    """

    name = "Posix"

    def __init__(self, roots: Sequence[str | Path], capacity_bytes: int, rank: int = 0, world_size: int = 1,
                 pool: BufferPool | None = None) -> None:
        super().__init__()
        self.capacity_bytes = capacity_bytes
        self.rank = rank
        self.world_size = world_size
        self.pool = pool or BufferPool(256 * 2**20)
        self.folders = [SharedFolder(root, capacity_bytes // len(roots), world_size) for root in roots]
        self._touched: dict[tuple[str, str], float] = {}
        self._degraded_until_s = 0.0
        self._degraded = False
        self._health_lock = Lock()

    def folder_of(self, key: str) -> SharedFolder:
        return self.folders[int(key[:4], 16) % len(self.folders)]

    # reading

    def lookup(self, namespace: str, keys: Sequence[str]) -> np.ndarray:
        """True where the files of all ranks are here."""
        return np.fromiter((self._complete(namespace, key) for key in keys), dtype=bool, count=len(keys))

    def _complete(self, namespace: str, key: str) -> bool:
        if not (is_hex_name(namespace) and is_hex_name(key)):
            return False
        return all(os.path.exists(path) for path in self.folder_of(key).paths(namespace, key))

    def load(self, namespace: str, key: str) -> StoredChunk | None:
        return self._guarded(namespace, key, self._read_chunk)

    def _read_chunk(self, handle: int, namespace: str, key: str) -> StoredChunk:
        header = self._checked_header(handle, namespace, key)
        chunk = header.meta, read_payload(handle, header, self.pool)
        self.counters.add_all(hits=1, loaded_bytes=header.meta.payload_bytes)
        self._touch(namespace, key)
        return chunk

    def load_header(self, namespace: str, key: str) -> Header | None:
        """Header of this rank's file, verified; the payload is not read."""
        return self._guarded(namespace, key, self._checked_header)

    def open_chunk(self, namespace: str, key: str) -> OpenChunk | None:
        """This rank's file, its header verified, to be read layer by layer; the caller closes it."""
        def keep(handle: int, namespace: str, key: str) -> OpenChunk:
            header = self._checked_header(handle, namespace, key)
            self._touch(namespace, key)
            return OpenChunk(self, os.dup(handle), header)

        return self._guarded(namespace, key, keep)

    def _guarded(self, namespace: str, key: str, read):
        """`read(handle, namespace, key)` of this rank's file; whatever is wrong with the file is counted: None."""
        if not (is_hex_name(namespace) and is_hex_name(key)):
            self.counters.add("misses")
            return None
        path = self.folder_of(key).path(namespace, key, self.rank)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return read(handle, namespace, key)
            except BadChunkFile as error:
                self.discard(path, handle, namespace, key, error)
            finally:
                os.close(handle)
        except FileNotFoundError:
            self.counters.add("misses")
        except OSError as error:
            self.counters.add("read_errors")
            logger.warning("chunk file %s cannot be read: %s", path, error)
        return None

    def _checked_header(self, handle: int, namespace: str, key: str) -> Header:
        header = read_header(handle)
        meta = header.meta
        found = (meta.namespace, meta.key, meta.rank, meta.world_size)
        expected = (namespace, key, self.rank, self.world_size)
        if found != expected:
            raise BadChunkFile("foreign", f"(namespace, key, rank, world size) is {found}, expected {expected}")
        return header

    def discard(self, path: str, handle: int, namespace: str, key: str, error: BadChunkFile) -> None:
        """Remove a bad file, and with it the other ranks' files, unless a new one took its place meanwhile."""
        self.counters.add(error.kind)
        logger.warning("chunk file %s is %s and will be computed anew: %s", path, error.kind, error)
        if error.kind == "unsupported":
            return
        try:
            if os.stat(path).st_ino != os.fstat(handle).st_ino:
                return
        except FileNotFoundError:
            return
        self.folder_of(key).remove(namespace, key)

    def scan(self, namespace: str) -> Iterator[ChunkMeta]:
        """Metas of the chunks of which this rank's file is here and good."""
        for folder in self.folders:
            for files in folder.walk(namespace):
                if folder.path(namespace, files.key, self.rank) in files.paths:
                    header = self.load_header(namespace, files.key)
                    if header is not None:
                        yield header.meta

    def namespaces(self) -> list[str]:
        return sorted({name for folder in self.folders for name in folder.namespaces()})

    # use

    def touch(self, namespace: str, keys: Sequence[str]) -> None:
        for key in keys:
            self._touch(namespace, key)

    def _touch(self, namespace: str, key: str) -> None:
        now = time.monotonic()
        if now - self._touched.get((namespace, key), -_TOUCH_INTERVAL_S) < _TOUCH_INTERVAL_S:
            return
        if len(self._touched) >= _TOUCHES_KEPT:
            self._touched.clear()
        self._touched[namespace, key] = now
        try:
            os.utime(self.folder_of(key).path(namespace, key, self.rank))
        except OSError:
            # gone, or somebody else's file: the order of eviction is a guess then, nothing else
            self.counters.add("untouched")

    def pin(self, namespace: str, keys: Sequence[str]) -> None:
        for folder in self.folders:
            folder.pins.pin((namespace, key) for key in keys if self.folder_of(key) is folder)

    def unpin(self, namespace: str, keys: Sequence[str]) -> None:
        for folder in self.folders:
            folder.pins.unpin((namespace, key) for key in keys if self.folder_of(key) is folder)

    # writing

    def save(self, meta: ChunkMeta, kv: torch.Tensor) -> bool:
        refusal = self._refusal(meta, kv)
        if refusal:
            self.counters.add("refused")
            logger.error("chunk %s is not saved: %s", meta.key, refusal)
            return False
        if self.holds(meta):
            self.counters.add("duplicates")
            return True
        if time.monotonic() < self._degraded_until_s:
            self.counters.add("not_saved")
            return False
        try:
            return self._write_making_room(meta, kv.contiguous())
        except OSError as error:
            self._degrade(meta, error)
            return False

    def _refusal(self, meta: ChunkMeta, kv: torch.Tensor) -> str:
        if (meta.rank, meta.world_size) != (self.rank, self.world_size):
            return f"it is of rank {meta.rank} of {meta.world_size}, this store of {self.rank} of {self.world_size}"
        if tuple(kv.shape) != meta.shape or kv.dtype != meta.torch_dtype or kv.device.type != "cpu":
            return (f"its KV is {tuple(kv.shape)} {kv.dtype} on {kv.device}, "
                    f"expected {meta.shape} {meta.dtype} on cpu")
        return ""

    def holds(self, meta: ChunkMeta) -> bool:
        """One copy per content, but all ranks' copies must be of the same source."""
        folder = self.folder_of(meta.key)
        if not os.path.isfile(folder.path(meta.namespace, meta.key, self.rank)):
            return False
        if self.world_size == 1:
            return True
        origins = {self._origin(path) for path in folder.paths(meta.namespace, meta.key)}
        return len(origins) == 1 or self._origin(folder.path(meta.namespace, meta.key, self.rank)) == meta.origin

    def is_whole(self, namespace: str, key: str) -> bool:
        """Whether the files of all ranks are here, with good headers and of one source."""
        origins = {self._origin(path) for path in self.folder_of(key).paths(namespace, key)}
        return len(origins) == 1 and None not in origins

    @staticmethod
    def _origin(path: str) -> tuple[str, int] | None:
        try:
            with open(path, "rb") as file:
                return read_header(file.fileno()).meta.origin
        except (OSError, BadChunkFile):
            return None

    def _write_making_room(self, meta: ChunkMeta, kv: torch.Tensor) -> bool:
        try:
            return self._write(meta, kv)
        except OSError as error:
            if error.errno not in _DISK_FULL:
                raise
        self._report_evicted(self.folder_of(meta.key).free_disk(2 * meta.payload_bytes))
        return self._write(meta, kv)

    def _write(self, meta: ChunkMeta, kv: torch.Tensor) -> bool:
        folder = self.folder_of(meta.key)
        added, evicted = folder.add(folder.path(meta.namespace, meta.key, self.rank), largest_file_bytes(meta),
                                    lambda path: write_chunk(path, meta, kv))
        self._report_evicted(evicted)
        if added:
            self.counters.add_all(saved=1, saved_bytes=meta.payload_bytes)
            self._recovered()
        else:
            self.counters.add("no_room")
        return added

    def _report_evicted(self, chunks: list[tuple[str, str]]) -> None:
        by_namespace: dict[str, list[str]] = {}
        for namespace, key in chunks:
            by_namespace.setdefault(namespace, []).append(key)
        for namespace, keys in by_namespace.items():
            self.evicted(namespace, keys)

    def _degrade(self, meta: ChunkMeta, error: OSError) -> None:
        with self._health_lock:
            self._degraded_until_s = time.monotonic() + _RETRY_S
            self.counters.add("write_errors")
            if not self._degraded:
                self._degraded = True
                logger.warning("chunks are not saved to %s for the time being, reading goes on: %s (retried every "
                               "%.0f s)", self.folder_of(meta.key).root, error.strerror, _RETRY_S)

    def _recovered(self) -> None:
        if self._degraded:
            with self._health_lock:
                self._degraded = False
            logger.warning("chunks are saved again to %s", ", ".join(str(folder.root) for folder in self.folders))

    # removing

    def delete(self, namespace: str, keys: Sequence[str]) -> int:
        if not is_hex_name(namespace):
            return 0
        return sum(self.folder_of(key).remove(namespace, key) for key in keys if is_hex_name(key))

    def clear(self, namespace: str | None = None) -> int:
        return sum(folder.clear(namespace) for folder in self.folders)

    def stats(self) -> dict:
        """Sizes of the whole folder, all processes and ranks together; event counts of this process."""
        return {
            "bytes": sum(folder.used_bytes() for folder in self.folders),
            "capacity_bytes": self.capacity_bytes,
            "degraded": self._degraded,
            **self.counters,
        }

    def close(self) -> None:
        for folder in self.folders:
            folder.close()

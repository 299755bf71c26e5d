"""A folder of chunk files that several processes read, write and evict from at the same time.

    <root>/<namespace>/<key[:2]>/<key>.<rank>of<world_size>.kv      chunks
    <root>/.store/usage, folder.lock, *.pins, directory_pins.json   what the processes share

No process owns the folder: any file may vanish at any moment, which is never an error. A chunk's files of all ranks are
one unit: they are counted, evicted and discarded together, since one rank's file is useless without the others.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ucm_ray.store.base import StoreError, is_hex_name
from ucm_ray.store.pins import Pin, Pins

logger = logging.getLogger("ucm_ray.store")

_CHUNK_FILE = re.compile(r"([0-9a-f]+)\.(\d+)of(\d+)\.kv")
_STALE_TEMPORARY_S = 600.0
# evicting somewhat more than asked for saves the next saves the same walk
_SPARE = 0.05
_COUNTER_BYTES = 8
_ATTEMPTS = 3


class ChunkFiles(NamedTuple):
    namespace: str
    key: str
    paths: list[str]  # one per rank
    num_bytes: int
    last_use_s: float


class SharedFolder:
    """Paths, size, LRU order, pins and eviction of one root.

    Raises StoreError if `root` cannot be created or written.
    """

    def __init__(self, root: str | Path, capacity_bytes: int, world_size: int = 1) -> None:
        self.root = Path(root).expanduser()
        self.capacity_bytes = capacity_bytes
        self.world_size = world_size
        self._control = self.root / ".store"
        self._prepare()
        self.pins = Pins(self._control)
        self._candidates: deque[ChunkFiles] = deque()
        self._counted = False

    def _prepare(self) -> None:
        try:
            self._control.mkdir(parents=True, exist_ok=True)
            probe = self._control / f"probe-{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(f"storage_backends: {self.root} cannot be written ({error.strerror}), expected a folder "
                             "this process may create files in") from None

    # paths

    def path(self, namespace: str, key: str, rank: int) -> str:
        return f"{self.root}/{namespace}/{key[:2]}/{key}.{rank}of{self.world_size}.kv"

    def paths(self, namespace: str, key: str) -> list[str]:
        return [self.path(namespace, key, rank) for rank in range(self.world_size)]

    def temporary_path(self, path: str) -> str:
        """A name in the same folder that no other writer uses; the folder is created."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return f"{path}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}.tmp"

    def namespaces(self) -> list[str]:
        return sorted(name for name in _names(self.root) if is_hex_name(name))

    def walk(self, namespace: str | None = None) -> Iterator[ChunkFiles]:
        """All chunks whose file names fit, of any world size; left-over temporary files are removed on the way."""
        for space in self.namespaces() if namespace is None else [namespace]:
            for shelf in _names(self.root / space):
                yield from self._walk_shelf(space, self.root / space / shelf)

    def _walk_shelf(self, namespace: str, folder: Path) -> Iterator[ChunkFiles]:
        found: dict[tuple[str, str], list[tuple[str, int, float]]] = {}
        try:
            entries = list(os.scandir(folder))
        except OSError:
            return
        for entry in entries:
            try:
                status = entry.stat()
            except OSError:
                continue
            match = _CHUNK_FILE.fullmatch(entry.name)
            if match:
                found.setdefault((match[1], match[3]), []).append((entry.path, status.st_size, status.st_mtime))
            elif entry.name.endswith(".tmp") and time.time() - status.st_mtime > _STALE_TEMPORARY_S:
                remove_file(entry.path)
        for (key, _), files in found.items():
            paths, sizes, times = zip(*files, strict=True)
            yield ChunkFiles(namespace, key, list(paths), sum(sizes), max(times))

    # size: one counter for all processes, corrected by every walk over the whole folder

    @contextmanager
    def _counter(self) -> Iterator[int]:
        # the folder may have been removed under a running engine
        self._control.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._control / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)

    def used_bytes(self) -> int:
        with self._counter() as handle:
            data = os.pread(handle, _COUNTER_BYTES, 0)
        return int.from_bytes(data, "little", signed=True) if len(data) == _COUNTER_BYTES else self.recount()

    def add_used(self, num_bytes: int, limit: int | None = None) -> bool:
        """Change the counter, unless it would exceed `limit`."""
        with self._counter() as handle:
            data = os.pread(handle, _COUNTER_BYTES, 0)
            if len(data) == _COUNTER_BYTES:
                used = max(0, int.from_bytes(data, "little", signed=True) + num_bytes)
                if limit is not None and used > limit:
                    return False
                os.pwrite(handle, used.to_bytes(_COUNTER_BYTES, "little", signed=True), 0)
        return True

    def recount(self) -> int:
        """Walk the folder: set the shared counter and the order of eviction to what is there."""
        with self._locked(fcntl.LOCK_EX):
            return self._recount()

    def _recount(self) -> int:
        chunks = sorted(self.walk(), key=lambda chunk: chunk.last_use_s)
        self._candidates = deque(chunks)
        self._counted = True
        used = sum(chunk.num_bytes for chunk in chunks)
        with self._counter() as handle:
            os.pwrite(handle, used.to_bytes(_COUNTER_BYTES, "little", signed=True), 0)
        return used

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Adding and removing files share the folder; counting and evicting have it alone, in all processes."""
        self._control.mkdir(parents=True, exist_ok=True)
        with open(self._control / "folder.lock", "w") as file:
            fcntl.flock(file, kind)
            yield

    # adding, evicting and removing

    def add(self, path: str, num_bytes: int, write: Callable[[str], int]) -> tuple[bool, list[Pin]]:
        """Let `write(temporary path) -> size` make a file of at most `num_bytes` and rename it to `path`.

        Evicts least recently used chunks first if there is no room; returns False if pins or the capacity forbid it,
        and the chunks that were evicted. Raises OSError, leaving no file behind.
        """
        gone: list[Pin] = []
        if num_bytes > self.capacity_bytes:
            return False, gone
        if not self._counted:
            # a process that was killed may have left the counter wrong
            self.recount()
        # others may take the room that was just made
        for _ in range(_ATTEMPTS):
            with self._locked(fcntl.LOCK_SH):
                if self.add_used(num_bytes, self.capacity_bytes):
                    self._add(path, num_bytes, write)
                    return True, gone
            gone += self._make_room(num_bytes)
        return False, gone

    def _add(self, path: str, reserved_bytes: int, write: Callable[[str], int]) -> None:
        change = -reserved_bytes
        temporary = self.temporary_path(path)
        try:
            num_bytes = write(temporary)
            replaced = file_bytes(path)
            os.rename(temporary, path)
            change += num_bytes - replaced
        except BaseException:
            remove_file(temporary)
            raise
        finally:
            self.add_used(change)

    def _make_room(self, num_bytes: int) -> list[Pin]:
        gone: list[Pin] = []
        spare = int(self.capacity_bytes * _SPARE)
        with self._locked(fcntl.LOCK_EX):
            # first in the order of the last walk, as long as it lasts: a walk looks at every file
            for walk in (False, True):
                if walk:
                    self._recount()
                excess = self.used_bytes() + num_bytes - self.capacity_bytes
                if excess <= 0:
                    break
                gone += self._evict(excess + spare)[1]
        return gone

    def free_disk(self, num_bytes: int) -> list[Pin]:
        """Evict about `num_bytes`, whatever the capacity, because the disk is full."""
        with self._locked(fcntl.LOCK_EX):
            freed, gone = self._evict(num_bytes)
            if freed < num_bytes:
                self._recount()
                gone += self._evict(num_bytes - freed)[1]
            return gone

    def _evict(self, num_bytes: int) -> tuple[int, list[Pin]]:
        """Remove chunks in the remembered order until `num_bytes` are free. Returns the bytes freed, and whose."""
        pinned = self.pins.all()
        freed, gone = 0, []
        while self._candidates and freed < num_bytes:
            chunk = self._candidates.popleft()
            if (chunk.namespace, chunk.key) in pinned or _last_use(chunk.paths) > chunk.last_use_s:
                continue
            removed = remove_files(chunk.paths)
            if removed:
                freed += removed
                gone.append((chunk.namespace, chunk.key))
        self.add_used(-freed)
        return freed, gone

    def remove(self, namespace: str, key: str) -> bool:
        """Remove a chunk's files of all ranks. False if none was here."""
        paths = self.paths(namespace, key)
        if not any(map(os.path.exists, paths)):
            return False
        with self._locked(fcntl.LOCK_SH):
            removed = remove_files(paths)
            if removed:
                self.add_used(-removed)
        return removed > 0

    def clear(self, namespace: str | None = None) -> int:
        """Remove all chunks, or those of a namespace. Returns how many there were."""
        with self._locked(fcntl.LOCK_EX):
            removed = sum(remove_files(chunk.paths) > 0 for chunk in self.walk(namespace))
            self._recount()
        return removed

    def close(self) -> None:
        self.pins.close()


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _last_use(paths: list[str]) -> float:
    latest = 0.0
    for path in paths:
        try:
            latest = max(latest, os.stat(path).st_mtime)
        except OSError:
            continue
    return latest


def remove_files(paths: list[str]) -> int:
    """Remove files, those that are still here. Returns the bytes that were freed."""
    return sum(remove_file(path) for path in paths)


def remove_file(path: str) -> int:
    num_bytes = file_bytes(path)
    try:
        os.unlink(path)
    except OSError:
        return 0
    return num_bytes


def file_bytes(path: str) -> int:
    """Size of a file, 0 if it is not here."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0

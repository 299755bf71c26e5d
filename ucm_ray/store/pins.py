"""Chunks that must not be evicted, known to all processes that share a folder."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

from ucm_ray.store.base import is_hex_name

logger = logging.getLogger("ucm_ray.store")

Pin = tuple[str, str]  # namespace, key


class Pins:
    """One log of `+namespace key` and `-namespace key` lines per process, locked for as long as the process lives.

    A log whose lock can be taken belongs to a process that ended: its pins are void and the file is removed. So no pin
    outlives its owner, however that ended, but those that are kept: they stand in a file of their own, which one
    process (see `KeptPins`) writes and everybody reads.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._counts: Counter[Pin] = Counter()
        self._lock = Lock()
        self._path: Path | None = None
        self._handle: int | None = None
        self._kept = folder / "directory_pins.json"

    def pin(self, pins: Iterable[Pin]) -> None:
        with self._lock:
            new = []
            for pin in pins:
                self._counts[pin] += 1
                if self._counts[pin] == 1:
                    new.append(pin)
            self._append("+", new)

    def unpin(self, pins: Iterable[Pin]) -> None:
        with self._lock:
            gone = []
            for pin in pins:
                if self._counts[pin] > 1:
                    self._counts[pin] -= 1
                elif self._counts.pop(pin, 0):
                    gone.append(pin)
            self._append("-", gone)

    def _append(self, sign: str, pins: list[Pin]) -> None:
        if not pins:
            return
        try:
            if self._handle is None:
                self._open()
            os.write(self._handle, "".join(f"{sign}{namespace} {key}\n" for namespace, key in pins).encode())
        except OSError as error:
            # the pins still hold against evictions by this process
            logger.warning("pins in %s are not visible to other processes: %s", self.folder, error)

    def _open(self) -> None:
        path = self.folder / f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.new"
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # only a locked log gets the name that others look for: an unlocked one would be taken for a dead process's
        self._path = path.rename(path.with_suffix(".pins"))

    def kept(self) -> set[Pin]:
        """Pins that hold whoever lives."""
        try:
            pins = json.loads(self._kept.read_text())
        except FileNotFoundError:
            return set()
        except (OSError, ValueError) as error:
            logger.warning("the pins in %s cannot be read: %s", self._kept, error)
            return set()
        return {(namespace, key) for namespace, keys in pins.items() for key in keys if is_hex_name(key)}

    def keep(self, pins: Iterable[Pin]) -> None:
        """Replace the pins that hold whoever lives."""
        by_namespace: dict[str, list[str]] = {}
        for namespace, key in sorted(pins):
            by_namespace.setdefault(namespace, []).append(key)
        temporary = self._kept.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(by_namespace))
            temporary.replace(self._kept)
        except OSError as error:
            logger.warning("pins cannot be saved to %s: %s", self._kept, error)

    def all(self) -> set[Pin]:
        """Pins of every living process, and those that are kept."""
        kept = self.kept()
        with self._lock:
            pinned = kept | set(self._counts)
            own = self._path
        for path in self.folder.glob("*.pins"):
            if path != own:
                pinned |= self._read_other(path)
        return pinned

    def _read_other(self, path: Path) -> set[Pin]:
        try:
            with open(path) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return self._parse(file.read())
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the pins in %s cannot be read: %s", path, error)
        return set()

    @staticmethod
    def _parse(text: str) -> set[Pin]:
        pinned: set[Pin] = set()
        for line in text.splitlines():
            sign, (namespace, _, key) = line[:1], line[1:].partition(" ")
            (pinned.add if sign == "+" else pinned.discard)((namespace, key))
        return pinned

    def close(self) -> None:
        with self._lock:
            self._counts.clear()
            if self._handle is not None:
                self._path.unlink(missing_ok=True)
                os.close(self._handle)
                self._handle = None

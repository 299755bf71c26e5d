"""Pins that outlive whoever sets them: written down in the folders, where every process that evicts reads them."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from ucm_ray.store.posix import PosixStage


class KeptPins:
    """Which chunks must stay, whether they are there at the moment or not: a folder that cannot be read for a while
    loses no pin. One process at a time keeps those of a store's folders. All methods may be called from any thread.
    """

    def __init__(self, posix: PosixStage) -> None:
        self._posix = posix
        self._lock = Lock()
        self._wanted: dict[str, set[str]] = {}
        for folder in posix.folders:
            for namespace, key in folder.pins.kept():
                self._wanted.setdefault(namespace, set()).add(key)

    def set(self, namespace: str, keys: Iterable[str], pinned: bool) -> None:
        with self._lock:
            wanted = self._wanted.setdefault(namespace, set())
            changed = [key for key in keys if (key in wanted) != pinned]
            if changed:
                (wanted.update if pinned else wanted.difference_update)(changed)
                self._write()

    def _write(self) -> None:
        pins = [(namespace, key) for namespace, keys in self._wanted.items() for key in keys]
        for folder in self._posix.folders:
            folder.pins.keep(pin for pin in pins if self._posix.folder_of(pin[1]) is folder)

    def among(self, namespace: str, keys: Iterable[str]) -> list[str]:
        """Those of `keys` that are pinned."""
        with self._lock:
            wanted = self._wanted.get(namespace, ())
            return [key for key in keys if key in wanted]

    def of(self, namespace: str) -> list[str]:
        with self._lock:
            return sorted(self._wanted.get(namespace, ()))

"""Pins that outlive the process that sets them: written down in the folder, in force while somebody follows it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from threading import Lock

from ucm_ray.store.base import is_hex_name
from ucm_ray.store.posix import PosixStage

logger = logging.getLogger("ucm_ray.store")


class KeptPins:
    """Which chunks must stay, whether they are there at the moment or not: a folder that cannot be read for a while
    loses no pin. One process at a time keeps those of a store's folders. All methods may be called from any thread.
    """

    def __init__(self, posix: PosixStage) -> None:
        self._posix = posix
        self._path = posix.folders[0].root / ".store" / "directory_pins.json"
        self._lock = Lock()
        self._wanted = self._read()
        for namespace, keys in self._wanted.items():
            posix.pin(namespace, sorted(keys))

    def set(self, namespace: str, keys: Iterable[str], pinned: bool) -> None:
        with self._lock:
            wanted = self._wanted.setdefault(namespace, set())
            changed = [key for key in dict.fromkeys(keys) if (key in wanted) != pinned]
            if not changed:
                return
            (wanted.update if pinned else wanted.difference_update)(changed)
            (self._posix.pin if pinned else self._posix.unpin)(namespace, changed)
            self._write()

    def among(self, namespace: str, keys: Iterable[str]) -> list[str]:
        """Those of `keys` that are pinned."""
        with self._lock:
            wanted = self._wanted.get(namespace, ())
            return [key for key in keys if key in wanted]

    def of(self, namespace: str) -> list[str]:
        with self._lock:
            return sorted(self._wanted.get(namespace, ()))

    def _read(self) -> dict[str, set[str]]:
        try:
            pins = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("%s: pins are lost: %s", self._path, error)
            return {}
        return {namespace: set(filter(is_hex_name, keys)) for namespace, keys in pins.items()}

    def _write(self) -> None:
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps({name: sorted(keys) for name, keys in self._wanted.items() if keys}))
            temporary.replace(self._path)
        except OSError as error:
            logger.warning("pins cannot be saved to %s: %s", self._path, error)

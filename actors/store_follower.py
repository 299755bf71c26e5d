"""Follows a folder of stored chunks that any number of engines write to, by the times its sub-folders changed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ucm_ray.store.base import ChunkMeta
from ucm_ray.store.factory import UcmConnectorFactory

# within the resolution of a file system's clock a folder may change again without a new time
_SETTLED_NS = 2_000_000_000


def pause_s(refresh_s: float, took_s: float) -> float:
    """Seconds to the next look: a folder with very many sub-folders is looked at less often, for 5% of a core."""
    return max(refresh_s, 20 * took_s)


class StoreFollower:
    """What was stored and what vanished since the last call of `changes`.

    `store_config` is the connector's extra configuration, with `world_size` where it is not 1.
    """

    def __init__(self, store_config: Mapping[str, Any]):
        world_size = int(store_config.get("world_size", 1))
        # no host memory of its own: headers are read and files deleted, no KV is loaded
        self.store = UcmConnectorFactory.create_connector({**store_config, "store_pipeline": "Posix"}, 0, world_size)
        self._posix = self.store.posix
        self._shelves: dict[str, int] = {}
        self._files: dict[str, dict[str, str]] = {}  # shelf -> file -> namespace

    @property
    def root(self) -> Path:
        return self._posix.folders[0].root

    def changes(self) -> tuple[dict[str, list[ChunkMeta]], dict[str, list[str]]]:
        """`(metas of new chunks, keys of vanished ones)`, each by namespace. The first call finds everything."""
        added: dict[str, list[ChunkMeta]] = {}
        removed: dict[str, list[str]] = {}
        seen = set()
        for folder in self._posix.folders:
            for namespace in folder.namespaces():
                for shelf in _subfolders(folder.root / namespace):
                    seen.add(shelf)
                    self._read_shelf(namespace, shelf, added, removed)
        for shelf in set(self._files) - seen:
            for key, namespace in self._files.pop(shelf).items():
                removed.setdefault(namespace, []).append(key)
            self._shelves.pop(shelf, None)
        return added, removed

    def _read_shelf(self, namespace: str, shelf: str, added: dict, removed: dict) -> None:
        modified_ns = _modified_ns(shelf)
        if modified_ns is None or (
            self._shelves.get(shelf) == modified_ns and time.time_ns() - modified_ns > _SETTLED_NS
        ):
            return
        suffix = f".{self._posix.rank}of{self._posix.world_size}.kv"
        keys = {name.removesuffix(suffix) for name in _names(shelf) if name.endswith(suffix)}
        before = self._files.setdefault(shelf, {})
        for key in before.keys() - keys:
            removed.setdefault(before.pop(key), []).append(key)
        for key in keys - before.keys():
            header = self._posix.load_header(namespace, key)
            if header is not None:
                before[key] = namespace
                added.setdefault(namespace, []).append(header.meta)
        self._shelves[shelf] = modified_ns


def _subfolders(folder: Path) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return []


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _modified_ns(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None

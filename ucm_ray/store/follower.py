"""Follows folders of stored chunks that any number of processes write to, by the times their sub-folders changed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from ucm_ray.store.base import ChunkMeta
from ucm_ray.store.posix import PosixStage

# within the resolution of a file system's clock a folder may change again without a new time
_SETTLED_NS = 2_000_000_000


class FolderChange(NamedTuple):
    """What was stored in a sub-folder and what vanished from it since it was read last."""

    added: list[ChunkMeta]
    removed: list[str]  # keys


class _Shelf(NamedTuple):
    modified_ns: int
    keys: frozenset[str]


def pause_s(refresh_s: float, took_s: float) -> float:
    """Seconds to the next look: a folder with very many sub-folders is looked at less often, for 5% of a core."""
    return max(refresh_s, 20 * took_s)


class StoreFollower:
    """What was stored and what vanished in the folders of `posix` since it was asked last; the first time, everything.

    Only headers of new files are read. One thread at a time may ask; `forget` and `doubt` may be called by any.
    """

    def __init__(self, posix: PosixStage) -> None:
        self._posix = posix
        self._suffix = f".{posix.rank}of{posix.world_size}.kv"
        self._shelves: dict[str, dict[str, _Shelf]] = {}  # namespace -> sub-folder -> what it held
        self._doubted: dict[str, frozenset[str]] = {}  # namespace -> keys to look at again

    def changes(self) -> tuple[dict[str, list[ChunkMeta]], dict[str, list[str]]]:
        """`(metas of new chunks, keys of vanished ones)`, each by namespace, of all namespaces."""
        added: dict[str, list[ChunkMeta]] = {}
        removed: dict[str, list[str]] = {}
        for namespace in sorted({*self._posix.namespaces(), *self._shelves}):
            for change in self.changes_of(namespace):
                added.setdefault(namespace, []).extend(change.added)
                removed.setdefault(namespace, []).extend(change.removed)
        return ({name: metas for name, metas in added.items() if metas},
                {name: keys for name, keys in removed.items() if keys})

    def changes_of(self, namespace: str, is_known: Callable[[str], bool] | None = None) -> Iterator[FolderChange]:
        """The changes of one namespace, a sub-folder at a time, so that the first are of use before the last are read.

        A sub-folder counts as read once the next one is asked for. Headers of keys that are known are not read.
        """
        shelves = self._shelves.setdefault(namespace, {})
        doubted = self._doubted.pop(namespace, frozenset())
        seen = set()
        for folder in self._posix.folders:
            for path in _subfolders(folder.root / namespace):
                seen.add(path)
                yield from self._read(namespace, path, shelves, is_known, doubted)
        for path in shelves.keys() - seen:
            yield FolderChange([], sorted(shelves[path].keys))
            shelves.pop(path, None)

    def forget(self, namespace: str | None = None) -> None:
        """Start anew with one namespace, or with all; what is being read meanwhile is void."""
        if namespace is None:
            self._shelves = {}
        else:
            self._shelves.pop(namespace, None)

    def doubt(self, namespace: str, keys: Iterable[str]) -> None:
        """Tell of these keys again if their files are here: they could not be loaded, but maybe only that once."""
        self._doubted[namespace] = self._doubted.get(namespace, frozenset()).union(keys)

    def _read(self, namespace: str, path: str, shelves: dict[str, _Shelf], is_known: Callable[[str], bool] | None,
              doubted: frozenset[str]) -> Iterator[FolderChange]:
        before = shelves.get(path, _Shelf(0, frozenset()))
        again = before.keys & doubted
        modified_ns = _modified_ns(path)
        if modified_ns is None or (
            before.modified_ns == modified_ns and time.time_ns() - modified_ns > _SETTLED_NS and not again
        ):
            return
        found = {name.removesuffix(self._suffix) for name in _names(path) if name.endswith(self._suffix)}
        added, keys = [], (found & before.keys) - again
        for key in sorted(found - keys):
            if key in again and not self._posix.is_whole(namespace, key):
                continue  # the next save completes it
            if is_known is None or not is_known(key):
                header = self._posix.load_header(namespace, key)
                if header is None:
                    continue
                added.append(header.meta)
            keys.add(key)
        removed = sorted(before.keys - found)
        if added or removed:
            yield FolderChange(added, removed)
        shelves[path] = _Shelf(modified_ns, frozenset(keys))


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

"""The blocks one worker or shard holds, and the block lists of the requests that ask about them."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ucm_ray.retrieval.packed import Geometry, PackedAnswer, PackedQuery
from ucm_ray.retrieval.scorers import Tables, default_threads, make_scorer


class Upserted(NamedTuple):
    """What an upsert did: blocks stored now, stored before (their content is the same), and refused for capacity."""

    stored: int
    present: int
    refused: int


class BlockBank:
    """Content-addressed block representations of one geometry, in a fixed number of bytes.

    Blocks are known by key (the hash of their content and context) and shared by all requests that hold them. When
    the bank is full the least recently used blocks give way; blocks used less than `protect_s` ago do not, and what
    then does not fit is refused, so that a pool that is too small refuses instead of thrashing. Thread safe.
    """

    def __init__(self, geometry: Geometry, capacity_bytes: int, device: str = "cpu", num_threads: int | None = None,
                 protect_s: float = 0.0, clock: Callable[[], float] = time.monotonic):
        self.geometry = geometry.check()
        self.num_slots = int(capacity_bytes) // geometry.record_bytes
        if self.num_slots < 1:
            raise ValueError(f"capacity_bytes is {capacity_bytes}, expected at least one block "
                             f"({geometry.record_bytes} bytes)")
        self._scorer = make_scorer(geometry, self.num_slots, device, num_threads or default_threads())
        self._protect_s = protect_s
        self._clock = clock
        self._lock = threading.RLock()
        self._slot_of: dict[str, int] = {}
        self._key_of: list[str | None] = [None] * self.num_slots
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._generations = np.zeros(self.num_slots, np.int32)
        self._last_used = np.zeros(self.num_slots, np.int64)
        self._row_of: dict[str, int] = {}
        self._keys_of: dict[str, list[str]] = {}
        self._free_rows: list[int] = []
        self._tables = Tables(*(np.full((0, 0), -1, np.int32) for _ in range(3)), np.zeros(0, np.int32))
        self._row_used = np.zeros(0, np.int64)
        self._reserve(1, 1)
        self._evicted = 0
        self._refused = 0

    def upsert(self, keys: Sequence[str], records: torch.Tensor) -> Upserted:
        """Stores blocks; a key that is present is left as it is, since equal keys mean equal content.

        Args:
            records: `[len(keys), *record_shape]` in the geometry's dtype (see `Geometry.pack`).
        """
        if records.shape != (len(keys), *self.geometry.record_shape) or records.dtype != self.geometry.torch_dtype:
            raise ValueError(f"records are {records.dtype} {list(records.shape)}, expected {self.geometry.torch_dtype} "
                             f"{[len(keys), *self.geometry.record_shape]}")
        with self._lock:
            new = {key: index for index, key in enumerate(keys) if key not in self._slot_of}
            present = len(keys) - len(new)
            self.touch(keys)
            self._make_room(len(new))
            admitted = list(new)[:len(self._free)]
            refused = len(new) - len(admitted)
            self._refused += refused
            if admitted:
                slots = np.array([self._free.pop() for _ in admitted], np.int32)
                self._scorer.write(slots, records[[new[key] for key in admitted]])
                self._slot_of.update(zip(admitted, slots.tolist(), strict=True))
                for key, slot in zip(admitted, slots.tolist(), strict=True):
                    self._key_of[slot] = key
                self._last_used[slots] = self._tick()
                self._resolve(set(admitted))
            return Upserted(len(admitted), present, refused)

    def append(self, request_id: str, keys: Sequence[str], positions: np.ndarray | None = None,
               skip_known: bool = False) -> None:
        """Appends blocks to a request's list, beginning it if need be. Their representations may come later.

        Args:
            positions: int32 `[len(keys)]`, ascending, above the list's last; consecutive when left out.
            skip_known: pass over positions up to the list's last instead of refusing them (the message came twice).
        """
        with self._lock:
            row = self._row_of.get(request_id)
            if row is None:
                row = self._new_row(request_id)
            length = int(self._tables.lengths[row])
            last = int(self._tables.positions[row, length - 1]) if length else -1
            positions = np.arange(last + 1, last + 1 + len(keys)) if positions is None else np.asarray(positions)
            if skip_known:
                known = int(np.searchsorted(positions, last, side="right"))
                keys, positions = keys[known:], positions[known:]
            if len(positions) != len(keys) or (len(keys) and (positions[0] <= last or (np.diff(positions) <= 0).any())):
                raise ValueError(f"positions of request {request_id!r} are {positions.tolist()[:8]}, expected "
                                 f"{len(keys)} ascending numbers above {last}")
            end = length + len(keys)
            self._reserve(row + 1, end)
            self._keys_of[request_id].extend(keys)
            slots = np.fromiter((self._slot_of.get(key, -1) for key in keys), np.int32, len(keys))
            self._tables.slots[row, length:end] = slots
            self._tables.generations[row, length:end] = np.where(slots >= 0, self._generations[slots], -1)
            self._tables.positions[row, length:end] = positions
            self._tables.lengths[row] = end
            self._row_used[row] = self._tick()

    def replace(self, request_id: str, keys: Sequence[str], positions: np.ndarray | None = None) -> None:
        """Sets a request's whole block list."""
        with self._lock:
            self.forget([request_id])
            self.append(request_id, keys, positions)

    def forget(self, request_ids: Sequence[str]) -> int:
        """Drops the block lists of finished requests (not the blocks); returns how many were known."""
        with self._lock:
            known = [request_id for request_id in request_ids if request_id in self._row_of]
            for request_id in known:
                row = self._row_of.pop(request_id)
                del self._keys_of[request_id]
                self._tables.lengths[row] = 0
                self._free_rows.append(row)
            return len(known)

    def expire(self, idle_s: float) -> int:
        """Drops the lists of requests neither asked about nor appended to for `idle_s`; returns how many."""
        with self._lock:
            oldest = self._tick() - int(idle_s * 1e6)
            return self.forget([name for name, row in self._row_of.items() if self._row_used[row] < oldest])

    def answer(self, query: PackedQuery, select: bool = True) -> PackedAnswer:
        """Scores the candidates of every request and selects the best; unknown requests have no candidates.

        `candidates` of the answer tells how many blocks were found; fewer than asked for means some are missing here.
        """
        layers, heads, num_stats, head_dim = self.geometry.record_shape
        if query.features.shape[1:] != (layers, heads, num_stats, head_dim):
            raise ValueError(f"query features have shape {list(query.features.shape)}, expected "
                             f"[num_requests, {layers}, {heads}, {num_stats}, {head_dim}]")
        with self._lock:
            rows = self.rows(query.request_ids)
            tick = self._tick()
            self._row_used[rows[rows >= 0]] = tick
            stop = np.where(query.stop < 0, np.iinfo(np.int32).max, query.stop).astype(np.int32)
            return self._scorer.answer(query, rows, stop, self._tables, self._generations, self._last_used,
                                       tick, select)

    def rows(self, request_ids: Sequence[str]) -> np.ndarray:
        """Table row of each request, int32, -1 for unknown ones."""
        return np.fromiter(map(self._row_of.get, request_ids, _ENDLESS), np.int32, len(request_ids))

    def lengths(self, request_ids: Sequence[str]) -> np.ndarray:
        """Number of blocks in each request's list, int32; 0 for unknown requests."""
        with self._lock:
            rows = self.rows(request_ids)
            return np.where(rows >= 0, self._tables.lengths[rows], 0).astype(np.int32)

    def request_keys(self, request_id: str) -> list[str]:
        """Block keys of a request in the order of its list; empty if unknown."""
        with self._lock:
            return list(self._keys_of.get(request_id, ()))

    def request_ids(self) -> list[str]:
        with self._lock:
            return list(self._row_of)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that are not stored, in order, each once."""
        with self._lock:
            return [key for key in dict.fromkeys(keys) if key not in self._slot_of]

    def read(self, keys: Sequence[str]) -> tuple[list[str], torch.Tensor]:
        """Keys that are present and their records `[n, *record_shape]` (a copy)."""
        with self._lock:
            found = [key for key in keys if key in self._slot_of]
            return found, self._scorer.read(np.array([self._slot_of[key] for key in found], np.int32))

    def touch(self, keys: Sequence[str]) -> None:
        """Marks blocks as just used; unknown keys are passed over."""
        with self._lock:
            self._last_used[[self._slot_of[key] for key in keys if key in self._slot_of]] = self._tick()

    def evict(self, keys: Sequence[str]) -> int:
        """Drops blocks at once; returns how many were present."""
        with self._lock:
            slots = [self._slot_of[key] for key in keys if key in self._slot_of]
            self._drop(slots)
            return len(slots)

    def stats(self) -> dict[str, int]:
        """Counters and sizes; `referenced_bytes` counts blocks that some request's list holds."""
        with self._lock:
            blocks = len(self._slot_of)
            valid = (np.arange(self._tables.slots.shape[1]) < self._tables.lengths[:, None]) & (self._tables.slots >= 0)
            valid &= self._generations[self._tables.slots] == self._tables.generations
            referenced = len(np.unique(self._tables.slots[valid]))
            return {"blocks": blocks, "bytes": blocks * self.geometry.record_bytes,
                    "referenced_bytes": referenced * self.geometry.record_bytes,
                    "capacity_bytes": self.num_slots * self.geometry.record_bytes, "requests": len(self._row_of),
                    "evicted": self._evicted, "refused": self._refused}

    def _tick(self) -> int:
        return int(self._clock() * 1e6)

    def _make_room(self, wanted: int) -> None:
        """Evicts least recently used blocks until `wanted` slots are free or only protected blocks remain."""
        short = min(wanted, self.num_slots) - len(self._free)
        if short <= 0:
            return
        used = np.fromiter(self._slot_of.values(), np.int64, len(self._slot_of))
        age_order = used[np.argsort(self._last_used[used], kind="stable")][:short]
        protected_from = self._tick() - int(self._protect_s * 1e6)
        if self._protect_s > 0:
            age_order = age_order[self._last_used[age_order] < protected_from]
        self._evicted += len(age_order)
        self._drop(age_order.tolist())

    def _drop(self, slots: list[int]) -> None:
        """Frees slots. The new generation makes every table entry that names them void, without looking for them."""
        self._generations[slots] += 1
        for slot in slots:
            del self._slot_of[self._key_of[slot]]
            self._key_of[slot] = None
            self._free.append(slot)

    def _resolve(self, new_keys: set[str]) -> None:
        """Points table entries of requests that waited for these blocks to their slots."""
        for request_id, row in self._row_of.items():
            length = self._tables.lengths[row]
            slots = self._tables.slots[row, :length]
            void = (slots < 0) | (self._generations[slots] != self._tables.generations[row, :length])
            if not void.any():
                continue
            keys = self._keys_of[request_id]
            for index in np.flatnonzero(void).tolist():
                if keys[index] in new_keys:
                    slot = self._slot_of[keys[index]]
                    self._tables.slots[row, index] = slot
                    self._tables.generations[row, index] = self._generations[slot]

    def _new_row(self, request_id: str) -> int:
        row = self._free_rows.pop() if self._free_rows else len(self._row_of)
        self._reserve(row + 1, 1)
        self._row_of[request_id] = row
        self._keys_of[request_id] = []
        self._tables.lengths[row] = 0
        return row

    def _reserve(self, num_rows: int, num_blocks: int) -> None:
        """Grows the tables to hold `num_rows` requests of `num_blocks` blocks, doubling."""
        rows, blocks = self._tables.slots.shape
        if num_rows <= rows and num_blocks <= blocks:
            return
        shape = (max(rows, 8 if not rows else rows * 2 if num_rows > rows else rows, num_rows),
                 max(blocks, 64 if not blocks else blocks * 2 if num_blocks > blocks else blocks, num_blocks))
        grown = []
        for table in self._tables[:3]:
            wider = np.full(shape, -1, np.int32)
            wider[:rows, :blocks] = table
            grown.append(wider)
        lengths, row_used = np.zeros(shape[0], np.int32), np.zeros(shape[0], np.int64)
        lengths[:rows], row_used[:rows] = self._tables.lengths, self._row_used
        self._row_used = row_used
        self._tables = Tables(*grown, lengths)


class _Endless:
    """An endless stream of -1, the default for `dict.get` under `map`."""

    def __iter__(self):
        return self

    def __next__(self):
        return -1


_ENDLESS = _Endless()

"""Which chunks are stored: their tokens, where their KV was computed, and anchors by which a prompt finds them.

One index for one namespace. All of it lies in flat numpy arrays: a stored chunk is a row; its tokens occupy whole cells
of `anchor_tokens` tokens in one pool, so that an anchor (a full cell) is named by its cell number and needs no pointer.
Beyond the token ids an anchor costs 17 to 22 bytes, and a chunk about 110 for its row and the look-up tables by key and
by place: some 47 bytes an anchor for chunks of four anchors, 60 at the worst moment of growth.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
from blake3 import blake3

from ucm_ray.blend.chunk import ChunkRecord
from ucm_ray.blend.hash_chains import HashChains
from ucm_ray.blend.rolling_hash import mix, tags_of, window_hashes
from ucm_ray.keys import KEY_BYTES

_START, _END = 0, 1
_UNKNOWN_CONTEXT = bytes(KEY_BYTES)
_UNKNOWN_CONTEXT_HEX = _UNKNOWN_CONTEXT.hex()


class ChunkIndex:
    """Stored chunks of one namespace. Thread safe for writers (one at a time) beside any number of readers.

    Arrays only grow or are replaced; a removed row is marked dead at once and its memory comes back when half of the
    rows are dead. Readers take the whole state once (`snapshot`), so that a replacement does not disturb them.
    """

    def __init__(self, anchor_tokens: int = 16):
        if anchor_tokens < 1:
            raise ValueError(f"anchor_tokens: found {anchor_tokens}, expected at least 1")
        self.anchor_tokens = anchor_tokens
        self._write_lock = threading.RLock()
        self._state = _State(anchor_tokens)

    def __len__(self) -> int:
        return self._state.num_alive

    def __contains__(self, key: str) -> bool:
        state = self._state
        return bool(state.rows_of_keys([key])[0] >= 0)

    def snapshot(self) -> _State:
        return self._state

    def contains(self, keys: list[str]) -> np.ndarray:
        """bool [keys]"""
        return self._state.rows_of_keys(keys) >= 0

    def get(self, key: str) -> ChunkRecord | None:
        state = self._state
        row = int(state.rows_of_keys([key])[0])
        return state.record(row) if row >= 0 else None

    def records(self) -> Iterable[ChunkRecord]:
        state = self._state
        for row in np.flatnonzero(state.alive[: state.num_rows]).tolist():
            yield state.record(row)

    def add(self, records: Iterable[ChunkRecord]) -> int:
        """Adds chunks; a known key with another source replaces what was known of it. Returns how many changed."""
        with self._write_lock:
            batch = list({record.key: record for record in records}.values())
            if not batch:
                return 0
            for record in batch:
                if len(record.token_ids) == 0:
                    raise ValueError(f"chunk {record.key}: no tokens")
            known = self._state.rows_of_keys([record.key for record in batch])
            stale = []
            fresh = []
            for record, row in zip(batch, known.tolist(), strict=False):
                if row < 0:
                    fresh.append(record)
                elif not self._state.same_source(row, record):
                    stale.append(row)
                    fresh.append(record)
            self._state.kill(np.array(stale, np.int64))
            self._state.append(fresh)
            return len(fresh)

    def remove(self, keys: Iterable[str]) -> int:
        """Forgets chunks; unknown keys are ignored. Returns how many were known."""
        with self._write_lock:
            rows = self._state.rows_of_keys(list(keys))
            rows = np.unique(rows[rows >= 0])
            self._state.kill(rows)
            if self._state.num_rows > 1024 and self._state.num_alive * 2 < self._state.num_rows:
                fresh = _State(self.anchor_tokens)
                fresh.append(list(self.records()))
                self._state = fresh
            return int(rows.size)

    def clear(self) -> None:
        with self._write_lock:
            self._state = _State(self.anchor_tokens)

    def memory_bytes(self, tokens: bool = True) -> int:
        """Bytes of all arrays; `tokens=False` leaves out the token ids themselves."""
        state = self._state
        total = state.nbytes
        return total if tokens else total - state.pool.nbytes

    @property
    def num_anchors(self) -> int:
        """Cells, living and dead."""
        return self._state.num_cells


class _State(SimpleNamespace):
    """The arrays. Rows are numbered in the order of adding and never reused.

    pool int32 [cells * anchor_tokens]; row_cell, row_length, row_source int32, row_position int64 [rows];
    row_key, row_context uint8 [rows, 16]; alive bool [rows]. Item n of `anchors` is cell n, of `keys` row n; of
    `places` items 2n and 2n+1 are start and end of row n.
    """

    def __init__(self, anchor_tokens: int):
        super().__init__(
            anchor_tokens=anchor_tokens, num_rows=0, num_cells=0, num_alive=0,
            pool=np.empty(0, np.int32), row_cell=np.empty(0, np.int32),
            row_length=np.empty(0, np.int32), row_source=np.empty(0, np.int32),
            row_position=np.empty(0, np.int64), row_key=np.empty((0, KEY_BYTES), np.uint8),
            row_context=np.empty((0, KEY_BYTES), np.uint8), alive=np.empty(0, bool),
            anchors=HashChains(), keys=HashChains(), places=HashChains(),
            source_names=[], source_numbers={}, odd_names={},
        )

    @property
    def nbytes(self) -> int:
        arrays = sum(value.nbytes for value in vars(self).values() if isinstance(value, (np.ndarray, HashChains)))
        # A dictionary entry with its string and int: measured about 180 bytes a source.
        return arrays + 180 * len(self.source_names) + 250 * len(self.odd_names)

    def rows_of_keys(self, keys: list[str]) -> np.ndarray:
        """Row of each key, -1 if unknown: int64 [keys]."""
        rows = np.full(len(keys), -1, np.int64)
        if not keys or not len(self.keys):
            return rows
        packed = _pack_keys(keys)
        indices, items = self.keys.find(_key_tags(packed))
        # Dead rows of a re-added key share its tag.
        while indices.size:
            good = self.alive.take(items) & (self.row_key[items] == packed[indices]).all(1)
            rows[indices[good]] = items[good]
            indices, items = indices[~good], items[~good]
            items = self.keys.next_same(items)
            indices, items = indices[items >= 0], items[items >= 0]
        return rows

    def rows_of_cells(self, cells: np.ndarray) -> np.ndarray:
        """int64 [cells]"""
        return np.searchsorted(self.row_cell[: self.num_rows], cells, "right") - 1

    def source_name(self, number: int) -> str:
        return self.source_names[number]

    def key(self, row: int) -> str:
        return self.odd_names.get(row) or self.row_key[row].tobytes().hex()

    def context(self, row: int) -> str:
        context = self.row_context[row].tobytes()
        return "" if context == _UNKNOWN_CONTEXT else context.hex()

    def keys_of(self, rows: np.ndarray) -> list[str]:
        digits, width = self.row_key[rows].tobytes().hex(), 2 * KEY_BYTES
        keys = [digits[start : start + width] for start in range(0, len(digits), width)]
        if self.odd_names:
            keys = [self.odd_names.get(row, key) for row, key in zip(rows.tolist(), keys, strict=False)]
        return keys

    def contexts_of(self, rows: np.ndarray) -> list[str]:
        digits, width = self.row_context[rows].tobytes().hex(), 2 * KEY_BYTES
        contexts = (digits[start : start + width] for start in range(0, len(digits), width))
        return ["" if context == _UNKNOWN_CONTEXT_HEX else context for context in contexts]

    def source_names_of(self, rows: np.ndarray) -> list[str]:
        return [self.source_names[number] for number in self.row_source[rows].tolist()]

    def record(self, row: int) -> ChunkRecord:
        first = int(self.row_cell[row]) * self.anchor_tokens
        token_ids = self.pool[first : first + int(self.row_length[row])].copy()
        source = self.source_name(int(self.row_source[row]))
        return ChunkRecord(self.key(row), token_ids, source, int(self.row_position[row]), self.context(row))

    def same_source(self, row: int, record: ChunkRecord) -> bool:
        return (
            self.source_name(int(self.row_source[row])) == record.source_id
            and int(self.row_position[row]) == record.source_position
            and self.context(row) == record.context_key
            and int(self.row_length[row]) == len(record.token_ids)
        )

    def neighbours(self, rows: np.ndarray, right: bool) -> tuple[np.ndarray, np.ndarray]:
        """Living rows that begin where `rows` end in the same source (right), or end where they begin (left).

        Returns (indices into `rows`, neighbour rows), possibly several for one.
        """
        source = self.row_source.take(rows)
        position = self.row_position.take(rows)
        if right:
            position = position + self.row_length.take(rows)
        side = np.full(rows.shape, _START if right else _END)
        indices, items = self.places.find(tags_of(mix(source, position, side)))
        indices, items = self.places.with_same(indices, items, 8)
        found = items >> 1
        found_position = self.row_position.take(found)
        if not right:
            found_position = found_position + self.row_length.take(found)
        good = (
            self.alive.take(found)
            & (self.row_source.take(found) == source.take(indices))
            & (found_position == position.take(indices))
            & ((items & 1) == (_START if right else _END))
        )
        return indices[good], found[good].astype(np.int64)

    def kill(self, rows: np.ndarray) -> None:
        if rows.size:
            self.num_alive -= int(np.count_nonzero(self.alive[rows]))
            self.alive[rows] = False

    def append(self, records: list[ChunkRecord]) -> None:
        count = len(records)
        if not count:
            return
        size, first_row = self.anchor_tokens, self.num_rows
        lengths = np.array([len(record.token_ids) for record in records], np.int64)
        cells = -(-lengths // size)
        first_cells = self.num_cells + np.concatenate(([0], np.cumsum(cells)[:-1]))
        num_cells, num_rows = self.num_cells + int(cells.sum()), first_row + count
        if num_cells * size > np.iinfo(np.int32).max * size:
            raise ValueError(f"chunk index: {num_cells} cells, at most {np.iinfo(np.int32).max}")
        self._reserve(num_rows, num_cells)
        tokens = np.concatenate([np.asarray(record.token_ids, np.int32) for record in records])
        within = np.arange(tokens.size) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.pool[np.repeat(first_cells * size, lengths) + within] = tokens
        rows = np.arange(first_row, num_rows)
        self.row_cell[rows] = first_cells
        self.row_length[rows] = lengths
        self.row_position[rows] = [record.source_position for record in records]
        self.row_source[rows] = [self._source_number(record.source_id) for record in records]
        packed = _pack_keys([record.key for record in records])
        self.row_key[rows] = packed
        for row, record in zip(rows.tolist(), records, strict=False):
            if not _is_hex_key(record.key):
                self.odd_names[row] = record.key
        contexts = [record.context_key for record in records]
        self.row_context[rows] = _pack_contexts(contexts)
        self.alive[rows] = True
        self.num_rows, self.num_alive = num_rows, self.num_alive + count
        self._link(rows, packed, num_cells)

    def _link(self, rows: np.ndarray, packed: np.ndarray, num_cells: int) -> None:
        """Makes new rows findable: by key, by place, and by the hash of each full cell."""
        size = self.anchor_tokens
        self.keys.add(_key_tags(packed))
        ends = self.row_position[rows] + self.row_length[rows]
        source = self.row_source[rows]
        places = np.empty(2 * rows.size, np.uint64)
        places[0::2] = mix(source, self.row_position[rows], np.full(rows.shape, _START))
        places[1::2] = mix(source, ends, np.full(rows.shape, _END))
        self.places.add(tags_of(places))
        first_cell, self.num_cells = self.num_cells, num_cells
        # The last, partly filled cell of a row gets a tag too: it keeps numbers simple and never passes verification.
        self.anchors.add(_cell_tags(self.pool, first_cell, num_cells, size))

    def _reserve(self, num_rows: int, num_cells: int) -> None:
        for name in ("row_cell", "row_length", "row_source", "row_position", "row_key", "row_context", "alive"):
            setattr(self, name, _grown(getattr(self, name), self.num_rows, num_rows))
        self.pool = _grown(self.pool, self.num_cells * self.anchor_tokens, num_cells * self.anchor_tokens)

    def _source_number(self, source_id: str) -> int:
        number = self.source_numbers.get(source_id)
        if number is None:
            number = len(self.source_names)
            self.source_names.append(source_id)
            self.source_numbers[source_id] = number
        return number


def _grown(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """The array itself if it is large enough, else a larger copy of its used part; unused elements are zero."""
    if needed <= len(array):
        return array
    grown = np.zeros((max(needed, len(array) + len(array) // 4, 64), *array.shape[1:]), array.dtype)
    grown[:used] = array[:used]
    return grown


def _cell_tags(pool: np.ndarray, first: int, last: int, size: int) -> np.ndarray:
    """Tags of the cells [first, last): uint32. In slices, to bound the working memory."""
    tags = np.empty(last - first, np.uint32)
    step = 1 << 16
    for start in range(first, last, step):
        end = min(start + step, last)
        tags[start - first : end - first] = tags_of(window_hashes(pool[start * size : end * size], size)[::size])
    return tags


def _key_tags(packed: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(packed[:, :4]).view(np.uint32)[:, 0]


def _is_hex_key(key: str) -> bool:
    if len(key) != 2 * KEY_BYTES or key != key.lower():
        return False
    try:
        return len(bytes.fromhex(key)) == KEY_BYTES
    except ValueError:
        return False


def _pack_keys(keys: list[str]) -> np.ndarray:
    """uint8 [keys, 16]. Keys that are not 32 hex characters are hashed."""
    packed = b"".join(
        bytes.fromhex(key) if _is_hex_key(key) else blake3(key.encode()).digest(KEY_BYTES) for key in keys
    )
    return np.frombuffer(packed, np.uint8).reshape(len(keys), KEY_BYTES)


def _pack_contexts(contexts: list[str]) -> np.ndarray:
    packed = b"".join(bytes.fromhex(context) if _is_hex_key(context) else _UNKNOWN_CONTEXT for context in contexts)
    return np.frombuffer(packed, np.uint8).reshape(len(contexts), KEY_BYTES)

"""A hash multimap of numbered items in flat numpy arrays, filled and read in batches."""

from __future__ import annotations

import numpy as np

_NO_ITEM = -1


class HashChains:
    """Maps 32-bit tags to item numbers 0, 1, 2, ... in the order of adding.

    `heads[tag & mask]` begins a chain of items with different tags that share a bucket (`next_tag`); items with the
    same tag hang behind the first of them in a second chain (`next_same`), so that a text which is stored a million
    times never lies in the way of another. A bitmap, eight bits for each bucket, answers most look-ups of absent tags
    with one access to a small array. Tags are short, so unrelated items may share one: callers verify. Memory: 17 to 22
    bytes an item, plus a quarter of 12 bytes as slack for growth.

    One writer and any number of readers may work at once: an item is complete before a chain leads to it, and arrays
    are replaced, never shrunk. Readers may miss items that are being added.
    """

    def __init__(self, capacity: int = 1024):
        self._size = 0
        self._tags = np.empty(capacity, np.uint32)
        self._next_tag = np.empty(capacity, np.int32)
        self._next_same = np.empty(capacity, np.int32)
        self._make_table(capacity)

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        heads, bits = self._table
        return sum(array.nbytes for array in (self._tags, self._next_tag, self._next_same, heads, bits))

    def _make_table(self, capacity: int) -> None:
        buckets = 1 << max(8, (capacity - 1).bit_length())
        self._table = (np.full(buckets, _NO_ITEM, np.int32), np.zeros(buckets, np.uint8))

    def add(self, tags: np.ndarray) -> None:
        """Adds items `len(self) ..`, with these tags (uint32 [n])."""
        first, count = self._size, len(tags)
        if count == 0:
            return
        self._reserve(first + count)
        self._tags[first : first + count] = tags
        self._next_tag[first : first + count] = _NO_ITEM
        self._next_same[first : first + count] = _NO_ITEM
        self._size += count
        heads, bits = self._table
        if self._size > heads.size:
            self._rebuild()
        else:
            self._link(np.arange(first, first + count, dtype=np.int32), heads, bits, self._next_tag, self._next_same)

    def _reserve(self, size: int) -> None:
        if size > self._tags.size:
            capacity = max(size, self._tags.size + self._tags.size // 4)
            for name in ("_tags", "_next_tag", "_next_same"):
                grown = np.empty(capacity, getattr(self, name).dtype)
                grown[: self._size] = getattr(self, name)[: self._size]
                setattr(self, name, grown)

    def _rebuild(self) -> None:
        """Larger table. Chains are made anew in fresh arrays, for readers still walk the old ones."""
        buckets = 1 << (self._size - 1).bit_length()
        heads, bits = np.full(buckets, _NO_ITEM, np.int32), np.zeros(buckets, np.uint8)
        next_tag, next_same = np.full_like(self._next_tag, _NO_ITEM), np.full_like(self._next_same, _NO_ITEM)
        self._link(np.arange(self._size, dtype=np.int32), heads, bits, next_tag, next_same)
        self._next_tag, self._next_same = next_tag, next_same
        self._table = (heads, bits)

    def _link(self, items: np.ndarray, heads, bits, next_tag, next_same) -> None:
        """Links new items, which are numbered consecutively and hang in no chain yet."""
        tags = self._tags[items[0] : items[0] + len(items)]
        order = np.argsort(tags, kind="stable")
        items, tags = items[order], tags[order]
        is_first = np.empty(len(items), bool)
        is_first[0] = True
        np.not_equal(tags[1:], tags[:-1], out=is_first[1:])
        group = np.cumsum(is_first) - 1
        group_first = items[is_first]
        known = self._walk(tags[is_first], heads, next_tag)
        owner = np.where(known >= 0, known, group_first)[group]
        follower = np.flatnonzero(owner != items)
        if follower.size:
            # Followers of one owner are adjacent and ascending. Chain them, then hang the chain behind the owner.
            owners, chained = owner[follower], items[follower]
            last = np.append(owners[1:] != owners[:-1], True)
            first = np.insert(last[:-1], 0, True)
            next_same[chained[~last]] = chained[1:][~last[:-1]]
            next_same[chained[last]] = next_same[owners[last]]
            next_same[owners[first]] = chained[first]
        fresh = group_first[known < 0]
        if fresh.size:
            self._link_buckets(fresh, heads, bits, next_tag)

    def _link_buckets(self, fresh: np.ndarray, heads, bits, next_tag) -> None:
        mask = np.uint32(heads.size - 1)
        buckets = (self._tags[fresh] & mask).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        fresh, buckets = fresh[order], buckets[order]
        last = np.append(buckets[1:] != buckets[:-1], True)
        next_tag[fresh[~last]] = fresh[1:][~last[:-1]]
        next_tag[fresh[last]] = heads[buckets[last]]
        first = np.insert(last[:-1], 0, True)
        byte, bit = _bit(self._tags[fresh], bits.size)
        np.bitwise_or.at(bits, byte, bit)
        heads[buckets[first]] = fresh[first]

    def _walk(self, tags: np.ndarray, heads: np.ndarray, next_tag: np.ndarray | None = None) -> np.ndarray:
        """First item of each tag, or -1: int32 [n]."""
        found = heads.take((tags & np.uint32(heads.size - 1)).astype(np.int64))
        # Read after the heads: these arrays are then large enough for every item found in them.
        all_tags, next_tag = self._tags, self._next_tag if next_tag is None else next_tag
        active = np.flatnonzero(found >= 0)
        while active.size:
            items = found[active]
            active = active[all_tags.take(items) != tags[active]]
            found[active] = next_tag.take(found[active])
            active = active[found[active] >= 0]
        return found

    def find(self, tags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(indices into `tags` that are known, the first item of each): int64 [hits], int32 [hits]."""
        heads, bits = self._table
        byte, bit = _bit(tags, bits.size)
        maybe = np.flatnonzero(bits.take(byte) & bit)
        if maybe.size == 0:
            return maybe, np.empty(0, np.int32)
        found = self._walk(tags[maybe], heads)
        hit = found >= 0
        return maybe[hit], found[hit]

    def next_same(self, items: np.ndarray) -> np.ndarray:
        """The next item with the same tag as each of these, or -1."""
        return self._next_same.take(items)

    def with_same(self, indices: np.ndarray, items: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        """Extends the answer of `find` by the other items with the same tag, at most `limit` for each index."""
        next_same = self._next_same
        all_indices, all_items = [indices], [items]
        for _ in range(limit - 1):
            items = next_same.take(items)
            more = items >= 0
            if not more.any():
                break
            indices, items = indices[more], items[more]
            all_indices.append(indices)
            all_items.append(items)
        return np.concatenate(all_indices), np.concatenate(all_items)


def _bit(tags: np.ndarray, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Byte and bit of each tag in a bitmap; other bits of the tag than the bucket's choose the bit."""
    byte = (tags & np.uint32(num_bytes - 1)).astype(np.int64)
    return byte, np.left_shift(np.uint8(1), (tags >> np.uint32(29)).astype(np.uint8))

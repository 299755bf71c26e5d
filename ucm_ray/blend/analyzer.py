"""Finds stored chunks in a prompt, wherever they stand.

How it works, and why so:
1. A rolling hash of every window of `anchor_tokens` tokens of the prompt is looked up among the anchors of the index,
   which are the non-overlapping windows of stored chunks. So the index holds one anchor for 16 tokens, not 16, and text
   is still found at any offset, since the prompt's side looks at every offset. A bitmap answers nearly all look-ups
   that find nothing.
2. A hit says where a whole stored chunk would lie in the prompt. Every such placement is compared token by token, all
   of them in one vectorised comparison: hashes never decide, and collisions only cost time.
3. Placements grow to both sides through the neighbours of the chunk in its source, without any hash, for the pieces
   that contain no whole anchor (ends of runs, chunks shorter than an anchor, edited text).
4. Placements of one source at one distance from their old positions form a line; maximal stretches of agreeing tokens
   on it are candidates. A chunk that agrees in at least `min_match_ratio` of its tokens is taken whole, its differing
   tokens marked; in others only the agreeing stretches count. A one-token insertion gives two stretches one token
   apart.
5. The longest candidate wins, the others are cut to what is left, and so on.

All steps over tokens are numpy; Python loops over matched chunks only. Numba would save perhaps half of the time, at
the price of seconds of compilation in the scheduler's process. Two things would make the number of placements explode,
and are thinned: text that repeats itself with a period of at most an anchor matches itself at every offset, so one
offset in `chunk_size` is looked at there; and boilerplate that is stored many times gets a limited number of tries.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from ucm_ray.blend.chunk import Chunk, ChunkRecord, ChunkType
from ucm_ray.blend.index import ChunkIndex
from ucm_ray.blend.rolling_hash import tags_of, window_hashes

_MANY_CANDIDATES = 256
"""With more candidates than this, none inside another, those that the others cover together are left out first."""

_BEST_REPEATS = 4
"""Stored chunks laid at each position of repetitive text."""


class _Placements(NamedTuple):
    """Stored chunks laid over the prompt, compared token by token. Sorted by source, delta and position.

    For each placement: row, start (prompt position of the chunk's token 0, may be negative), low and high (part of the
    chunk inside the prompt), first (index of its first token among all compared tokens). For each compared token
    (chunk after chunk): its position in the prompt, agree, and taken (agree, or in a chunk that is taken whole).
    """

    rows: np.ndarray
    starts: np.ndarray
    low: np.ndarray
    high: np.ndarray
    first: np.ndarray
    position: np.ndarray
    agree: np.ndarray
    taken: np.ndarray


class _Candidates(NamedTuple):
    """Stretches [start, end) of the prompt, and the index of their first token among the compared ones."""

    start: np.ndarray
    end: np.ndarray
    first: np.ndarray
    differing: np.ndarray
    """tokens that differ"""
    moved: np.ndarray
    """bool: at another position than when stored"""


class ChunkAnalyzer:
    """Cuts a prompt into stored and unknown spans."""

    def __init__(self, chunk_size: int = 64, min_match_ratio: float = 0.8, anchor_tokens: int = 16,
                 same_anchor_limit: int = 16):
        """`anchor_tokens`: shortest text that is found in indexes made here; a ChunkIndex brings its own length.

        `chunk_size`: usual size of stored chunks. A chunk without a whole anchor is found through its neighbours only.
        `same_anchor_limit`: stored chunks tried for one anchor's text. Boilerplate may be stored in thousands of
        chunks; the right one among them is found by its other anchors, or as the neighbour of a chunk that is.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size: found {chunk_size}, expected at least 1")
        if not 0 < min_match_ratio <= 1:
            raise ValueError(f"min_match_ratio: found {min_match_ratio}, expected a number above 0, at most 1")
        if anchor_tokens < 1:
            raise ValueError(f"anchor_tokens: found {anchor_tokens}, expected at least 1")
        self.chunk_size = chunk_size
        self.min_match_ratio = min_match_ratio
        self.anchor_tokens = min(anchor_tokens, chunk_size)
        self.same_anchor_limit = same_anchor_limit

    def analyze(self, token_ids, index: ChunkIndex | Iterable[ChunkRecord]) -> list[Chunk]:
        """Chunks that are sorted, disjoint and cover [0, len(token_ids)).

        `index` may also be any iterable of stored chunks (the seed's cached blocks): a small index is then made of
        them.
        """
        tokens = np.ascontiguousarray(token_ids, np.int32)
        if tokens.ndim != 1:
            raise ValueError(f"token ids must have one dimension, found shape {tokens.shape}")
        if not isinstance(index, ChunkIndex):
            records, index = index, ChunkIndex(self.anchor_tokens)
            index.add(records)
        state = index.snapshot()
        rows, starts, hot = self._find(tokens, state)
        if rows.size == 0:
            return _with_gaps([], len(tokens))
        placements = self._grow(tokens, state, rows, starts, hot)
        candidates = self._stretches(state, placements)
        if candidates.start.size == 0:
            return _with_gaps([], len(tokens))
        picks = _longest_first(candidates, state.anchor_tokens)
        return _with_gaps(self._chunks(state, placements, candidates, picks), len(tokens))

    def _find(self, tokens: np.ndarray, state) -> tuple[np.ndarray, np.ndarray, bool]:
        """Placements that an anchor hints at, each once: (row, start) int64; and whether the text is repetitive."""
        tags = tags_of(window_hashes(tokens, state.anchor_tokens))
        positions, cells = state.anchors.find(tags)
        if positions.size == 0:
            return positions, positions, False
        budget = max(8192, tags.size // 2)
        repeated = _repetitive(tags, positions, state.anchor_tokens)
        hot = np.count_nonzero(repeated) > 256
        repeats = positions[:0], cells[:0]
        if hot:
            kept = repeated & (positions % self.chunk_size == 0)
            repeats = self._best_repeats(tokens, state, positions[kept], cells[kept])
            positions, cells = positions[~repeated], cells[~repeated]
        if positions.size > budget:
            # Many copies of the same text, cut at different offsets: look at one way of cutting.
            phase = positions % state.anchor_tokens
            kept = phase == np.bincount(phase).argmax()
            positions, cells, hot = positions[kept], cells[kept], True
        limit = min(self.same_anchor_limit, max(1, budget // max(1, positions.size)))
        positions, cells = state.anchors.with_same(positions, cells, limit)
        positions, cells = np.append(positions, repeats[0]), np.append(cells, repeats[1])
        rows = state.rows_of_cells(cells)
        alive = state.alive.take(rows)
        rows, positions, cells = rows[alive], positions[alive], cells[alive]
        starts = positions - (cells - state.row_cell.take(rows)).astype(np.int64) * state.anchor_tokens
        return *_unpacked(np.unique(_packed(rows, starts))), hot

    def _best_repeats(self, tokens, state, positions: np.ndarray, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For positions in repetitive text, which share few anchors: (position, cell) of each anchor's best chunks.

        The chunks stored with an anchor are compared at one position only; those that agree most there are taken at all
        positions of that anchor.
        """
        if positions.size == 0:
            return positions, cells
        order = np.argsort(cells, kind="stable")
        distinct, begin, count = np.unique(cells[order], return_index=True, return_counts=True)
        middle = positions[order][begin + count // 2]
        number, tried = state.anchors.with_same(np.arange(distinct.size), distinct, max(4, 4096 // distinct.size))
        agreeing = self._agreement(state, state.rows_of_cells(tried), middle[number], tried, tokens)
        best = np.lexsort((-agreeing, number))
        rank = np.arange(best.size) - np.searchsorted(number[best], number[best])
        best = best[rank < _BEST_REPEATS]
        chosen = np.full((distinct.size, _BEST_REPEATS), -1, cells.dtype)
        chosen[number[best], rank[rank < _BEST_REPEATS]] = tried[best]
        cells = chosen[np.searchsorted(distinct, cells)].ravel()
        positions = np.repeat(positions, _BEST_REPEATS)
        return positions[cells >= 0], cells[cells >= 0]

    def _agreement(self, state, rows: np.ndarray, positions: np.ndarray, cells: np.ndarray, tokens) -> np.ndarray:
        """How many tokens of each row agree with the prompt when its cell lies at a position: int64 [rows]."""
        inside = (cells - state.row_cell.take(rows)).astype(np.int64) * state.anchor_tokens
        within = np.arange(int(state.row_length.take(rows).max()))
        in_prompt = (positions - inside)[:, None] + within
        in_pool = state.row_cell.take(rows).astype(np.int64)[:, None] * state.anchor_tokens + within
        fits = (within < state.row_length.take(rows)[:, None]) & (in_prompt >= 0) & (in_prompt < tokens.size)
        same = tokens.take(in_prompt, mode="clip") == state.pool.take(in_pool, mode="clip")
        return np.where(state.alive.take(rows), (same & fits).sum(1), -1)

    def _grow(self, tokens: np.ndarray, state, rows: np.ndarray, starts: np.ndarray, hot: bool) -> _Placements:
        """Adds neighbours of placements whose outermost token is taken, until there are none.

        In repetitive text only where no other placement goes on: there every placement has neighbours.
        """
        placements = frontier = self._compare(tokens, state, rows, starts)
        known = _packed(rows, starts)
        covered = np.zeros(len(tokens), bool)
        while True:
            if hot:
                covered[frontier.position[frontier.taken]] = True
            fresh = np.setdiff1d(_packed(*self._neighbours(state, frontier, covered)), known)
            if fresh.size == 0:
                break
            known = np.concatenate((known, fresh))
            hot |= known.size > 4096 + len(tokens)
            frontier = self._compare(tokens, state, *_unpacked(fresh))
        if known.size == rows.size:
            return placements
        return self._compare(tokens, state, *_unpacked(known))

    def _compare(self, tokens: np.ndarray, state, rows: np.ndarray, starts: np.ndarray) -> _Placements:
        position = state.row_position.take(rows)
        order = np.lexsort((position, starts - position, state.row_source.take(rows)))
        rows, starts = rows[order], starts[order]
        length = state.row_length.take(rows).astype(np.int64)
        low = np.maximum(-starts, 0)
        high = np.minimum(length, len(tokens) - starts)
        count = high - low
        first = np.cumsum(count) - count
        within = np.arange(int(count.sum()))
        in_prompt = within + np.repeat(starts + low - first, count)
        in_pool = within + np.repeat(state.row_cell.take(rows) * np.int64(state.anchor_tokens) + low - first, count)
        agree = tokens.take(in_prompt) == state.pool.take(in_pool)
        agreeing = np.add.reduceat(agree, first, dtype=np.int64)
        whole = agreeing >= self.min_match_ratio * count - 1e-9
        taken = agree | np.repeat(whole, count)
        return _Placements(rows, starts, low, high, first, in_prompt, agree, taken)

    def _neighbours(self, state, placed: _Placements, covered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Placements next to the given ones, where the next token of the prompt is not `covered` (bool [tokens])."""
        length = state.row_length.take(placed.rows)
        last = placed.first + (placed.high - placed.low) - 1
        follows = self._follows(state, placed)
        after = placed.starts + length
        right = (placed.high == length) & (after < covered.size) & placed.taken[last]
        right[:-1] &= ~follows[1:]
        right &= ~covered.take(np.minimum(after, covered.size - 1))
        left = (placed.low == 0) & (placed.starts > 0) & placed.taken[placed.first] & ~follows
        left &= ~covered.take(np.maximum(placed.starts - 1, 0))
        new_rows, new_starts = [], []
        right, left = np.flatnonzero(right), np.flatnonzero(left)
        if right.size:
            indices, found = state.neighbours(placed.rows[right], right=True)
            new_rows.append(found)
            new_starts.append(placed.starts[right][indices] + length[right][indices])
        if left.size:
            indices, found = state.neighbours(placed.rows[left], right=False)
            new_rows.append(found)
            new_starts.append(placed.starts[left][indices] - state.row_length.take(found))
        if not new_rows:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate(new_rows), np.concatenate(new_starts)

    def _follows(self, state, placed: _Placements) -> np.ndarray:
        """bool [placements]: continues the placement before it, on the same line."""
        position = state.row_position.take(placed.rows)
        source = state.row_source.take(placed.rows)
        delta = placed.starts - position
        follows = np.zeros(placed.rows.size, bool)
        ends = placed.starts + placed.high
        follows[1:] = (
            (source[1:] == source[:-1]) & (delta[1:] == delta[:-1]) & (placed.starts[1:] + placed.low[1:] == ends[:-1])
        )
        return follows

    def _stretches(self, state, placed: _Placements) -> _Candidates:
        """Maximal taken stretches with at least one agreeing anchor, trimmed to agreeing tokens at both ends."""
        begins = placed.taken.copy()
        begins[1:] &= ~placed.taken[:-1]
        breaks = placed.first[~self._follows(state, placed)]
        begins[breaks] = placed.taken[breaks]
        begin = np.flatnonzero(begins)
        # A stretch ends before the next begin at a token that is taken; so count taken tokens between.
        taken_before = np.concatenate(([0], np.cumsum(placed.taken)))
        end = begin + np.diff(np.append(taken_before[begin], taken_before[-1]))
        agreeing = np.flatnonzero(placed.agree)
        begin = agreeing[np.searchsorted(agreeing, begin)]
        end = agreeing[np.searchsorted(agreeing, end) - 1] + 1
        anchors = self._agreeing_anchors(placed, state.anchor_tokens)
        sound = np.searchsorted(anchors, end - state.anchor_tokens, "right") > np.searchsorted(anchors, begin)
        begin, end = begin[sound], end[sound]
        row = np.searchsorted(placed.first, begin, "right") - 1
        start = placed.position[begin]
        moved = placed.starts[row] != state.row_position.take(placed.rows[row])
        agreeing_before = np.concatenate(([0], np.cumsum(placed.agree)))
        differing = end - begin - (agreeing_before[end] - agreeing_before[begin])
        return _Candidates(start, start + end - begin, begin, differing, moved)

    def _agreeing_anchors(self, placed: _Placements, size: int) -> np.ndarray:
        """Indices, among the compared tokens, where a stored anchor begins all of whose tokens agree. Sorted."""
        skipped = -placed.low % size
        count = np.maximum(placed.high - placed.low - skipped, 0) // size
        begin = np.repeat(placed.first + skipped, count) + size * (
            np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        )
        before = np.concatenate(([0], np.cumsum(placed.agree)))
        return begin[before[begin + size] - before[begin] == size]

    def _chunks(self, state, placed: _Placements, candidates: _Candidates, picks) -> list[Chunk]:
        """Picked stretches as chunks, one for each stored chunk they touch. Sorted."""
        start, end, which = (np.array(column, np.int64) for column in zip(*picks, strict=False))
        offset = candidates.first[which] - candidates.start[which]
        begin, stop = start + offset, end + offset
        place_from = np.searchsorted(placed.first, begin, "right") - 1
        count = np.searchsorted(placed.first, stop, "left") - place_from
        place = np.repeat(place_from - np.cumsum(count) + count, count) + np.arange(int(count.sum()))
        first, low = placed.first[place], placed.low[place]
        begin = np.maximum(np.repeat(begin, count), first)
        stop = np.minimum(np.repeat(stop, count), first + placed.high[place] - low)
        offset, inner, rows = np.repeat(offset, count), begin - first + low, placed.rows[place]
        agreeing = np.concatenate(([0], np.cumsum(placed.agree)))
        pieces = zip(
            (begin - offset).tolist(), (stop - offset).tolist(), state.keys_of(rows),
            (state.row_position[rows] + inner).tolist(), inner.tolist(), state.source_names_of(rows),
            state.contexts_of(rows), (agreeing[stop] - agreeing[begin] == stop - begin).tolist(), offset.tolist(),
            strict=False,
        )
        chunks: list[Chunk] = []
        for left, right, key, position, inside, source, context, full, moved_by in pieces:
            if full:
                chunks.append(Chunk(left, right, ChunkType.FULL_MATCH, key, position, inside, source, (), context))
            else:
                differing = np.flatnonzero(~placed.agree[left + moved_by : right + moved_by]) + left
                chunks.extend(self._edited(left, right, key, position, inside, source, context, differing.tolist()))
        return chunks

    def _edited(self, start: int, end: int, key: str, position: int, inside: int, source: str, context: str, differing):
        """One PARTIAL_MATCH; or the agreeing stretches, where cutting has taken away the better part of the chunk."""
        if end - start - len(differing) >= self.min_match_ratio * (end - start) - 1e-9:
            yield Chunk(start, end, ChunkType.PARTIAL_MATCH, key, position, inside, source, tuple(differing), context)
            return
        borders = [start - 1, *differing, end]
        for left, right in zip(borders, borders[1:], strict=False):
            left += 1
            if left < right:
                skipped = left - start
                yield Chunk(left, right, ChunkType.FULL_MATCH, key, position + skipped, inside + skipped, source, (),
                            context)


def _repetitive(tags: np.ndarray, positions: np.ndarray, window: int) -> np.ndarray:
    """bool [positions]: the same window of text stood a few tokens (at most a window) earlier."""
    repeated, here = np.zeros(positions.size, bool), tags[positions]
    for period in range(1, window + 1):
        repeated |= (tags.take(positions - period, mode="clip") == here) & (positions >= period)
    return repeated


def _packed(rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(row, start) pairs as int64. Starts fit in 32 bits, rows in 31."""
    return (rows.astype(np.int64) << 32) + (starts + (1 << 31))


def _unpacked(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return packed >> 32, (packed & 0xFFFFFFFF) - (1 << 31)


def _longest_first(candidates: _Candidates, min_tokens: int) -> list[tuple[int, int, int]]:
    """Disjoint (start, end, candidate), sorted: the longest candidate, then the longest of what is left, and so on.

    Ties: text at its old position first, then the earlier; of equal spans the one with fewer differences. Pieces
    shorter than `min_tokens` are dropped.
    """
    order = np.lexsort((candidates.moved, candidates.differing, -candidates.end, candidates.start))
    start, end = candidates.start[order], candidates.end[order]
    # A stretch inside another never adds anything: the other one is cut no more than it.
    useful = np.ones(order.size, bool)
    useful[1:] = end[1:] > np.maximum.accumulate(end)[:-1]
    order, start, end = order[useful], start[useful], end[useful]
    if order.size > _MANY_CANDIDATES:
        useful = _cover(start, end)
        order, start, end = order[useful], start[useful], end[useful]
    start, end = start.tolist(), end.tolist()
    which, moved = order.tolist(), candidates.moved[order].tolist()
    if all(right <= left for right, left in zip(end, start[1:], strict=False)):
        return list(zip(start, end, which, strict=False))
    heap = [(left - right, far, left, right, number)
            for left, right, far, number in zip(start, end, moved, which, strict=True)]
    heapify(heap)
    starts: list[int] = []
    ends: list[int] = []
    picks: list[tuple[int, int, int]] = []
    while heap:
        _, far, left, right, number = heappop(heap)
        # Picked spans that overlap [left, right) are numbers low to high - 1.
        low, high = bisect_right(ends, left), bisect_left(starts, right)
        if low == high:
            starts.insert(low, left)
            ends.insert(low, right)
            picks.append((left, right, number))
            continue
        overlapped = zip(starts[low:high], ends[low:high], strict=True)
        borders = [left, *(border for span in overlapped for border in span), right]
        for free_left, free_right in zip(borders[::2], borders[1::2], strict=False):
            if free_right - free_left >= min_tokens:
                heappush(heap, (free_left - free_right, far, free_left, free_right, number))
    return sorted(picks)


def _cover(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Indices of fewest stretches that cover what all cover, and of all that are much longer than the typical one.

    Starts and ends ascend strictly. Repetitive text matches itself at so many offsets that each stretch overlaps dozens
    of others; among those only the number of pieces matters.
    """
    ends = end.tolist()
    following = np.searchsorted(start, end, "right").tolist()
    kept, number = [], 0
    while number < len(ends):
        kept.append(number)
        # The last stretch that begins inside this one or at its end reaches farthest; else the next one there is.
        number = max(number + 1, following[number] - 1)
    long = np.flatnonzero(end - start > 4 * np.median(end - start))
    return np.union1d(np.array(kept, np.int64), long)


def _with_gaps(chunks: list[Chunk], num_tokens: int) -> list[Chunk]:
    result, position = [], 0
    for chunk in chunks:
        if position < chunk.start_idx:
            result.append(Chunk(position, chunk.start_idx, ChunkType.NO_MATCH))
        result.append(chunk)
        position = chunk.end_idx
    if position < num_tokens:
        result.append(Chunk(position, num_tokens, ChunkType.NO_MATCH))
    return result

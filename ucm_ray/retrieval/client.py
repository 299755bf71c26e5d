"""Client of a retrieval pool: places blocks on shards, asks all shards at once, merges, and never keeps anyone waiting.

The client is the owner of what it publishes: it keeps a copy of its blocks, from which it fills shards that come back
empty and, past the deadline, scores by itself. It knows shards only through `ShardLink`, so it needs no Ray; `connect`
finds a pool in a Ray cluster.
"""

import heapq
import itertools
import logging
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ucm_ray.retrieval import wire
from ucm_ray.retrieval.lane import Lane, aligned
from ucm_ray.retrieval.packed import Geometry, PackedAnswer, PackedQuery, Source
from ucm_ray.retrieval.placement import hash_names, place
from ucm_ray.retrieval.retriever import RetrievalFuture, Retriever

logger = logging.getLogger(__name__)

FALLBACKS = ("local", "last", "dense")
_UPLOAD_BLOCKS = 2048
_MAX_WRITES_IN_FLIGHT = 64


class RetrievalError(RuntimeError):
    """The pool cannot be used: none runs, the address is wrong, or the cluster refuses this process."""


class ShardLink(ABC):
    """How a client reaches one shard."""

    shard_id: str

    @abstractmethod
    def call(self, method: str, args: Sequence, num_returns: int, done: Callable[[list | Exception], None]) -> None:
        """Calls a method of the shard and returns at once. `done` gets its `num_returns` results in a list, or an
        exception, once and from any thread; never, if the shard hangs."""

    @abstractmethod
    def wait(self, method: str, args: Sequence, timeout_s: float):
        """Calls a method and waits for its result. Raises on failure or timeout."""

    def hang_bell(self, timeout_s: float) -> None:
        """Sets up `ring` if the shard is on this machine, anew if it was set up before. Raises on failure or timeout.
        """
        return None

    def ring(self, args: Sequence, done: Callable[[list | Exception], None]) -> bool:
        """As `call` of "answer" with one result, but faster, and it may overtake what was called before. False, and
        nothing is called, where that does not work."""
        return False

    def close(self) -> None:
        """`ring` no more."""
        return None


class Membership(NamedTuple):
    """Which shards form the pool. A larger version replaces a smaller one."""

    version: int
    shards: tuple[ShardLink, ...]


class PoolLink(ABC):
    """How a client reaches the pool."""

    @abstractmethod
    def membership(self, timeout_s: float) -> Membership:
        """Today's shards. Raises on failure or timeout."""

    @abstractmethod
    def adopted(self, client_id: str, version: int | None) -> None:
        """Tells the pool that this client has moved its blocks to this membership; None: that it is gone."""


class _Shard:
    """What a client knows about one shard in one membership."""

    def __init__(self, link: ShardLink):
        self.link = link
        self.epoch = ""
        self.ready = False       # holds all our blocks and lists, as far as we know
        self.suspect = False     # missed a deadline; not waited for until it answers again
        self.writes_in_flight = 0
        self.retry_at_s = 0.0
        self.in_lane = False     # shares our lane


class _View:
    """One membership with this client's placement on it.

    Each view registers the requests under names of its own, so that a client can fill a new view's shards while it asks
    the old one's.
    """

    def __init__(self, membership: Membership, client_id: str):
        self.version = membership.version
        self.shards = [_Shard(link) for link in membership.shards]
        self.prefix = f"{client_id}/{membership.version}/"
        self.names: dict[str, str] = {}
        self._count = itertools.count()
        self._hashes = hash_names([link.shard_id for link in membership.shards])

    def place(self, keys: Sequence[str]) -> np.ndarray:
        """Index into `shards` for each key."""
        return place(hash_names(keys), self._hashes)

    def name(self, request_id: str) -> str:
        """The shards' name for a request; a new one if the request was forgotten and begins again."""
        if request_id not in self.names:
            self.names[request_id] = f"{self.prefix}{next(self._count)}/{request_id}"
        return self.names[request_id]

    @property
    def usable(self) -> bool:
        return bool(self.shards) and all(shard.ready and not shard.suspect for shard in self.shards)


class _Pending:
    """One query on its way: collects the shards' parts."""

    def __init__(self, query: PackedQuery, expected: np.ndarray, future: RetrievalFuture, view: _View, expires_s: float,
                 deadline_s: float):
        self.query, self.expected, self.future, self.view = query, expected, future, view
        self.expires_s, self.deadline_s = expires_s, deadline_s
        self.parts: list[list | None] = [None] * len(view.shards)
        self.missing = len(view.shards)
        self.outstanding = len(view.shards)  # may still write to our slot of the lane
        self.slot: int | None = None
        self.answer_offsets: list[int] = []
        self.lock = threading.Lock()


class RetrievalClient(Retriever):
    """Retrieval by the shards of a pool, with the interface of `RetrievalWorker`.

    Args:
        pool: link to the pool.
        config: as `Retriever`; `retrieval_cache_size` bounds the owner's copy.
        deadline_s: within this time every future resolves, by a fallback if need be.
        fallbacks: which fallbacks may answer, tried in the order local, last, dense; dense always can.
        client_id: names this client's requests on the shards; a new one per process by default.
        refresh_s: how often the pool is asked for its membership.
        use_lane: share memory with shards on the same machine (see `lane`).
    """

    def __init__(self, pool: PoolLink, config: Mapping | None = None,
                 load_block_repr: Callable[[str], torch.Tensor] | None = None, geometry: Geometry | None = None,
                 deadline_s: float = 0.05, fallbacks: Sequence[str] = FALLBACKS, client_id: str | None = None,
                 refresh_s: float = 0.25, use_lane: bool = True):
        unknown = set(fallbacks) - set(FALLBACKS)
        if unknown or deadline_s <= 0:
            raise ValueError(f"fallbacks are {list(fallbacks)} and deadline_s {deadline_s}, expected fallbacks out of "
                             f"{', '.join(FALLBACKS)} and a deadline above 0")
        super().__init__(config, load_block_repr, geometry)
        self.deadline_s = deadline_s
        self.client_id = client_id or uuid.uuid4().hex[:12]
        self._pool = pool
        self._fallbacks = tuple(fallbacks)
        self._refresh_s = refresh_s
        self._last: dict[str, tuple[PackedAnswer, int]] = {}
        self._local_s = 0.0
        self.counters = dict.fromkeys(("queries", "exact", "local", "last", "dense", "refills", "moves"), 0)
        # Guards views and what was sent to them. Never held while waiting for a shard by who publishes or asks.
        self._write_lock = threading.RLock()
        self._stale = threading.Event()
        self._closed = False
        self._refusal_told = False
        self._outbox: list[tuple[list[str], torch.Tensor]] = []
        self._grown: dict[str, int] = {}
        self._view = _View(pool.membership(10.0), self.client_id)
        self._deadlines = _Deadlines()
        self._lane = Lane() if use_lane and hasattr(os, "memfd_create") else None
        pool.adopted(self.client_id, self._view.version)
        for shard in self._view.shards:
            self._refill(self._view, shard)
        self._keeper = threading.Thread(target=self._keep, name="retrieval-keeper", daemon=True)
        self._keeper.start()

    @classmethod
    def connect(cls, address: str | None = None, namespace: str = "ucm_ray", pool: str = "retrieval",
                timeout_s: float = 10.0, **options) -> "RetrievalClient":
        """Client of the pool called `pool` in a Ray cluster, from any Python process.

        Args:
            address: of the cluster, as for `ray.init`; None for the cluster this process is in, or the local one.
            namespace: Ray namespace the pool was started in.
            options: see `RetrievalClient`.
        Raises:
            RetrievalError: nothing answers at the address, authentication fails, or no such pool runs there.
        """
        from actors.retrieval_pool import find_pool

        return cls(find_pool(address, namespace, pool, timeout_s), **options)

    def submit(self, query: PackedQuery, deadline_s: float | None = None) -> RetrievalFuture:
        """Asks all shards; the future's result is a `PackedAnswer` whose `sources` say who answered each request.

        Returns at once. Candidates are the blocks published for the requests so far.
        """
        future = RetrievalFuture()
        now = time.monotonic()
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        try:
            geometry = self.bank.geometry
            if query.features.shape[1:] != geometry.record_shape:
                raise ValueError(f"query features have shape {list(query.features.shape)}, expected "
                                 f"[num_requests, {', '.join(map(str, geometry.record_shape))}]")
        except (RuntimeError, ValueError) as error:
            future.fail(error)
            return future
        lengths = self.bank.lengths(query.request_ids)
        stop = np.where(query.stop < 0, lengths, np.minimum(query.stop, lengths)).astype(np.int32)
        expected = np.maximum(stop - query.start, 0)
        view = self._view
        pending = _Pending(query, expected, future, view, now + deadline_s, deadline_s)
        self.counters["queries"] += 1
        if not view.usable:
            self._deadlines.add(now, lambda: self._fall_back(pending, self._why_unusable(view)))
            return future
        # Leave time to score locally before the deadline, but give the shards at least half of it.
        scoring_s = 0.1 * deadline_s + 3 * self._local_s if "local" in self._fallbacks else 0.0
        margin_s = min(0.05 * deadline_s + scoring_s, deadline_s / 2)
        self._deadlines.add(pending.expires_s - margin_s, lambda: self._expire(pending))
        longest = int(expected.max()) if expected.size else 0
        names = tuple(map(view.names.get, query.request_ids, itertools.repeat("")))
        if not self._ask_through_lane(pending, names, stop, longest):
            num_pieces = wire.answer_pieces(query, longest)
            message = wire.encode_query(query, names, stop, num_pieces, time.time())
            for index, shard in enumerate(view.shards):
                shard.link.call("answer", message, 1 + num_pieces, _receiver(self._receive, pending, index))
        return future

    def _ask_through_lane(self, pending: _Pending, names: tuple[str, ...], stop: np.ndarray, longest: int) -> bool:
        """Asks all shards through shared memory, if all share it and a slot is free."""
        query, view = pending.query, pending.view
        if self._lane is None or not all(shard.in_lane for shard in view.shards):
            return False
        query_bytes, answer_bytes = aligned(query.features.nbytes), wire.lane_answer_bytes(query, longest)
        slot = self._lane.lease(query_bytes + answer_bytes * len(view.shards))
        if slot is None:
            return False
        pending.slot = slot
        self._lane.array(slot, query.features.shape, np.float32)[:] = query.features
        header = wire.QueryHeader(names, query.k, query.start, stop, query.per_head, query.features.shape, 0,
                                  time.time(), self._lane.lane_id, slot)
        pending.answer_offsets = [slot + query_bytes + answer_bytes * index for index in range(len(view.shards))]
        for index, shard in enumerate(view.shards):
            header = header._replace(answer_offset=pending.answer_offsets[index])
            receiver = _receiver(self._receive, pending, index)
            # a query must not overtake the blocks it asks about
            if shard.writes_in_flight or not shard.link.ring((header,), receiver):
                shard.link.call("answer", (header,), 1, receiver)
        return True

    def forget(self, request_ids: Sequence[str]) -> None:
        super().forget(request_ids)
        with self._bank_lock:
            for request_id in request_ids:
                self._last.pop(request_id, None)
                self._grown.pop(request_id, None)
        view = self._view
        names = [name for name in (view.names.pop(request_id, None) for request_id in request_ids) if name]
        for shard in view.shards if names else ():
            shard.link.call("forget", (names,), 1, _ignore)

    def evict(self, keys: Sequence[str]) -> None:
        """Drops blocks from the owner's copy and the shards; forget the requests that list them first."""
        with self._bank_lock:
            self.bank.evict(keys)
        view = self._view
        owner = view.place(keys) if len(keys) and view.shards else np.empty(0, np.int32)
        for index, shard in enumerate(view.shards):
            if len(mine := np.flatnonzero(owner == index)):
                shard.link.call("evict", ([keys[at] for at in mine],), 1, _ignore)

    def stats(self) -> dict:
        """Sizes of the owner's copy, counters of answers by source, and the membership in use."""
        view = self._view
        return {**super().stats(), **self.counters, "version": view.version,
                "shards": {shard.link.shard_id: "ready" if shard.ready and not shard.suspect else "recovering"
                           for shard in view.shards}}

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Waits until every shard holds this client's blocks. Raises TimeoutError naming those that do not."""
        end = time.monotonic() + timeout_s
        while not self._all_written(end - time.monotonic()):
            if time.monotonic() > end:
                raise TimeoutError(f"after {timeout_s} s: {self._why_unusable(self._view) or 'writes still wait'}")
            self._stale.set()
            time.sleep(0.01)

    def _all_written(self, timeout_s: float) -> bool:
        """Whether the shards hold everything published so far. Under the write lock: whoever has it may have taken
        what was published and not have sent it yet."""
        if not self._write_lock.acquire(timeout=max(0.0, timeout_s)):
            return False
        try:
            return (self._view.usable and not self._outbox and not self._grown
                    and not any(shard.writes_in_flight for shard in self._view.shards))
        finally:
            self._write_lock.release()

    def close(self) -> None:
        """Ends the client; its request lists on the shards are dropped."""
        self._closed = True
        self._stale.set()
        self._keeper.join(timeout=5)
        self.forget(self._bank.request_ids() if self._bank else [])
        super().close()
        self._deadlines.close()
        self._pool.adopted(self.client_id, None)
        if self._lane is not None:
            for shard in self._view.shards:
                shard.link.call("leave_lane", (self._lane.lane_id,), 1, _ignore)
                shard.link.close()
            self._lane.close()

    # What is published goes to the owner's copy at once, and to the shards by whoever holds the write lock.

    def _store(self, keys: Sequence[str], records: torch.Tensor) -> None:
        self.bank.upsert(keys, records)
        self._outbox.append((list(keys), records))

    def _append(self, request_id: str, keys: Sequence[str]) -> None:
        before = len(self.bank.request_keys(request_id))
        self.bank.append(request_id, keys)
        self._grown.setdefault(request_id, before)

    def _flush(self) -> None:
        """Sends what was published, unless the keeper is at work on the shards, who then sends it."""
        if self._write_lock.acquire(blocking=False):
            try:
                self._send(self._view)
            finally:
                self._write_lock.release()
        else:
            self._stale.set()

    def _send(self, view: _View) -> None:
        """One message per shard with the new blocks and the new ends of request lists. Needs the write lock."""
        with self._bank_lock:
            outbox, self._outbox = self._outbox, []
            grown, self._grown = self._grown, {}
            if not outbox and not grown:
                return
            appends = self._lists(view, grown)
        keys = [key for some, _ in outbox for key in some]
        records = torch.cat([records for _, records in outbox]) if outbox else None
        owner = view.place(keys) if keys else np.empty(0, np.int32)
        for index, shard in enumerate(view.shards):
            mine = np.flatnonzero(owner == index)
            if len(mine) or appends[index]:
                self._write(shard, [keys[at] for at in mine], records[mine] if len(mine) else None, appends[index])

    def _lists(self, view: _View, begins: Mapping[str, int]) -> list[list[tuple[str, list[str], np.ndarray]]]:
        """For each shard the ends of request lists from the given positions on: (name, keys, positions)."""
        lists: list[list] = [[] for _ in view.shards]
        for request_id, begin in begins.items():
            keys = self.bank.request_keys(request_id)
            name = view.name(request_id)
            owner = view.place(keys[begin:]) if len(keys) > begin else np.empty(0, np.int32)
            for index in range(len(view.shards)):
                mine = np.flatnonzero(owner == index) + begin
                if len(mine):
                    lists[index].append((name, [keys[at] for at in mine], mine.astype(np.int32)))
        return lists

    def _write(self, shard: _Shard, keys: list[str], records: torch.Tensor | None, appends: list) -> None:
        """Sends one write without waiting. If it fails the shard is filled anew."""
        if not shard.ready or shard.writes_in_flight >= _MAX_WRITES_IN_FLIGHT:
            shard.ready = False
            self._stale.set()
            return
        shard.writes_in_flight += 1

        def done(result):
            shard.writes_in_flight -= 1
            if isinstance(result, Exception) or result[0][0] != shard.epoch:
                shard.ready = False
                self._stale.set()

        shard.link.call("write", (tuple(self.bank.geometry), keys, _bytes(records), appends), 1, done)

    # Answers

    def _receive(self, pending: _Pending, index: int, result) -> None:
        """A shard's part of an answer arrived, or its failure."""
        try:
            self._take(pending, index, result)
        finally:
            with pending.lock:
                pending.outstanding -= 1
                done = not pending.outstanding and pending.slot is not None
            if done:
                self._lane.release(pending.slot)

    def _take(self, pending: _Pending, index: int, result) -> None:
        shard = pending.view.shards[index]
        if isinstance(result, Exception):
            shard.ready = False
            self._stale.set()
            why = f"shard {shard.link.shard_id} failed: {type(result).__name__}"
            self._deadlines.add(time.monotonic(), lambda: self._fall_back(pending, why))
            return
        if pending.slot is not None:
            result = result[0]  # a call with one result returns it as it is: the list [header]
        shard.suspect = False
        if result[0].epoch != shard.epoch and shard.ready:
            shard.ready = False
            self._stale.set()
        with pending.lock:
            pending.parts[index] = result
            pending.missing -= 1
            if pending.missing:
                return
        if not pending.future.done():
            self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        """All shards answered: merge, and let a fallback answer requests of which blocks are missing."""
        headers = [part[0] for part in pending.parts]
        candidates = np.sum([header.candidates for header in headers], axis=0, dtype=np.int32)
        incomplete = candidates != pending.expected
        if incomplete.any():
            for shard, header in zip(pending.view.shards, headers, strict=True):
                if header.epoch != shard.epoch or time.monotonic() >= shard.retry_at_s:
                    shard.ready = False
            self._stale.set()
            why = f"{int(np.abs(pending.expected - candidates).sum())} blocks are not on their shards"
            if incomplete.all():
                self._deadlines.add(time.monotonic(), lambda: self._fall_back(pending, why))
                return
        parts = [self._part(pending, index) for index in range(len(headers))]
        answer = wire.merge(pending.query, parts, candidates, self._threads)
        if incomplete.any():
            self._deadlines.add(time.monotonic(), lambda: self._fall_back(pending, why, answer, incomplete))
            return
        self._settle(pending, answer)

    def _part(self, pending: _Pending, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and scores a shard answered."""
        header, *pieces = pending.parts[index]
        if header.block_dtype != "lane":
            return wire.decode_answer(header, pieces)
        scores = self._lane.array(pending.answer_offsets[index], header.shape, np.float32)
        return self._lane.array(pending.answer_offsets[index] + scores.nbytes, header.shape, np.int32), scores

    def _expire(self, pending: _Pending) -> None:
        if pending.future.done():
            return
        late = [shard for shard, part in zip(pending.view.shards, pending.parts, strict=True) if part is None]
        for shard in late:
            shard.suspect = True
        self._stale.set()
        self._fall_back(pending, f"deadline: no answer from shard {', '.join(shard.link.shard_id for shard in late)}")

    def _fall_back(self, pending: _Pending, why: str, answer: PackedAnswer | None = None,
                   wanted: np.ndarray | None = None) -> None:
        """Answers the `wanted` requests (all by default) without the shards; runs in the deadline thread."""
        if pending.future.done():
            return
        query = pending.query
        if answer is None:
            answer = PackedAnswer.empty(query, Source.DENSE)
        todo = np.ones(len(query.request_ids), bool) if wanted is None else wanted.copy()
        answer.reason = why
        answer.sources[todo] = Source.DENSE.value
        answer.blocks[todo], answer.scores[todo] = -1, -np.inf
        now = time.monotonic()
        # A late answer is worse than the last selection; a tenth of the deadline is kept for those behind this one.
        latest_s = pending.expires_s - 0.1 * pending.deadline_s - 2 * self._local_s
        if "local" in self._fallbacks and now <= latest_s:
            self._answer_locally(pending, answer, todo)
        if "last" in self._fallbacks and todo.any():
            for index in np.flatnonzero(todo).tolist():
                self._repeat_last(query, index, answer)
        self._settle(pending, answer)

    def _answer_locally(self, pending: _Pending, answer: PackedAnswer, todo: np.ndarray) -> None:
        """Scores the owner's copy for the requests in `todo`, and takes those off it that are complete there."""
        begin = time.monotonic()
        local = self.bank.answer(pending.query)
        self._local_s = 0.8 * self._local_s + 0.2 * (time.monotonic() - begin)
        complete = todo & (local.candidates >= pending.expected)
        for name in ("blocks", "scores", "candidates"):
            getattr(answer, name)[complete] = getattr(local, name)[complete]
        answer.sources[complete] = Source.LOCAL.value
        todo &= ~complete

    def _repeat_last(self, query: PackedQuery, index: int, answer: PackedAnswer) -> None:
        """Fills in the request's last selection, clipped to today's candidates, if there is one of the same form."""
        last, at = self._last.get(query.request_ids[index], (None, 0))
        if last is None or last.blocks.shape[1:3] != answer.blocks.shape[1:3]:
            return
        blocks, scores = last.blocks[at], last.scores[at]
        stop = query.stop[index] if query.stop[index] >= 0 else np.iinfo(np.int32).max
        scores = np.where((blocks >= query.start[index]) & (blocks < stop), scores, -np.inf)
        kept = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :int(query.k[index])], axis=-1)
        scores = np.take_along_axis(scores, kept, -1)
        blocks = np.where(scores > -np.inf, np.take_along_axis(blocks, kept, -1), -1)
        behind = np.argsort(blocks < 0, axis=-1, kind="stable")
        answer.blocks[index, ..., :kept.shape[-1]] = np.take_along_axis(blocks, behind, -1)
        answer.scores[index, ..., :kept.shape[-1]] = np.take_along_axis(scores, behind, -1)
        answer.sources[index] = Source.LAST.value

    def _settle(self, pending: _Pending, answer: PackedAnswer) -> None:
        if pending.future.settle(answer):
            worst = pending.future.source
            self.counters[worst.name.lower()] += 1
            if worst in (Source.EXACT, Source.LOCAL):
                places = zip(itertools.repeat(answer), itertools.count(), strict=False)
                self._last.update(zip(answer.request_ids, places, strict=False))

    @staticmethod
    def _why_unusable(view: _View) -> str:
        bad = [f"{shard.link.shard_id} ({'recovering' if not shard.ready else 'slow'})" for shard in view.shards
               if not shard.ready or shard.suspect]
        return f"shards not ready: {', '.join(bad)}" if bad else "" if view.shards else "the pool has no shards"

    # Recovery: one thread watches the pool, fills shards that lost blocks, and moves to new memberships

    def _keep(self) -> None:
        while not self._closed:
            self._stale.wait(self._refresh_s)
            self._stale.clear()
            if self._closed:
                return
            try:
                membership = self._pool.membership(2.0)
            except Exception as error:  # the pool itself may be restarting; shards keep answering meanwhile
                logger.warning("retrieval pool does not answer: %s", _first_line(error))
            else:
                self._adopt(membership)
            view = self._view
            for shard in view.shards:
                if (not shard.ready or shard.suspect) and time.monotonic() >= shard.retry_at_s:
                    self._refill(view, shard)
            with self._write_lock:
                self._send(view)
            with self._bank_lock:
                known = set(self._bank.request_ids()) if self._bank else set()
                self._last = {name: last for name, last in self._last.items() if name in known}

    def _refill(self, view: _View, shard: _Shard) -> bool:
        """Gives a shard all blocks and lists it should hold; returns whether it worked.

        The bulk goes without the write lock, so publishing goes on; what came meanwhile follows under the lock.
        """
        index = view.shards.index(shard)
        try:
            epoch, _ = shard.link.wait("missing", ([],), 2.0)
            if shard.ready and epoch == shard.epoch:  # it was only slow
                shard.suspect = False
                return True
            shard.ready = False
            self._fill(view, index)
            with self._write_lock:
                self._send(view)
                shard.epoch = self._fill(view, index) or epoch
                shard.writes_in_flight = 0
                shard.in_lane = self._share_lane(shard)
                shard.ready, shard.suspect = True, False
            self.counters["refills"] += 1
            shard.retry_at_s = time.monotonic() + 1.0
            return True
        except Exception as error:
            shard.retry_at_s = time.monotonic() + 0.05
            self._tell(f"retrieval shard {shard.link.shard_id} cannot be filled yet", error)
            return False

    def _tell(self, what: str, error: Exception) -> None:
        """Most failures pass; blocks of another geometry than a shard holds are refused for ever."""
        if isinstance(error, ValueError):
            if not self._refusal_told:
                self._refusal_told = True
                logger.error("%s, fallbacks answer until it can (said once): %s", what, _last_line(error))
        else:
            logger.info("%s: %s", what, _first_line(error))

    def _fill(self, view: _View, index: int) -> str:
        """Uploads what the shard misses, then its whole request lists. Returns its epoch; raises if the shard fails."""
        if self._bank is None:
            return ""
        link = view.shards[index].link
        with self._bank_lock:
            lists = self._lists(view, dict.fromkeys(self.bank.request_ids(), 0))[index]
        keys = list(dict.fromkeys(key for _, some, _ in lists for key in some))
        geometry = tuple(self.bank.geometry)
        for begin in range(0, len(keys), _UPLOAD_BLOCKS):
            _, missing = link.wait("missing", (keys[begin:begin + _UPLOAD_BLOCKS],), 5.0)
            found, records = self._read(missing)
            if found:
                link.wait("write", (geometry, found, _bytes(records)), 10.0)
        epoch, _ = link.wait("write", (geometry, [], b"", [], lists), 10.0)
        return epoch

    def _share_lane(self, shard: _Shard) -> bool:
        """Whether the shard could join our lane: it is on this machine and may open our memory."""
        shared = self._lane is not None and shard.link.wait("join_lane", self._lane.invitation, 5.0)
        if shared:
            shard.link.hang_bell(5.0)
        return shared

    def _read(self, keys: Sequence[str]) -> tuple[list[str], torch.Tensor]:
        """Records from the owner's copy, and from `load_block_repr` for blocks it no longer holds."""
        found, records = self.bank.read(keys)
        if self._load_block_repr is not None and len(found) < len(keys):
            lost = [key for key in keys if key not in set(found)]
            loaded = self.bank.geometry.pack(torch.stack([self._load(key) for key in lost], dim=2))
            found, records = [*found, *lost], torch.cat([records, loaded])
        return found, records

    def _adopt(self, membership: Membership) -> None:
        """Moves to a new membership: fill its shards while the old ones go on answering, then switch."""
        old = self._view
        if membership.version <= old.version:
            return
        new = _View(membership, self.client_id)
        try:
            for index in range(len(new.shards)):
                self._fill(new, index)
            with self._write_lock:
                self._send(old)
                for index, shard in enumerate(new.shards):
                    shard.epoch = self._fill(new, index) or shard.link.wait("missing", ([],), 5.0)[0]
                    shard.in_lane = self._share_lane(shard)
                    shard.ready = True
                self._view = new
        except Exception as error:
            self._tell(f"cannot move to membership {membership.version} of the retrieval pool yet", error)
            return
        for shard in old.shards:
            shard.link.close()
        self.counters["moves"] += 1
        self._pool.adopted(self.client_id, new.version)
        # Queries asked under the old names may still be on their way; they are done once their deadline is over.
        names = list(old.names.values())
        self._deadlines.add(time.monotonic() + 2 * self.deadline_s, lambda: self._drop_names(old, names))

    @staticmethod
    def _drop_names(view: _View, names: list[str]) -> None:
        for shard in view.shards:
            shard.link.call("forget", (names,), 1, _ignore)


class _Deadlines:
    """A thread that runs callbacks at given times."""

    def __init__(self):
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="retrieval-deadlines", daemon=True)
        self._thread.start()

    def add(self, at_s: float, callback: Callable[[], None]) -> None:
        with self._condition:
            heapq.heappush(self._heap, (at_s, next(self._count), callback))
            if self._heap[0][0] == at_s:
                self._condition.notify()

    def close(self) -> None:
        """Runs what is left at once, so that no future stays open, and ends."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._condition.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
                if not self._heap:
                    return
                callback = heapq.heappop(self._heap)[2]
            try:
                callback()
            except Exception:
                logger.exception("a retrieval fallback failed")


def _receiver(receive, pending: _Pending, index: int):
    return lambda result: receive(pending, index, result)


def _ignore(result) -> None:
    """For calls whose failure is repaired elsewhere."""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _last_line(error: Exception) -> str:
    """Of an error from another process, behind its traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _bytes(records: torch.Tensor | None) -> bytes:
    if records is None or not records.numel():
        return b""
    records = records.contiguous()
    return (records.view(torch.int16) if records.element_size() == 2 else records).numpy().tobytes()

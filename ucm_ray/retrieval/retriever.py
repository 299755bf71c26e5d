"""The one interface of retrieval, local or in a Ray pool, and the future it returns."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

import numpy as np
import torch

from ucm_ray.retrieval.bank import BlockBank
from ucm_ray.retrieval.packed import Geometry, PackedAnswer, PackedQuery, Source

DEFAULTS = {"retrieval_workers": 4, "retrieval_cache_size": 10000, "local_window_sz": 2, "init_window_sz": 1,
            "representation": "mean", "dtype": "bfloat16", "score_threads": None}


class RetrievalFuture(Future):
    """A `concurrent.futures.Future` that can also be awaited, and says where its answer came from.

    Attributes:
        source: once done, the `Source` of the answer (of a packed answer: the worst of its requests).
        reason: why a fallback answered, or "".
    """

    source: Source | None = None
    reason: str = ""

    def __await__(self):
        return asyncio.wrap_future(self).__await__()

    def settle(self, answer: PackedAnswer, result=None) -> bool:
        """Resolves with `answer` (or `result` made of it) unless already resolved; returns whether it did."""
        worst = int(answer.sources.max()) if answer.sources.size else 0
        with self._condition:
            if self.done():
                return False
            self.source, self.reason = Source(worst), answer.reason
        return _resolve(self, lambda: self.set_result(answer if result is None else result))

    def fail(self, error: BaseException) -> bool:
        """Resolves with an exception unless already resolved; returns whether it did."""
        return _resolve(self, lambda: self.set_exception(error))


class Retriever(ABC):
    """Stores block representations and tells which blocks a query needs. Thread safe.

    Args:
        config: the seed's keys (`DEFAULTS`); unknown keys are left to other parts of the sparse configuration.
        load_block_repr: called with a block hash that is not stored; returns its statistics
            `[num_stats, num_layers, num_kv_heads, head_dim]`, or, where these are 1, without the first one or two axes.
        geometry: what a block looks like; left out, it is taken from the first representation that arrives.
    """

    def __init__(self, config: Mapping | None = None, load_block_repr: Callable[[str], torch.Tensor] | None = None,
                 geometry: Geometry | None = None):
        settings = {**DEFAULTS, **{key: value for key, value in (config or {}).items() if key in DEFAULTS}}
        for name in ("retrieval_workers", "retrieval_cache_size"):
            if settings[name] < 1:
                raise ValueError(f"{name} is {settings[name]}, expected >= 1")
        self._settings = settings
        self._load_block_repr = load_block_repr
        self._threads = ThreadPoolExecutor(settings["retrieval_workers"], thread_name_prefix="retrieval")
        self._bank: BlockBank | None = None
        self._bank_lock = threading.RLock()
        if geometry is not None:
            self._open_bank(geometry)

    @property
    def geometry(self) -> Geometry | None:
        """Geometry of the stored blocks; None before the first one."""
        return self._bank.geometry if self._bank else None

    @property
    def bank(self) -> BlockBank:
        """The blocks held in this process. Raises RuntimeError before anything was stored and no geometry was given."""
        if self._bank is None:
            raise RuntimeError("no block representation was stored yet and no geometry was given")
        return self._bank

    def publish(self, keys: Sequence[str], stats: torch.Tensor | None,
                appends: Mapping[str, Sequence[str]] | None = None) -> None:
        """Stores representations and appends blocks to requests' lists: one call per step.

        Args:
            stats: `[num_stats, num_layers, len(keys), num_kv_heads, head_dim]`, or None when `keys` is empty.
            appends: request id -> keys of the blocks it grew by.
        """
        with self._bank_lock:
            if len(keys):
                self._open_bank(self._geometry_of(stats))
                self._store(keys, self.bank.geometry.pack(stats))
            for request_id, more in (appends or {}).items():
                self._append(request_id, more)
            self._flush()

    @abstractmethod
    def submit(self, query: PackedQuery, deadline_s: float | None = None) -> RetrievalFuture:
        """Answers a packed query; the future's result is a `PackedAnswer`."""

    def submit_retrieval(self, request_id: str, query_repr: torch.Tensor, block_hashes: Sequence[str], k: int,
                         deadline_s: float | None = None) -> RetrievalFuture:
        """The seed's call: the blocks one request needs.

        Args:
            query_repr: `[num_heads, head_dim]`, or `[num_layers, num_heads, head_dim]` for several layers at once.
            block_hashes: all blocks of the request, in order. Those not stored are fetched with `load_block_repr`.
            k: how many blocks to keep, initial and local windows included.
        Returns:
            Future of the sorted block indices (see `select_top_k_blocks`), one list per layer for a 3-d query. Fails
            with KeyError for a block nobody has and ValueError for bad shapes or numbers.
        """
        future = RetrievalFuture()
        self._threads.submit(self._retrieve, future, request_id, query_repr, list(block_hashes), k, deadline_s)
        return future

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drops the block lists of finished requests; the blocks stay until others need the room."""
        if self._bank:
            self._bank.forget(request_ids)

    def stats(self) -> dict:
        """Counters and sizes of the blocks held in this process."""
        return self._bank.stats() if self._bank else {}

    def close(self) -> None:
        """Ends the threads after the work they have."""
        self._threads.shutdown(wait=True)

    def _store(self, keys: Sequence[str], records: torch.Tensor) -> None:
        self.bank.upsert(keys, records)

    def _append(self, request_id: str, keys: Sequence[str]) -> None:
        self.bank.append(request_id, keys)

    def _flush(self) -> None:
        """Sends what `_store` and `_append` collected; nothing to do for a retriever that keeps all in this process."""
        return

    def _open_bank(self, geometry: Geometry) -> None:
        with self._bank_lock:
            if self._bank is None:
                self._bank = BlockBank(geometry, geometry.record_bytes * self._settings["retrieval_cache_size"],
                                       num_threads=self._settings["score_threads"])
            elif self._bank.geometry != geometry:
                raise ValueError(f"blocks of geometry {tuple(geometry)}, expected {tuple(self._bank.geometry)}")

    def _geometry_of(self, stats: torch.Tensor) -> Geometry:
        if stats is None or stats.dim() not in (4, 5):
            shape = None if stats is None else list(stats.shape)
            raise ValueError(f"stats has shape {shape}, expected "
                             "[num_stats, num_layers, num_blocks, num_kv_heads, head_dim]")
        if self._bank:
            return self._bank.geometry
        num_layers = stats.shape[1] if stats.dim() == 5 else 1
        return Geometry(num_layers, *stats.shape[-2:], self._settings["representation"], self._settings["dtype"])

    def _retrieve(self, future: RetrievalFuture, request_id: str, query_repr: torch.Tensor, block_hashes: list[str],
                  k: int, deadline_s: float | None) -> None:
        """Body of `submit_retrieval`."""
        try:
            if query_repr.dim() not in (2, 3):
                raise ValueError(f"query_repr has shape {list(query_repr.shape)}, expected [num_heads, head_dim] or "
                                 "[num_layers, num_heads, head_dim]")
            if k < 0:
                raise ValueError(f"k is {k}, expected >= 0")
            single = query_repr.dim() == 2
            layers = 1 if single else query_repr.shape[0]
            total = len(block_hashes)
            begin = min(self._settings["init_window_sz"], total)
            end = max(begin, total - self._settings["local_window_sz"])
            if not total:
                future.settle(_nothing(), [] if single else [[]] * layers)
                return
            with self._bank_lock:
                self._ensure(request_id, block_hashes)
                query = PackedQuery.build([request_id], query_repr.reshape(1, layers, *query_repr.shape[-2:]),
                                          self.bank.geometry, max(0, k - begin - (total - end)), begin, end)
                inner = self._submit_now(query, deadline_s)
        except Exception as error:
            future.fail(error)
            return
        inner.add_done_callback(lambda done: _finish_retrieval(done, future, begin, end, total, single))

    def _submit_now(self, query: PackedQuery, deadline_s: float | None) -> RetrievalFuture:
        """`submit`, called from a thread of this retriever while it holds the bank."""
        return self.submit(query, deadline_s)

    def _ensure(self, request_id: str, block_hashes: list[str]) -> None:
        """Makes the request's list equal `block_hashes`, with all representations stored."""
        missing = self.bank.missing(block_hashes) if self._bank else list(dict.fromkeys(block_hashes))
        if missing:
            stacked = torch.stack([self._load(key) for key in missing], dim=2)
            self._open_bank(self._geometry_of(stacked))
            if len(set(block_hashes)) > self.bank.num_slots:
                raise ValueError(f"request {request_id!r} has {len(set(block_hashes))} blocks, expected at most "
                                 f"retrieval_cache_size ({self.bank.num_slots})")
            self.bank.touch(block_hashes)
            self._store(missing, self.bank.geometry.pack(stacked))
        known = self.bank.request_keys(request_id)
        if known != block_hashes:
            if known != block_hashes[:len(known)]:
                self.forget([request_id])
                known = []
            self._append(request_id, block_hashes[len(known):])
        self._flush()

    def _load(self, key: str) -> torch.Tensor:
        """Statistics of one block from its owner, `[num_stats, num_layers, num_kv_heads, head_dim]`."""
        if self._load_block_repr is None:
            raise KeyError(f"block {key!r} is not stored and no load_block_repr was given")
        stats = self._load_block_repr(key)
        if stats is None:
            raise KeyError(f"block {key!r} is not stored and load_block_repr does not know it")
        while stats.dim() < 4:
            stats = stats.unsqueeze(0)
        return stats


def _finish_retrieval(done: RetrievalFuture, future: RetrievalFuture, begin: int, end: int, total: int,
                      single: bool) -> None:
    """Adds the windows to the selected middle blocks and resolves `future`."""
    if done.exception() is not None:
        future.fail(done.exception())
        return
    answer: PackedAnswer = done.result()
    if answer.source(0) is Source.DENSE:
        chosen = [list(range(total)) for _ in range(answer.blocks.shape[1])]
    else:
        chosen = [[*range(begin), *answer.selected(0, layer), *range(end, total)]
                  for layer in range(answer.blocks.shape[1])]
    future.settle(answer, chosen[0] if single else chosen)


def _nothing() -> PackedAnswer:
    empty = np.empty((1, 1, 1, 0), np.float32)
    return PackedAnswer(("",), empty.astype(np.int32), empty, np.zeros(1, np.int32))


def _resolve(future: Future, setter: Callable[[], None]) -> bool:
    try:
        setter()
    except InvalidStateError:
        return False
    return True

"""One shard of a retrieval pool: block representations on one device; upsert, score, evict.

`RetrievalShard` is a plain class, so it also runs without Ray; `shard_actor` makes it a Ray actor with threads of its
own: "data" does one write or query after another in the order they were sent, "control" answers meanwhile.
"""

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ucm_ray.retrieval import bell, kernels, lane, wire
from ucm_ray.retrieval.bank import BlockBank
from ucm_ray.retrieval.packed import Geometry, PackedAnswer, PackedQuery, Source
from ucm_ray.retrieval.scorers import CpuScorer

CONCURRENCY_GROUPS = {"data": 1, "control": 2}
_DATA_METHODS = ("write", "answer", "missing", "forget", "evict", "join_lane", "leave_lane", "serve_bell")
_CONTROL_METHODS = ("info", "warm_up")
_RECENT_QUERIES = 256
_MAX_LANES = 64


class RetrievalShard:
    """Holds the blocks that placement gives it, for any number of clients, and scores them.

    A shard that restarts comes back empty under a new epoch; whoever owns the blocks sees the epoch in the next answer
    and fills it again. The first write decides the geometry; another geometry is refused.

    Args:
        capacity_bytes: room for representations.
        device: "cpu", "cuda", or "auto" for CUDA if this process sees a GPU.
        num_threads: threads that score; None for all cores this process may use.
        protect_s: blocks used less than this many seconds ago are never evicted; what does not fit is refused.
        request_ttl_s: lists of requests not heard of for so long are dropped (their client is gone).
    """

    def __init__(self, capacity_bytes: int, device: str = "auto", num_threads: int | None = 1, protect_s: float = 5.0,
                 request_ttl_s: float = 600.0):
        self._epoch = uuid.uuid4().hex
        self._capacity_bytes = capacity_bytes
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self._num_threads = num_threads
        self._protect_s = protect_s
        self._request_ttl_s = request_ttl_s
        self._bank: BlockBank | None = None
        self._lanes: dict[str, np.ndarray] = {}
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT_QUERIES)
        self._queries = 0
        self._last_expiry_s = time.monotonic()
        self._lock = threading.Lock()

    def write(self, geometry: tuple, keys: Sequence[str], records: bytes | np.ndarray,
              appends: Sequence[tuple[str, Sequence[str], np.ndarray]] = (),
              replaces: Sequence[tuple[str, Sequence[str], np.ndarray]] = ()) -> tuple[str, int]:
        """Stores blocks, then appends to and replaces request lists.

        Args:
            geometry: fields of `Geometry`.
            keys, records: blocks; the bytes of `[len(keys), *record_shape]` in the geometry's dtype.
            appends, replaces: (request id, keys, int32 positions in the request's whole list).
        Returns:
            Epoch of this shard, and how many blocks were refused for capacity.
        """
        bank = self._bank_for(Geometry(*geometry))
        refused = 0
        if len(keys):
            data = torch.frombuffer(bytearray(records), dtype=bank.geometry.torch_dtype)
            refused = bank.upsert(keys, data.view(-1, *bank.geometry.record_shape)).refused
        for request_id, request_keys, positions in replaces:
            bank.replace(request_id, request_keys, positions)
        for request_id, request_keys, positions in appends:
            bank.append(request_id, request_keys, positions, skip_known=True)
        self._expire()
        return self._epoch, refused

    def answer(self, header: wire.QueryHeader, *pieces: bytes) -> list:
        """This shard's own best blocks for each request, as `wire.encode_answer` packs them."""
        waited_s = time.time() - header.sent_at_s
        memory = None
        if header.lane_id:
            memory = self._lanes[header.lane_id]
            features = lane.array_at(memory, header.query_offset, header.features_shape, np.float32)
            query = PackedQuery(header.request_ids, features, header.k, header.start, header.stop, header.per_head)
        else:
            query = wire.decode_query(header, pieces)
        begin = time.perf_counter()
        if self._bank is None:
            answer = PackedAnswer.empty(query, Source.EXACT)
        else:
            answer = self._bank.answer(query)
        with self._lock:
            self._queries += 1
            self._recent.append((waited_s, time.perf_counter() - begin))
        if memory is not None:
            return wire.answer_into_lane(answer, self._epoch, memory, header.answer_offset)
        return wire.encode_answer(answer, self._epoch, header.num_pieces)

    def join_lane(self, lane_id: str, path: str, token: bytes) -> bool:
        """Opens the memory a client shares, if this process can reach it. The oldest lanes are left for new ones."""
        memory = lane.join(path, token)
        if memory is None:
            return False
        while len(self._lanes) >= _MAX_LANES:
            self._lanes.pop(next(iter(self._lanes)))
        self._lanes[lane_id] = memory
        return True

    def leave_lane(self, lane_id: str) -> None:
        """Lets go of a client's memory."""
        self._lanes.pop(lane_id, None)

    def serve_bell(self, invitation: tuple[str, str]) -> bool:
        """Answers a client's queries through its pipes as well, if this process can open them."""
        return bell.serve(invitation, self.answer)

    def missing(self, keys: Sequence[str]) -> tuple[str, list[str]]:
        """Epoch, and those of `keys` this shard does not hold."""
        return self._epoch, list(dict.fromkeys(keys)) if self._bank is None else self._bank.missing(keys)

    def forget(self, request_ids: Sequence[str]) -> int:
        """Drops the block lists of finished requests."""
        return self._bank.forget(request_ids) if self._bank else 0

    def evict(self, keys: Sequence[str]) -> int:
        """Drops blocks."""
        return self._bank.evict(keys) if self._bank else 0

    def info(self) -> dict:
        """Epoch, process id, device, sizes, and recent query times. `queue_ms` is the median time queries waited."""
        with self._lock:
            recent = np.array(self._recent) if self._recent else np.zeros((1, 2))
            queries = self._queries
        # A sender whose clock is ahead of ours makes waits negative: shift them so that the shortest is zero.
        waits = recent[:, 0] - min(0.0, recent[:, 0].min())
        return {"epoch": self._epoch, "pid": os.getpid(), "device": self._device, "queries": queries,
                "queue_ms": float(np.median(waits) * 1e3), "score_ms": float(np.median(recent[:, 1]) * 1e3),
                "bytes": 0, "referenced_bytes": 0, "blocks": 0, "requests": 0, "refused": 0, "evicted": 0,
                "capacity_bytes": self._capacity_bytes, **(self._bank.stats() if self._bank else {})}

    def warm_up(self) -> str:
        """Loads the kernels, so the first query does not wait for that; returns the epoch."""
        if self._device == "cpu":
            for dtype in CpuScorer.DTYPES.values():
                kernels.warm_up(dtype)
        return self._epoch

    def _bank_for(self, geometry: Geometry) -> BlockBank:
        if self._bank is None:
            self._bank = BlockBank(geometry, self._capacity_bytes, self._device, self._num_threads, self._protect_s)
        elif self._bank.geometry != geometry:
            raise ValueError(f"blocks of geometry {tuple(geometry)}, expected {tuple(self._bank.geometry)}, which this "
                             "shard already holds; use a pool of its own for each model")
        return self._bank

    def _expire(self) -> None:
        now = time.monotonic()
        if now - self._last_expiry_s > self._request_ttl_s / 10:
            self._last_expiry_s = now
            self._bank.expire(self._request_ttl_s)


def shard_actor():
    """`RetrievalShard` as a Ray actor class."""
    import ray

    methods = {name: ray.method(concurrency_group=group)(_forward(getattr(RetrievalShard, name)))
               for group, names in (("data", _DATA_METHODS), ("control", _CONTROL_METHODS)) for name in names}
    return ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(type("RetrievalShardActor", (RetrievalShard,), methods))


def _forward(method):
    """A function of its own for each actor method: Ray marks functions, and the plain class must stay unmarked."""
    def call(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call

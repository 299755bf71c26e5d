"""Named blocks for applications: the one owner of what was published over HTTP, in a retrieval pool of its own.

`RetrievalDocuments` is a named, restartable Ray actor that all ingress replicas share. The engines' pool is another
one: no application can displace the blocks of running requests. What is published lives in memory; after a restart of
this actor names are unknown until they are published again.
"""

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from actors.retrieval_pool import PoolSettings, RayPoolLink, start_pool
from ucm_ray.retrieval.client import RetrievalClient, RetrievalError
from ucm_ray.retrieval.packed import Geometry, PackedQuery, Source

_DEADLINE_S = 2.0
_START_S = 60.0


class Refused(Exception):
    """What cannot be done, with the HTTP status that says so."""

    def __init__(self, status: int, message: str):
        super().__init__(status, message)
        self.status, self.message = status, message


@dataclass
class _Named:
    """The blocks of one name; `request_id` is what clients and shards call it."""

    request_id: str
    keys: list[str] = field(default_factory=list)


class RetrievalDocuments:
    """Publishes, scores and evicts named blocks; every caller sees its own names only.

    Args:
        name: of the pool; namespace: Ray namespace it lives in.
        geometry: fields of `Geometry` that all blocks have.
        pool: fields of `PoolSettings`.
    """

    def __init__(self, name: str, namespace: str, geometry: tuple, pool: dict[str, Any]):
        self._name, self._namespace = name, namespace
        self._geometry = Geometry(*geometry).check()
        self._pool = PoolSettings(**pool).check()
        most = self._pool.max_shards if self._pool.autoscale else self._pool.shards
        # shards are never filled evenly: blocks are placed by their names
        room = self._pool.target_fill * most * self._pool.capacity_bytes
        self._capacity = max(1, int(room / self._geometry.record_bytes))
        self._named: dict[tuple[str, str], _Named] = {}
        self._num_blocks = 0
        self._count = itertools.count()
        self._client: RetrievalClient | None = None
        self._lock = threading.RLock()
        self._connecting = threading.Lock()

    def upsert(self, caller: str, name: str, stats: np.ndarray, append: bool) -> int:
        """Sets or extends a name's blocks; how many it has now.

        Args:
            stats: float32 `[num_stats, num_layers, num_blocks, num_kv_heads, head_dim]`.
        """
        layers, heads, num_stats, head_dim = self._geometry.record_shape
        if stats.ndim != 5 or (*stats.shape[:2], *stats.shape[3:]) != (num_stats, layers, heads, head_dim):
            raise Refused(400, f"blocks: found shape {list(stats.shape)}, expected "
                               f"[{num_stats}, {layers}, num_blocks, {heads}, {head_dim}]")
        num_blocks = stats.shape[2]
        client = self._connect()
        with self._lock:
            old = self._named.get((caller, name))
            given_up = len(old.keys) if old and not append else 0
            if self._num_blocks - given_up + num_blocks > self._capacity:
                raise Refused(507, f"the retrieval pool holds {self._num_blocks} of {self._capacity} blocks, which "
                                   f"leaves no room for {num_blocks} more; evict names that are not needed")
            if old and append:
                named = old
            else:
                named = _Named(f"d{next(self._count)}")
            start = len(named.keys)
            keys = [f"{client.client_id}/{named.request_id}/{index}" for index in range(start, start + num_blocks)]
            try:
                client.publish(keys, torch.from_numpy(np.array(stats)), {named.request_id: keys})
            except ValueError as error:  # a number that the stored dtype cannot hold
                raise Refused(400, f"blocks: {error}") from None
            named.keys += keys
            if old is not None and old is not named:
                self._drop(old)
            self._named[caller, name] = named
            self._num_blocks += num_blocks
            return len(named.keys)

    def top_k(self, caller: str, name: str, query: np.ndarray, k: int, start: int, stop: int | None,
              per_head: bool) -> dict[str, Any]:
        """The best blocks of a name, per layer and group (KV head, or one for all).

        Args:
            query: float32 `[num_layers, num_heads, head_dim]`.
        Returns:
            `candidates`, `source`, and `blocks` and `scores` as lists `[num_layers][groups][at most k]`.
        """
        client = self._connect()
        with self._lock:
            named = self._named.get((caller, name))
        if named is None:
            raise Refused(404, f"no blocks are stored under the name {name!r}")
        if query.ndim != 3:
            raise Refused(400, f"query: found shape {list(query.shape)}, expected [num_layers, num_heads, head_dim]")
        try:
            packed = PackedQuery.build([named.request_id], torch.from_numpy(np.array(query[None])), self._geometry,
                                       k, start, -1 if stop is None else stop, per_head)
        except ValueError as error:
            raise Refused(400, f"query: {error}") from None
        answer = client.submit(packed, _DEADLINE_S).result(_DEADLINE_S + 5)
        if answer.source(0) is Source.DENSE:
            raise Refused(503, f"the retrieval shards do not answer ({answer.reason}); ask again in a moment")
        chosen = answer.blocks[0] >= 0
        rows = [[(answer.blocks[0, layer, group][kept].tolist(), answer.scores[0, layer, group][kept].tolist())
                 for group, kept in enumerate(groups)] for layer, groups in enumerate(chosen)]
        return {"candidates": int(answer.candidates[0]), "source": answer.source(0).name.lower(),
                "blocks": [[blocks for blocks, _ in row] for row in rows],
                "scores": [[scores for _, scores in row] for row in rows]}

    def evict(self, caller: str, names: list[str]) -> tuple[int, int]:
        """Drops names with their blocks, all or none; how many names and blocks."""
        with self._lock:
            unknown = next((name for name in names if (caller, name) not in self._named), None)
            if unknown is not None:
                raise Refused(404, f"no blocks are stored under the name {unknown!r}")
            before, names = self._num_blocks, list(dict.fromkeys(names))
            for name in names:
                self._drop(self._named.pop((caller, name)))
            return len(names), before - self._num_blocks

    def info(self, caller: str) -> dict[str, Any]:
        """What blocks must look like, and how much the caller has stored."""
        with self._lock:
            own = [len(named.keys) for (owner, _), named in self._named.items() if owner == caller]
        return {**self._geometry._asdict(), "num_stats": self._geometry.method.num_stats,
                "capacity_blocks": self._capacity, "names": len(own), "blocks": sum(own)}

    def _drop(self, named: _Named) -> None:
        self._client.forget([named.request_id])
        self._client.evict(named.keys)
        self._num_blocks -= len(named.keys)

    def _connect(self) -> RetrievalClient:
        """The pool's client; starts the pool the first time. Without the other lock: that may take long."""
        if self._client is not None:
            return self._client
        if not self._connecting.acquire(timeout=_START_S):
            raise Refused(503, "the retrieval pool is being started; ask again in a moment")
        try:
            if self._client is None:
                pool = start_pool(self._pool, self._name, self._namespace, _START_S)
                self._client = RetrievalClient(RayPoolLink(pool), {"retrieval_cache_size": self._capacity},
                                               geometry=self._geometry, deadline_s=_DEADLINE_S, fallbacks=("local",))
        except RetrievalError as error:
            raise Refused(503, f"no retrieval pool runs: {error}") from None
        finally:
            self._connecting.release()
        return self._client


def connect_documents(name: str, namespace: str, geometry: Geometry, pool: PoolSettings) -> Any:
    """Handle of the actor for the pool called `name`, started if need be; it outlives this process."""
    from dataclasses import asdict

    import ray

    return ray.remote(RetrievalDocuments).options(
        name=f"{name}-documents", namespace=namespace, lifetime="detached", get_if_exists=True, max_restarts=-1,
        num_cpus=0, max_concurrency=8,
    ).remote(name, namespace, tuple(geometry), asdict(pool))

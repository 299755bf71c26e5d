"""A Ray Serve request router that sends a prompt to where most of its chunks already lie in host memory.

The ingress has tokenised and looked the prompt up before it calls the handle, in the process the router runs in; it
leaves the chunks as a hint under the request's id. What lies where is not asked for: a replica that was sent a prompt
has its chunks in host memory from then on, until as many bytes of others were sent there as its cache holds.
"""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from typing import Any

from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import (
    LocalityMixin,
    MultiplexMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from ucm_ray.serve.routing_hint import Chunks, hint_of


class Residency:
    """Which chunks lie in which replica's host memory, by what was sent there; LRU by bytes. Thread safe."""

    def __init__(self, capacity_bytes: int):
        self._capacity_bytes = capacity_bytes
        self._chunks: dict[Any, OrderedDict[str, int]] = {}
        self._bytes: dict[Any, int] = {}
        self._lock = threading.Lock()

    def sent(self, replica: Any, chunks: Chunks) -> None:
        """A prompt with these chunks went to a replica."""
        with self._lock:
            held = self._chunks.setdefault(replica, OrderedDict())
            for chunk in chunks:
                before = held.pop(chunk.key, 0)
                self._bytes[replica] = self._bytes.get(replica, 0) + chunk.num_bytes - before
                held[chunk.key] = chunk.num_bytes
            while self._bytes.get(replica, 0) > self._capacity_bytes and held:
                self._bytes[replica] -= held.popitem(last=False)[1]

    def tokens(self, replica: Any, chunks: Chunks) -> int:
        """Tokens of a prompt that lie in a replica's host memory."""
        with self._lock:
            held = self._chunks.get(replica, {})
            return sum(chunk.num_tokens for chunk in chunks if chunk.key in held)

    def keep_only(self, replicas: set[Any]) -> None:
        """Forget replicas that are gone: a new one starts with empty memory."""
        with self._lock:
            for replica in set(self._chunks) - replicas:
                del self._chunks[replica]
                self._bytes.pop(replica, None)


def rank_replicas(resident: list[int], queued: list[int], prompt_tokens: int, load_weight: float) -> list[int]:
    """Indices of replicas, best first.

    A request waiting or running costs as much as `load_weight` of the prompt's reusable tokens missing: so a replica
    with everything in memory is preferred until it is `1 / load_weight` requests behind the others.
    """
    scale = max(prompt_tokens, 1)
    scores = [tokens / scale - load_weight * waiting for tokens, waiting in zip(resident, queued, strict=True)]
    return sorted(range(len(scores)), key=lambda index: -scores[index])


class ChunkAwareRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Most chunks in host memory, balanced against load; power of two choices for prompts with nothing stored.

    Not first in, first out: a replica chosen for one prompt is of no special use to the one before it in the queue.
    """

    # Serve's 0.1 s is short for a replica that shares its cores with the engine it runs
    queue_len_response_deadline_s = 0.5

    def initialize_state(self, capacity_bytes: int = 2 * 2**30, load_weight: float = 0.25) -> None:
        """`capacity_bytes`: KV that a replica's host memory holds."""
        self.residency = Residency(capacity_bytes)
        self._load_weight = load_weight

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        chunks: Chunks = []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            chunks = hint_of(pending_request.metadata.request_id)
        if not chunks or len(candidate_replicas) < 2:
            return [_two_of(candidate_replicas)]
        total = sum(chunk.num_tokens for chunk in chunks)
        resident = [self.residency.tokens(replica.replica_id, chunks) for replica in candidate_replicas]
        if not any(resident):
            return [_two_of(candidate_replicas)]
        queued = [self._replica_queue_len_cache.get(replica.replica_id) or 0 for replica in candidate_replicas]
        order = rank_replicas(resident, queued, total, self._load_weight)
        # one replica a rank: Serve tries the next rank only when the one before takes no more requests
        return [[candidate_replicas[index]] for index in order]

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: RequestMetadata | None = None
    ) -> PendingRequest | None:
        """The very call a replica was chosen for.

        Ray Serve looks it up by `internal_request_id`, which all calls made while one HTTP request is served share: of
        several documents ingested together, one call would be fulfilled and the others would wait for ever.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                return pending
        return None

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        chunks = hint_of(pending_request.metadata.request_id)
        if chunks:
            self.residency.sent(replica_id, chunks)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.residency.keep_only(set(self._replica_id_set))


def _two_of(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Two at random: Serve asks both for their queues and takes the shorter one."""
    return random.sample(replicas, min(2, len(replicas)))

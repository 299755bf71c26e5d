"""A Ray Serve request router that sends a prompt to where most of its chunks already lie in host memory.

The ingress has tokenised and looked the prompt up before it calls the handle, in the process the router runs in; it
leaves the chunks as a hint under the request's id. What lies where is not asked for: `Residency` follows what replicas
compute (stored chunks say who computed them) and what they are sent.
"""

from __future__ import annotations

import random
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

from ucm_ray.keys import source_prefix
from ucm_ray.serve.routing_hint import hint_of

# of the prompt's reusable tokens; a system prompt that one replica has and another has not is no reason to prefer it
_LEAST_ADVANTAGE = 0.1


def rank_replicas(resident: list[int], queued: list[int], prompt_tokens: int, load_weight: float) -> list[int]:
    """Indices of replicas, best first.

    A request waiting or running costs as much as `load_weight` of the prompt's reusable tokens missing: so a replica
    with everything in memory is preferred until it is `1 / load_weight` requests behind the others. Equals come in
    random order.
    """
    scale = max(prompt_tokens, 1)
    scores = [tokens / scale - load_weight * waiting for tokens, waiting in zip(resident, queued, strict=True)]
    return sorted(range(len(scores)), key=lambda index: (-scores[index], random.random()))


class ChunkAwareRouter(LocalityMixin, MultiplexMixin, RequestRouter):
    """Most chunks in host memory, balanced against load; power of two choices where no replica has more than others.

    Not first in, first out: a replica chosen for one prompt is of no special use to the one before it in the queue.
    """

    # Serve's 0.1 s is short for a replica that shares its cores with the engine it runs
    queue_len_response_deadline_s = 0.5

    def initialize_state(self, load_weight: float = 0.25) -> None:
        self._load_weight = load_weight

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        hint = None
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            hint = hint_of(pending_request.metadata.request_id)
        if hint is None:
            return [_two_of(candidate_replicas)]
        names = [_name_of(replica.replica_id) for replica in candidate_replicas]
        hint.residency.keep_only(frozenset(names))
        chunks = hint.stored + hint.fresh
        resident = [hint.residency.tokens(name, chunks) for name in names]
        total = max(sum(chunk.num_tokens for chunk in hint.stored), *resident, 1)
        if max(resident) - min(resident) < _LEAST_ADVANTAGE * total:
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
        hint = hint_of(pending_request.metadata.request_id)
        if hint is not None:
            hint.residency.put(_name_of(replica_id), hint.stored + hint.fresh)


def _name_of(replica_id: ReplicaID) -> str:
    """What the replica's engine puts in front of the source ids of all it computes."""
    return source_prefix(replica_id.unique_id)


def _two_of(replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Two at random: Serve asks both for their queues and takes the shorter one."""
    return random.sample(replicas, min(2, len(replicas)))

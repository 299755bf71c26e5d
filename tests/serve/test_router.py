"""Which replica a prompt goes to."""

import random
from collections import Counter

from ray.serve.config import RequestRouterConfig

from ucm_ray.serve.router import Residency, rank_replicas
from ucm_ray.serve.routing_hint import PromptChunk, hint_of, routing_hint


def chunks(*names: str, num_bytes: int = 10) -> list[PromptChunk]:
    return [PromptChunk(name, 64, num_bytes) for name in names]


def test_a_replica_holds_what_it_was_sent_until_its_memory_is_full():
    residency = Residency(capacity_bytes=30)
    residency.sent("one", chunks("a", "b"))
    assert residency.tokens("one", chunks("a", "b", "c")) == 128
    assert residency.tokens("two", chunks("a")) == 0
    residency.sent("one", chunks("a"))
    residency.sent("one", chunks("c", "d"))
    assert residency.tokens("one", chunks("a", "b", "c", "d")) == 192, "b was used longest ago"
    assert residency.tokens("one", chunks("b")) == 0


def test_a_replica_that_is_gone_is_forgotten():
    residency = Residency(capacity_bytes=100)
    residency.sent("one", chunks("a"))
    residency.keep_only({"two"})
    assert residency.tokens("one", chunks("a")) == 0


def test_the_most_chunks_win_until_the_queue_is_too_long():
    assert rank_replicas([100, 900], [0, 0], 1000, 0.25) == [1, 0]
    assert rank_replicas([100, 900], [0, 3], 1000, 0.25)[0] == 1
    assert rank_replicas([100, 900], [0, 4], 1000, 0.25)[0] == 0
    assert rank_replicas([0, 0], [2, 1], 0, 0.25)[0] == 1


def test_a_hint_lives_as_long_as_its_request():
    with routing_hint("id", chunks("a")):
        assert hint_of("id") == chunks("a")
    assert hint_of("id") == []
    with routing_hint("id", []):
        assert hint_of("id") == []


def test_the_router_ray_serve_unpickles_sees_the_hints_of_this_process():
    config = RequestRouterConfig(request_router_class="ucm_ray.serve.router.ChunkAwareRouter")
    shipped = config.get_request_router_class()
    with routing_hint("id", chunks("a")):
        assert shipped.choose_replicas.__globals__["hint_of"]("id") == chunks("a")


def test_on_a_skewed_workload_more_tokens_are_found_in_memory_than_by_chance():
    """Documents of Zipf popularity, 8 of 200 a request, memory for a third of them on each of two replicas."""
    draw = random.Random(0)
    weights = [1 / (rank + 1) for rank in range(200)]
    requests = []
    for _ in range(600):
        wanted: set[int] = set()
        while len(wanted) < 8:
            wanted.update(draw.choices(range(200), weights, k=8 - len(wanted)))
        requests.append(chunks(*(f"d{number}" for number in wanted)))

    def found(choose) -> float:
        residency, hits, sent = Residency(capacity_bytes=66 * 10), 0, Counter()
        for request in requests:
            replica = choose(residency, request, sent)
            hits += residency.tokens(replica, request)
            residency.sent(replica, request)
            sent[replica] += 1
        assert min(sent.values()) > 0.2 * len(requests), "one replica does all the work"
        return hits / sum(chunk.num_tokens for request in requests for chunk in request)

    def aware(residency, request, sent):
        resident = [residency.tokens(replica, request) for replica in range(2)]
        # the one that was sent more has the longer queue
        queued = [max(0, sent[0] - sent[1]) / 8, max(0, sent[1] - sent[0]) / 8]
        return rank_replicas(resident, queued, 8 * 64, 0.25)[0]

    by_chance = found(lambda residency, request, sent: draw.randrange(2))
    by_chunks = found(aware)
    assert by_chunks > 1.05 * by_chance

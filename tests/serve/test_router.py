"""Which replica a prompt goes to."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import RequestRouterConfig

from actors.chunk_directory import Change, Changes, DirectoryRecord
from ucm_ray.blend.analyzer import ChunkAnalyzer
from ucm_ray.keys import chunk_key, new_source_id, source_prefix
from ucm_ray.serve.cache_service import prompt_chunks
from ucm_ray.serve.directory_copy import DirectoryCopy
from ucm_ray.serve.residency import PromptChunk, Residency
from ucm_ray.serve.router import ChunkAwareRouter, rank_replicas
from ucm_ray.serve.routing_hint import RoutingHint, hint_of, routing_hint

SPACE = "ab" * 16
NO_HINT = RoutingHint([], [], Residency(0))


def chunks(*names: str, num_bytes: int = 10) -> list[PromptChunk]:
    return [PromptChunk(name, 64, num_bytes) for name in names]


def hint(residency: Residency, stored=(), fresh=()) -> RoutingHint:
    return RoutingHint(list(stored), list(fresh), residency)


class Pair:
    """The router in front of two replicas that are not there; it is told what waits at each of them."""

    def __init__(self, residency: Residency):
        deployment = DeploymentID("engines", "app")
        self.replicas = [SimpleNamespace(replica_id=ReplicaID(name, deployment)) for name in ("one", "two")]
        self.names = [source_prefix("one"), source_prefix("two")]
        self.residency = residency
        self.queued: dict = {}
        self.router = object.__new__(ChunkAwareRouter)
        self.router.initialize_state(load_weight=0.25)
        self.router._replica_queue_len_cache = self.queued

    def ranks(self, stored=(), fresh=()) -> list[list[str]]:
        """Serve asks for replicas, and sends the prompt to the first."""
        pending = SimpleNamespace(metadata=SimpleNamespace(request_id="id"), routing_context=SimpleNamespace())
        with routing_hint("id", hint(self.residency, stored, fresh)):
            ranks = asyncio.run(self.router.choose_replicas(self.replicas, pending))
            self.router.on_request_routed(pending, ranks[0][0].replica_id, None)
        return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]


def tell(copy: DirectoryCopy, *computed: tuple[str, np.ndarray]) -> list[PromptChunk]:
    """The directory lists chunks of 100 bytes: `(replica, tokens)`."""
    records = tuple(DirectoryRecord(chunk_key(SPACE, tokens), tokens, new_source_id(source_prefix(replica)), 0, "",
                                    "request", 100, float(number))
                    for number, (replica, tokens) in enumerate(computed))
    copy.subscriber.apply(Changes("epoch", 1, (Change(1, "add", SPACE, records),)))
    return [PromptChunk(record.key, len(record.token_ids), 100) for record in records]


def text(number: int, tokens: int = 64) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 5000, tokens).astype(np.int32)


def test_a_replica_holds_what_it_was_sent_until_its_memory_is_full():
    residency = Residency(capacity_bytes=30)
    residency.put("one", chunks("a", "b"))
    assert residency.tokens("one", chunks("a", "b", "c")) == 128
    assert residency.tokens("two", chunks("a")) == 0
    residency.put("one", chunks("a"))
    residency.put("one", chunks("c", "d"))
    assert residency.tokens("one", chunks("a", "b", "c", "d")) == 192, "b was used longest ago"
    assert residency.tokens("one", chunks("b")) == 0


def test_a_replica_that_is_gone_is_forgotten():
    residency = Residency(capacity_bytes=100)
    residency.put("one", chunks("a"))
    residency.keep_only(frozenset({"two"}))
    residency.put("one", chunks("a"))
    assert residency.tokens("one", chunks("a")) == 0


def test_the_most_chunks_win_until_the_queue_is_too_long():
    assert rank_replicas([100, 900], [0, 0], 1000, 0.25) == [1, 0]
    assert rank_replicas([100, 900], [0, 3], 1000, 0.25)[0] == 1
    assert rank_replicas([100, 900], [0, 4], 1000, 0.25)[0] == 0
    assert rank_replicas([0, 0], [2, 1], 0, 0.25)[0] == 1


def test_a_hint_lives_as_long_as_its_request():
    with routing_hint("id", NO_HINT):
        assert hint_of("id") is NO_HINT
    assert hint_of("id") is None
    with routing_hint("id", None):
        assert hint_of("id") is None


def test_the_router_ray_serve_unpickles_sees_the_hints_of_this_process():
    config = RequestRouterConfig(request_router_class="ucm_ray.serve.router.ChunkAwareRouter")
    shipped = config.get_request_router_class()
    with routing_hint("id", NO_HINT):
        assert shipped.choose_replicas.__globals__["hint_of"]("id") is NO_HINT


def test_a_stored_chunk_says_who_computed_it_and_the_prompt_goes_there(copy):
    pair = Pair(copy._residency)
    first, second = text(1), text(2)
    stored = tell(copy, ("two", first), ("one", second))
    ids = np.concatenate([text(3, 40), first, text(4, 30)])
    found, fresh = prompt_chunks(ids, SPACE, copy, ChunkAnalyzer(64, 0.5, 16), 64, 2)
    assert found == stored[:1] and sum(chunk.num_tokens for chunk in fresh) <= 128
    for _ in range(5):
        assert pair.ranks(found, fresh) == [["two"], ["one"]]
    assert pair.ranks(stored[1:]) == [["one"], ["two"]]


def test_text_in_no_store_yet_is_followed_by_the_keys_it_will_be_saved_by(copy):
    """A conversation goes on before the store lists what was computed for its first turn."""
    pair = Pair(copy._residency)
    turn = text(5, 300)
    found, fresh = prompt_chunks(turn, SPACE, copy, ChunkAnalyzer(64, 0.5, 16), 64, 2)
    assert found == [] and [chunk.num_bytes for chunk in fresh] == [128] * 4
    assert [chunk.key for chunk in fresh] == [chunk_key(SPACE, turn[start:start + 64]) for start in (0, 64, 128, 192)]
    home = pair.ranks(found, fresh)[0][0]
    longer = np.concatenate([turn, text(6, 100)])
    for _ in range(5):
        assert pair.ranks(*prompt_chunks(longer, SPACE, copy, ChunkAnalyzer(64, 0.5, 16), 64, 2))[0] == [home]


def test_what_a_replica_computes_pushes_out_what_it_held():
    residency = Residency(capacity_bytes=30)
    residency.put("one", chunks("a", "b"))
    residency.put("one", chunks("c", "d"))
    assert residency.tokens("one", chunks("a", "b", "c", "d")) == 192


def test_where_no_replica_has_more_the_queues_decide():
    residency = Residency(capacity_bytes=1000)
    pair = Pair(residency)
    assert [len(rank) for rank in pair.ranks(chunks("a", "b"))] == [2]
    for name in pair.names:
        residency.put(name, chunks("system"))
    assert [len(rank) for rank in pair.ranks(chunks("system", "c"))] == [2]
    residency.put(pair.names[0], chunks("short"))
    long = [PromptChunk("long", 1000, 10)]
    assert [len(rank) for rank in pair.ranks(chunks("short") + long)] == [2], "64 of 1064 tokens are no advantage"


def test_a_longer_queue_outweighs_memory():
    residency = Residency(capacity_bytes=1000)
    pair = Pair(residency)
    residency.put(pair.names[0], chunks("a"))
    pair.queued[pair.replicas[0].replica_id] = 3
    assert pair.ranks(chunks("a"))[0] == ["one"]
    pair.queued[pair.replicas[0].replica_id] = 5
    assert pair.ranks(chunks("a"))[0] == ["two"]


def test_source_ids_say_which_engine_and_are_else_random():
    prefix = source_prefix("replica")
    made = {new_source_id(prefix) for _ in range(100)}
    assert len(made) == 100
    assert all(len(bytes.fromhex(name)) == 16 and name.startswith(prefix) for name in made)
    assert source_prefix("other") != prefix


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
            residency.put(replica, request)
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

"""The cache behind the routes, over a directory and an engine that are not there."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from actors.chunk_directory import ChunkTable, DirectoryRecord
from ucm_ray.config import parse_settings
from ucm_ray.integration.vllm.controls import SWITCHED_OFF
from ucm_ray.keys import Namespace, chunk_key
from ucm_ray.serve import api
from ucm_ray.serve.cache_service import CacheService
from ucm_ray.serve.errors import ServiceError

VOCABULARY = 1000
SINK = [1, 2, 3]
ENGINE = {"namespace": Namespace("m", "r", "bfloat16", "{}", "layers=1,kv_heads=1,head_dim=8", 1).to_dict(),
          "max_model_len": 256, "token_bytes": 32}
GOOD = {"blend": {"reason": SWITCHED_OFF}}


class Tokenizer:
    """Two characters a token; says which threads it worked in."""

    vocabulary_size = VOCABULARY

    def __init__(self):
        self.on_loop: list[bool] = []

    def _note(self):
        try:
            asyncio.get_running_loop()
            self.on_loop.append(True)
        except RuntimeError:
            self.on_loop.append(False)

    def text(self, text):
        self._note()
        return [ord(letter) % VOCABULARY for letter in text[::2]]

    def pieces(self, token_ids):
        self._note()
        return [chr(token) for token in token_ids]


class Directory:
    """The directory's table, asked as an actor is; what it hears of reaches the copy at once."""

    def __init__(self, copy):
        self.table, self.copy, self.asked = ChunkTable(), copy, []

    def __getattr__(self, name):
        async def ask(*arguments):
            self.asked.append((name, *arguments))
            return getattr(self, f"_{name}")(*arguments)

        return SimpleNamespace(remote=ask)

    def _owners(self, namespace, keys):
        return [sorted(self.table.nodes(namespace, key)) for key in keys]

    def _chunk(self, namespace, key):
        record = self.table.get(namespace, key)
        return record and {"key": key, "document": record.source_id, "num_bytes": record.num_bytes,
                           "source_position": 0, "num_tokens": len(record.token_ids), "context": "canonical",
                           "pinned": False, "nodes": [], "created_s": 0.0, "token_ids": record.token_ids.tolist()}

    def _delete(self, namespace, keys):
        return len(self.table.remove(namespace, keys))

    def _stats(self, namespace):
        count = len(self.table.keys(namespace))
        return {"chunks": count, "tokens": count, "bytes": count, "pinned": 0, "version": self.table.version}

    def save(self, namespace, ids, size):
        for start in range(0, len(ids), size):
            tokens = np.asarray(ids[start:start + size], np.int32)
            record = DirectoryRecord(chunk_key(namespace, tokens), tokens, "source", start, "", "canonical", 10, 0.0)
            self.table.add(namespace, [record])
            self.copy._add(namespace, [record])


class Engine:
    """Saves what it is asked to, unless it takes it for stored, as in the next `deaf` calls."""

    def __init__(self, directory, size, receipt=GOOD):
        self.receipt, self.calls, self.deaf = receipt, [], 0
        self._directory, self._size = directory, size
        self.describe = SimpleNamespace(remote=self._describe)
        self.ingest = SimpleNamespace(remote=self._ingest)

    async def _describe(self):
        return ENGINE

    async def _ingest(self, ids, params, salt):
        self.calls.append(params["ucm"])
        self.deaf -= 1
        if self.receipt is GOOD and self.deaf < 0:
            namespace = Namespace.from_dict(ENGINE["namespace"] | {"salt": salt}).hex
            self._directory.save(namespace, ids[len(SINK):], self._size)
        return {"receipt": self.receipt, "seconds": 0.1}


@pytest.fixture
def service(copy, monkeypatch):
    monkeypatch.setattr("ucm_ray.serve.cache_service.start_directory", lambda *_: Directory(copy))
    monkeypatch.setattr("ucm_ray.serve.cache_service.DirectoryCopy", lambda *_: copy)
    monkeypatch.setattr("ucm_ray.serve.cache_service.sink_tokens", lambda *_: SINK)
    monkeypatch.setattr("ucm_ray.serve.cache_service._STORED_TIMEOUT_S", 0.3)

    def make(receipt=GOOD, **blend):
        made = CacheService(parse_settings({"blend": blend, "store": {"refresh_s": 0.2}}), None, Tokenizer())
        made._engines = Engine(made._directory, 64, receipt)
        return made

    return make


def document(count: int = 150) -> api.Document:
    return api.Document(token_ids=np.random.default_rng(3).integers(10, 900, count).tolist())


def ingest(service, *documents, salt=""):
    return asyncio.run(service.ingest(list(documents) or [document()], salt, False))


def test_asking_about_namespaces_without_chunks_keeps_nothing(copy):
    for number in range(1000):
        assert len(copy.index(f"{number:032x}")) == 0
    assert copy._indexes == {} and copy.index("a" * 32) is copy.index("b" * 32)


def test_an_emptied_namespace_keeps_no_index(copy):
    tokens = np.arange(64, dtype=np.int32)
    record = DirectoryRecord(chunk_key("ab" * 16, tokens), tokens, "source", 0, "", "request", 10, 0.0)
    copy._add("ab" * 16, [record])
    assert record.key in copy.index("ab" * 16) and record.key not in copy.index("cd" * 16)
    copy._remove("cd" * 16, [record.key])
    assert copy.num_bytes("ab" * 16, record.key) == 10
    copy._remove("ab" * 16, [record.key])
    assert copy._indexes == {} and copy.num_bytes("ab" * 16, record.key) == 0


def test_a_document_is_computed_once_and_saved_whatever_requests_save(service):
    made = service()
    (first,) = ingest(made)
    (second,) = ingest(made)
    assert (first.num_chunks, first.new_chunks, second.new_chunks) == (3, 3, 0) and first.chunks == second.chunks
    assert len(made._engines.calls) == 1 and made._engines.calls[0]["save"] is True


def test_a_deleted_document_can_be_ingested_again_at_once(service):
    """The copy still lists it, and so does the engine, which saves nothing the first time."""
    made = service()
    (stored,) = ingest(made)
    assert asyncio.run(made.delete(api.KeysRequest(keys=stored.chunks), "")).chunks == 3
    for key in stored.chunks[1:]:
        made.copy._remove(asyncio.run(made.namespace("")), [key])
    made._engines.deaf = 1
    (again,) = ingest(made)
    assert again.new_chunks == 3 and len(made._engines.calls) == 3


@pytest.mark.parametrize(("receipt", "words"), [
    ({"blend": {"reason": "speculative decoding is on"}}, "speculative decoding is on"), ({}, "no receipt")])
def test_an_engine_that_does_not_blend_is_said_at_once(service, receipt, words):
    made = service(receipt)
    with pytest.raises(ServiceError, match=words) as refused:
        ingest(made)
    assert refused.value.status_code == 409 and len(made._engines.calls) == 1


def test_without_blend_nothing_is_computed_for_an_ingest(service):
    made = service(enabled=False)
    with pytest.raises(ServiceError, match="blend.enabled: false") as refused:
        ingest(made)
    assert refused.value.status_code == 409 and made._engines.calls == []


@pytest.mark.parametrize("ids", [[5, 2**31], [5, 2**63], [-1, 5], [VOCABULARY]])
@pytest.mark.parametrize("tokens", [False, True])
def test_ids_outside_the_vocabulary_are_the_callers_mistake(service, ids, tokens):
    with pytest.raises(ServiceError, match="token_ids: found") as refused:
        asyncio.run(service().lookup(api.LookupRequest(token_ids=ids, tokens=tokens), ""))
    assert refused.value.status_code == 400


def test_text_is_tokenised_and_decoded_beside_the_event_loop(service):
    made = service()
    (stored,) = ingest(made, api.Document(text="A text of some length. " * 20))
    assert asyncio.run(made.lookup(api.LookupRequest(token_ids=[7, 8], tokens=True), "")).tokens == ["\x07", "\x08"]
    assert asyncio.run(made.chunk("", stored.chunks[0])).text
    assert made.tokenizer.on_loop == [False] * 3


def test_a_key_named_twice_is_deleted_once(service):
    made = service()
    (stored,) = ingest(made)
    key = stored.chunks[0]
    asyncio.run(made.delete(api.KeysRequest(keys=[key, key]), ""))
    assert made._directory.asked[-1][0] == "delete" and made._directory.asked[-1][2] == [key]


def test_statistics_count_one_part_of_the_cache_and_all_requests_of_the_key(service):
    made = service()
    ingest(made, salt="key.apart")
    made.keep_receipt("key", "request", {"blend": {"reused_tokens": 5}})
    apart, whole = (asyncio.run(made.statistics(salt, "key")) for salt in ("key.apart", "key"))
    assert (apart.chunks, whole.chunks) == (3, 0)
    assert apart.requests == whole.requests == {"requests": 1, "reused_tokens": 5}

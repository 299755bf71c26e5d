"""The cache behind the routes of `/ucm/v1`: what is stored, for whom, and how much of a prompt it would cover."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable
from typing import Any

import numpy as np
from ray.exceptions import RayError

from actors.chunk_directory import connect_directory, directory_name, start_directory
from ucm_ray.blend.analyzer import ChunkAnalyzer
from ucm_ray.blend.sink import sink_tokens
from ucm_ray.config import Settings
from ucm_ray.integration.vllm.controls import SWITCHED_OFF
from ucm_ray.keys import Namespace, chunk_key
from ucm_ray.serve import api
from ucm_ray.serve.directory_copy import DirectoryCopy
from ucm_ray.serve.errors import ServiceError, bad_request, not_found
from ucm_ray.serve.metrics import ServiceMetrics
from ucm_ray.serve.receipts import ReceiptBook
from ucm_ray.serve.residency import Chunks, PromptChunk, Residency
from ucm_ray.serve.routing_hint import RoutingHint
from ucm_ray.serve.tokenizer import PromptTokenizer

logger = logging.getLogger(__name__)

_DIRECTORY_TIMEOUT_S = 10.0
_STORED_TIMEOUT_S = 60.0
_READ_AGAIN_S = 0.5  # beyond store.refresh_s: an engine has to read the list of stored chunks, too
_PARALLEL_INGESTS = 4
_KEPT_CALLERS = 10_000


class CacheService:
    """One per ingress replica. `engines` is the handle of the engine deployment.

    Every method takes the caller's `salt` and sees that salt's namespace only.
    """

    def __init__(self, settings: Settings, engines: Any, tokenizer: PromptTokenizer):
        self.settings, self._engines, self.tokenizer = settings, engines, tokenizer
        self._store = settings.connector_config() | {"world_size": settings.engine.tensor_parallel_size}
        self._directory = start_directory(self._store, settings.service.directory_max_chunks)
        self.residency = Residency(settings.store.cache_capacity_bytes * settings.engine.tensor_parallel_size)
        self.copy = DirectoryCopy(self._connect, settings.blend.anchor_tokens, self.residency)
        self.metrics = ServiceMetrics()
        self.receipts = ReceiptBook(settings.service.kept_receipts)
        self._analyzer = ChunkAnalyzer(settings.blend.blend_chunk_size, settings.blend.min_match_ratio,
                                       settings.blend.anchor_tokens)
        self._engine: dict[str, Any] | None = None
        self._sink: list[int] = []  # known with the engine
        self._meeting: asyncio.Task[Any] | None = None
        self._totals: OrderedDict[str, dict[str, float]] = OrderedDict()
        self._ingests = asyncio.Semaphore(_PARALLEL_INGESTS)
        self._prefill_tokens_s: float | None = None

    async def engine(self) -> dict[str, Any]:
        """What `UcmLLMServer.describe` says. Waits for an engine the first time."""
        if self._engine is None:
            engine = await self._engines.describe.remote()
            self._sink = sink_tokens(self.tokenizer, engine["max_model_len"])
            self._engine = engine
        return self._engine

    async def namespace(self, salt: str) -> str:
        """Hex name of a salt's namespace. Waits for an engine the first time."""
        return Namespace.from_dict((await self.engine())["namespace"] | {"salt": salt}).hex

    def known_namespace(self, salt: str) -> str | None:
        """As `namespace`, without waiting: None before an engine has been heard of."""
        return Namespace.from_dict(self._engine["namespace"] | {"salt": salt}).hex if self._engine else None

    # ingest

    async def ingest(self, documents: list[api.Document], salt: str, pin: bool) -> list[api.IngestedDocument]:
        """Compute and store documents; those stored already cost a look-up."""
        if not self.settings.blend.enabled:
            raise ServiceError(409, "documents cannot be stored: this service's configuration says blend.enabled: "
                                    "false, expected true")
        namespace = await self.namespace(salt)
        texts = [await asyncio.to_thread(self._document_ids, document, index)
                 for index, document in enumerate(documents)]
        done = await asyncio.gather(*(self._ingest_one(ids, namespace, salt) for ids in texts))
        if pin:
            await self._ask(self._directory.pin.remote(namespace, [key for one in done for key in one.chunks], True))
        return list(done)

    def _document_ids(self, document: api.Document, index: int) -> list[int]:
        ids = document.token_ids if document.token_ids is not None else self.tokenizer.text(document.text)
        where = f"documents.{index}"
        if not ids:
            raise bad_request(f"{where}: found a text without tokens", where)
        self._check_ids(ids, f"{where}.token_ids")
        return ids

    def _check_ids(self, ids: list[int], where: str) -> None:
        if min(ids) < 0 or max(ids) >= self.tokenizer.vocabulary_size:
            raise bad_request(f"{where}: found {min(ids)} to {max(ids)}, expected 0 to "
                              f"{self.tokenizer.vocabulary_size - 1}", where)

    async def _ingest_one(self, ids: list[int], namespace: str, salt: str) -> api.IngestedDocument:
        started_s = time.perf_counter()
        size = self.settings.blend.blend_chunk_size
        keys = [chunk_key(namespace, ids[start:start + size]) for start in range(0, len(ids), size)]
        # the directory itself: our copy of it may still list what has just been deleted
        owners = await self._ask(self._directory.owners.remote(namespace, keys))
        missing = [key for key, nodes in zip(keys, owners, strict=True) if not nodes]
        if missing:
            async with self._ingests:
                await self._compute_and_store(ids, keys, namespace, salt)
            self.metrics.ingested_tokens.inc(len(ids))
        records = {key: await self._ask(self._directory.chunk.remote(namespace, key)) for key in dict.fromkeys(keys)}
        known = [record for record in records.values() if record is not None]
        lost = len(records) - len(known)
        if lost:
            raise ServiceError(507, f"{lost} of {len(records)} chunks could not be stored: the store is full or slow")
        return api.IngestedDocument(
            id=next(record["document"] or record["key"] for record in known), num_tokens=len(ids),
            num_chunks=len(keys), num_bytes=sum(record["num_bytes"] for record in known), new_chunks=len(set(missing)),
            chunks=keys, seconds=time.perf_counter() - started_s)

    async def _compute_and_store(self, ids: list[int], keys: list[str], namespace: str, salt: str) -> None:
        size = self.settings.blend.blend_chunk_size
        # whole chunks per part, so that a long document's keys are those of its text alone
        room = (self._engine["max_model_len"] - len(self._sink) - 1) // size * size
        if room < size:
            raise ServiceError(500, f"max_model_len {self._engine['max_model_len']} leaves no room for a chunk "
                                    f"behind the sink passage of {len(self._sink)} tokens")
        for start in range(0, len(ids), room):
            await self._compute(ids[start:start + room], salt)
        if await self._stored(namespace, keys, self.settings.store.refresh_s + _READ_AGAIN_S):
            return
        # an engine saves nothing that it takes for stored, and hears of a deletion only after store.refresh_s
        stored = self.copy.index(namespace).contains(keys)
        for start in range(0, len(ids), room):
            if not stored[start // size:(start + room) // size].all():
                await self._compute(ids[start:start + room], salt)
        await self._stored(namespace, keys, _STORED_TIMEOUT_S)

    async def _compute(self, ids: list[int], salt: str) -> None:
        params = {"ucm": {"ingest_from": len(self._sink), "blend": False, "save": True}}
        try:
            answer = await self._engines.ingest.remote([*self._sink, *ids], params, salt)
        except ValueError as error:
            raise bad_request(f"the engine refused the document: {error}", "documents") from error
        blend = answer["receipt"].get("blend")
        reason = blend["reason"] if blend else "it gave no receipt"
        if reason not in ("", SWITCHED_OFF):
            raise ServiceError(409, f"documents cannot be stored, the engine does not blend: {reason}")
        rate = len(ids) / max(answer["seconds"], 1e-6)
        self._prefill_tokens_s = rate if self._prefill_tokens_s is None else 0.8 * self._prefill_tokens_s + 0.2 * rate

    async def _stored(self, namespace: str, keys: list[str], timeout_s: float) -> bool:
        """Wait until the directory has heard of all keys: KV is written in the background. False if it has not."""
        deadline_s = time.monotonic() + timeout_s
        while not self.copy.index(namespace).contains(keys).all():
            if time.monotonic() > deadline_s:
                return False
            await asyncio.sleep(0.02)
        return True

    # look-up

    async def lookup(self, request: api.LookupRequest, salt: str) -> api.LookupResponse:
        ids = await self._prompt_ids(request)
        namespace = await self.namespace(salt)
        chunks = await asyncio.to_thread(self._analyzer.analyze, ids, self.copy.index(namespace))
        budget = self.settings.blend.budget if request.budget is None else request.budget
        matched = [chunk for chunk in chunks if chunk.matched]
        reusable = sum(chunk.num_tokens - len(chunk.mismatched) for chunk in matched)
        recomputed = int(budget * reusable)
        saved = reusable - recomputed
        return api.LookupResponse(
            prompt_tokens=len(ids), reusable_tokens=reusable, recomputed_tokens=recomputed,
            computed_tokens=len(ids) - reusable, estimated_saving=saved / len(ids),
            estimated_saving_s=saved / self._prefill_tokens_s if self._prefill_tokens_s else None,
            spans=[_span(chunk) for chunk in chunks],
            tokens=await asyncio.to_thread(self.tokenizer.pieces, ids) if request.tokens else None)

    async def _prompt_ids(self, request: api.LookupRequest) -> list[int]:
        if request.token_ids is not None:
            self._check_ids(request.token_ids, "token_ids")
            return request.token_ids
        payload = {"messages": request.messages} if request.messages is not None else {"prompt": request.prompt}
        ids = await self.tokenizer.prompt(payload | {"model": self.settings.service.model_id})
        if not ids:
            raise bad_request("messages: only text contents can be looked up", "messages")
        return ids

    # routing

    async def routing_hint(self, ids: list[int], salt: str) -> RoutingHint:
        """What the router needs to know of a prompt; without chunks until an engine has been heard of."""
        namespace = self.known_namespace(salt)
        if namespace is None:
            self._meet_engine()
            return RoutingHint([], [], self.residency)
        chunks = await asyncio.to_thread(prompt_chunks, np.asarray(ids, np.int32), namespace, self.copy, self._analyzer,
                                         self.settings.blend.blend_chunk_size, self._engine["token_bytes"])
        return RoutingHint(*chunks, self.residency)

    def _meet_engine(self) -> None:
        """Ask who the engine is, for later prompts; this one does not wait."""
        if self._meeting is None or self._meeting.done():
            self._meeting = asyncio.create_task(self._try_engine())

    async def _try_engine(self) -> None:
        try:
            await self.engine()
        except Exception as error:  # no replica, or one that just died: the next prompt asks again
            logger.info("no engine says who it is: %s", type(error).__name__)

    # listing and management

    async def chunks(self, salt: str, offset: int, limit: int, document: str | None) -> api.ChunkPage:
        namespace = await self.namespace(salt)
        total, page = await self._ask(self._directory.chunks.remote(namespace, offset, limit, document))
        return api.ChunkPage(total=total, offset=offset, data=page)

    async def documents(self, salt: str, offset: int, limit: int) -> api.DocumentPage:
        namespace = await self.namespace(salt)
        total, page = await self._ask(self._directory.documents.remote(namespace, offset, limit))
        return api.DocumentPage(total=total, offset=offset, data=page)

    async def chunk(self, salt: str, key: str) -> api.ChunkDetail:
        found = await self._ask(self._directory.chunk.remote(await self.namespace(salt), key))
        if found is None:
            raise not_found(f"chunk {key[:64]!r} is not stored", "key")
        pieces = await asyncio.to_thread(self.tokenizer.pieces, found["token_ids"])
        return api.ChunkDetail(**found, text="".join(pieces))

    async def pin(self, request: api.PinRequest, salt: str) -> api.Affected:
        namespace, keys = await self._known_keys(request, salt)
        return api.Affected(chunks=await self._ask(self._directory.pin.remote(namespace, keys, request.pinned)))

    async def delete(self, request: api.KeysRequest, salt: str) -> api.Affected:
        namespace, keys = await self._known_keys(request, salt)
        return api.Affected(chunks=await self._ask(self._directory.delete.remote(namespace, keys)))

    async def clear(self, salt: str) -> api.Affected:
        return api.Affected(chunks=await self._ask(self._directory.clear.remote(await self.namespace(salt))))

    async def _known_keys(self, request: api.KeysRequest, salt: str) -> tuple[str, list[str]]:
        """Raises 404 naming the first key or document that is not stored."""
        namespace = await self.namespace(salt)
        keys = list(request.keys)
        for document in request.documents:
            total, page = await self._ask(self._directory.chunks.remote(namespace, 0, api.MAX_KEYS, document))
            if not total:
                raise not_found(f"document {document[:64]!r} is not stored", "documents")
            keys += [chunk["key"] for chunk in page]
        keys = list(dict.fromkeys(keys))
        for key, owners in zip(keys, await self._ask(self._directory.owners.remote(namespace, keys)), strict=True):
            if not owners:
                raise not_found(f"chunk {key[:64]!r} is not stored", "keys")
        return namespace, keys

    # receipts and statistics

    def keep_receipt(self, salt: str, request_id: str, receipt: dict[str, Any]) -> None:
        self.receipts.put(salt, request_id, receipt)
        self.metrics.observe(receipt)
        totals = self._totals.setdefault(salt, {"requests": 0})
        self._totals.move_to_end(salt)
        if len(self._totals) > _KEPT_CALLERS:
            self._totals.popitem(last=False)
        totals["requests"] += 1
        for name, value in (receipt.get("blend") or {}).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and name != "budget":
                totals[name] = totals.get(name, 0) + value

    async def statistics(self, salt: str, key_salt: str) -> api.Statistics:
        """Of the cache of `salt`, and of the requests of the key, which are counted under its own salt."""
        stats = await self._ask(self._directory.stats.remote(await self.namespace(salt)))
        own = {name: stats.pop(name) for name in ("chunks", "tokens", "bytes", "pinned")}
        return api.Statistics(**own, requests=self._totals.get(key_salt, {"requests": 0}),
                              directory=stats | {"synchronised": self.copy.synchronised})

    async def exposition(self) -> tuple[bytes, str]:
        """Metrics of this ingress replica and of the directory."""
        try:
            stats = await self._ask(self._directory.stats.remote())
        except ServiceError:
            self.metrics.directory_up.set(0)
        else:
            self.metrics.directory_up.set(1)
            self.metrics.stored_chunks.set(stats["chunks"])
            self.metrics.stored_bytes.set(stats["bytes"])
        await self._read_stores()
        return self.metrics.render()

    async def _read_stores(self) -> None:
        """Ask all replicas for their stores' numbers; who does not answer in time keeps its old ones."""
        try:
            answers = await self._engines.broadcast("store_stats").results_async(
                timeout_s=_DIRECTORY_TIMEOUT_S, return_exceptions=True)
        except Exception as error:  # no replica yet, or one that just died: metrics are no reason to fail
            logger.info("replicas do not tell their stores' numbers: %s", type(error).__name__)
            return
        for answer in answers:
            if isinstance(answer, dict):
                self.metrics.observe_store(answer["replica"], answer["numbers"])

    # the directory

    def _connect(self) -> Any:
        """The directory's handle, for the subscriber; started again should it have been removed for good."""
        try:
            return connect_directory(directory_name(self._store))
        except ValueError:
            self._directory = start_directory(self._store, self.settings.service.directory_max_chunks)
            return self._directory

    async def _ask(self, reference: Awaitable[Any]) -> Any:
        """The directory's answer; 503 while it restarts, which Ray does by itself."""
        try:
            return await asyncio.wait_for(_awaited(reference), _DIRECTORY_TIMEOUT_S)
        except (TimeoutError, RayError) as error:
            raise ServiceError(503, f"the chunk directory does not answer ({type(error).__name__}); it is being "
                                    "restarted, ask again in a moment") from error


def prompt_chunks(ids: np.ndarray, namespace: str, copy: DirectoryCopy, analyzer: ChunkAnalyzer,
                  chunk_tokens: int, token_bytes: int) -> tuple[Chunks, Chunks]:
    """What is stored of a prompt, int32 [tokens], and the rest of it under the keys it will be saved by."""
    matched = [chunk for chunk in analyzer.analyze(ids, copy.index(namespace)) if chunk.matched]
    stored = [PromptChunk(chunk.source_block_id, chunk.num_tokens, copy.num_bytes(namespace, chunk.source_block_id))
              for chunk in matched]
    known = np.zeros(len(ids), bool)
    for chunk in matched:
        known[chunk.start_idx:chunk.end_idx] = True
    fresh = [PromptChunk(chunk_key(namespace, ids[start:start + chunk_tokens]), chunk_tokens,
                         chunk_tokens * token_bytes)
             for start in range(0, len(ids) - chunk_tokens + 1, chunk_tokens)
             if not known[start:start + chunk_tokens].all()]
    return stored, fresh


async def _awaited(reference: Awaitable[Any]) -> Any:
    return await reference


def _span(chunk: Any) -> api.Span:
    return api.Span(start=chunk.start_idx, end=chunk.end_idx, match=chunk.chunk_type.value,
                    chunk=chunk.source_block_id, document=chunk.source_id, source_position=chunk.source_position,
                    mismatched=list(chunk.mismatched))

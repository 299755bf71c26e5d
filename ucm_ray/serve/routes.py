"""The routes beside OpenAI's: `/ucm/v1`, metrics and the playground; and receipts on every OpenAI answer."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi import Path as PathParameter
from pydantic import BaseModel
from ray.llm._internal.serve.core.configs.openai_api_models import (
    DetokenizeRequest,
    ErrorResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from ray.llm._internal.serve.core.ingress.ingress import OpenAiIngress
from ray.llm._internal.serve.utils.server_utils import get_serve_request_id
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response

from ucm_ray.bench.data import load_documents
from ucm_ray.serve import api
from ucm_ray.serve.auth import salt_of
from ucm_ray.serve.cache_service import CacheService
from ucm_ray.serve.errors import ServiceError, bad_request, error_body, not_found, unavailable
from ucm_ray.serve.receipts import split_receipt
from ucm_ray.serve.retrieval import RetrievalService
from ucm_ray.serve.routing_hint import RoutingHint, routing_hint
from ucm_ray.serve.tracing import RequestSpan, RequestTracer

logger = logging.getLogger(__name__)

PLAYGROUND = Path(__file__).parent / "playground.html"

Key = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{4,128}$")]
Offset = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(ge=1, le=api.MAX_PAGE)]
Salt = Annotated[str | None, Query(min_length=1, max_length=256, alias="cache_salt")]

ROUTES: dict[str, Callable[[FastAPI], Callable[..., Any]]] = {
    "ingest": lambda app: app.post("/ucm/v1/documents", response_model=api.IngestResponse, tags=["cache"]),
    "list_documents": lambda app: app.get("/ucm/v1/documents", response_model=api.DocumentPage, tags=["cache"]),
    "delete_document": lambda app: app.delete("/ucm/v1/documents/{key}", response_model=api.Affected, tags=["cache"]),
    "list_chunks": lambda app: app.get("/ucm/v1/chunks", response_model=api.ChunkPage, tags=["cache"]),
    "clear_chunks": lambda app: app.delete("/ucm/v1/chunks", response_model=api.Affected, tags=["cache"]),
    "inspect_chunk": lambda app: app.get("/ucm/v1/chunks/{key}", response_model=api.ChunkDetail, tags=["cache"]),
    "delete_chunk": lambda app: app.delete("/ucm/v1/chunks/{key}", response_model=api.Affected, tags=["cache"]),
    "pin_chunks": lambda app: app.post("/ucm/v1/pin", response_model=api.Affected, tags=["cache"]),
    "delete_chunks": lambda app: app.post("/ucm/v1/delete", response_model=api.Affected, tags=["cache"]),
    "lookup": lambda app: app.post("/ucm/v1/lookup", response_model=api.LookupResponse, tags=["cache"]),
    "retrieval_info": lambda app: app.get("/ucm/v1/retrieval", response_model=api.RetrievalInfo, tags=["retrieval"]),
    "upsert_blocks": lambda app: app.post("/ucm/v1/retrieval/blocks", response_model=api.BlocksResponse,
                                          tags=["retrieval"]),
    "top_k": lambda app: app.post("/ucm/v1/retrieval/top_k", response_model=api.TopKResponse, tags=["retrieval"]),
    "evict_blocks": lambda app: app.post("/ucm/v1/retrieval/evict", response_model=api.Evicted, tags=["retrieval"]),
    "read_receipt": lambda app: app.get("/ucm/v1/receipts/{request_id}", tags=["requests"]),
    "statistics": lambda app: app.get("/ucm/v1/stats", response_model=api.Statistics, tags=["requests"]),
    "metrics": lambda app: app.get("/metrics", include_in_schema=False),
    "playground": lambda app: app.get("/ucm/", include_in_schema=False),
    "examples": lambda app: app.get("/ucm/examples.json", include_in_schema=False),
}
# the page itself holds no data; it asks for a key where one is needed
OPEN_ROUTES = ("/ucm/", "/ucm/examples.json", "/docs", "/openapi.json")


class UcmRoutes(OpenAiIngress):
    """Mixin of the ingress; these are set by its constructor."""

    cache: CacheService
    retrieval: RetrievalService
    tracer: RequestTracer

    # documents and chunks

    async def ingest(self, body: api.IngestRequest, request: Request) -> api.IngestResponse:
        """Compute and store documents, so that the first prompt with them is blended already."""
        await self._get_model_id(body.model)
        salt = caller_salt(request, body.cache_salt)
        return api.IngestResponse(data=await self.cache.ingest(body.documents, salt, body.pin))

    async def list_documents(self, request: Request, offset: Offset = 0, limit: Limit = 100,
                             cache_salt: Salt = None) -> api.DocumentPage:
        """Ingested documents, by the sequence their KV was computed in."""
        return await self.cache.documents(caller_salt(request, cache_salt), offset, limit)

    async def delete_document(self, key: Key, request: Request, cache_salt: Salt = None) -> api.Affected:
        """Delete every chunk of a document."""
        return await self.cache.delete(api.KeysRequest(documents=[key]), caller_salt(request, cache_salt))

    async def list_chunks(self, request: Request, offset: Offset = 0, limit: Limit = 100,
                          document: Annotated[str | None, Query(max_length=128)] = None,
                          cache_salt: Salt = None) -> api.ChunkPage:
        """Stored chunks, all or those of one document."""
        return await self.cache.chunks(caller_salt(request, cache_salt), offset, limit, document)

    async def inspect_chunk(self, key: Key, request: Request, cache_salt: Salt = None) -> api.ChunkDetail:
        """One chunk with its tokens and text."""
        return await self.cache.chunk(caller_salt(request, cache_salt), key)

    async def delete_chunk(self, key: Key, request: Request, cache_salt: Salt = None) -> api.Affected:
        """Delete one chunk."""
        return await self.cache.delete(api.KeysRequest(keys=[key]), caller_salt(request, cache_salt))

    async def delete_chunks(self, body: api.KeysRequest, request: Request) -> api.Affected:
        """Delete many chunks or documents."""
        return await self.cache.delete(body, caller_salt(request, body.cache_salt))

    async def clear_chunks(self, request: Request, cache_salt: Salt = None) -> api.Affected:
        """Delete everything the caller has stored under one `cache_salt`, or without one."""
        return await self.cache.clear(caller_salt(request, cache_salt))

    async def pin_chunks(self, body: api.PinRequest, request: Request) -> api.Affected:
        """Pin or unpin chunks: pinned ones are never evicted for room."""
        return await self.cache.pin(body, caller_salt(request, body.cache_salt))

    async def lookup(self, body: api.LookupRequest, request: Request) -> api.LookupResponse:
        """What of a prompt would be reused, without running it."""
        await self._get_model_id(body.model)
        return await self.cache.lookup(body, caller_salt(request, body.cache_salt))

    # retrieval

    async def retrieval_info(self, request: Request, cache_salt: Salt = None) -> api.RetrievalInfo:
        """What blocks must look like, and how many the caller has stored."""
        return await self.retrieval.info(caller_salt(request, cache_salt))

    async def upsert_blocks(self, body: api.BlocksRequest, request: Request) -> api.BlocksResponse:
        """Store the block representations of a request or document, under a name."""
        return await self.retrieval.upsert(body, caller_salt(request, body.cache_salt))

    async def top_k(self, body: api.TopKRequest, request: Request) -> api.TopKResponse:
        """The blocks of a name that a query needs most."""
        return await self.retrieval.top_k(body, caller_salt(request, body.cache_salt))

    async def evict_blocks(self, body: api.NamesRequest, request: Request) -> api.Evicted:
        """Drop names with all their blocks."""
        return await self.retrieval.evict(body, caller_salt(request, body.cache_salt))

    # requests

    async def read_receipt(self, request_id: Annotated[str, PathParameter(max_length=256)],
                           request: Request) -> dict[str, Any]:
        """The receipt of one of the caller's last requests, by the `id` of its response."""
        salt = caller_salt(request)
        receipt = self.cache.receipts.get(salt, request_id) or await self._ask_peers(salt, request_id)
        if receipt is None:
            raise not_found(f"no receipt of a request {request_id!r}; it may be running, or too long ago", "request_id")
        return {"request_id": request_id, "ucm": receipt}

    async def statistics(self, request: Request, cache_salt: Salt = None) -> api.Statistics:
        """Numbers of the caller's cache, of the part of one `cache_salt` or without one, and of the key's requests."""
        return await self.cache.statistics(caller_salt(request, cache_salt), caller_salt(request))

    async def metrics(self) -> Response:
        """Prometheus metrics of this ingress replica."""
        body, content_type = await self.cache.exposition()
        return Response(body, media_type=content_type)

    async def playground(self) -> HTMLResponse:
        """The page to try it all by hand."""
        return HTMLResponse(PLAYGROUND.read_text(encoding="utf-8"))

    async def examples(self) -> list[dict[str, str]]:
        """Documents and questions for the page."""
        return [{"title": document.title, "text": document.text, "question": document.questions[0].question}
                for document in load_documents()]

    async def cache_call(self, route: str, arguments: dict[str, Any], api_key: str) -> tuple[int, Any]:
        """A route called over the handle, by `ucm_ray.Client.in_cluster`: `(status, answer or message)`."""
        service = self.cache.settings.service
        if route not in ROUTES:
            return 404, f"no route {route!r}"
        if service.api_keys and api_key not in service.api_keys:
            return 401, "Missing or unknown API key"
        caller = SimpleNamespace(state=SimpleNamespace(ucm_salt=salt_of(api_key) if service.api_keys else ""))
        try:
            answer = await getattr(self, route)(**arguments, request=caller)
        except ServiceError as error:
            return error.status_code, error.message
        return 200, answer.model_dump() if isinstance(answer, BaseModel) else answer

    async def local_receipt(self, salt: str, request_id: str) -> dict[str, Any] | None:
        """What this ingress replica knows; called by its peers."""
        return self.cache.receipts.get(salt, request_id)

    async def _ask_peers(self, salt: str, request_id: str) -> dict[str, Any] | None:
        if self.cache.settings.service.ingress_replicas == 1:
            return None
        from ray import serve

        context = serve.get_replica_context()
        handle = serve.get_deployment_handle(context.deployment, context.app_name)
        answers = await handle.broadcast("local_receipt", salt, request_id).results_async(
            timeout_s=2.0, return_exceptions=True)
        return next((answer for answer in answers if isinstance(answer, dict)), None)

    # OpenAI routes, and vLLM's two beside them

    async def tokenize(self, body: TokenizeCompletionRequest | TokenizeChatRequest, request: Request) -> Response:
        """Token ids of a text, or of messages under the chat template. Ray's route takes a text only."""
        return await super().tokenize(body, request)

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """The text of token ids. Ids that are none would end as an error inside the engine."""
        most = self.cache.tokenizer.vocabulary_size - 1
        if max(body.tokens, default=0) > most:
            raise bad_request(f"tokens: found {max(body.tokens)}, expected 0 to {most}", "tokens")
        return await super().detokenize(body, request)

    async def _get_response(self, *, body: Any, call_method: str,
                            raw_request: Request | None = None) -> AsyncGenerator[Any, None]:
        answers = super()._get_response
        if call_method not in ("chat", "completions"):
            async for answer in answers(body=body, call_method=call_method, raw_request=without_key(raw_request)):
                yield answer
            return
        only_ucm(body)
        request_id = get_serve_request_id()
        headers = raw_request.headers if raw_request is not None else {}
        with self.tracer.request(call_method, request_id, body.model, headers) as span:
            hint = await self._tokenise(body)
            with routing_hint(request_id, hint):
                stream = answers(body=body, call_method=call_method, raw_request=without_key(raw_request))
                async for answer in self._with_receipts(stream, caller_salt(raw_request), _wants_usage(body), span):
                    yield answer

    async def _tokenise(self, body: Any) -> RoutingHint | None:
        """Put the prompt's ids into the request, so that no engine tokenises again; what the router is told of them."""
        if getattr(body, "echo", False) or getattr(body, "prompt_embeds", None) is not None:
            return None
        if _is_ids(getattr(body, "prompt", None)):
            ids = body.prompt
            if min(ids) < 0 or max(ids) > api.MAX_INT32:
                raise bad_request(f"prompt: found token ids {min(ids)} to {max(ids)}, expected ids of the model's "
                                  "vocabulary", "prompt")
        else:
            ids = await self.cache.tokenizer.prompt(
                body.model_dump(exclude_unset=True, exclude={"kv_transfer_params"}))
        if not ids:
            return None
        if hasattr(body, "messages"):
            body.kv_transfer_params["prompt_token_ids"] = ids
        else:
            body.prompt = ids
        if self.cache.settings.service.router != "chunk_aware":
            return None
        return await self.cache.routing_hint(ids, body.cache_salt or "")

    async def _with_receipts(self, answers: AsyncIterator[Any], salt: str, wants_usage: bool,
                             span: RequestSpan) -> AsyncIterator[Any]:
        """Keep every receipt; take it out of streams that did not ask for usage; end broken streams with an error."""
        started = False

        def keep(request_id: str, receipt: dict[str, Any]) -> None:
            self.cache.keep_receipt(salt, request_id, receipt)
            span.keep(request_id, receipt)

        try:
            async for answer in answers:
                started = True
                if isinstance(answer, list) and all(isinstance(event, str) for event in answer):
                    answer = [_keep(event, keep, wants_usage) for event in answer]
                    answer = [event for event in answer if event]
                    if not answer:
                        continue
                elif isinstance(answer, ErrorResponse):
                    span.fail(answer.error.message)
                elif isinstance(getattr(answer, "kv_transfer_params", None), dict):
                    keep(answer.id, answer.kv_transfer_params.get("ucm") or {})
                yield answer
        except Exception as error:
            known = unavailable(error)
            if not started:
                raise (known or error) from None
            self.cache.metrics.stream_failures.inc()
            logger.warning("request %s: the stream broke: %s", get_serve_request_id(), type(error).__name__)
            status, message = (known.status_code, known.message) if known else (500, "the stream ended with an error")
            span.fail(message)
            yield [f"data: {json.dumps(error_body(status, message))}\n\n", "data: [DONE]\n\n"]


def caller_salt(request: Request | None, cache_salt: str | None = None) -> str:
    """The salt of the caller's key, divided by the caller's own `cache_salt`; as the OpenAI routes do it."""
    salt = getattr(request.state, "ucm_salt", "") if request is not None else ""
    if not cache_salt:
        return salt
    return f"{salt}.{cache_salt}" if salt else cache_salt


def only_ucm(body: Any) -> None:
    """Of `kv_transfer_params` a client sets our part only: the rest commands the engine's connectors.

    It is never left empty, since an empty one would let `vllm_xargs` take its place.
    """
    given = body.kv_transfer_params or {}
    if foreign := sorted(set(given) - {"ucm"}):
        raise bad_request(f"kv_transfer_params.{foreign[0]}: expected only 'ucm'", "kv_transfer_params")
    body.kv_transfer_params = {"ucm": given.get("ucm") or {}}


def without_key(request: Request | None) -> Request | None:
    """The same request without the caller's key: engines have no use for it."""
    if request is None:
        return None
    headers = [(name, value) for name, value in request.scope["headers"] if name.lower() != b"authorization"]
    return Request(request.scope | {"headers": Headers(raw=headers).raw}, request.receive)


def _keep(event: str, keep: Callable[[str, dict[str, Any]], None], wants_usage: bool) -> str:
    """The event as the client gets it, its receipt kept."""
    rest, request_id, receipt = split_receipt(event)
    if receipt is None:
        return event
    keep(request_id, receipt)
    return event if wants_usage else rest


def _wants_usage(body: Any) -> bool:
    options = getattr(body, "stream_options", None)
    return bool(options and options.include_usage)


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(item, int) for item in prompt)


__all__ = ["OPEN_ROUTES", "ROUTES", "ServiceError", "UcmRoutes"]

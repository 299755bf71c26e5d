"""The cache from Python: `Client` and `AsyncClient`, over HTTP or, inside the cluster, over the service's handle.

    with Client("http://127.0.0.1:8000", api_key="...") as client:
        client.ingest(["First document.", "Second document."])
        print(client.lookup(prompt="...").reusable_tokens)

Both have the same methods; those of `AsyncClient` are awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import httpx
from pydantic import BaseModel, TypeAdapter

from ucm_ray.serve import api

DEFAULT_URL = "http://127.0.0.1:8000"


class ClientError(RuntimeError):
    """The service refused a request or could not be reached; `status` is None in the latter case."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class _Call(NamedTuple):
    """One operation, for either way of sending it."""

    route: str  # name of the method of `ucm_ray.serve.routes.UcmRoutes`
    method: str
    path: str
    answer: Any
    body: BaseModel | None = None
    parameters: dict[str, Any] = {}
    path_parameters: dict[str, Any] = {}


class _Operations:
    """What can be asked. `_send` of the sub-class does it, now or as a coroutine."""

    def __init__(self, cache_salt: str | None):
        self._cache_salt = cache_salt

    def ingest(self, documents: Sequence[str | Sequence[int]], pin: bool = False) -> api.IngestResponse:
        """Compute and store documents (texts or token ids), exactly as prompts will contain them."""
        body = api.IngestRequest(documents=[_document(one) for one in documents], pin=pin, cache_salt=self._cache_salt)
        return self._send(_Call("ingest", "POST", "/ucm/v1/documents", api.IngestResponse, body))

    def lookup(self, prompt: str | None = None, *, messages: list[dict[str, Any]] | None = None,
               token_ids: Sequence[int] | None = None, budget: float | None = None,
               tokens: bool = False) -> api.LookupResponse:
        """What of a prompt would be reused, without running it."""
        body = api.LookupRequest(prompt=prompt, messages=messages, budget=budget, tokens=tokens,
                                 token_ids=None if token_ids is None else list(token_ids), cache_salt=self._cache_salt)
        return self._send(_Call("lookup", "POST", "/ucm/v1/lookup", api.LookupResponse, body))

    def documents(self, offset: int = 0, limit: int = 100) -> api.DocumentPage:
        """One page of the ingested documents."""
        return self._send(_Call("list_documents", "GET", "/ucm/v1/documents", api.DocumentPage,
                                parameters=self._salted(offset=offset, limit=limit)))

    def chunks(self, document: str | None = None, offset: int = 0, limit: int = 100) -> api.ChunkPage:
        """One page of the stored chunks, of all or of one document."""
        return self._send(_Call("list_chunks", "GET", "/ucm/v1/chunks", api.ChunkPage,
                                parameters=self._salted(offset=offset, limit=limit, document=document)))

    def chunk(self, key: str) -> api.ChunkDetail:
        """One chunk with its tokens and text."""
        return self._send(_Call("inspect_chunk", "GET", f"/ucm/v1/chunks/{key}", api.ChunkDetail,
                                parameters=self._salted(), path_parameters={"key": key}))

    def delete(self, keys: Sequence[str] = (), documents: Sequence[str] = ()) -> api.Affected:
        """Delete chunks by key, or all chunks of documents."""
        body = api.KeysRequest(keys=list(keys), documents=list(documents), cache_salt=self._cache_salt)
        return self._send(_Call("delete_chunks", "POST", "/ucm/v1/delete", api.Affected, body))

    def clear(self) -> api.Affected:
        """Delete everything this client's key has stored under this client's `cache_salt`, or without one."""
        return self._send(_Call("clear_chunks", "DELETE", "/ucm/v1/chunks", api.Affected, parameters=self._salted()))

    def pin(self, keys: Sequence[str] = (), documents: Sequence[str] = (), pinned: bool = True) -> api.Affected:
        """Keep chunks or documents whatever else needs room; `pinned=False` lets them go again."""
        body = api.PinRequest(keys=list(keys), documents=list(documents), pinned=pinned, cache_salt=self._cache_salt)
        return self._send(_Call("pin_chunks", "POST", "/ucm/v1/pin", api.Affected, body))

    def retrieval(self) -> api.RetrievalInfo:
        """What blocks must look like, and how many this key has stored."""
        return self._send(_Call("retrieval_info", "GET", "/ucm/v1/retrieval", api.RetrievalInfo,
                                parameters=self._salted()))

    def upsert_blocks(self, name: str, blocks: Any, append: bool = False) -> api.BlocksResponse:
        """Store block representations under a name.

        Args:
            blocks: `[num_stats, num_layers, num_blocks, num_kv_heads, head_dim]`, as `BlockRepresentation.compute`
                returns them: a tensor on the CPU, an array or nested lists.
        """
        body = api.BlocksRequest(name=name, blocks=api.Tensor.of(blocks), append=append, cache_salt=self._cache_salt)
        return self._send(_Call("upsert_blocks", "POST", "/ucm/v1/retrieval/blocks", api.BlocksResponse, body))

    def top_k(self, name: str, query: Any, k: int, *, start: int = 0, stop: int | None = None,
              per_head: bool = False) -> api.TopKResponse:
        """The blocks of a name that a query `[num_layers, num_heads, head_dim]` needs most."""
        body = api.TopKRequest(name=name, query=api.Tensor.of(query), k=k, start=start, stop=stop, per_head=per_head,
                               cache_salt=self._cache_salt)
        return self._send(_Call("top_k", "POST", "/ucm/v1/retrieval/top_k", api.TopKResponse, body))

    def evict_blocks(self, names: Sequence[str]) -> api.Evicted:
        """Drop names with all their blocks."""
        body = api.NamesRequest(names=list(names), cache_salt=self._cache_salt)
        return self._send(_Call("evict_blocks", "POST", "/ucm/v1/retrieval/evict", api.Evicted, body))

    def stats(self) -> api.Statistics:
        """Numbers of this key's cache, of the part of this client's `cache_salt`, and of the key's requests."""
        return self._send(_Call("statistics", "GET", "/ucm/v1/stats", api.Statistics, parameters=self._salted()))

    def receipt(self, request_id: str) -> dict[str, Any]:
        """The receipt of a request, by the `id` of its response."""
        return self._send(_Call("read_receipt", "GET", f"/ucm/v1/receipts/{request_id}", dict[str, Any],
                                path_parameters={"request_id": request_id}))

    def _salted(self, **parameters: Any) -> dict[str, Any]:
        given = parameters | {"cache_salt": self._cache_salt}
        return {name: value for name, value in given.items() if value is not None}

    def _send(self, call: _Call) -> Any:
        raise NotImplementedError


class Client(_Operations):
    """Blocking. `cache_salt` divides the key's cache further; `handle` of `in_cluster` replaces HTTP."""

    def __init__(self, base_url: str = DEFAULT_URL, api_key: str | None = None, cache_salt: str | None = None,
                 timeout_s: float = 300.0, handle: Any = None):
        super().__init__(cache_salt)
        self._handle, self._api_key, self._timeout_s = handle, api_key, timeout_s
        self._http = httpx.Client(base_url=base_url, headers=_headers(api_key), timeout=timeout_s)

    @classmethod
    def in_cluster(cls, app_name: str = "default", **options: Any) -> Client:
        """For code that runs in the service's Ray cluster: calls go to the ingress without HTTP."""
        return cls(handle=_app_handle(app_name), **options)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _send(self, call: _Call) -> Any:
        if self._handle is not None:
            answer = self._handle.cache_call.remote(call.route, _arguments(call), self._api_key or "")
            return _unpacked(call, answer.result(timeout_s=self._timeout_s))
        try:
            return _answer(call, self._http.request(call.method, call.path, **_request(call)))
        except httpx.TransportError as error:
            raise _unreachable(self._http.base_url, error) from error


class AsyncClient(_Operations):
    """The same for asyncio."""

    def __init__(self, base_url: str = DEFAULT_URL, api_key: str | None = None, cache_salt: str | None = None,
                 timeout_s: float = 300.0, handle: Any = None):
        super().__init__(cache_salt)
        self._handle, self._api_key, self._timeout_s = handle, api_key, timeout_s
        self._http = httpx.AsyncClient(base_url=base_url, headers=_headers(api_key), timeout=timeout_s)

    @classmethod
    def in_cluster(cls, app_name: str = "default", **options: Any) -> AsyncClient:
        """For code that runs in the service's Ray cluster: calls go to the ingress without HTTP."""
        return cls(handle=_app_handle(app_name), **options)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self.close()

    async def _send(self, call: _Call) -> Any:
        if self._handle is not None:
            answer = self._handle.cache_call.remote(call.route, _arguments(call), self._api_key or "")
            return _unpacked(call, await asyncio.wait_for(answer, self._timeout_s))
        try:
            return _answer(call, await self._http.request(call.method, call.path, **_request(call)))
        except httpx.TransportError as error:
            raise _unreachable(self._http.base_url, error) from error


def _document(document: str | Sequence[int]) -> api.Document:
    return api.Document(text=document) if isinstance(document, str) else api.Document(token_ids=list(document))


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def _request(call: _Call) -> dict[str, Any]:
    body = None if call.body is None else call.body.model_dump(exclude_none=True)
    return {"params": call.parameters} | ({} if body is None else {"json": body})


def _arguments(call: _Call) -> dict[str, Any]:
    return {**call.parameters, **call.path_parameters} | ({} if call.body is None else {"body": call.body})


def _answer(call: _Call, response: httpx.Response) -> Any:
    if response.is_success:
        return _typed(call, response.json())
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    raise ClientError(f"{response.status_code}: {message}", response.status_code)


def _unpacked(call: _Call, answer: tuple[int, Any]) -> Any:
    status, content = answer
    if status != 200:
        raise ClientError(f"{status}: {content}", status)
    return _typed(call, content)


def _typed(call: _Call, content: Any) -> Any:
    return TypeAdapter(call.answer).validate_python(content)


def _unreachable(base_url: Any, error: Exception) -> ClientError:
    return ClientError(f"the service at {base_url} cannot be reached ({type(error).__name__}); "
                       "start it with 'make serve' or give its address")


def _app_handle(app_name: str) -> Any:
    from ray import serve

    return serve.get_app_handle(app_name)

"""Retrieval behind `/ucm/v1/retrieval`: blocks by name, scored by the shards of a pool."""

from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError

from actors.retrieval_documents import Refused, connect_documents
from actors.retrieval_pool import PoolSettings, end_pools, own_namespace
from ucm_ray.config import Settings
from ucm_ray.retrieval.packed import Geometry
from ucm_ray.serve import api
from ucm_ray.serve.cache_service import CacheService
from ucm_ray.serve.errors import ServiceError

# the first call starts the pool
_TIMEOUT_S = 90.0


class RetrievalService:
    """One per ingress replica; what is stored belongs to an actor that all of them share."""

    def __init__(self, settings: Settings, cache: CacheService):
        self._settings, self._cache = settings, cache
        self._actor: Any = None

    async def upsert(self, body: api.BlocksRequest, salt: str) -> api.BlocksResponse:
        blocks = await self._ask("upsert", salt, body.name, body.blocks.array(), body.append)
        return api.BlocksResponse(name=body.name, blocks=blocks)

    async def top_k(self, body: api.TopKRequest, salt: str) -> api.TopKResponse:
        found = await self._ask("top_k", salt, body.name, body.query.array(), body.k, body.start, body.stop,
                                body.per_head)
        return api.TopKResponse(name=body.name, **found)

    async def evict(self, body: api.NamesRequest, salt: str) -> api.Evicted:
        names, blocks = await self._ask("evict", salt, body.names)
        return api.Evicted(names=names, blocks=blocks)

    async def info(self, salt: str) -> api.RetrievalInfo:
        return api.RetrievalInfo(**await self._ask("info", salt))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """The owner's answer. Raises `ServiceError`: what the owner refused, or 503 while there is none."""
        if self._settings.retrieval.backend != "ray":
            raise ServiceError(503, "no retrieval pool runs in this service: its configuration says "
                                    f"retrieval.backend: {self._settings.retrieval.backend}, expected ray")
        if self._actor is None:
            self._actor = await self._connect()
        try:
            return await asyncio.wait_for(_awaited(getattr(self._actor, method).remote(*arguments)), _TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, Refused):
                raise ServiceError(error.cause.status, error.cause.message) from None
            raise
        except (TimeoutError, RayError) as error:
            self._actor = None
            raise ServiceError(503, f"the retrieval pool does not answer ({type(error).__name__}); it is being "
                                    "restarted, ask again in a moment") from error

    async def _connect(self) -> Any:
        settings = self._settings.retrieval
        sizes = dict(re.findall(r"(\w+)=(\d+)", (await self._cache.engine())["namespace"]["kv_layout"]))
        geometry = Geometry(int(sizes["layers"]), int(sizes["kv_heads"]), int(sizes["head_dim"]),
                            self._settings.esa.representation, settings.dtype)
        # the GPU, or the share of it that `num_gpus` asks for, is the engines' shards': there is no second one
        pool = PoolSettings(shards=settings.shards, min_shards=settings.shards, max_shards=settings.max_shards,
                            autoscale=settings.max_shards > settings.shards, capacity_bytes=settings.capacity_bytes,
                            num_cpus=settings.num_cpus, device="cpu")
        app = serve.get_replica_context().app_name
        # one pool a model: blocks of two models have nothing to say to each other
        namespace = own_namespace(settings.namespace, app, "http", await self._cache.namespace(""), geometry,
                                  asdict(pool))

        def connect() -> Any:
            end_pools(settings.namespace, app, "http", keep=namespace)
            return connect_documents("retrieval-http", namespace, geometry, pool)

        return await asyncio.to_thread(connect)


async def _awaited(reference: Any) -> Any:
    return await reference

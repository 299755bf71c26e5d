"""The engine replica: Ray Serve LLM's server plus receipts on every answer, ingest, and what the ingress must know."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest, ErrorResponse
from ray.llm._internal.serve.core.server.llm_server import LLMServer

from actors.peer_store import start_source
from actors.retrieval_pool import PoolSettings, end_pools, own_namespace, start_pool
from ucm_ray.serve.receipts import append_receipt, no_receipt, record_receipts

_KEPT_RECEIPTS = 4096


class UcmLLMServer(LLMServer):
    """One engine. Everything here runs beside the engine's step, in the replica's own process."""

    async def start(self) -> None:
        context = serve.get_replica_context()
        self._replica = context.replica_id.unique_id
        self._name_engine()
        config = self._llm_config
        config.update_engine_kwargs(**await asyncio.to_thread(
            start_retrieval, config.engine_kwargs, config.model_loading_config.model_source, context.app_name))
        await super().start()
        client = self.engine._engine_client
        if self.engine._oai_serving_tokenization is None:
            # Ray 2.60 looks for it under the name of earlier vLLMs, and refuses /tokenize and /detokenize
            self.engine._oai_serving_tokenization = self.engine._app_state.serving_tokenization
        self._receipts: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._recorded = client.vllm_config.kv_transfer_config is not None
        client.generate = record_receipts(client.generate, self._put_receipt)
        if self._recorded:
            self._start_source(client.vllm_config)

    def _name_engine(self) -> None:
        """The engine is called as the replica is: by that, the router knows who computed a stored chunk."""
        transfer = self._llm_config.engine_kwargs.get("kv_transfer_config")
        if transfer:
            self._llm_config.update_engine_kwargs(kv_transfer_config={**transfer, "engine_id": self._replica})

    def _start_source(self, config: Any) -> None:
        """Where every node has its own folder, this node's has to be served to the others."""
        store = config.kv_transfer_config.kv_connector_extra_config
        if "Peers" in store.get("store_pipeline", ""):
            world_size = config.parallel_config.tensor_parallel_size
            start_source(dict(store) | {"world_size": world_size}, ray.get_runtime_context().get_node_id())

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return self._with_receipts(await super().chat(request, raw_request_info))

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncIterator[Any]:
        return self._with_receipts(await super().completions(request, raw_request_info))

    async def describe(self) -> dict[str, Any]:
        """What the ingress needs to know of the engine: the namespace and size of its KV, and limits."""
        from ucm_ray.integration.vllm.settings import namespace_of

        config = self.engine._engine_client.vllm_config
        model, parallel = config.model_config, config.parallel_config
        heads = model.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
        return {
            "namespace": namespace_of(config).to_dict(),
            "max_model_len": model.max_model_len,
            "token_bytes": 2 * model.get_num_layers(parallel) * heads * model.get_head_size() * model.dtype.itemsize,
            "block_size": config.cache_config.block_size,
            "pid": os.getpid(),
        }

    async def store_stats(self) -> dict[str, Any]:
        """Numbers of the stores of all ranks, added up, as `{"Cache.hits": ...}`, and the replica's id."""
        totals: dict[str, float] = {}
        for rank in await self.engine._engine_client.collective_rpc("ucm_store_stats", timeout=5.0):
            for stage, numbers in rank.items():
                for name, value in (numbers.items() if isinstance(numbers, dict) else ()):
                    totals[f"{stage}.{name}"] = totals.get(f"{stage}.{name}", 0) + value
        return {"replica": self._replica, "numbers": totals}

    async def ingest(self, token_ids: list[int], kv_transfer_params: dict[str, Any], salt: str) -> dict[str, Any]:
        """Compute a sequence once so that the connector stores its KV; the engine's receipt and the time it took.

        Raises ValueError with the engine's words when it refuses the sequence.
        """
        started_s = time.perf_counter()
        request = CompletionRequest(
            model=self._llm_config.model_id, prompt=token_ids, max_tokens=1, temperature=0.0,
            cache_salt=salt or None, kv_transfer_params=kv_transfer_params, request_id=f"ingest-{uuid.uuid4().hex}",
        )
        async for answer in self.engine.completions(request):
            if isinstance(answer, ErrorResponse):
                raise ValueError(answer.error.message)
            receipt = (answer.kv_transfer_params or {}).get("ucm", {})
        return {"receipt": receipt, "seconds": time.perf_counter() - started_s}

    async def _with_receipts(self, answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for answer in append_receipt(answers, self._take_receipt):
            if hasattr(answer, "kv_transfer_params") and hasattr(answer, "usage"):
                receipt = self._take_receipt(answer.id, answer.usage.prompt_tokens if answer.usage else 0)
                answer.kv_transfer_params = (answer.kv_transfer_params or {}) | {"ucm": receipt}
            yield answer

    def _put_receipt(self, response_id: str, receipt: dict[str, Any]) -> None:
        self._receipts[response_id] = receipt
        while len(self._receipts) > _KEPT_RECEIPTS:
            self._receipts.popitem(last=False)

    def _take_receipt(self, response_id: str, prompt_tokens: int = 0) -> dict[str, Any]:
        receipt = self._receipts.pop(response_id, None)
        if receipt is not None:
            return receipt | {"replica": self._replica}
        reason = "the engine gave no receipt" if self._recorded else "blend and ESA are off"
        return no_receipt(reason, prompt_tokens)


def start_retrieval(engine_kwargs: dict[str, Any], model: Any, app: str) -> dict[str, Any]:
    """The cluster's retrieval shards, where `retrieval.backend` is `ray`; returns the engine arguments that name them.

    Pools that the application has left from another model or other settings end: shards keep the geometry of their
    first write and would refuse this engine's blocks for ever.
    """
    transfer = engine_kwargs.get("kv_transfer_config") or {}
    extra = transfer.get("kv_connector_extra_config", {})
    retrieval = extra.get("retrieval") or {}
    if retrieval.get("backend") != "ray":
        return {}
    esa = extra.get("ucm_sparse_config", {}).get("ESA", {})
    geometry = {"model": _fingerprint(model), "representation": esa.get("representation"),
                "dtype": esa.get("retrieval_dtype"), "tensor_parallel_size": engine_kwargs.get("tensor_parallel_size"),
                "hf_overrides": engine_kwargs.get("hf_overrides")}
    namespace = own_namespace(retrieval["namespace"], app, "engine", geometry, retrieval)
    end_pools(retrieval["namespace"], app, "engine", keep=namespace)
    shards, most = retrieval["shards"], retrieval["max_shards"]
    start_pool(PoolSettings(
        shards=shards, min_shards=shards, max_shards=most, autoscale=most > shards,
        capacity_bytes=retrieval["capacity_bytes"], num_cpus=retrieval["num_cpus"], num_gpus=retrieval["num_gpus"],
    ), namespace=namespace)
    named = {**extra, "retrieval": {**retrieval, "namespace": namespace}}
    return {"kv_transfer_config": {**transfer, "kv_connector_extra_config": named}}


def _fingerprint(model: Any) -> list[str]:
    """A model's name and, of a folder, what decides its shape: another one may come to lie there."""
    config = Path(str(model)) / "config.json"
    return [str(model), hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""]

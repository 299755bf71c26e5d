"""Worker side of ESA: joins vLLM's batch to `ucm_ray.sparse.ESA` and runs the kernels over what it selects.

Nothing here raises into the engine: on any error ESA switches itself off for the rest of the process, and every row is
read densely, which is always right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig

from ucm_ray.integration.vllm import esa_backend
from ucm_ray.integration.vllm.esa_kernels import kernel_for
from ucm_ray.integration.vllm.esa_meta import EsaReport, EsaRequestStep, EsaStepMeta
from ucm_ray.integration.vllm.esa_scheduler import unsupported
from ucm_ray.integration.vllm.paged_kv import PagedKV, paged_kv_for
from ucm_ray.integration.vllm.plugin import root_module
from ucm_ray.integration.vllm.support import own_layers
from ucm_ray.retrieval.packed import Geometry
from ucm_ray.retrieval.retriever import Retriever
from ucm_ray.retrieval.worker import RetrievalWorker
from ucm_ray.sparse.base import UcmSparseRole
from ucm_ray.sparse.config import EsaConfig
from ucm_ray.sparse.esa import ESA, EsaMetadata, SparseView
from ucm_ray.sparse.request import ReqMeta

logger = logging.getLogger("ucm_ray.sparse")


@dataclass
class _Request:
    """A tracked request as the worker sees it; blocks in units of the kernel's."""

    num_prompt_tokens: int
    ratio: float
    first_sparse: int
    token_ids: np.ndarray | None = None  # int32, the first ones known, with room for those to come
    blocks: list[int] = field(default_factory=list)

    def put(self, position: int, token_id: int) -> None:
        """A token that is decoded."""
        if position >= len(self.token_ids):
            self.token_ids = np.concatenate([self.token_ids, np.zeros(max(64, position // 4), np.int32)])
        self.token_ids[position] = token_id


class EsaRuntime:
    """One per rank. Call order per step: `begin_step` before the forward, the attention layers, `end_step` after it."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        esa_settings: dict[str, Any],
        kv_caches: dict[str, torch.Tensor],
        paged: PagedKV | None = None,
        retrieval: dict[str, Any] | None = None,
    ) -> None:
        layers = own_layers(vllm_config, kv_caches)
        self.disabled = unsupported(vllm_config) or unsupported_layers(layers)
        self._told = False  # the scheduler knows that ESA is off
        self._requests: dict[str, _Request] = {}
        self._step: list[EsaRequestStep] = []
        self._by_slot_block: dict[int, EsaRequestStep] | None = None
        self._attn_metadata: Any = None
        self._metadata: EsaMetadata | None = None
        self._input_ids: torch.Tensor | None = None
        self._hook: Any = None
        if self.disabled:
            logger.warning("ESA is off: %s", self.disabled)
            return
        self._paged = paged or paged_kv_for(layers)
        self._block_ratio = vllm_config.cache_config.block_size // self._paged.block_size
        self._layer_index = {name: index for index, name in enumerate(layers)}
        self._kernel = kernel_for(self._paged)
        self._settings = EsaConfig.from_dict(esa_settings)
        self.esa = ESA(
            UcmSparseRole.WORKER,
            {**esa_settings, "per_head": self._kernel.per_head and esa_settings.get("per_head", True)},
            self._retriever_maker(retrieval or {}),
        )
        self.esa.register_kv_caches(
            kv_caches,
            read_keys=self._paged.key_blocks,
            block_size=self._paged.block_size,
            num_kv_heads=self._paged.num_kv_heads,
            head_dim=self._paged.head_dim,
        )
        esa_backend.RUNTIME = self
        if self._settings.lexical_blocks:
            # the scheduler may be a step ahead of the last sampled token; what the model is given is always right
            self._hook = root_module(next(iter(layers.values()))).register_forward_pre_hook(
                self._see_input, with_kwargs=True
            )

    def _see_input(self, _module, args, kwargs) -> None:
        """Before every forward of the model, those of blending passes included."""
        self._input_ids = kwargs.get("input_ids", args[0] if args else None)

    def _retriever_maker(self, retrieval: dict[str, Any]) -> Callable[[Geometry], Retriever] | None:
        """Connects to the Ray pool; None: ESA scores in this process."""
        if retrieval.get("backend") != "ray":
            return None

        def connect(geometry: Geometry) -> Retriever:
            from ucm_ray.retrieval.client import RetrievalClient, RetrievalError

            settings = self._settings
            config = {
                "retrieval_workers": settings.retrieval_workers,
                "retrieval_cache_size": settings.retrieval_cache_size,
            }
            try:
                return RetrievalClient.connect(
                    namespace=retrieval.get("namespace", "ucm_ray"),
                    config=config,
                    geometry=geometry,
                    deadline_s=max(1e-3, settings.deadline_ms / 1e3),
                    fallbacks=("local",) if settings.fallback == "local" else (),
                )
            except RetrievalError as error:
                logger.warning("ESA retrieves in this process: %s", error)
                return RetrievalWorker(config, geometry=geometry)

        return connect

    # ---- one step, called by the connector

    def begin_step(self, step: EsaStepMeta | None) -> None:
        """Before the forward (from `bind_connector_metadata`)."""
        self._step, self._by_slot_block = [], None
        self._attn_metadata = self._metadata = None
        if self.disabled or not step:
            return
        try:
            self._take(step)
        except Exception as error:
            self._switch_off(error)

    def _take(self, step: EsaStepMeta) -> None:
        gone = [request_id for request_id in step.gone if self._requests.pop(request_id, None) is not None]
        self.esa.forget(gone)
        by_block = {}
        for item in step.requests:
            if item.replace:
                self.esa.forget([item.request_id])
                self._requests[item.request_id] = _Request(
                    item.num_prompt_tokens, item.ratio, item.first_sparse, item.token_ids
                )
            request = self._requests[item.request_id]
            request.blocks.extend(self._kernel_blocks(item.block_ids))
            last = item.num_computed_tokens + item.num_scheduled_tokens - 1
            by_block[request.blocks[last // self._paged.block_size]] = item
        self._step, self._by_slot_block = step.requests, by_block

    def _kernel_blocks(self, block_ids: np.ndarray) -> list[int]:
        if self._block_ratio == 1:
            return block_ids.tolist()
        return (block_ids[:, None] * self._block_ratio + np.arange(self._block_ratio)).ravel().tolist()

    def end_step(self) -> None:
        """After the forward (from `wait_for_save` or `get_finished`)."""
        if self.disabled or self._metadata is None:
            return
        try:
            self.esa.finish_step()
        except Exception as error:
            self._switch_off(error)
        self._step, self._by_slot_block = [], None
        self._attn_metadata = self._metadata = None

    def take_report(self) -> EsaReport | None:
        """Receipts so far of unfinished requests, or once that ESA is off (`build_connector_worker_meta`)."""
        if self.disabled:
            told, self._told = self._told, True
            return None if told else EsaReport(disabled=self.disabled)
        states = ((request_id, self.esa.state(request_id)) for request_id in self._requests)
        usage = {request_id: state.usage.to_dict() for request_id, state in states if state is not None}
        return EsaReport(usage) if usage else None

    def shutdown(self) -> None:
        if esa_backend.RUNTIME is self:
            esa_backend.RUNTIME = None
        if self._hook is not None:
            self._hook.remove()
        if not self.disabled:
            self.esa.close()

    def _switch_off(self, error: Exception) -> None:
        logger.exception("ESA is off from here on: %s", error)
        self.disabled = f"{type(error).__name__}: {error}"
        self._metadata = None
        if esa_backend.RUNTIME is self:
            esa_backend.RUNTIME = None

    # ---- every layer, called by the attention backend

    def attention_begin(self, layer, query, key, value, attn_metadata) -> SparseView | None:
        """What the layer's sparse rows read; None if everything is read as usual."""
        if self._by_slot_block is None:
            return None
        try:
            if attn_metadata is not self._attn_metadata:
                metadata = self._match_rows(attn_metadata)
                if metadata is None:
                    return None
                self._attn_metadata, self._metadata = attn_metadata, metadata
            self.esa.attention_begin(self._layer_index[layer.layer_name], query, key, value, self._metadata)
            return self._metadata.view
        except Exception as error:
            self._switch_off(error)
            return None

    def attend(self, impl, layer, query, kv_cache, attn_metadata, output, view: SparseView) -> bool:
        """Run the kernels of a layer; False if they could not, and the caller must read densely."""
        try:
            self._kernel.attend(impl, layer, query, kv_cache, attn_metadata, output, view)
            return True
        except Exception as error:
            self._switch_off(error)
            return False

    def attention_finished(self, layer, output):
        return self.esa.attention_finished(self._layer_index[layer.layer_name], output)

    def _match_rows(self, attn_metadata) -> EsaMetadata | None:
        """Find the step's requests in the runner's batch, whose order is its own.

        The block a row writes its last token to belongs to one request alone (a shared block is full and never
        written), so it names the request. Rows of a blending pass write to other blocks and are left alone.
        """
        starts = attn_metadata.query_start_loc.tolist()
        ends = [end - 1 for end in starts[1:]]
        slots = attn_metadata.slot_mapping[ends].tolist()
        block_size = self._paged.block_size
        token_ids = self._input_ids[ends].tolist() if self._input_ids is not None else None
        requests = []
        for row, slot in enumerate(slots):
            item = self._by_slot_block.get(slot // block_size)
            if item is None or item.num_scheduled_tokens != starts[row + 1] - starts[row]:
                continue
            request = self._requests[item.request_id]
            end = item.num_computed_tokens + item.num_scheduled_tokens
            known = token_ids is not None and request.token_ids is not None
            if known and end > request.num_prompt_tokens:
                request.put(end - 1, token_ids[row])
            requests.append(
                ReqMeta(
                    item.request_id,
                    row,
                    item.num_scheduled_tokens,
                    item.num_computed_tokens,
                    request.blocks,
                    num_prompt_tokens=request.num_prompt_tokens,
                    sparse_ratio=request.ratio,
                    first_sparse_token=request.first_sparse,
                    token_ids=request.token_ids[:end] if known else None,
                )
            )
        return EsaMetadata(requests, starts) if requests else None


def unsupported_layers(layers: dict[str, Any]) -> str:
    """Why ESA cannot run on these attention layers; empty if it can."""
    if not layers:
        return "no attention layer"
    for name, layer in layers.items():
        if not getattr(layer.impl, "can_be_sparse", False):
            return f"layer {name}: {type(layer.impl).__name__} cannot leave out blocks"
    if len({tuple(layer.kv_cache.shape[1:]) for layer in layers.values()}) > 1:
        return "layers with different KV shapes"
    return ""

"""`BlendConnector`: vLLM's KV connector for reuse of stored KV at any position, and the home of ESA's runtime.

    LLM(model, kv_transfer_config=KVTransferConfig(
        kv_connector="BlendConnector", kv_connector_module_path="ucm_ray.integration.vllm.blend_connector",
        kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config={...}))

vLLM makes one object in the scheduler's process (`SchedulerSide`) and one in each worker (`WorkerSide`). No hook here
ever raises into the engine, where an exception would end it: the request is then computed as usual.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from ucm_ray.integration.vllm.metrics import BlendPromMetrics, BlendStats
from ucm_ray.integration.vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("ucm_ray.blend")


_logged: set[tuple[str, type]] = set()


def log_once(hook: str, error: Exception) -> None:
    """The first error of a kind in a hook with its traceback; hooks run every step."""
    if (hook, type(error)) not in _logged:
        _logged.add((hook, type(error)))
        logger.exception("%s failed; the engine goes on without it (said once)", hook)


def harmless(otherwise: Any):
    """Log an error of a hook and answer `otherwise` instead (called if callable)."""
    def wrap(hook):
        @functools.wraps(hook)
        def safe(self, *args, **kwargs):
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                log_once(hook.__name__, error)
                return otherwise() if callable(otherwise) else otherwise
        return safe
    return wrap


class BlendConnector(KVConnectorBase_V1):
    """See the module. Methods are grouped as in vLLM's base class."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole,
                 kv_cache_config: KVCacheConfig | None = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.from_vllm(vllm_config)
        self._scheduler = self._worker = None
        if role == KVConnectorRole.SCHEDULER:
            from ucm_ray.integration.vllm.scheduler_side import SchedulerSide

            self._scheduler = SchedulerSide(vllm_config, settings, kv_cache_config)
        else:
            from ucm_ray.integration.vllm.worker_side import WorkerSide

            self._worker = WorkerSide(vllm_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: a save that is dropped is a later miss

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker.esa is not None:
            self._worker.esa.begin_step(connector_metadata.esa)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        try:
            self._worker.after_forward(self._get_connector_metadata())
        except Exception as error:
            log_once("start_load_kv", error)
            self._worker.abandon(error)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self._worker.esa is not None:
            self._worker.esa.end_step()

    @harmless((None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._worker.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_blocks()

    @harmless(None)
    def build_connector_worker_meta(self):
        return self._worker.take_report()

    # ---- scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_block_pool(gpu_block_pool)

    @harmless((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.accept(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        try:
            return self._scheduler.build_meta(scheduler_output)
        except Exception as error:
            log_once("build_connector_meta", error)
            return self._scheduler.take_meta(scheduler_output)

    @harmless(None)
    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.update(connector_output)

    @harmless((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finish(request, block_ids)

    @harmless(False)
    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_held_requests

    @harmless(False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    # ---- both

    @harmless(None)
    def get_kv_connector_stats(self) -> BlendStats | None:
        # the scheduler hears all that workers did
        counters = self._scheduler.take_counters() if self._scheduler else {}
        return BlendStats(data=counters) if counters else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        return BlendStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> BlendPromMetrics:
        return BlendPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @harmless(None)
    def shutdown(self) -> None:
        (self._scheduler or self._worker).shutdown()

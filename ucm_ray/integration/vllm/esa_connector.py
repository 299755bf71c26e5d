"""`EsaConnector`: sparse decode without reuse of stored KV, for engines that need only that.

    KVTransferConfig(kv_connector="EsaConnector", kv_connector_module_path="ucm_ray.integration.vllm.esa_connector",
                     kv_role="kv_both", kv_connector_extra_config={"ucm_sparse_config": {"ESA": {"sparse_ratio": 0.3}}})

`BlendConnector` calls the same two halves in the same places.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from ucm_ray.integration.vllm.blend_connector import harmless
from ucm_ray.integration.vllm.controls import parse_ucm_params
from ucm_ray.integration.vllm.esa_meta import EsaReport, EsaStepMeta
from ucm_ray.integration.vllm.esa_runtime import EsaRuntime
from ucm_ray.integration.vllm.esa_scheduler import EsaScheduler
from ucm_ray.integration.vllm.settings import ConnectorSettings
from ucm_ray.integration.vllm.support import own_layers

logger = logging.getLogger("ucm_ray.sparse")


@dataclass
class EsaConnectorMeta(KVConnectorMetadata):
    esa: EsaStepMeta = field(default_factory=EsaStepMeta)


@dataclass
class EsaWorkerReport(KVConnectorWorkerMetadata):
    esa: EsaReport = field(default_factory=EsaReport)

    def aggregate(self, other: EsaWorkerReport) -> EsaWorkerReport:
        self.esa.aggregate(other.esa)
        return self


class EsaConnector(KVConnectorBase_V1):
    """See the module. Stores and loads nothing."""

    def __init__(self, vllm_config, role: KVConnectorRole, kv_cache_config=None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = ConnectorSettings.from_vllm(vllm_config)
        esa = self._settings.esa.model_dump()
        self._scheduler = EsaScheduler(vllm_config, esa) if role == KVConnectorRole.SCHEDULER else None
        self._runtime: EsaRuntime | None = None
        self._failure: EsaReport | None = None  # not told yet

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        own_layers(self._vllm_config, kv_caches)  # the one error that must stop the engine
        try:
            self._runtime = EsaRuntime(
                self._vllm_config,
                self._settings.esa.model_dump(),
                kv_caches,
                retrieval=self._settings.retrieval.model_dump(),
            )
        except Exception as error:
            logger.exception("ESA is off: this engine cannot be used for it")
            self._failure = EsaReport(disabled=f"{type(error).__name__}: {error}")

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._runtime is not None:
            self._runtime.begin_step(connector_metadata.esa)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        if self._runtime is not None:
            self._runtime.end_step()

    def build_connector_worker_meta(self) -> EsaWorkerReport | None:
        report, self._failure = self._failure, None
        if self._runtime is not None:
            report = self._runtime.take_report()
        return EsaWorkerReport(report) if report else None

    # ---- scheduler side

    @harmless((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._scheduler.on_request(request, parse_ucm_params(request.kv_transfer_params))
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    @harmless(EsaConnectorMeta)
    def build_connector_meta(self, scheduler_output) -> EsaConnectorMeta:
        return EsaConnectorMeta(self._scheduler.build_step(scheduler_output))

    @harmless(None)
    def update_connector_output(self, connector_output) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, EsaWorkerReport):
            self._scheduler.update(report.esa)

    @harmless((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        receipt = self._scheduler.receipt(request.request_id)
        return False, {"ucm": {"esa": receipt}} if receipt is not None else None

    # ---- both

    def shutdown(self) -> None:
        if self._runtime is not None:
            self._runtime.shutdown()

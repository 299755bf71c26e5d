"""Scheduler side of ESA: which requests may be decoded sparsely, what the workers must know of them, their receipts.

KV of a token decoded sparsely is approximate, and so is everything after it. At admission, before vLLM hashes any of
these blocks, the request's hash chain is tainted from the first token that may be decoded sparsely.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm_ray.integration.vllm.esa_meta import EsaReport, EsaRequestStep, EsaStepMeta
from ucm_ray.integration.vllm.taint import taint_from, tainted_from_block
from ucm_ray.sparse.config import EsaConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("ucm_ray.sparse")


@dataclass
class _Tracked:
    request: Request
    ratio: float
    first_sparse: int  # tokens before this one are exact


class EsaScheduler:
    """One per engine, in the scheduler's process."""

    def __init__(self, vllm_config: VllmConfig, esa_settings: dict[str, Any]) -> None:
        self.settings = EsaConfig.from_dict(esa_settings)
        self.disabled = unsupported(vllm_config)
        self._block_size = vllm_config.cache_config.block_size
        self._tracked: dict[str, _Tracked] = {}
        self._known: set[str] = set()  # requests the workers hold state of
        self._gone: list[str] = []
        self._usage: dict[str, dict[str, int]] = {}
        self._reasons: dict[str, str] = {}

    # ---- requests

    def on_request(self, request: Request, controls: Any = None) -> None:
        """Call from `get_num_new_matched_tokens`, whatever it returns; again when a preempted request comes back.

        `controls` has `esa` and `sparse_ratio` (`RequestControls`), or is None for the deployment's values.
        """
        wanted = getattr(controls, "esa", None)
        ratio = getattr(controls, "sparse_ratio", None) or self.settings.sparse_ratio
        reason = self.disabled or self._refusal(request, wanted, ratio)
        if reason:
            self._reasons[request.request_id] = reason
            return
        end = request.num_prompt_tokens + (request.max_tokens or 0)
        first = self.settings.first_sparse_position(request.num_tokens, ratio, self._block_size)
        if first is None or first >= end:
            self._reasons[request.request_id] = "too short"
            return
        known = self._tracked.get(request.request_id)  # preempted: what was decoded sparsely may be found again
        self._tracked[request.request_id] = _Tracked(request, ratio, min(first, known.first_sparse) if known else first)
        taint_from(request, first, self._block_size)

    def _refusal(self, request: Request, wanted: bool | None, ratio: float) -> str:
        if wanted is False:
            return "off"
        if ratio >= 1.0:
            return "ratio 1.0"
        if request.pooling_params is not None:
            return "pooling"
        if request.mm_features or request.prompt_embeds is not None:
            return "multimodal or prompt embeddings"
        return ""

    def num_exact_tokens(self, request: Request) -> int:
        """Leading tokens of `request` whose KV ESA left exact; nothing behind them may be saved."""
        tracked = self._tracked.get(request.request_id)
        return request.num_tokens if tracked is None else min(tracked.first_sparse, request.num_tokens)

    def is_only_taint(self, request: Request) -> bool:
        """Whether nothing but sparse decode made KV of `request` approximate."""
        tracked = self._tracked.get(request.request_id)
        return tracked is not None and tainted_from_block(request) in (None, tracked.first_sparse // self._block_size)

    def receipt(self, request_id: str) -> dict[str, Any] | None:
        """Blocks read and so on of a request; call when it finishes, once."""
        reason = self._reasons.pop(request_id, "")
        usage = self._usage.pop(request_id, None)
        if self._tracked.pop(request_id, None) is not None or request_id in self._known:
            reason = reason or self.disabled
            self._leave(request_id)
        if usage is None:
            return {
                "blocks_read": 0,
                "blocks_total": 0,
                "fallbacks": 0,
                "max_staleness": 0,
                "reason": reason or "dense",
            }
        return {**usage, "reason": reason}

    # ---- steps

    def build_step(self, scheduler_output: SchedulerOutput) -> EsaStepMeta:
        """Call from `build_connector_meta`."""
        step = EsaStepMeta()
        if self.disabled:
            step.gone, self._gone = self._gone, []
            return step
        counts = scheduler_output.num_scheduled_tokens
        for request_id in (*scheduler_output.finished_req_ids, *(scheduler_output.preempted_req_ids or ())):
            if request_id in self._known:
                self._leave(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id in self._tracked:
                step.requests.append(
                    self._first_step(new.req_id, counts[new.req_id], new.num_computed_tokens, new.block_ids)
                )
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id not in self._tracked:
                continue
            if request_id in cached.resumed_req_ids or request_id not in self._known:
                if blocks is not None:
                    step.requests.append(self._first_step(request_id, counts[request_id], computed, blocks))
            else:
                new_blocks = np.asarray(blocks[0] if blocks else (), np.int64)
                step.requests.append(EsaRequestStep(request_id, counts[request_id], computed, new_blocks))
        step.gone, self._gone = self._gone, []
        return step

    def _first_step(self, request_id: str, count: int, computed: int, blocks) -> EsaRequestStep:
        tracked = self._tracked[request_id]
        self._known.add(request_id)
        # A request that was preempted computes its own output again, exactly, before it decodes on.
        prefilled = tracked.request.num_tokens
        return EsaRequestStep(
            request_id,
            count,
            computed,
            np.asarray(blocks[0], np.int64),
            True,
            prefilled,
            tracked.ratio,
            tracked.first_sparse,
            np.asarray(tracked.request.all_token_ids[:prefilled], np.int32) if self.settings.lexical_blocks else None,
        )

    def _leave(self, request_id: str) -> None:
        if request_id in self._known:
            self._known.discard(request_id)
            self._gone.append(request_id)

    def update(self, report: EsaReport | None) -> None:
        """Take what the workers report after a step (`update_connector_output`)."""
        if report is None:
            return
        for request_id, usage in report.usage.items():
            if request_id in self._tracked:
                self._usage[request_id] = usage
        if report.disabled and not self.disabled:
            logger.error("ESA is off: %s", report.disabled)
            self.disabled = report.disabled
            for request_id in list(self._known):
                self._leave(request_id)


def unsupported(vllm_config: VllmConfig) -> str:
    """Why ESA cannot run on this engine; empty if it can."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if vllm_config.speculative_config is not None:
        return "speculative decoding"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism"
    if model.use_mla:
        return "MLA"
    if model.is_hybrid or model.is_attention_free:
        return "layers without attention"
    if vllm_config.cache_config.cache_dtype.startswith("fp8"):
        return "fp8 KV cache"
    return ""

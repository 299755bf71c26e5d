"""Scheduler side of the connector: what to reuse, and the receipt. What to save is decided in `saver`."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import RequestStatus

from ucm_ray.blend.analyzer import ChunkAnalyzer
from ucm_ray.blend.chunk import Chunk, ChunkType
from ucm_ray.blend.cost_model import CostModel
from ucm_ray.blend.plan import Decline, Plan, Planner
from ucm_ray.blend.policies import get_policy
from ucm_ray.integration.vllm.catalogue import FIRST_READ_S, ChunkCatalogue
from ucm_ray.integration.vllm.controls import SWITCHED_OFF, Controls, parse_ucm_params
from ucm_ray.integration.vllm.meta import (
    BlendConnectorMeta,
    BlendReport,
    BlendRequestMeta,
    WorkerReport,
)
from ucm_ray.integration.vllm.saver import Saver
from ucm_ray.integration.vllm.settings import ConnectorSettings, namespace_of
from ucm_ray.integration.vllm.support import unsupported_engine, unsupported_request
from ucm_ray.integration.vllm.taint import taint_from
from ucm_ray.keys import Namespace
from ucm_ray.store import UcmConnectorFactory

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("ucm_ray.blend")

MIN_INGEST_TOKENS = 32
FINISHED_NORMALLY = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class Receipt:
    """What was done for one request; `reason` says why nothing, or less than asked, was reused."""

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    missed_tokens: int = 0
    runs: int = 0
    policy: str = ""
    budget: float = 0.0
    reason: str = ""
    load_ms: float = 0.0
    recompute_ms: float = 0.0
    failed_chunks: int = 0


@dataclass
class RequestState:
    """What the scheduler side knows of one unfinished request."""

    request: Request
    controls: Controls
    namespace: Namespace
    receipt: Receipt
    token_ids: np.ndarray  # int32 [num_prompt_tokens]
    since_s: float = field(default_factory=time.monotonic)
    chunks: list[Chunk] | None = None
    plan: Plan | None = None  # of the latest admission
    loading: bool = False
    declined_by_cost: bool = False
    failed: str = ""  # why blending this request broke down
    outdated: bool = False  # some of its KV was computed before the store was cleared
    gaps: list[tuple[int, int]] = field(default_factory=list)  # new text between what the accepted plan reuses
    reused_until: int | None = None  # where the last reused text of the accepted plan ends
    recomputed_ranges: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Reading:
    """A plan whose files are being read by several ranks."""

    ranks: int = 0
    good: np.ndarray | None = None


class SchedulerSide:
    """One per engine. Every method is called by the scheduler's thread."""

    def __init__(self, config: VllmConfig, settings: ConnectorSettings, kv_cache_config: KVCacheConfig | None) -> None:
        self._config, self._settings = config, settings
        self._block_size = config.cache_config.block_size
        self._world_size = config.parallel_config.tensor_parallel_size
        self._disabled = unsupported_engine(config, kv_cache_config)
        if not settings.blend.enabled:
            self._disabled = "blending is off in the configuration"
        elif self._disabled:
            logger.warning("blending is off: %s", self._disabled)
        self._namespace = namespace_of(config)
        self._namespaces: dict[str, Namespace] = {"": self._namespace}
        store = None
        if not self._disabled:
            # KV is the workers' affair: the scheduler only reads headers
            store = UcmConnectorFactory.create_connector(
                settings.store_config("Posix") if "Posix" in settings.store.store_pipeline else settings.store_config(),
                0, self._world_size)
        self._store = store
        self._catalogue = ChunkCatalogue(store.posix if store else None, settings.store.refresh_s,
                                         min(settings.blend.anchor_tokens, settings.blend.blend_chunk_size))
        self._analyzer = ChunkAnalyzer(settings.blend.blend_chunk_size, settings.blend.min_match_ratio,
                                       settings.blend.anchor_tokens)
        self.cost_model = CostModel() if settings.blend.cost_model else None
        self._planner = Planner(settings.blend, self.cost_model)
        self._num_layers = config.model_config.get_num_layers(config.parallel_config)
        self._states: dict[str, RequestState] = {}
        self._meta = BlendConnectorMeta()
        self._reading: dict[str, _Reading] = {}
        self.counters: dict[str, float] = {}
        self.esa = None
        if settings.esa.enabled:
            from ucm_ray.integration.vllm.esa_scheduler import EsaScheduler

            self.esa = EsaScheduler(config, settings.esa.model_dump())
        self._saver = Saver(config, settings.blend, self._catalogue, self._analyzer, self.esa, self._count)
        if not self._disabled:
            self._catalogue.index(self._namespace.hex)
            self._saver.read_sink()

    # ---- set-up

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._saver.bind_block_pool(pool)

    def _namespace_for(self, request: Request) -> Namespace:
        salt = request.cache_salt or ""
        if salt not in self._namespaces:
            if len(self._namespaces) > 4096:
                self._namespaces = {"": self._namespace}
            self._namespaces[salt] = Namespace.from_dict({**self._namespace.to_dict(), "salt": salt})
        return self._namespaces[salt]

    # ---- matching

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond `num_computed_tokens` that a plan will fill, asynchronously; (0, False) to decline, (None,
        False) to be asked again in the next step."""
        state = self._state(request)
        if self.esa is not None:
            self.esa.on_request(request, state.controls)
        plan = self._plan(request, state, num_computed_tokens)
        if plan is None:
            return None, False
        state.receipt.prefix_tokens = num_computed_tokens
        if isinstance(plan, Decline):
            state.plan = None
            if plan.by_cost and not state.declined_by_cost:  # a waiting request is matched again in every step
                state.declined_by_cost = True
                self.cost_model.forget()
            if state.reused_until is None:
                state.receipt.reason = plan.reason
            return 0, False
        state.plan = plan
        return plan.end - num_computed_tokens, True

    def _state(self, request: Request) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            token_ids = np.asarray(request.prompt_token_ids or [], np.int32)
            receipt = Receipt(prompt_tokens=request.num_prompt_tokens)
            controls = parse_ucm_params(request.kv_transfer_params)
            receipt.reason = controls.error
            state = RequestState(request, controls, self._namespace_for(request), receipt, token_ids)
            self._states[request.request_id] = state
        return state

    def _plan(self, request: Request, state: RequestState, num_computed_tokens: int
              ) -> Plan | Decline | None:
        """None: the list of stored chunks is being read."""
        controls = state.controls
        if self._disabled:
            return Decline(self._disabled)
        if controls.error or state.failed:
            return Decline(controls.error or state.failed)
        if controls.blend is False or controls.ingest_from is not None:
            return Decline(SWITCHED_OFF)
        reason = unsupported_request(request)
        if reason:
            return Decline(reason)
        policy = get_policy(controls.policy or self._settings.blend.policy)
        if getattr(policy, "check_layer", 0) >= self._num_layers:
            return Decline(f"policy {controls.policy!r}: the model has {self._num_layers} layers")
        if num_computed_tokens >= len(state.token_ids) - 1:
            return Decline("vLLM's own prefix cache holds the whole prompt")
        if state.chunks is None:
            # the request's own limit: with very many namespaces their readings never end
            if time.monotonic() - state.since_s < FIRST_READ_S and not self._catalogue.is_ready(state.namespace.hex):
                return None
            begun = time.perf_counter()
            state.chunks = self._analyzer.analyze(state.token_ids, self._catalogue.index(state.namespace.hex))
            self._count("analysis_s", time.perf_counter() - begun)
        return self._planner.plan(state.token_ids, state.chunks, num_computed_tokens, controls.policy, controls.budget,
                                  state.namespace.hex)

    def accept(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The scheduler has allocated blocks for the plan: taint the request and send the plan."""
        state = self._states.get(request.request_id)
        if not num_external_tokens or state is None or state.plan is None:
            return
        plan = state.plan
        exact = exact_until(plan)
        if exact < plan.end:
            taint_from(request, exact, self._block_size)
        state.loading = True
        self._saver.met.note_reused(chunk.source_block_id for chunk in plan.chunks)
        state.reused_until = plan.runs[-1].end
        state.gaps = [(start, end) for start, end in plan.must_compute
                      if end - start >= MIN_INGEST_TOKENS and end <= state.reused_until]
        receipt = state.receipt
        receipt.reused_tokens, receipt.runs = plan.reused_tokens, len(plan.runs)
        receipt.missed_tokens = plan.missed_tokens + len(state.token_ids) - plan.end
        receipt.policy, receipt.budget, receipt.reason = plan.policy, plan.budget, plan.reason
        chunks = {kind: [chunk for chunk in plan.chunks if chunk.chunk_type is kind] for kind in ChunkType}
        self._meta.request_metas[request.request_id] = BlendRequestMeta(
            request_id=request.request_id,
            full_match_chunks=chunks[ChunkType.FULL_MATCH],
            partial_match_chunks=chunks[ChunkType.PARTIAL_MATCH],
            no_match_chunks=chunks[ChunkType.NO_MATCH],
            position_mapping={chunk.start_idx: chunk.source_position for chunk in plan.chunks},
            recompute_ranges=list(plan.must_compute),
            plan=plan,
            token_ids=state.token_ids[: plan.end],
            block_ids=np.asarray(blocks.get_block_ids()[0], np.int64),
            namespace=state.namespace.hex,
        )
        self._set_prefill_stats(request, state, plan.reused_tokens)

    def _set_prefill_stats(self, request: Request, state: RequestState, reused: int) -> None:
        """`cached_tokens` counts tokens whose KV was reused, not the whole span of the plan."""
        stats = request.prefill_stats
        if stats is not None and request.num_preemptions <= 0:
            stats.set(num_prompt_tokens=request.num_prompt_tokens, num_local_cached_tokens=state.plan.start,
                      num_external_cached_tokens=max(0, reused))

    # ---- every step

    def build_meta(self, scheduler_output: SchedulerOutput) -> BlendConnectorMeta:
        meta = self._meta
        if self.esa is not None:
            meta.esa = self.esa.build_step(scheduler_output)
        meta.cancelled_ingests = self._saver.impatient_ingests()
        meta.drop_saves = self._saver.has_held_requests and self._saver.is_scarce
        return self.take_meta(scheduler_output)

    def take_meta(self, scheduler_output: SchedulerOutput) -> BlendConnectorMeta:
        """What has been gathered: every accepted plan and held request must reach the workers, or it waits for ever."""
        meta, self._meta = self._meta, BlendConnectorMeta()
        meta.num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens
        meta.num_prefill_tokens = meta.num_scheduled_tokens - len(scheduler_output.num_scheduled_tokens)
        return meta

    def update(self, output: KVConnectorOutput) -> None:
        """Take in what the workers did in the last step."""
        self._saver.released(output.finished_sending or ())
        report = output.kv_connector_worker_meta
        if not isinstance(report, WorkerReport):
            return
        if self.esa is not None:
            self.esa.update(report.esa)
        if report.disabled and not self._disabled:
            self._disabled = report.disabled
            logger.error("blending is off: %s", report.disabled)
        self._catalogue.add(report.saved)
        self._catalogue.add(report.stored, replace=True)
        for namespace, key in report.lost:
            self._catalogue.remove(namespace, [key])
        for request_id, good in report.loaded.items():
            self._agree(request_id, good, report.loaded_ranks[request_id])
        for request_id, done in report.reports.items():
            self._finish_plan(request_id, done)

    def _agree(self, request_id: str, good: np.ndarray, ranks: int) -> None:
        """Start a plan once every rank has read its files; a chunk counts if all ranks have it."""
        if request_id not in self._states:  # aborted meanwhile
            return
        reading = self._reading.setdefault(request_id, _Reading())
        reading.ranks += ranks
        reading.good = good if reading.good is None else reading.good & good
        if reading.ranks == self._world_size:
            self._meta.run[request_id] = reading.good
            del self._reading[request_id]

    def _finish_plan(self, request_id: str, done: BlendReport) -> None:
        state = self._states.get(request_id)
        if state is None or state.plan is None:
            return
        state.loading = False
        receipt = state.receipt
        receipt.recomputed_tokens = done.recomputed_tokens
        state.recomputed_ranges = done.recomputed_ranges
        receipt.reused_tokens = state.plan.reused_tokens - done.failed_tokens
        receipt.missed_tokens += done.failed_tokens
        receipt.failed_chunks += done.failed_chunks
        receipt.load_ms += done.load_ms
        receipt.recompute_ms += done.recompute_ms
        if done.error:
            receipt.reused_tokens = receipt.recomputed_tokens = 0
            # once is enough: tried again it would fail again, for ever
            state.failed = receipt.reason = f"blending failed, computed as usual: {done.error}"
        self._set_prefill_stats(state.request, state, receipt.reused_tokens - receipt.recomputed_tokens)
        if self.cost_model is not None and not done.error:
            self.cost_model.observe(state.plan, done.load_ms, done.recompute_ms)
        self._count("requests_blended", 1)
        self._count("reused_tokens", receipt.reused_tokens)
        self._count("recomputed_tokens", receipt.recomputed_tokens)
        self._count("missed_tokens", receipt.missed_tokens)
        self._count("load_ms", done.load_ms)
        self._count("recompute_ms", done.recompute_ms)
        self._count("failed_chunks", done.failed_chunks)

    def _count(self, name: str, amount: float) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount

    def take_counters(self) -> dict[str, float]:
        counters, self.counters = self.counters, {}
        return counters

    # ---- the end of a request

    def finish(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are still needed, and the receipt."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False, None
        self._reading.pop(request.request_id, None)
        held = False
        # a request aborted in mid-load: its blocks come back through finished_recving
        waits_for_load = state.loading and request.status not in FINISHED_NORMALLY
        may_save = request.status in FINISHED_NORMALLY and not self._disabled and not state.outdated
        if not waits_for_load and may_save:
            held = self._saver.hold(request, state, np.asarray(block_ids, np.int64), self._meta)
        if not state.receipt.reused_tokens:
            self._count("requests_not_blended", 1)
        receipt = asdict(state.receipt)
        if state.controls.trace:
            receipt["recomputed_ranges"] = state.recomputed_ranges
        found = {"blend": receipt}
        if self.esa is not None:
            found["esa"] = self.esa.receipt(request.request_id)
        return held, {"ucm": found}

    @property
    def has_held_requests(self) -> bool:
        """Whether saves or ingests wait for an engine step; without requests there would be none."""
        return self._saver.has_held_requests

    # ---- maintenance

    def reset(self) -> bool:
        """Forget every stored chunk (vLLM's `reset_prefix_cache(reset_connector=True)`)."""
        self._meta.clear_store = True  # the workers' host memory, and what they have not written yet
        self._saver.forget()
        for state in self._states.values():
            state.chunks = None
            state.outdated = state.outdated or state.request.num_computed_tokens > 0
        self._catalogue.clear(self._store.clear if self._store is not None else None)
        return True

    def shutdown(self) -> None:
        self._catalogue.close()
        if self._store is not None:
            self._store.close()


def exact_until(plan: Plan) -> int:
    """First position whose KV will not be exactly what full prefill gives."""
    position = plan.start
    computed = sorted(plan.must_compute)
    exact_runs = [(run.start, run.end) for run in plan.runs if run.exact]
    for start, end in sorted([*computed, *exact_runs]):
        if start > position:
            break
        position = max(position, end)
    return position


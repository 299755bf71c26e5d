"""Worker side of the connector: executes plans, copies exact KV out, computes new text, all between engine steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform

from ucm_ray.integration.vllm.blend_task import BlendTask, Loaded, is_of_source
from ucm_ray.integration.vllm.esa_meta import EsaReport
from ucm_ray.integration.vllm.meta import BlendConnectorMeta, IngestJob, SaveJob, WorkerReport
from ucm_ray.integration.vllm.observer import QuestionObserver
from ucm_ray.integration.vllm.paged_kv import PagedKV, paged_kv_for
from ucm_ray.integration.vllm.placement import make_placer, slots_of
from ucm_ray.integration.vllm.plugin import root_module
from ucm_ray.integration.vllm.self_check import check_engine
from ucm_ray.integration.vllm.settings import ConnectorSettings
from ucm_ray.integration.vllm.support import own_layers, unsupported_layers
from ucm_ray.integration.vllm.virtual_sequences import Row, VirtualSequences
from ucm_ray.store import ChunkMeta, StoredChunk, UcmConnectorFactory

logger = logging.getLogger("ucm_ray.blend")

IDLE_WAIT_S = 0.05  # an idle engine waits this long a step for files instead of spinning
IDLE_TOKENS = 8192  # work of one idle step: a new request waits at most this long
PASS_TOKENS = 512  # a pass of that many tokens is bound by arithmetic: sharing more gains nothing
SAVE_TOKENS_PER_STEP = 128  # beside pure decode: twice what such an engine can prefill meanwhile
IDLE_SAVE_TOKENS = 1024
SAVE_PATIENCE_S = 20.0
BLOCKED_WAIT_S = 0.002
IDLE_INGEST_TOKENS = 256
INGEST_TOKENS = 128


class WorkerSide:
    """One per rank. Every public method is called by the model runner's thread."""

    def __init__(self, vllm_config: VllmConfig, settings: ConnectorSettings) -> None:
        self._config, self._settings = vllm_config, settings
        parallel = vllm_config.parallel_config
        self._world_size = parallel.tensor_parallel_size
        self._rank = get_tp_group().rank_in_group if self._world_size > 1 else 0
        # page-locked memory where a GPU copies from it
        store = settings.store_config() | {"pin_memory": current_platform.is_cuda_alike()}
        self._store = UcmConnectorFactory.create_connector(store, self._rank, self._world_size)
        self._store.on_evict.append(self._on_evict)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="ucm-read")
        self._ready = False
        self._paged: PagedKV | None = None
        self._block_ratio = 1  # blocks of the attention kernel in one of the scheduler's
        self._tasks: dict[str, BlendTask] = {}
        self._saves: list[SaveJob] = []
        self._ingests: dict[str, IngestJob] = {}
        self._sink: tuple[np.ndarray, torch.Tensor] | None = None  # the passage's tokens and their KV
        self._finished_recving: set[str] = set()
        self._finished_sending: set[str] = set()
        self._invalid_blocks: set[int] = set()
        self._unwritten: dict[tuple[str, str], StoredChunk] = {}  # copied out, not yet in the store
        self._report = WorkerReport()
        self.esa = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find model and layout, and prove on this very engine that both do what we believe."""
        layers = own_layers(self._config, kv_caches)
        try:
            reason = unsupported_layers(layers)
            if reason:
                raise ValueError(reason)
            self._layers = layers
            self._paged = paged_kv_for(layers)
            self._block_ratio = self._config.cache_config.block_size // self._paged.block_size
            model = root_module(next(iter(layers.values())))
            self._virtual = VirtualSequences(self._config, model, self._paged)
            self._corrector = self._settings.position_corrector(self._config)
            self._placer = make_placer(self._paged, self._corrector)
            self._observer = QuestionObserver(self._paged, layers)
            if self._settings.blend.enabled:
                # the model is compiled by vLLM's own warm-up, later and under settings of its own
                self._virtual.skip_compiled = True
                check_engine(self._virtual, self._corrector, self._config.model_config.get_vocab_size())
                self._virtual.skip_compiled = False
            self._ready = True
        except Exception as error:
            logger.exception("blending is off: this engine cannot be used for it")
            self._report.disabled = f"self-check failed: {error}"
        if self._world_size > 1:
            # one rank that works would wait for ever for one that does not
            ready = torch.tensor(int(self._ready))
            torch.distributed.all_reduce(ready, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group)
            self._ready = bool(ready)
        if self._settings.esa.enabled:
            self._start_esa(kv_caches)

    def _start_esa(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from ucm_ray.integration.vllm.esa_runtime import EsaRuntime

        try:
            self.esa = EsaRuntime(self._config, self._settings.esa.model_dump(), kv_caches,
                                  retrieval=self._settings.retrieval.model_dump())
        except Exception as error:
            logger.exception("ESA is off: this engine cannot be used for it")
            self._report.esa = EsaReport(disabled=f"{type(error).__name__}: {error}")

    # ---- one step

    def after_forward(self, meta: BlendConnectorMeta) -> None:
        """Work of this step; the engine's own forward has been submitted."""
        self._take(meta)
        if not self._ready:  # the scheduler hears of it only with the first step's report
            self.abandon(RuntimeError("this engine failed its self-check"))
            return
        if meta.clear_store:
            self._clear_store()
        self._start_plans(meta)
        if meta.drop_saves:
            self._drop_saves()
        self._work(meta)

    def _work(self, meta: BlendConnectorMeta) -> None:
        if not (self._tasks or self._saves or self._ingests):
            return
        idle = meta.num_scheduled_tokens == 0
        self._accept_read_plans(meta, idle)
        self._run_tasks(IDLE_TOKENS if idle else self._busy_tokens)
        # as much as the step prefills: held blocks do not pile up
        self._run_saves(IDLE_SAVE_TOKENS if idle else max(SAVE_TOKENS_PER_STEP, meta.num_prefill_tokens))
        if idle and self._saves and not self._tasks:
            time.sleep(BLOCKED_WAIT_S)  # leave the processor to the writing thread
        if not self._tasks:
            self._run_ingests(idle)

    def abandon(self, error: Exception) -> None:
        """Give every plan and every held request back, so that nothing waits for us."""
        for request_id, task in list(self._tasks.items()):
            self._fail(task, error)
            self._report.reports[request_id] = task.report()
            self._finished_recving.add(request_id)
        for job in self._saves:
            self._drop_save(job)
        self._finished_sending.update(self._ingests)
        self._tasks, self._saves, self._ingests = {}, [], {}

    def _drop_save(self, job: SaveJob) -> None:
        """What was not copied out stays unsaved."""
        self._report.lost += [(meta.namespace, meta.key) for _, meta in job.chunks]
        self._finished_sending.add(job.request_id)

    def _take(self, meta: BlendConnectorMeta) -> None:
        """Note all that the scheduler waits for before anything can fail, so that `abandon` knows of it."""
        for job in meta.saves:
            job.block_ids, job.since_s = self._kernel_blocks(job.block_ids), time.monotonic()
            self._saves.append(job)
        for request_id, request in meta.request_metas.items():
            request.block_ids = self._kernel_blocks(request.block_ids)
            self._tasks[request_id] = BlendTask(request, self._paged)
        for job in meta.ingests:
            job.block_ids = self._kernel_blocks(job.block_ids)
            self._ingests[job.request_id] = job
        for request_id in meta.urgent_ingests:
            if request_id in self._ingests:
                self._ingests[request_id].urgent = True
        for request_id in meta.cancelled_ingests:
            if self._ingests.pop(request_id, None) is not None:
                self._finished_sending.add(request_id)

    def _clear_store(self) -> None:
        """Forget all KV, also what is on its way in or out: it may be that of other weights."""
        self.abandon(RuntimeError("the store was cleared"))
        self._unwritten, self._sink, self._report.saved = {}, None, []
        try:
            self._store.clear()
        except Exception:
            logger.exception("the store could not be cleared")

    def _start_plans(self, meta: BlendConnectorMeta) -> None:
        for request_id, request in meta.request_metas.items():
            if request_id in self._tasks:
                keys = [chunk.source_block_id for chunk in request.plan.chunks]
                self._save_now(request.namespace, set(keys))
                self._tasks[request_id].future = self._readers.submit(self._timed_load, request.namespace, keys)

    def _drop_saves(self) -> None:
        for job in self._saves:
            if job.droppable:
                self._drop_save(job)
        self._saves = [job for job in self._saves if not job.droppable]

    def _save_now(self, namespace: str, keys: set[str]) -> None:
        """A plan may name chunks that the scheduler has only just asked to save."""
        while any(meta.key in keys and meta.namespace == namespace for job in self._saves for _, meta in job.chunks):
            self._run_saves(1, patient=False)

    def _timed_load(self, namespace: str, keys: list[str]) -> Loaded:
        begun = time.perf_counter()
        return Loaded(self._load(namespace, keys), time.perf_counter() - begun)

    def _load(self, namespace: str, keys: list[str]) -> list[StoredChunk | None]:
        """Chunks from memory on their way to the disk, else from the store."""
        found: list[StoredChunk | None] = [self._unwritten.get((namespace, key)) for key in keys]
        missing = [index for index, chunk in enumerate(found) if chunk is None]
        for index, chunk in zip(missing, self._store.load_many(namespace, [keys[i] for i in missing]), strict=True):
            found[index] = chunk
        return found

    def _kernel_blocks(self, block_ids: np.ndarray) -> np.ndarray:
        """The scheduler's blocks in units of the attention kernel's, which may be smaller."""
        ratio = self._block_ratio
        if ratio == 1:
            return block_ids
        return (block_ids[:, None] * ratio + np.arange(ratio)).reshape(-1)

    # ---- plans

    def _accept_read_plans(self, meta: BlendConnectorMeta, idle: bool) -> None:
        """Plans whose files have arrived may start, once all ranks say so."""
        deadline = time.monotonic() + IDLE_WAIT_S
        for request_id, task in list(self._tasks.items()):
            if task.phase != "reading":
                continue
            if idle and not task.future.done():
                wait_quietly(task.future, deadline - time.monotonic())
            if task.future.done() and task.good is None:
                task.loaded, task.load_s = self._loaded(task)
                task.good = task.check(task.loaded)
                self._note_lost(task)
                if self._world_size > 1:
                    self._report.loaded[request_id] = task.good
                    self._report.loaded_ranks[request_id] = 1
            good = task.good if self._world_size == 1 else meta.run.get(request_id)
            if good is not None:
                self._guarded(task, lambda task=task, good=good: task.accept(task.loaded, good))
                task.loaded = []

    def _loaded(self, task: BlendTask) -> Loaded:
        try:
            return task.future.result()
        except Exception:
            logger.exception("reading the chunks of request %s failed", task.meta.request_id)
            return Loaded([None] * len(task.plan.chunks))

    def _note_lost(self, task: BlendTask) -> None:
        for chunk, found, fine in zip(task.plan.chunks, task.loaded, task.good, strict=True):
            if fine:
                continue
            # several ranks may have it of several sources: then it is looked for anew
            if found is not None and self._world_size == 1 and not is_of_source(chunk, found[0]):
                self._report.stored.append(found[0])
            else:
                self._report.lost.append((task.meta.namespace, chunk.source_block_id))

    @property
    def _busy_tokens(self) -> int:
        """Work beside a step that decodes: less than the engine's own largest prefill step would take, since scattered
        tokens cost more each than those of one piece."""
        return min(self._settings.blend.blend_tokens_per_step, max(1, self._virtual.max_tokens // 2))

    def _run_tasks(self, budget: float) -> None:
        """Advance plans in the order they came; small plans share passes. Stops when a plan is done, so that its
        request gets its first token before the next plan's work begins."""
        waiting = len(self._tasks)
        while budget > 0 and len(self._tasks) == waiting:
            running = [task for task in self._tasks.values() if task.phase != "reading"]
            if not running:
                return
            before = budget
            for task in running:
                if task.phase == "placing" and budget > 0:
                    budget = self._guarded(task, lambda task=task, b=budget: task.place(b, self._placer.place), budget)
            budget -= self._run_pass(running, min(budget, PASS_TOKENS))
            finished = self._finish_phases()
            if budget == before and not finished:
                return

    def _run_pass(self, running: Sequence[BlendTask], budget: float) -> float:
        """One shared pass per number of layers, of about `budget` tokens; returns the tokens computed."""
        room = budget
        for depth in sorted({task.first_layers for task in running if task.has_work}):
            rows: list[Row] = []
            members = [task for task in running if task.has_work and task.first_layers == depth]
            begun = time.perf_counter()
            for task in members:
                taken = task.next_work(room, self._virtual.max_rows - len(rows))
                rows += taken
                room -= sum(row.end - row.start for row in taken)
            if not rows:
                continue
            owners = list(dict.fromkeys(row.owner for row in rows))
            observing = any(task.phase == "observing" and task.mass is not None for task in owners)
            try:
                passes = self._virtual.run(rows, depth or None, self._observer if observing else None)
            except Exception as error:
                logger.exception("a blending pass failed; its requests are computed as usual")
                for task in owners:
                    self._fail(task, error)
                continue
            spent = time.perf_counter() - begun
            total = sum(row.end - row.start for row in rows)
            for task in owners:
                share = sum(row.end - row.start for row in rows if row.owner is task) / total
                task.recompute_s += spent * share
                task.passes += passes
        return budget - room

    def _finish_phases(self) -> bool:
        """Let tasks whose rows have all run go on to their next phase; whether any did."""
        moved = False
        for request_id, task in list(self._tasks.items()):
            if task.phase == "observing" and not task.has_work:
                moved = True
                begun = time.perf_counter()
                self._guarded(task, lambda task=task: task.observed(self._scores(task)))
                task.recompute_s += time.perf_counter() - begun
            elif task.phase == "repairing" and not task.has_work:
                task.repaired()
            if task.phase == "done":
                moved = True
                self._report.reports[request_id] = task.report()
                self._finished_recving.add(request_id)
                del self._tasks[request_id]
        return moved

    def _scores(self, task: BlendTask) -> np.ndarray:
        """Scores of the reused tokens, the same on every rank."""
        at = torch.from_numpy(task.plan.reused_positions() - task.plan.start)
        if task.mass is not None:
            mass, norm = task.mass[:, at].contiguous(), task.value_norm[:, at].contiguous()
            scores = (self._all_reduce(mass) * self._all_reduce(norm)).mean(0)
        else:
            scores = torch.zeros(len(at))
            layer = task.policy.check_layer
            wanted = torch.from_numpy(task.plan.candidate_mask())
            positions = task.plan.candidate_positions()
            slots = slots_of(task.meta.block_ids, positions, self._paged.block_size).to(self._paged.device)
            fresh, _ = self._paged.read(layer, slots)
            reused = task.reused_keys[torch.from_numpy(positions - task.plan.start)]
            scores[wanted] = (fresh.float().cpu() - reused).square().sum((1, 2))
            scores = self._all_reduce(scores)
        if self._world_size > 1:
            # equal sums could still round differently: rank 0 decides
            scores = get_tp_group().broadcast(scores.to(self._paged.device), src=0).cpu()
        return scores.numpy()

    def _all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._world_size == 1:
            return tensor
        return get_tp_group().all_reduce(tensor.to(self._paged.device)).cpu()

    def _guarded(self, task: BlendTask, step, otherwise=None):
        """No error of a plan may reach the engine: the request is computed as usual instead."""
        try:
            return step()
        except Exception as error:
            logger.exception("blending request %s failed; it is computed as usual", task.meta.request_id)
            self._fail(task, error)
            return otherwise

    def _fail(self, task: BlendTask, error: Exception) -> None:
        size = self._config.cache_config.block_size // self._block_ratio
        blocks = task.meta.block_ids[task.plan.start // size : -(-task.plan.end // size)]
        self._invalid_blocks.update(int(block) // self._block_ratio for block in blocks)
        task.error = f"{type(error).__name__}: {error}"
        task.phase, task._todo = "done", []

    # ---- exact KV out of the cache

    def _run_saves(self, budget: int, patient: bool = True) -> None:
        """Copy out chunks of finished requests, oldest first. While the store's queue is full they wait in their
        blocks, for a time: a slow disk delays saving before it loses anything."""
        while self._saves and budget > 0:
            job = self._saves[0]
            chunks, rest = take_chunks(job.chunks, min(budget, SAVE_TOKENS_PER_STEP))  # never more than the queue
            if patient and chunks and not self._store.has_room(sum(meta.payload_bytes for _, meta in chunks)):
                if time.monotonic() - job.since_s < SAVE_PATIENCE_S:
                    return
                self._drop_save(self._saves.pop(0))
                continue
            job.chunks = rest
            budget -= sum(meta.num_tokens for _, meta in chunks)
            self._save_chunks(job.block_ids, chunks)
            if not job.chunks:
                self._saves.pop(0)
                self._finished_sending.add(job.request_id)

    def _save_chunks(self, block_ids: np.ndarray, chunks) -> None:
        if not chunks:
            return
        try:
            for start, meta in chunks:
                kv = self._store.buffer(meta)
                self._placer.copy_out(block_ids, start, kv)
                self._save(replace(meta, rank=self._rank, world_size=self._world_size), kv)
        except Exception:
            logger.exception("saving %d chunks failed; they stay unsaved", len(chunks))

    def _save(self, meta: ChunkMeta, kv: torch.Tensor) -> None:
        name, chunk = (meta.namespace, meta.key), (meta, kv)
        self._unwritten[name] = chunk
        if self._rank == 0:
            self._report.saved.append(meta)

        def written(future) -> None:
            if self._unwritten.get(name) is not chunk:
                return  # forgotten with the store
            self._unwritten.pop(name, None)
            if future.cancelled() or future.exception() is not None or not future.result():
                self._report.lost.append(name)

        self._store.save_async(meta, kv).add_done_callback(written)

    def _run_ingests(self, idle: bool) -> None:
        """Compute queued text behind the sink passage, a slice at a time, then save it. Beside other requests only what
        is urgent, in smaller slices."""
        job = next((job for job in self._ingests.values() if idle or job.urgent), None)
        if job is None:
            return
        length = len(job.token_ids)
        try:
            start = job.done or self._place_sink(job)
            job.done = min(start + (IDLE_INGEST_TOKENS if idle else INGEST_TOKENS), length)
            self._virtual.run([Row(start, job.done, job.token_ids, job.block_ids)])
            if job.done >= job.num_sink_tokens:
                self._keep_sink(job)
        except Exception:
            logger.exception("computing new text for the store failed; it stays unsaved")
            job.chunks, job.done = [], length
        if job.done == length:
            self._save_chunks(job.block_ids, job.chunks)
            del self._ingests[job.request_id]
            self._finished_sending.add(job.request_id)

    def _place_sink(self, job: IngestJob) -> int:
        """Write the passage's KV, if it was computed before; tokens written."""
        sink = job.token_ids[: job.num_sink_tokens]
        if self._sink is None or not np.array_equal(self._sink[0], sink):
            return 0
        self._placer.copy_in(job.block_ids, 0, self._sink[1])
        return len(sink)

    def _keep_sink(self, job: IngestJob) -> None:
        """Keep the KV of the longest passage so far."""
        length = job.num_sink_tokens
        if self._sink is not None and len(self._sink[0]) >= length:
            return
        paged = self._paged
        kv = torch.empty(len(paged.names), 2, length, paged.num_kv_heads, paged.head_dim, dtype=paged.dtype)
        self._placer.copy_out(job.block_ids, 0, kv)
        self._sink = (job.token_ids[:length].copy(), kv)

    # ---- what the engine asks after the step

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may be freed, and requests whose plan is done (aborted ones too)."""
        for request_id in finished_req_ids & self._tasks.keys():
            del self._tasks[request_id]
            self._finished_recving.add(request_id)
        sending, recving = self._finished_sending, self._finished_recving
        self._finished_sending, self._finished_recving = set(), set()
        return sending or None, recving or None

    def take_invalid_blocks(self) -> set[int]:
        invalid, self._invalid_blocks = self._invalid_blocks, set()
        return invalid

    def take_report(self) -> WorkerReport | None:
        report, self._report = self._report, WorkerReport()
        if self.esa is not None:
            report.esa = self.esa.take_report()
        return report if report else None

    def _on_evict(self, namespace: str, keys: list[str]) -> None:
        self._report.lost += [(namespace, key) for key in keys]

    def store_stats(self) -> dict:
        return self._store.stats()

    def shutdown(self) -> None:
        if self.esa is not None:
            self.esa.shutdown()
        self._run_saves(1 << 30, patient=False)
        self._store.flush(10.0)
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._store.close()


def wait_quietly(future, timeout_s: float) -> None:
    """Wait for a future without caring how it ends."""
    from concurrent.futures import wait

    wait([future], timeout=max(0.0, timeout_s))


def take_chunks(chunks: list, budget: int) -> tuple[list, list]:
    """Split a list of (position, meta) after about `budget` tokens, at least one chunk."""
    total = 0
    for index, (_, meta) in enumerate(chunks):
        total += meta.num_tokens
        if total >= budget:
            return chunks[: index + 1], chunks[index + 1 :]
    return chunks, []

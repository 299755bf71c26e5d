"""What of a finished request is new to the store, and how long its blocks are held until the workers have copied it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from vllm.config import VllmConfig

from ucm_ray.blend.analyzer import ChunkAnalyzer
from ucm_ray.blend.chunk import ChunkType
from ucm_ray.blend.met_text import MetText
from ucm_ray.blend.sink import sink_tokens
from ucm_ray.config import BlendSettings
from ucm_ray.integration.vllm.catalogue import ChunkCatalogue
from ucm_ray.integration.vllm.meta import BlendConnectorMeta, IngestJob, SaveJob
from ucm_ray.integration.vllm.support import unsupported_request
from ucm_ray.integration.vllm.taint import is_tainted, tainted_blocks_from
from ucm_ray.keys import chunk_key, context_key, new_source_id, source_prefix
from ucm_ray.store import ChunkMeta
from ucm_ray.store.base import dtype_name

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from ucm_ray.integration.vllm.esa_scheduler import EsaScheduler
    from ucm_ray.integration.vllm.scheduler_side import RequestState

logger = logging.getLogger("ucm_ray.blend")

MAX_PENDING_INGESTS = 4
INGEST_PATIENCE_S = 30.0  # blocks of a finished request are held at most that long for canonical ingest
MIN_FREE_BLOCKS = 0.1  # below this share of free blocks nothing is held, except what a request asks to be stored
MIN_INGEST_ROOM = 64
GAP_SINK_TOKENS = 400  # computed anew for each request whose gaps are stored, so the passage's end must do


@dataclass
class _Ingest:
    """Text of a finished request that is being computed for the store."""

    since_s: float  # when its blocks were first held
    keys: frozenset[str]


class Saver:
    """One per engine. Every method is called by the scheduler's thread."""

    def __init__(self, config: VllmConfig, settings: BlendSettings, catalogue: ChunkCatalogue, analyzer: ChunkAnalyzer,
                 esa: EsaScheduler | None, count: Callable[[str, float], None]) -> None:
        model, parallel = config.model_config, config.parallel_config
        self._model, self._settings = model, settings
        self._catalogue, self._analyzer, self._esa, self._count = catalogue, analyzer, esa, count
        self._block_size = config.cache_config.block_size
        # what all chunks of this engine have in common
        self._shape = {"num_layers": model.get_num_layers(parallel), "num_kv_heads": model.get_num_kv_heads(parallel),
                       "head_dim": model.get_head_size(), "dtype": dtype_name(model.dtype),
                       "world_size": parallel.tensor_parallel_size}
        self._source_prefix = source_prefix(config.kv_transfer_config.engine_id)
        self._ingests: dict[str, _Ingest] = {}
        self.met = MetText()
        self._held: set[str] = set()  # finished requests whose blocks the workers still read
        self._pool: BlockPool | None = None
        self._sink: list[int] | None = None

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool = pool

    def read_sink(self) -> None:
        """Make the sink passage of the model's own tokens, in the background; without a tokenizer there is no ingest
        of gaps."""
        threading.Thread(target=self._read_sink, name="ucm-sink", daemon=True).start()

    def _read_sink(self) -> None:
        try:
            from vllm.tokenizers import get_tokenizer

            tokenizer = get_tokenizer(self._model.tokenizer, trust_remote_code=self._model.trust_remote_code)
            self._sink = sink_tokens(tokenizer, self._model.max_model_len)[-GAP_SINK_TOKENS:]
        except Exception as error:
            logger.warning("text first seen inside blended requests is not stored: no tokenizer (%s)", error)

    # ---- a request ends

    def hold(self, request: Request, state: RequestState, block_ids: np.ndarray, meta: BlendConnectorMeta) -> bool:
        """Put what is to be saved of a finished request into `meta`; whether its blocks, int64, are needed for it."""
        save = self._settings.save if state.controls.save is None else state.controls.save
        if not save or not len(block_ids) or unsupported_request(request):
            return False
        if self.is_scarce and state.controls.ingest_from is None:
            return False
        only_esa = self._esa is not None and not state.receipt.reused_tokens and self._esa.is_only_taint(request)
        if is_tainted(request) and not only_esa:
            held = self._ingest(request, state, block_ids, meta)
        else:
            held = self._save(request, state, block_ids, meta, only_esa)
        if held:
            self._held.add(request.request_id)
        return held

    def _save(self, request: Request, state: RequestState, block_ids: np.ndarray, meta: BlendConnectorMeta,
              only_esa: bool) -> bool:
        """Exact KV, as it is."""
        # KV of the last token was never computed
        tokens = np.asarray(request.all_token_ids[: request.num_tokens - 1], np.int32)
        tokens = tokens[: min(len(tokens), len(block_ids) * self._block_size)]
        if only_esa:
            tokens = tokens[: self._esa.num_exact_tokens(request)]
        first = state.controls.ingest_from or 0
        canonical = state.controls.ingest_from is not None
        if canonical:
            tokens = tokens[: request.num_prompt_tokens]
        covered = None if canonical else self._covered(tokens, state)
        chunks = self._new_chunks(tokens, first, len(tokens), state.namespace.hex,
                                  "canonical" if canonical else "request", keep_tail=canonical, covered=covered)
        if not chunks:
            return False
        meta.saves.append(SaveJob(request.request_id, block_ids, chunks, droppable=not canonical))
        # the workers copy before they read: whoever plans with these chunks from now on will find them
        self._catalogue.add(chunk for _, chunk in chunks)
        self._count("saved_tokens", sum(chunk.num_tokens for _, chunk in chunks))
        return True

    def _covered(self, tokens: np.ndarray, state: RequestState) -> np.ndarray:
        """bool [tokens]: text that is in the store already, under whatever cutting."""
        covered = np.zeros(len(tokens), bool)
        index = self._catalogue.index(state.namespace.hex)
        for chunk in self._analyzer.analyze(tokens, index) if len(index) else ():
            if chunk.chunk_type is ChunkType.FULL_MATCH:
                covered[chunk.start_idx : chunk.end_idx] = True
        return covered

    def _new_chunks(self, tokens: np.ndarray, first: int, end: int, namespace: str, context: str, keep_tail: bool,
                    covered: np.ndarray | None = None) -> list[tuple[int, ChunkMeta]]:
        """Chunks of `tokens[first:end]` that the store does not hold; positions are those in `tokens`."""
        size = self._settings.blend_chunk_size
        index = self._catalogue.index(namespace)
        source_id = new_source_id(self._source_prefix)
        chunks: dict[str, tuple[int, ChunkMeta]] = {}
        for start in range(first, end, size):
            stop = min(start + size, end)
            if stop - start < size and not keep_tail:
                break
            if covered is not None and covered[start:stop].all():
                continue
            text = tokens[start:stop]
            key = chunk_key(namespace, text)
            if key in index or key in chunks:
                continue
            chunks[key] = start, ChunkMeta(
                key=key, namespace=namespace, token_ids=text, source_id=source_id, source_position=start,
                context=context, context_key=context_key(namespace, tokens[:start]), **self._shape)
        return list(chunks.values())

    def _ingest(self, request: Request, state: RequestState, block_ids: np.ndarray, meta: BlendConnectorMeta) -> bool:
        """Text first seen in a blended request: computed anew behind the sink passage, in this request's own blocks.

        Where most new text comes again, as in conversations, and otherwise once it has, it is urgent: computed beside
        other requests; the rest only when there are none.
        """
        texts = self._new_texts(request, state)
        if not texts or self._sink is None:
            return False
        own = block_ids[tainted_blocks_from(request) :]
        room = len(own) * self._block_size - sum(map(len, texts))
        if room < MIN_INGEST_ROOM:
            return False
        sink = np.asarray(self._sink[-min(room, len(self._sink)) :], np.int32)
        tokens = np.concatenate([sink, *texts])
        covered = self._covered(tokens, state)
        found, start = {}, len(sink)
        for text in texts:
            for at, chunk in self._new_chunks(tokens, start, start + len(text), state.namespace.hex, "canonical",
                                              keep_tail=True, covered=covered):
                found.setdefault(chunk.key, (at, chunk))
            start += len(text)
        chunks = self._not_under_way(list(found.values()), meta)
        if not chunks:
            return False
        keys = frozenset(chunk.key for _, chunk in chunks)
        urgent = self.met.meet(keys)
        if len(self._ingests) >= MAX_PENDING_INGESTS * (1 + urgent):
            return False
        tokens = tokens[: max(start + chunk.num_tokens for start, chunk in chunks)]
        self._ingests[request.request_id] = _Ingest(time.monotonic(), keys)
        meta.ingests.append(IngestJob(request.request_id, tokens, len(sink), own, chunks, urgent))
        self._count("ingested_tokens", len(tokens) - len(sink))
        return True

    def _not_under_way(self, chunks: list[tuple[int, ChunkMeta]], meta: BlendConnectorMeta
                       ) -> list[tuple[int, ChunkMeta]]:
        """Those that no other request's ingest will compute; that one has become urgent."""
        wanted = {chunk.key for _, chunk in chunks}
        for request_id, ingest in self._ingests.items():
            if wanted & ingest.keys:
                meta.urgent_ingests.append(request_id)
                wanted -= ingest.keys
        return [(start, chunk) for start, chunk in chunks if chunk.key in wanted]

    def _new_texts(self, request: Request, state: RequestState) -> list[np.ndarray]:
        """What stood between stored text, and what came after it: the question and the answer, the next turn's history
        (if it is worth a chunk)."""
        texts = [state.token_ids[start:end] for start, end in state.gaps]
        if state.reused_until is not None:
            last = np.asarray(request.all_token_ids[state.reused_until : request.num_tokens], np.int32)
            if len(last) >= self._settings.blend_chunk_size:
                texts.append(last)
        return texts

    def forget(self) -> None:
        """No text was met before, and the workers drop what they have not stored yet."""
        self.met.clear()
        for ingest in self._ingests.values():
            ingest.keys = frozenset()

    # ---- while blocks are held

    @property
    def has_held_requests(self) -> bool:
        return bool(self._held)

    @property
    def is_scarce(self) -> bool:
        """Whether running requests need the blocks."""
        return self._pool is not None and (
            self._pool.get_num_free_blocks() < MIN_FREE_BLOCKS * self._pool.num_gpu_blocks)

    def impatient_ingests(self) -> list[str]:
        """Requests whose blocks are needed, or were held long enough: their ingest is given up."""
        if not self._ingests:
            return []
        now, scarce = time.monotonic(), self.is_scarce
        late = [request_id for request_id, ingest in self._ingests.items()
                if scarce or now - ingest.since_s > INGEST_PATIENCE_S]
        for request_id in late:
            del self._ingests[request_id]
        return late

    def released(self, request_ids: Iterable[str]) -> None:
        """The workers no longer read these requests' blocks."""
        for request_id in request_ids:
            self._ingests.pop(request_id, None)
            self._held.discard(request_id)

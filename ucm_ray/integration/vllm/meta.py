"""What the two sides of the connector tell each other every engine step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from ucm_ray.blend.chunk import Chunk
from ucm_ray.blend.plan import Plan
from ucm_ray.store.base import ChunkMeta


@dataclass
class BlendRequestMeta:
    """One accepted plan, sent to the workers once. The first six fields are the seed's."""

    request_id: str
    full_match_chunks: list[Chunk]
    partial_match_chunks: list[Chunk]
    no_match_chunks: list[Chunk]
    position_mapping: dict[int, int]  # start of a chunk in the prompt -> where that token's KV was computed
    recompute_ranges: list[tuple[int, int]]  # computed whatever the policy says: gaps and differing tokens
    plan: Plan
    token_ids: np.ndarray  # int32, the prompt up to the plan's end
    block_ids: np.ndarray  # int64, the request's blocks
    namespace: str


@dataclass
class SaveJob:
    """Copy exact KV of a finished request out of its blocks, then release them."""

    request_id: str
    block_ids: np.ndarray  # int64
    chunks: list[tuple[int, ChunkMeta]]  # position of the chunk's first token in the request, what to store
    droppable: bool = True  # given up when blocks become scarce
    since_s: float = 0.0  # the worker's clock, when the job reached it


@dataclass
class IngestJob:
    """Compute text exactly behind the sink passage, in blocks a finished request still holds, and save it.

    `chunks` hold positions in `token_ids` (sink passage, then the text).
    """

    request_id: str
    token_ids: np.ndarray  # int32
    num_sink_tokens: int
    block_ids: np.ndarray  # int64, blocks nobody else can see
    chunks: list[tuple[int, ChunkMeta]]
    urgent: bool = False  # not only while nothing else is to do
    done: int = 0  # the worker's: tokens computed so far


@dataclass
class BlendConnectorMeta(KVConnectorMetadata):
    """From the scheduler to every worker, once a step."""

    request_metas: dict[str, BlendRequestMeta] = field(default_factory=dict)
    run: dict[str, np.ndarray] = field(default_factory=dict)  # plans all ranks have read: which chunks are good
    saves: list[SaveJob] = field(default_factory=list)
    ingests: list[IngestJob] = field(default_factory=list)
    urgent_ingests: list[str] = field(default_factory=list)  # of those sent before
    cancelled_ingests: list[str] = field(default_factory=list)
    drop_saves: bool = False  # blocks are scarce: release those that only wait to be copied
    clear_store: bool = False
    num_scheduled_tokens: int = 0  # 0: nothing decodes or prefills in this step, the workers may take their time
    num_prefill_tokens: int = 0  # of these, without one for each request
    esa: Any = None  # EsaStepMeta


@dataclass
class BlendReport:
    """What a worker did for one plan, for the receipt."""

    recomputed_tokens: int
    failed_chunks: int
    failed_tokens: int
    load_ms: float
    recompute_ms: float
    passes: int
    error: str = ""
    recomputed_ranges: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """From the workers to the scheduler, after a step."""

    loaded: dict[str, np.ndarray] = field(default_factory=dict)  # plan -> which chunks are good on this rank
    loaded_ranks: dict[str, int] = field(default_factory=dict)
    reports: dict[str, BlendReport] = field(default_factory=dict)
    saved: list[ChunkMeta] = field(default_factory=list)  # rank 0's; the KV is on its way to the store
    stored: list[ChunkMeta] = field(default_factory=list)  # found in the store instead of what a plan was made from
    lost: list[tuple[str, str]] = field(default_factory=list)  # namespace, key: missing, corrupt or evicted
    disabled: str = ""  # the start-up self-check failed
    esa: Any = None  # EsaReport

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        for request_id, good in other.loaded.items():
            mine = self.loaded.get(request_id)
            self.loaded[request_id] = good if mine is None else mine & good
            self.loaded_ranks[request_id] = self.loaded_ranks.get(request_id, 0) + other.loaded_ranks[request_id]
        self.reports = {**other.reports, **self.reports}
        self.saved = self.saved or other.saved
        self.stored = self.stored + other.stored
        self.lost = self.lost + other.lost
        self.disabled = self.disabled or other.disabled
        self.esa = self.esa.aggregate(other.esa) if self.esa is not None else other.esa
        return self

    def __bool__(self) -> bool:
        return bool(self.loaded or self.reports or self.saved or self.stored or self.lost or self.disabled
                    or self.esa is not None)

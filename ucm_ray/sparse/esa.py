"""ESA: decode over the initial, the local and the retrieved blocks of a request instead of all of them.

Per step and batch: `attention_begin` of the first layer decides which rows read sparsely and lays out the block
tables of all layers; `attention_begin` of every layer keeps the queries that the next selection needs; `finish_step`
publishes the representations of blocks that filled and selects for the steps to come. So the queries of step t choose
what steps t+1 ... t+stride read, and no layer waits for a selection.

A part of a selection is static (`prompt_mass`), the rest is retrieved (`retriever`); in every step the least of the
retrieved blocks give way to those that repeat the last tokens (`lexical`). docs/esa.md has the numbers behind the
defaults.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ucm_ray.retrieval.packed import Geometry, PackedAnswer, PackedQuery, Source
from ucm_ray.retrieval.retriever import Retriever
from ucm_ray.retrieval.worker import RetrievalWorker
from ucm_ray.sparse.base import UcmSparseBase, UcmSparseRole
from ucm_ray.sparse.config import Budget, EsaConfig
from ucm_ray.sparse.lexical import followers
from ucm_ray.sparse.prompt_mass import prompt_block_mass
from ucm_ray.sparse.request import ReqMeta, RequestState, Selection, membership

logger = logging.getLogger("ucm_ray.sparse")

# keys of whole blocks: (layer, block ids int64 [n]) -> [num_kv_heads, head_dim, n * block_size]
KeyReader = Callable[[int, torch.Tensor], torch.Tensor]


class SparseView(NamedTuple):
    """What the sparse rows of a batch read in one layer.

    Attributes:
        rows: batch rows that read sparsely, ascending; all others read everything.
        tokens: int64 `[len(rows)]`, the row's token in the batch.
        block_table: int32 `[len(rows) * groups, width]`. With one group per KV head an entry is
            `block * num_kv_heads + head`, the number of the block in a cache seen as one head per block.
        seq_lens: int32 `[len(rows) * groups]`, tokens behind a table row.
        max_seq_len: the largest of `seq_lens`.
        is_whole_batch: no other rows, one token each.
    """

    rows: list[int]
    tokens: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    is_whole_batch: bool


@dataclass
class EsaMetadata:
    """One step's batch. Made anew for every step: ESA recognises a step by the object.

    `requests` holds the batch rows ESA may narrow, in any order; rows without a request read densely.
    `query_start_loc`: first token of each row and the end of the last, `num_rows + 1` numbers.
    """

    requests: list[ReqMeta]
    query_start_loc: Sequence[int]
    view: SparseView | None = field(default=None, compare=False)


class ESA(UcmSparseBase):
    """Essential Sparse Attention for a batch of requests; see `EsaConfig` for the parameters.

    Args:
        config: the seed's keys, see `EsaConfig.from_dict`.
        retriever: makes who answers, for blocks of the given geometry; a local `RetrievalWorker` when left out.
    """

    def __init__(
        self, role: UcmSparseRole, config: dict[str, Any], retriever: Callable[[Geometry], Retriever] | None = None
    ):
        super().__init__(role, config)
        self.settings = EsaConfig.from_dict(config)
        self._states: dict[str, RequestState] = {}
        self._make_retriever = retriever or self._local_retriever
        self._retriever: Retriever | None = None
        self._metadata: EsaMetadata | None = None
        self._owner = uuid.uuid4().hex[:12]
        self._num_started = 0

    # ---- set-up

    def register_kv_caches(
        self,
        kv_caches,
        read_keys: KeyReader | None = None,
        block_size: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        """Hand over the paged KV caches, one per layer.

        Without `read_keys` each is `[2, num_blocks, block_size, num_kv_heads, head_dim]`, keys then values. With it the
        layout is the caller's affair, and the geometry must be given.
        """
        super().register_kv_caches(kv_caches)
        first = self.kv_caches[0]
        if read_keys is None:
            if first.dim() != 5 or first.shape[0] != 2:
                raise ValueError(
                    f"kv cache of layer 0 has shape {list(first.shape)}, expected "
                    "[2, num_blocks, block_size, num_kv_heads, head_dim]"
                )
            _, _, block_size, num_kv_heads, head_dim = first.shape
            read_keys = self._read_plain_keys
        self._read_keys = read_keys
        self.num_layers, self.device = len(self.kv_caches), first.device
        self.block_size, self.num_kv_heads, self.head_dim = block_size, num_kv_heads, head_dim
        self.kv_block_bytes = 2 * block_size * num_kv_heads * head_dim * first.element_size()
        self.groups = num_kv_heads if self.settings.per_head else 1
        self._heads = torch.arange(self.groups, dtype=torch.int32)[:, None]
        self._queries: list[torch.Tensor | None] = [None] * self.num_layers
        self._laid_out_for: list[str] = []
        self._geometry = Geometry(
            self.num_layers, num_kv_heads, head_dim, self.settings.representation, self.settings.retrieval_dtype
        )
        self._retriever = self._make_retriever(self._geometry)

    def _local_retriever(self, geometry: Geometry) -> Retriever:
        keys = ("retrieval_workers", "retrieval_cache_size")
        return RetrievalWorker({key: getattr(self.settings, key) for key in keys}, geometry=geometry)

    def _read_plain_keys(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        return self.kv_caches[layer][0][block_ids].permute(2, 3, 0, 1).flatten(2)

    # ---- the two calls of every layer

    def attention_begin(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: EsaMetadata
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep what later selections need; put what this layer reads into `metadata.view` (None: everything).

        Args:
            query: `[num_tokens, num_heads, head_dim]`; key, value: `[num_tokens, num_kv_heads, head_dim]`, already
                written to the cache.
        Returns:
            query, key, value as given, and a tensor like the query for the output.
        """
        if metadata is not self._metadata:
            self._begin_step(metadata)
        if self._captured is not None:
            self._queries[layer_idx] = query[self._captured]
        for state, rows in self._prompt_tails:
            state.prompt_queries[layer_idx].append(query[rows].clone())
        metadata.view = None if self._tables is None else self._view._replace(block_table=self._tables[layer_idx])
        return query, key, value, torch.empty_like(query)

    def attention_finished(self, layer_idx: int, output: torch.Tensor) -> torch.Tensor:
        """The output stands as it is: tokens left out were left out of the softmax too."""
        return output

    def close(self) -> None:
        """Let go of the retriever."""
        if self._retriever is not None:
            self._retriever.close()

    # ---- requests

    def state(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop requests that finished, were aborted or were preempted; their blocks may change owner now."""
        known = [request_id for request_id in request_ids if self._states.pop(request_id, None) is not None]
        if known:
            self._retriever.forget(known)

    def _follow(self, meta: ReqMeta) -> RequestState:
        """The state of a request, brought up to this step."""
        state = self._states.get(meta.request_id)
        if state is not None and meta.num_computed_tokens < state.num_tokens:
            self.forget([meta.request_id])  # tokens were taken back: nothing learnt from them may stay
            state = None
        if state is None:
            ratio = self.settings.sparse_ratio if meta.sparse_ratio is None else meta.sparse_ratio
            # A key is for one content: not for a block number, nor for a request that starts over.
            self._num_started += 1
            state = RequestState(
                meta.request_id,
                meta.num_prompt_tokens,
                ratio,
                self.num_layers,
                key_prefix=f"{self._owner}/{self._num_started}/",
            )
            self._states[meta.request_id] = state
        if len(meta.vllm_block_ids) != len(state.block_ids):
            state.block_ids = np.asarray(meta.vllm_block_ids, np.int64)
        state.num_tokens = meta.num_tokens
        return state

    # ---- before the first layer

    def _begin_step(self, metadata: EsaMetadata) -> None:
        self._metadata = metadata
        self._prompt_tails: list[tuple[RequestState, slice]] = []
        self._decoding: list[tuple[ReqMeta, RequestState]] = []
        for meta in metadata.requests:
            state = self._follow(meta)
            if meta.is_decode:
                self._decoding.append((meta, state))
            else:
                self._note_prompt_tail(metadata, meta, state)
        self._pays = self._decoding and self._saved_bytes() >= max(1, self.settings.min_saved_bytes)
        sparse = []
        if self._pays:
            for _, state in self._decoding:
                self._receive(state)
            sparse = [
                (meta, state)
                for meta, state in self._decoding
                if self._is_usable(state) and meta.num_computed_tokens >= meta.first_sparse_token
            ]
            sparse.sort(key=lambda pair: pair[0].index_in_batch)
        self._count(sparse)
        self._lay_out(metadata, sparse)
        wanted = self._pays and any(self._may_ask(state) for _, state in self._decoding)
        self._captured = self._token_index(metadata, self._decoding) if wanted else None

    def _note_prompt_tail(self, metadata: EsaMetadata, meta: ReqMeta, state: RequestState) -> None:
        """Which of this step's tokens are among the last queries of the prompt."""
        if self.settings.budget(self._num_blocks(meta.num_prompt_tokens + 1), state.ratio) is None:
            return  # too short now; the first selection will be asked for when it has grown
        window = self.settings.prompt_window if self.settings.static_share > 0 else 1
        first = max(meta.num_computed_tokens, meta.num_prompt_tokens - window)
        last = min(meta.num_tokens, meta.num_prompt_tokens)
        if first < last:
            offset = metadata.query_start_loc[meta.index_in_batch] - meta.num_computed_tokens
            self._prompt_tails.append((state, slice(offset + first, offset + last)))

    def _token_index(self, metadata: EsaMetadata, rows: list[tuple[ReqMeta, RequestState]]) -> torch.Tensor:
        starts = [metadata.query_start_loc[meta.index_in_batch] for meta, _ in rows]
        return torch.tensor(starts, dtype=torch.int64, device=self.device)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _saved_bytes(self) -> int:
        """KV that this step's decoding rows would not read if all of them had a selection."""
        saved = 0
        for meta, state in self._decoding:
            budget = self.settings.budget(self._num_blocks(meta.num_tokens), state.ratio)
            if budget is not None:
                saved += budget.local_start - budget.init - budget.num_middle
        return saved * self.kv_block_bytes * self.num_layers

    def _is_usable(self, state: RequestState) -> bool:
        """Whether a selection is there and young enough; the fallback `last` puts up with an old one."""
        if state.selection is None or state.dense_for_now:
            return False
        return state.age < 2 * self.settings.retrieval_stride or state.stands_in

    def _may_ask(self, state: RequestState) -> bool:
        """Whether this step's queries may be needed for the next selection."""
        if state.pending is not None or state.ratio >= 1.0:
            return False
        due = state.selection is None or state.dense_for_now or state.age >= self.settings.retrieval_stride
        return due or self.settings.drift_cosine > 0

    def _width(self, meta: ReqMeta, state: RequestState) -> int:
        """Blocks a row reads: init, middle, and all from the local window's start on."""
        selection = state.selection
        return selection.init + selection.middle.shape[-1] + self._num_blocks(meta.num_tokens) - selection.local_start

    def _lay_out(self, metadata: EsaMetadata, sparse: list[tuple[ReqMeta, RequestState]]) -> None:
        """Block tables of all layers. Most of a row changes with its selection or a new block, not with every token."""
        if not sparse:
            self._tables = None
            return
        widths = [self._width(meta, state) for meta, state in sparse]
        self._reserve_tables([state.key_prefix for _, state in sparse], max(widths))
        for row, ((meta, state), width) in enumerate(zip(sparse, widths, strict=True)):
            if self._written[row] != (state.version, width):
                self._written[row] = (state.version, width)
                self._write_table(self._laid_out[:, row, :, :width], meta, state)
            self._write_lexical(self._laid_out[:, row, :, :width], meta, state)
        self._tables = self._laid_out.flatten(1, 2).to(self.device)
        lengths = [
            (width - 1) * self.block_size + (meta.num_tokens - 1) % self.block_size + 1
            for (meta, _), width in zip(sparse, widths, strict=True)
        ]
        seq_lens = torch.tensor(lengths, dtype=torch.int32).repeat_interleave(self.groups).to(self.device)
        num_rows = len(metadata.query_start_loc) - 1
        self._view = SparseView(
            [meta.index_in_batch for meta, _ in sparse],
            self._token_index(metadata, sparse),
            self._tables[0],
            seq_lens,
            max(lengths),
            is_whole_batch=len(sparse) == num_rows == metadata.query_start_loc[-1],
        )

    def _reserve_tables(self, owners: list[str], width: int) -> None:
        """One buffer for as long as the same requests decode and their rows fit. A request that starts over is another
        owner: its blocks are others, whatever its name."""
        if owners == self._laid_out_for and width <= self._laid_out.shape[-1]:
            return
        self._laid_out_for = owners
        self._laid_out = torch.zeros((self.num_layers, len(owners), self.groups, width + 4), dtype=torch.int32)
        self._written: list[tuple[int, int] | None] = [None] * len(owners)

    def _write_table(self, table: torch.Tensor, meta: ReqMeta, state: RequestState) -> None:
        """Fill `[num_layers, groups, width]`. The block being filled comes last: only it may be part full."""
        selection = state.selection
        init, middle = selection.init, selection.middle
        blocks = torch.from_numpy(state.block_ids)[: self._num_blocks(meta.num_tokens)]
        k = middle.shape[-1]
        table[..., :init] = blocks[:init]
        table[..., init : init + k] = blocks[middle]
        table[..., init + k :] = blocks[selection.local_start :]
        if self.groups > 1:
            table.mul_(self.groups).add_(self._heads)
        state.selected_blocks = selection.blocks_read(middle, len(blocks))

    def _write_lexical(self, table: torch.Tensor, meta: ReqMeta, state: RequestState) -> None:
        """Put the blocks that repeat the last tokens into the places the selection leaves them."""
        meta.selected_blocks = state.selected_blocks
        selection = state.selection
        if not selection.num_lexical or meta.token_ids is None:
            return
        wanted = followers(
            meta.token_ids, self.block_size, selection.num_lexical, selection.init, selection.local_start
        )
        found = selection.with_blocks(wanted)
        end = selection.init + selection.middle.shape[-1]
        places = table[..., end - selection.num_lexical : end]
        places.copy_(torch.from_numpy(state.block_ids)[found])
        if self.groups > 1:
            places.mul_(self.groups).add_(self._heads)
        if len(wanted):
            middle = torch.cat([selection.middle[..., : -selection.num_lexical], found], -1)
            meta.selected_blocks = selection.blocks_read(middle, self._num_blocks(meta.num_tokens))

    def _count(self, sparse: list[tuple[ReqMeta, RequestState]]) -> None:
        narrowed = {id(state) for _, state in sparse}
        for meta, state in self._decoding:
            total = self._num_blocks(meta.num_tokens)
            state.age += 1
            if id(state) in narrowed:
                state.count(
                    blocks_read=self._width(meta, state), blocks_total=total, sparse_steps=1, max_staleness=state.age
                )
            else:
                meta.selected_blocks = list(range(total))
                state.count(blocks_read=total, blocks_total=total, dense_steps=1)

    # ---- after the last layer

    def finish_step(self) -> None:
        """Publish blocks that filled in this step, and select for the next ones. Call once the forward has ended."""
        metadata = self._metadata
        if metadata is None:
            return
        self._index([self._states[meta.request_id] for meta in metadata.requests if meta.request_id in self._states])
        due: list[tuple[RequestState, torch.Tensor]] = []
        for meta in metadata.requests:
            state = self._states.get(meta.request_id)
            if state is not None and not meta.is_decode and state.num_tokens >= state.num_prompt_tokens:
                due += self._finish_prompt(state)
        due += self._due()
        if due:
            self._ask(due)
        self._captured, self._tables, self._metadata = None, None, None

    def _index(self, states: list[RequestState]) -> None:
        """Representations of blocks that are full and not yet known, whoever wrote their KV."""
        new = [
            (state, state.num_indexed, state.num_tokens // self.block_size)
            for state in states
            if state.num_tokens // self.block_size > state.num_indexed and self._may_be_sparse(state)
        ]
        if not new:
            return
        blocks = torch.from_numpy(np.concatenate([state.block_ids[start:end] for state, start, end in new]))
        stats = []
        for layer in range(self.num_layers):
            found = self._read_keys(layer, blocks.to(self.device))
            found = found.view(self.num_kv_heads, self.head_dim, -1, self.block_size).permute(2, 3, 0, 1)
            stats.append(self._geometry.method.compute(found))
        appends = {}
        for state, start, end in new:
            appends[state.request_id] = [f"{state.key_prefix}{index}" for index in range(start, end)]
            state.num_indexed = end
        self._retriever.publish([key for keys in appends.values() for key in keys], torch.stack(stats, 1), appends)

    def _may_be_sparse(self, state: RequestState) -> bool:
        """Whether the request is long enough, now or at the end of its prompt."""
        num_tokens = max(state.num_tokens, state.num_prompt_tokens) + 1
        return self.settings.budget(self._num_blocks(num_tokens), state.ratio) is not None

    def _finish_prompt(self, state: RequestState) -> list[tuple[RequestState, torch.Tensor]]:
        """Fix the static share; returns the request and the query for its first selection, if it is long enough."""
        tails = [torch.cat(pieces) if pieces else None for pieces in state.prompt_queries]
        state.prompt_queries = [[] for _ in range(self.num_layers)]
        if any(tail is None for tail in tails):
            return []
        budget = self.settings.budget(self._num_blocks(state.num_tokens + 1), state.ratio)
        if budget is None:
            return []
        num_static = int((budget.num_middle - budget.num_lexical) * self.settings.static_share)
        if num_static:
            state.static = self._static_blocks(state, tails, budget, num_static)
        return [(state, torch.stack([tail[-1] for tail in tails]))]

    def _static_blocks(self, state: RequestState, tails, budget: Budget, num_static: int) -> torch.Tensor:
        """int64 `[num_layers, groups, num_static]`."""
        blocks = torch.from_numpy(state.block_ids)[: self._num_blocks(state.num_tokens)].to(self.device)
        chosen = []
        for layer, tail in enumerate(tails):
            mass = prompt_block_mass(
                tail, self._read_keys(layer, blocks), state.num_tokens, self.block_size, self.head_dim**-0.5
            )
            if self.groups == 1:
                mass = mass.sum(0, keepdim=True)
            middle = mass[:, budget.init : budget.local_start]
            chosen.append(middle.topk(min(num_static, middle.shape[-1])).indices + budget.init)
        return torch.stack(chosen).cpu()

    def _due(self) -> list[tuple[RequestState, torch.Tensor]]:
        """Decoding requests whose selection is missing, old, or made for queries unlike the present ones."""
        if self._captured is None or any(query is None for query in self._queries):
            return []
        wanted = []
        for index, (meta, state) in enumerate(self._decoding):
            if not self._may_ask(state):
                continue
            if self.settings.budget(self._num_blocks(meta.num_tokens + 1), state.ratio) is None:
                continue
            is_due = state.selection is None or state.dense_for_now or state.age >= self.settings.retrieval_stride
            if is_due or self._has_drifted(index, state):
                wanted.append(index)
        if not wanted:
            return []
        queries = torch.stack(self._queries, 1)  # [rows, num_layers, num_heads, head_dim]
        return [(self._decoding[index][1], queries[index]) for index in wanted]

    def _has_drifted(self, index: int, state: RequestState) -> bool:
        now = torch.stack([query[index] for query in self._queries]).flatten(1).float()
        then = state.selected_with.flatten(1).float()
        return float(torch.cosine_similarity(now, then, dim=1).mean()) < self.settings.drift_cosine

    # ---- questions and answers

    def _ask(self, due: list[tuple[RequestState, torch.Tensor]]) -> None:
        """One packed question for all requests that need a selection."""
        budgets = [self.settings.budget(self._num_blocks(state.num_tokens + 1), state.ratio) for state, _ in due]
        query = PackedQuery.build(
            [state.request_id for state, _ in due],
            torch.stack([query for _, query in due]),
            self._geometry,
            k=[budget.num_middle for budget in budgets],
            start=[budget.init for budget in budgets],
            stop=[budget.local_start for budget in budgets],
            per_head=self.groups > 1,
        )
        deadline_s = self.settings.deadline_ms / 1e3
        future = self._retriever.submit(query, max(1e-3, deadline_s))
        if isinstance(self._retriever, RetrievalWorker):
            wait([future])  # milliseconds in this very process: no need to decode with an older selection
        for index, ((state, vectors), budget) in enumerate(zip(due, budgets, strict=True)):
            state.pending = _Pending(future, query, index, budget, vectors, time.monotonic())
            if future.done():
                self._receive(state)

    def _receive(self, state: RequestState) -> None:
        """Take an answer that has come. A step that cannot do without it waits to the deadline, then falls back."""
        pending: _Pending | None = state.pending
        if pending is None:
            return
        pending.age += 1
        needed = not self._is_usable(state)
        if not needed and not pending.future.done() and not pending.is_overdue(self.settings.deadline_ms / 1e3):
            return
        state.pending = None
        answer = pending.wait(self.settings.deadline_ms / 1e3 if needed else 0.0)
        source = Source.DENSE if answer is None else answer.source(pending.index)
        if source is not Source.EXACT:
            state.count(fallbacks=1)
        if source in (Source.EXACT, Source.LOCAL):
            self._adopt(state, pending, answer)
        elif self.settings.fallback == "last" and state.selection is not None:
            state.stands_in = True
        else:
            state.dense_for_now = True

    def _adopt(self, state: RequestState, pending: _Pending, answer: PackedAnswer) -> None:
        """Join the static and the retrieved share into the request's selection."""
        budget = pending.budget
        blocks = torch.from_numpy(answer.blocks[pending.index, ..., : budget.num_middle]).long()
        scores = torch.from_numpy(answer.scores[pending.index, ..., : budget.num_middle]).clone()
        static = blocks[..., :0] if state.static is None else state.static[..., : budget.num_middle]
        scores.masked_fill_(membership(static, budget.local_start).gather(-1, blocks), float("-inf"))
        best = scores.topk(budget.num_middle - static.shape[-1]).indices
        blocks = torch.cat([static, blocks.gather(-1, best)], -1)
        state.selection = Selection.of(
            budget.init, budget.local_start, blocks, min(budget.num_lexical, best.shape[-1])
        )
        state.selected_with = pending.vectors
        state.version += 1
        state.age = pending.age - 1
        state.dense_for_now = state.stands_in = False


@dataclass
class _Pending:
    """A question on its way, and which of its requests is meant."""

    future: Future[PackedAnswer]
    query: PackedQuery
    index: int
    budget: Budget
    vectors: torch.Tensor
    asked_at: float
    age: int = 0  # decode steps begun since it was asked

    def is_overdue(self, deadline_s: float) -> bool:
        return time.monotonic() > self.asked_at + deadline_s

    def wait(self, deadline_s: float) -> PackedAnswer | None:
        """The answer, if it comes before the deadline (counted from the question) and is whole."""
        try:
            answer = self.future.result(timeout=max(0.0, self.asked_at + deadline_s - time.monotonic()))
        except (FutureTimeout, CancelledError):
            return None
        except Exception as error:
            logger.warning("retrieval failed, falling back: %s: %s", type(error).__name__, error)
            return None
        return answer if _is_whole(answer, self) else None


def _is_whole(answer: PackedAnswer, pending: _Pending) -> bool:
    """Whether all blocks asked for are named; some may be unknown to whom was asked."""
    blocks = answer.blocks[pending.index, ..., : pending.budget.num_middle]
    return blocks.shape[-1] == pending.budget.num_middle and bool((blocks >= 0).all())

"""One accepted plan on its way into the paged cache: read, placed, observed, repaired."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from ucm_ray.blend.chunk import Chunk
from ucm_ray.blend.plan import Plan
from ucm_ray.blend.policies import get_policy, positions_to_ranges
from ucm_ray.integration.vllm.meta import BlendReport, BlendRequestMeta
from ucm_ray.integration.vllm.paged_kv import PagedKV
from ucm_ray.integration.vllm.virtual_sequences import Row
from ucm_ray.store.base import ChunkMeta, StoredChunk

MIN_HIDDEN_TOKENS = 64  # less is not worth it
PLACING_COST = 1 / 16  # placing a token's KV costs about that part of computing the token


class Piece(NamedTuple):
    """Stored KV for a span of the prompt."""

    chunk: Chunk
    kv: torch.Tensor  # [num_layers, 2, num_tokens, num_kv_heads, head_dim], this chunk's span only


class Loaded(NamedTuple):
    """What was read for a plan."""

    chunks: list[StoredChunk | None]
    seconds: float = 0.0  # in the reading thread alone: no engine step is in it


class BlendTask:
    """State of one plan on one rank. The worker asks for rows within a budget and runs them.

    Phases: `reading`, `placing`, `observing` (only for policies with a signal), `repairing`, `done`. Inside a phase
    work is cut in ascending order of positions, so that any cutting gives the same result: a token only looks left.
    """

    def __init__(self, meta: BlendRequestMeta, paged: PagedKV) -> None:
        self.meta, self.paged = meta, paged
        self.future: Future[Loaded] = Future()
        self.plan: Plan = meta.plan
        self.phase = "reading"
        self.policy = get_policy(self.plan.policy)
        self.load_s = self.recompute_s = 0.0  # reading and placing; passes of the model
        self.passes = self.recomputed_tokens = self.failed_chunks = 0
        self.recomputed_ranges: list[tuple[int, int]] = []
        self.error = ""
        self.loaded: list[StoredChunk | None] = []
        self.good: np.ndarray | None = None  # which chunks of the plan this rank can use, once its files are read
        self.pieces: list[Piece] = []
        self.scores: np.ndarray | None = None
        self.mass: torch.Tensor | None = None  # float32 [num_layers, span]: question attention per position
        self.value_norm: torch.Tensor | None = None  # float32 [num_layers, span]
        self.reused_keys: torch.Tensor | None = None  # keys of the check layer as reused, [span, kv_heads, head_dim]
        self._todo: list[Row] = []
        self._placed = 0

    # ---- reading

    def check(self, loaded: list[StoredChunk | None]) -> np.ndarray:
        """Which of the plan's chunks can be used: present, and still what the plan was made from. bool [chunks]"""
        return np.array([found is not None and self._is_planned(chunk, found)
                         for chunk, found in zip(self.plan.chunks, loaded, strict=True)], bool)

    def _is_planned(self, chunk: Chunk, found: StoredChunk) -> bool:
        meta, kv = found
        offset, length = chunk.source_offset, chunk.num_tokens
        heads = (self.paged.num_kv_heads, self.paged.head_dim)
        if kv.shape[0] != len(self.paged.names) or tuple(kv.shape[3:]) != heads:
            return False
        if not is_of_source(chunk, meta):
            return False
        stored = meta.token_ids[offset : offset + length]
        prompt = self.meta.token_ids[chunk.start_idx : chunk.end_idx]
        if len(stored) != length:
            return False
        differs = np.flatnonzero(stored != prompt) + chunk.start_idx
        return set(differs.tolist()) <= set(chunk.mismatched)

    def accept(self, loaded: list[StoredChunk | None], good: np.ndarray) -> None:
        """Start placing. Chunks that are not good on every rank are computed instead of reused."""
        bad = [chunk for chunk, fine in zip(self.plan.chunks, good, strict=True) if not fine]
        if bad:
            self.failed_chunks = len(bad)
            self.plan = without_chunks(self.plan, bad)
        self.pieces = [
            Piece(chunk, found[1][:, :, chunk.source_offset : chunk.source_offset + chunk.num_tokens])
            for chunk, found, fine in zip(self.meta.plan.chunks, loaded, good, strict=True) if fine
        ]
        span, layers = self.plan.end - self.plan.start, len(self.paged.names)
        if not self.plan.num_candidates:
            self.policy = get_policy("none")
        if self.policy.signal == "question_mass":
            self.value_norm = torch.zeros(layers, span)
            self.mass = torch.zeros(layers, span)
        elif self.policy.signal == "key_deviation":
            self.reused_keys = torch.zeros(span, self.paged.num_kv_heads, self.paged.head_dim)
        self.phase = "placing"

    # ---- placing

    def place(self, budget: float, place_pieces: Callable[[BlendTask, list[Piece]], None]) -> float:
        """Write pieces into the paged cache until `budget` (in computed tokens) is used up; returns what is left."""
        begun = time.perf_counter()
        first = self._placed
        while self._placed < len(self.pieces) and budget > 0:
            budget -= self.pieces[self._placed].chunk.num_tokens * PLACING_COST
            self._placed += 1
        if first < self._placed:
            place_pieces(self, self.pieces[first : self._placed])
        if self._placed == len(self.pieces):
            self.pieces = []
            self._begin_observing()
        self.load_s += time.perf_counter() - begun
        return budget

    # ---- observing and repairing

    def _begin_observing(self) -> None:
        plan = self.plan
        if self.policy.signal == "question_mass":
            self._todo = self._question_rows()
        elif self.policy.signal == "key_deviation":
            computed = np.zeros(plan.end - plan.start, bool)
            computed[plan.candidate_positions() - plan.start] = True
            for start, end in plan.must_compute:
                computed[start - plan.start : end - plan.start] = True
            self._todo = self._rows(positions_to_ranges(np.flatnonzero(computed) + plan.start))
        else:
            self._begin_repairing()
            return
        self.phase = "observing"
        if not self._todo:
            self._begin_repairing()

    def _question_rows(self) -> list[Row]:
        """The question, and the gaps: it must not look at slots nobody has written. New text between the last run and a
        question far behind it is left out, as a hole in the prompt: it is computed once, when all is repaired."""
        plan, size = self.plan, self.paged.block_size
        rows = self._rows(plan.must_compute)
        tail = rows[-1] if rows else None
        if plan.question is None or tail is None or not tail.start <= plan.question[0] < tail.end:
            return rows
        hidden = (-(-tail.start // size) * size, plan.question[0] // size * size)
        if hidden[1] - hidden[0] < MIN_HIDDEN_TOKENS:
            return rows
        before = [tail._replace(end=hidden[0])] if tail.start < hidden[0] else []
        return [*rows[:-1], *before, tail._replace(start=hidden[1], hidden=hidden)]

    def _begin_repairing(self) -> None:
        plan = self.plan
        selected = self.policy.select(plan, self.scores)
        self.recomputed_tokens = len(selected)
        self.recomputed_ranges = positions_to_ranges(selected)
        compute = np.zeros(plan.end - plan.start, bool)
        compute[selected - plan.start] = True
        for start, end in plan.must_compute:
            compute[start - plan.start : end - plan.start] = True
        if self.policy.signal == "question_mass" and len(selected):
            # the observing passes computed the gaps, all layers: those before the first repaired token stay as they are
            compute[: selected[0] - plan.start] = False
        self._todo = self._rows(positions_to_ranges(np.flatnonzero(compute) + plan.start))
        self.mass = self.value_norm = self.reused_keys = None
        self.phase = "repairing" if self._todo else "done"

    def _rows(self, ranges) -> list[Row]:
        return [Row(start, end, self.meta.token_ids, self.meta.block_ids, self) for start, end in ranges]

    @property
    def first_layers(self) -> int:
        """Layers to run while observing; 0 means all."""
        return self.policy.check_layer + 1 if self.phase == "observing" and self.policy.signal == "key_deviation" else 0

    def next_work(self, budget: float, max_rows: int) -> list[Row]:
        """Take the next rows, at most `max_rows` and about `budget` tokens."""
        taken: list[Row] = []
        while self._todo and budget > 0 and len(taken) < max_rows:
            row = self._todo[0]
            length = min(row.end - row.start, max(1, int(budget)))
            taken.append(row._replace(end=row.start + length))
            if row.start + length == row.end:
                self._todo.pop(0)
            else:
                self._todo[0] = row._replace(start=row.start + length)
            budget -= length
        return taken

    @property
    def has_work(self) -> bool:
        return bool(self._todo)

    def observed(self, scores: np.ndarray | None) -> None:
        """All rows of the observing phase ran; `scores` as the policy wants them."""
        self.scores = scores
        self._begin_repairing()

    def repaired(self) -> None:
        self.phase = "done"

    def report(self) -> BlendReport:
        failed_tokens = self.meta.plan.reused_tokens - self.plan.reused_tokens
        return BlendReport(self.recomputed_tokens, self.failed_chunks, failed_tokens, self.load_s * 1e3,
                           self.recompute_s * 1e3, self.passes, self.error, self.recomputed_ranges)


def is_of_source(chunk: Chunk, meta: ChunkMeta) -> bool:
    """False if the store holds the same text computed elsewhere: it keeps the first copy, or a file was replaced."""
    return meta.source_position + chunk.source_offset == chunk.source_position and meta.context_key == chunk.context_key


def without_chunks(plan: Plan, bad: list[Chunk]) -> Plan:
    """The same span with the tokens of `bad` chunks computed instead of reused."""
    computed = np.zeros(plan.end - plan.start, bool)
    spans = [*plan.must_compute, *((chunk.start_idx, chunk.end_idx) for chunk in bad)]
    for start, end in spans:
        computed[start - plan.start : end - plan.start] = True
    ranges = tuple(positions_to_ranges(np.flatnonzero(computed) + plan.start))
    chunks = tuple(chunk for chunk in plan.chunks if chunk not in bad)
    return replace(plan, chunks=chunks, must_compute=ranges, reused_tokens=plan.end - plan.start - int(computed.sum()))

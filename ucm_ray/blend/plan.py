"""The plan of one request: which stored KV fills which positions, what is computed, what may be recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ucm_ray.blend.chunk import Chunk, Run, clip_chunk
from ucm_ray.blend.policies import get_policy, positions_to_ranges
from ucm_ray.keys import context_key


@dataclass(frozen=True)
class Plan:
    """Fills the positions [start, end) of a prompt. Positions are absolute; everything is sorted and disjoint.

    A position of the span is either reused (in a run and not mismatched) or inside `must_compute`. For policies that
    look at the question the span goes up to the last token but one: then `question` lies inside the span and inside
    `must_compute`. Otherwise `question` begins at or after `end` and vLLM computes it as usual.
    """

    start: int
    end: int
    chunks: tuple[Chunk, ...]
    """Matched spans, clipped to [start, end)."""
    runs: tuple[Run, ...]
    must_compute: tuple[tuple[int, int], ...]
    """Gaps and mismatches inside [start, end): always computed."""
    question: tuple[int, int] | None
    """Text after the last run, at most its last `question_tokens` tokens, without the prompt's last token."""
    policy: str
    budget: float
    reused_tokens: int
    reason: str = ""

    @cached_property
    def _reused(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(positions int64 [reused], run index int64 [reused], candidate bool [reused])"""
        computed = np.zeros(self.end - self.start, bool)
        for start, end in self.must_compute:
            computed[start - self.start : end - self.start] = True
        if not self.runs:
            empty = np.empty(0, np.int64)
            return empty, empty, np.empty(0, bool)
        positions = np.concatenate([np.arange(run.start, run.end) for run in self.runs])
        run_index = np.repeat(np.arange(len(self.runs)), [run.num_tokens for run in self.runs])
        kept = ~computed[positions - self.start]
        positions, run_index = positions[kept], run_index[kept]
        exact = np.array([run.exact for run in self.runs])
        return positions, run_index, ~exact[run_index]

    def reused_positions(self) -> np.ndarray:
        """Sorted int64 positions whose KV is reused. Scores for a policy come in this order."""
        return self._reused[0]

    def candidate_mask(self) -> np.ndarray:
        """bool [reused]: False where an exact run makes recomputing pointless."""
        return self._reused[2]

    def candidate_positions(self) -> np.ndarray:
        """Sorted int64 positions that a policy may recompute: reused ones outside exact runs."""
        positions, _, candidate = self._reused
        return positions[candidate]

    def candidate_run_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """For each candidate, first index and index past the last of its run's candidates: two int64 [candidates]."""
        _, run_index, candidate = self._reused
        run_index = run_index[candidate]
        return np.searchsorted(run_index, run_index, "left"), np.searchsorted(run_index, run_index, "right")

    @property
    def num_candidates(self) -> int:
        return int(np.count_nonzero(self._reused[2]))

    @property
    def exact(self) -> bool:
        """True if the result equals full prefill with nothing recomputed: every run is exact."""
        return all(run.exact for run in self.runs)

    @property
    def missed_tokens(self) -> int:
        """Tokens of the span that no stored KV covers."""
        return self.end - self.start - self.reused_tokens

    @property
    def question_inside(self) -> bool:
        return self.question is not None and self.question[0] < self.end

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_reused"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True)
class Decline:
    """Why a request is not blended."""

    reason: str
    by_cost: bool = False
    """Computing was found to be cheaper."""


@dataclass(frozen=True)
class PlannerSettings:
    """Keys of the configuration that planning reads, with their defaults."""

    policy: str = "query"
    budget: float = 0.10
    recompute_boundary: int = 2
    """Least first and last tokens of each run that `boundary` takes, when it was chosen and no budget asked for."""
    question_tokens: int = 128
    min_question_tokens: int = 8
    """Fewer tokens after the last run are the chat template's tail, not a question."""
    min_run_tokens: int = 16
    min_reused_tokens: int = 32

    @classmethod
    def from_any(cls, settings: Any) -> PlannerSettings:
        """From None, a PlannerSettings, a dictionary or any object with some of these attributes."""
        if settings is None:
            return cls()
        if isinstance(settings, cls):
            return settings
        read = settings.get if isinstance(settings, dict) else lambda name: getattr(settings, name, None)
        names = cls.__dataclass_fields__
        return cls(**{name: read(name) for name in names if read(name) is not None})


class Planner:
    """Makes a plan out of an analysed prompt."""

    def __init__(self, settings: Any = None, cost_model: Any = None, namespace_hex: str = ""):
        """`namespace_hex`: whose `context_key`s the chunks carry, needed to recognise exact runs by context."""
        self.settings = PlannerSettings.from_any(settings)
        self.cost_model = cost_model
        self.namespace_hex = namespace_hex
        get_policy(self.settings.policy)
        _check_budget(self.settings.budget)

    def plan(self, token_ids, chunks: list[Chunk], num_computed_tokens: int, policy: str | None = None,
             budget: float | None = None, namespace_hex: str | None = None) -> Plan | Decline:
        """The plan behind vLLM's own prefix hit of `num_computed_tokens`, or why there is none.

        The last prompt token is never inside a plan: vLLM computes it to get logits. Raises ValueError for an unknown
        policy or a budget outside [0, 1].
        """
        settings = self.settings
        name = policy if policy is not None else settings.policy
        signal = get_policy(name).signal
        token_ids = np.asarray(token_ids)
        last = len(token_ids) - 1
        start = num_computed_tokens
        exact_spans = self._exact_spans(token_ids, chunks, namespace_hex or self.namespace_hex)
        matched, runs = self._clip(chunks, exact_spans, start, last)
        exact = [run for run in runs if run.exact]
        if exact and sum(run.num_tokens for run in runs if not run.exact) < settings.min_reused_tokens:
            # the others are not worth the exactness of all that comes after them, which could then not be saved either
            runs = exact
            matched = [part for run in runs for chunk in matched if (part := clip_chunk(chunk, run.start, run.end))]
        reason = ""
        question = self._question(runs, last)
        if signal == "question_mass" and question is None and runs:
            matched, runs, question, name, reason = self._find_question(matched, runs, start, last, name)
        reused = sum(run.num_tokens for run in runs) - sum(len(chunk.mismatched) for chunk in matched)
        if reused < settings.min_reused_tokens:
            return Decline(f"too few reusable tokens: {reused}, at least {settings.min_reused_tokens} needed")
        inexact = any(not run.exact for run in runs)
        looks_at_question = get_policy(name).signal == "question_mass" and inexact
        end = last if looks_at_question else runs[-1].end
        planned_budget = self._budget(name, budget, policy or settings.policy, runs)
        plan = Plan(start, end, tuple(matched), tuple(runs), _gaps(start, end, runs, matched), question, name,
                    planned_budget, reused, reason)
        if self.cost_model is not None:
            declined = self.cost_model.decline_reason(plan, len(token_ids))
            if declined:
                return Decline(declined, by_cost=True)
        return plan

    def _exact_spans(self, token_ids: np.ndarray, chunks: list[Chunk], namespace_hex: str) -> list[tuple[int, int]]:
        """Spans whose KV is what full prefill gives: same tokens before, same positions.

        A run at its old position is exact if it begins at position 0, or if the context key of its first chunk is the
        key of this prompt's tokens before it; and only up to its first mismatch.
        """
        spans = []
        for group in _group_runs([chunk for chunk in chunks if chunk.matched]):
            first = group[0]
            if first.delta != 0:
                continue
            before = first.start_idx - first.source_offset
            known = first.context_key and namespace_hex and first.source_offset == 0
            if before == 0 and first.source_offset == 0 or (
                known and first.context_key == context_key(namespace_hex, token_ids[:before])
            ):
                mismatches = [chunk.mismatched[0] for chunk in group if chunk.mismatched]
                spans.append((first.start_idx, min(mismatches, default=group[-1].end_idx)))
        return spans

    def _clip(self, chunks, exact_spans, start: int, end: int) -> tuple[list[Chunk], list[Run]]:
        """Matched chunks and runs inside [start, end), without runs too short to be worth it."""
        matched, runs = [], []
        clipped = [part for chunk in chunks if chunk.matched and (part := clip_chunk(chunk, start, end))]
        for group in _group_runs(clipped):
            first, last = group[0].start_idx, group[-1].end_idx
            exact_end = max((span[1] for span in exact_spans if span[0] <= first < span[1]), default=first)
            exact_end = min(exact_end, last)
            # An exact run is worth it at any length: it has no border to repair.
            if exact_end < last and last - first < self.settings.min_run_tokens:
                continue
            matched.extend(group)
            if first < exact_end:
                runs.append(Run(first, exact_end, group[0].source_id, group[0].delta, exact=True))
            if exact_end < last:
                runs.append(Run(exact_end, last, group[0].source_id, group[0].delta))
        return matched, runs

    def _question(self, runs: list[Run], last: int) -> tuple[int, int] | None:
        end = runs[-1].end if runs else 0
        if last - end < self.settings.min_question_tokens:
            return None
        return max(end, last - self.settings.question_tokens), last

    def _find_question(self, matched, runs, start: int, last: int, name: str):
        """A policy wants a question but the last run reaches the end of the prompt.

        If everything is exact nothing needs repair. A short last run behind other text is the question, seen before:
        it is computed rather than reused. Else `boundary` takes over.
        """
        if all(run.exact for run in runs):
            return matched, runs, None, name, "every run is exact"
        shorter = runs[:-1]
        is_short = runs[-1].end - runs[-1].start <= min(64, self.settings.question_tokens)
        if shorter and is_short and (question := self._question(shorter, last)) is not None:
            kept = [part for chunk in matched if (part := clip_chunk(chunk, start, shorter[-1].end))]
            return kept, shorter, question, name, "the question was reusable and is computed"
        return matched, runs, None, "boundary", "no question after the last run: boundary"

    def _budget(self, name: str, budget: float | None, asked_policy: str, runs: list[Run]) -> float:
        if budget is not None:
            _check_budget(budget)
        if name == "none":
            return 0.0
        if budget is not None:
            return float(budget)
        if name == "boundary" and asked_policy == "boundary":
            inexact = [run.num_tokens for run in runs if not run.exact]
            least = sum(min(2 * self.settings.recompute_boundary, tokens) for tokens in inexact)
            return max(self.settings.budget, least / max(1, sum(inexact))) if inexact else self.settings.budget
        return self.settings.budget


def _check_budget(budget: float) -> None:
    if not isinstance(budget, (int, float)) or not 0 <= budget <= 1:
        raise ValueError(f"budget: found {budget!r}, expected a number from 0 to 1")


def _group_runs(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Adjacent chunks that continue each other in one source."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        previous = groups[-1][-1] if groups else None
        if previous is not None and (previous.end_idx, previous.source_id, previous.delta) == (
            chunk.start_idx, chunk.source_id, chunk.delta
        ):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _gaps(start: int, end: int, runs: list[Run], matched: list[Chunk]) -> tuple[tuple[int, int], ...]:
    """Ranges of [start, end) that are in no run or mismatched."""
    computed = np.ones(max(0, end - start), bool)
    for run in runs:
        computed[run.start - start : run.end - start] = False
    for chunk in matched:
        computed[[position - start for position in chunk.mismatched]] = True
    return tuple(positions_to_ranges(np.flatnonzero(computed) + start))

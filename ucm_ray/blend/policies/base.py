"""What a recompute policy is: from a plan (and scores, if it wants some) to the reused tokens to recompute."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:
    from ucm_ray.blend.plan import Plan

Signal = Literal["none", "key_deviation", "question_mass"]


@dataclass(frozen=True)
class RecomputePolicy(ABC):
    """Chooses which reused tokens of a plan are recomputed.

    `signal` tells the engine side which scores to measure before it calls `select`: none at all, the squared deviation
    of keys at one layer, or the question's attention mass times the value norm.
    """

    name: ClassVar[str]
    signal: ClassVar[Signal] = "none"
    argument: ClassVar[str | None] = None
    """Field that `name@value` sets."""

    @abstractmethod
    def select(self, plan: Plan, scores: np.ndarray | None = None) -> np.ndarray:
        """Sorted int64 positions to recompute: reused, not in an exact run, at most `budget_tokens(plan)` of them.

        `scores` is float `[len(plan.reused_positions())]`, in that order; only policies with a signal read it.
        """


def budget_tokens(plan: Plan) -> int:
    """Most tokens a policy may choose: the plan's budget, a share of the reused tokens outside exact runs."""
    return min(int(plan.budget * plan.num_candidates + 1e-9), plan.num_candidates)


def checked_scores(plan: Plan, scores: np.ndarray | None, policy: str) -> np.ndarray:
    """Scores of the candidates as float64; not-a-number counts as lowest, infinities are kept."""
    positions = plan.reused_positions()
    if scores is None or np.shape(scores) != positions.shape:
        found = None if scores is None else np.shape(scores)
        raise ValueError(f"policy {policy}: scores have shape {found}, expected {positions.shape}")
    values = np.asarray(scores, dtype=np.float64)
    values = np.where(np.isnan(values), -np.inf, values)
    return values[plan.candidate_mask()]


def take_top(positions: np.ndarray, scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` positions with the highest scores, unsorted; ties go to the earlier position."""
    if count <= 0:
        return positions[:0]
    return positions[np.argsort(-scores, kind="stable")[:count]]


def positions_to_ranges(positions: np.ndarray) -> list[tuple[int, int]]:
    """Sorted unique positions as maximal contiguous ranges [(start, end), ...]."""
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size == 0:
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1)
    starts = positions[np.concatenate(([0], breaks + 1))]
    ends = positions[np.concatenate((breaks, [positions.size - 1]))] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=False))

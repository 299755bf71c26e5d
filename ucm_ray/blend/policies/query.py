"""Recompute what the question looks at: its attention mass times the value norm, plus the first tokens of each run.

The question's tokens run once over the merged, not yet repaired cache; a token's score is, averaged over layers, the
attention that the question pays to it (mean over heads and question tokens) times the norm of its value (mean over KV
heads). The top tokens are recomputed scattered as they are: rounding up to spans was measured to be worse.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucm_ray.blend.policies.base import RecomputePolicy, budget_tokens, checked_scores, take_top


@dataclass(frozen=True)
class QuestionMass(RecomputePolicy):
    """`first_tokens`: tokens at the start of each run that come before all others, as far as the budget goes."""

    name = "query"
    signal = "question_mass"
    first_tokens: int = 2

    def select(self, plan, scores=None) -> np.ndarray:
        positions = plan.candidate_positions()
        values = checked_scores(plan, scores, self.name)
        budget = budget_tokens(plan)
        if positions.size == 0 or budget == 0:
            return positions[:0]
        start, _ = plan.candidate_run_bounds()
        rank = np.arange(positions.size) - start
        first = rank < self.first_tokens
        # With more runs than the budget can start, every run's first token precedes any run's second; ties by score.
        heads = np.flatnonzero(first)
        heads = heads[np.lexsort((-values[heads], rank[heads]))][:budget]
        others = take_top(np.flatnonzero(~first), values[~first], budget - heads.size)
        return np.sort(positions[np.concatenate((heads, others))])

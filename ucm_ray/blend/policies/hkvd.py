"""Recompute the tokens whose keys deviate most at one early layer (HKVD, CacheBlend, arXiv 2405.16444)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucm_ray.blend.policies.base import RecomputePolicy, budget_tokens, checked_scores, take_top


@dataclass(frozen=True)
class KeyDeviation(RecomputePolicy):
    """`check_layer`: 0-based layer whose keys are compared, computed from layers 0 to `check_layer` over the plan.

    Scores are the squared differences of the recomputed and the reused keys, summed over KV heads and head_dim.
    CacheBlend looks at layer 1 (`hkvd@1`); layer 3 was closer to full prefill.
    """

    name = "hkvd"
    signal = "key_deviation"
    argument = "check_layer"
    check_layer: int = 3

    def select(self, plan, scores=None) -> np.ndarray:
        chosen = take_top(plan.candidate_positions(), checked_scores(plan, scores, self.name), budget_tokens(plan))
        return np.sort(chosen)

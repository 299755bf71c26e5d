"""Recompute the first and last tokens of each run: the seed's policy, for any budget.

Best where the question is not known when documents are blended. The first token of a run comes before its last, and
every run gets its n-th token before any run gets its n+1-th.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucm_ray.blend.policies.base import RecomputePolicy, budget_tokens


@dataclass(frozen=True)
class Boundary(RecomputePolicy):
    name = "boundary"

    def select(self, plan, scores=None) -> np.ndarray:
        positions = plan.candidate_positions()
        if positions.size == 0:
            return positions
        start, end = plan.candidate_run_bounds()
        # Rank inside the run counted from whichever end is nearer, first tokens before last ones at equal distance.
        from_start = np.arange(positions.size) - start
        from_end = end - 1 - np.arange(positions.size)
        rank = np.minimum(2 * from_start, 2 * from_end + 1)
        order = np.lexsort((positions, rank))
        return np.sort(positions[order[: budget_tokens(plan)]])

"""Recompute nothing: the fastest and the least faithful."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ucm_ray.blend.policies.base import RecomputePolicy


@dataclass(frozen=True)
class NoRecompute(RecomputePolicy):
    name = "none"

    def select(self, plan, scores=None) -> np.ndarray:
        return np.empty(0, np.int64)

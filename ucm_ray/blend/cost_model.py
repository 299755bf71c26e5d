"""Whether blending a prompt is cheaper than computing it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from ucm_ray.blend.plan import Plan
from ucm_ray.blend.policies import get_policy


@dataclass(frozen=True)
class Costs:
    """Milliseconds. The defaults are ratios to `prefill`, which is all that a decision needs."""

    prefill: float = 1.0
    """per token computed in one piece"""
    scattered: float = 1.5
    """per token recomputed in scattered ranges: its attention shares no reading of keys with its neighbours"""
    load: float = 1 / 16
    """per reused token: read, rotated, written into the paged cache"""
    plan: float = 16.0
    """per plan"""


_LARGEST_STEP = 4.0  # an observation counts at most as that many times the estimate, or as that part of it
_MIN_COMPUTED_TOKENS = 32  # a pass of fewer takes as long as one of so many: it tells nothing of a token's price


class CostModel:
    """Compares, for the span of a plan, computing all of it with what the plan does.

    Both compute the gaps, so gaps do not decide, but what is reused must pay for its own loading, for the tokens
    recomputed in it and for the question's second pass. The cost of loading starts as a ratio to computing and is
    corrected by what finished plans took, in bounded steps. Each refused request moves it a little back, so that
    disturbed measurements cannot turn blending off for good. The other costs stay as they are.
    """

    def __init__(self, costs: Costs | None = None, memory: float = 0.8, min_saving: float = 0.05):
        """`memory`: weight of the past in each update. `min_saving`: share of the span's prefill that must be saved."""
        self._prior = costs or Costs()
        self._memory, self._min_saving = memory, min_saving
        self._lock = threading.Lock()
        self._load = self._prior.load

    @property
    def costs(self) -> Costs:
        """The present estimate, in units of the prior's `prefill`."""
        return replace(self._prior, load=self._load)

    def computing(self, plan: Plan) -> float:
        """Cost of prefilling the span."""
        return (plan.end - plan.start) * self._prior.prefill

    def blending(self, plan: Plan) -> float:
        """Cost of carrying out the plan."""
        costs = self.costs
        recomputed = int(plan.budget * plan.num_candidates)
        signal = get_policy(plan.policy).signal if plan.num_candidates else "none"
        watched = 0
        if signal == "question_mass" and plan.question:
            watched = plan.missed_tokens
        elif signal == "key_deviation":
            # The first layers over the whole span: a tenth of the model, as an order of magnitude.
            watched = (plan.end - plan.start) // 10
        return (plan.missed_tokens * costs.prefill + recomputed * costs.scattered + watched * costs.prefill
                + plan.reused_tokens * costs.load + costs.plan)

    def decline_reason(self, plan: Plan, num_prompt_tokens: int) -> str:
        """Empty if the plan is worth it."""
        computing, blending = self.computing(plan), self.blending(plan)
        if blending <= computing * (1 - self._min_saving):
            return ""
        return (f"computing is cheaper: {plan.reused_tokens} of {num_prompt_tokens} tokens reusable, "
                f"blending would cost {blending / computing:.2f} of a prefill")

    def observe(self, plan: Plan, load_ms: float, recompute_ms: float) -> None:
        """A plan was carried out: reading and placing took `load_ms`, all passes of the model `recompute_ms`."""
        scattered = int(plan.budget * plan.num_candidates)
        missed = plan.missed_tokens * (2 if plan.num_candidates and plan.question_inside else 1)
        if missed + scattered < _MIN_COMPUTED_TOKENS or not plan.reused_tokens or min(load_ms, recompute_ms) <= 0:
            return
        prior = self._prior
        # gaps are computed in one piece, the rest scattered: one time for both, split by the known ratio
        unit_ms = recompute_ms / (missed * prior.prefill + scattered * prior.scattered)
        seen = load_ms / plan.reused_tokens / unit_ms
        with self._lock:
            seen = min(max(seen, self._load / _LARGEST_STEP), self._load * _LARGEST_STEP)
            self._load = self._memory * self._load + (1 - self._memory) * seen

    def forget(self) -> None:
        """A request was refused: trust the measurements a little less."""
        with self._lock:
            self._load += 0.05 * (self._prior.load - self._load)

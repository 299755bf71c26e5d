"""Whether blending a prompt is cheaper than computing it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

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


class CostModel:
    """Compares, for the span of a plan, computing all of it with what the plan does.

    Both compute the gaps, so gaps do not decide, but what is reused must pay for its own loading, for the tokens
    recomputed in it and for the question's second pass. Costs start as ratios and are corrected by what finished plans
    took. Each refusal moves them a little back, so that a disturbed measurement cannot turn blending off for good.
    """

    def __init__(self, costs: Costs | None = None, memory: float = 0.8, min_saving: float = 0.05):
        """`memory`: weight of the past in each update. `min_saving`: share of the span's prefill that must be saved."""
        self._prior = costs or Costs()
        self._memory, self._min_saving = memory, min_saving
        self._lock = threading.Lock()
        self._load_ratio = self._prior.load / self._prior.prefill
        self._scattered_ratio = self._prior.scattered / self._prior.prefill
        self._prefill_ms: float | None = None

    @property
    def costs(self) -> Costs:
        """The present estimate, in units of the prior's `prefill`."""
        unit = self._prior.prefill
        return Costs(unit, self._scattered_ratio * unit, self._load_ratio * unit, self._prior.plan)

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
        self._forget()
        return (f"computing is cheaper: {plan.reused_tokens} of {num_prompt_tokens} tokens reusable, "
                f"blending would cost {blending / computing:.2f} of a prefill")

    def observe_prefill(self, num_tokens: int, milliseconds: float) -> None:
        """A plain prefill took so long. Until one was seen, only the two ratios to each other are known."""
        if num_tokens > 0 and milliseconds > 0:
            with self._lock:
                per_token = milliseconds / num_tokens
                past = self._prefill_ms if self._prefill_ms is not None else per_token
                self._prefill_ms = self._memory * past + (1 - self._memory) * per_token

    def observe(self, plan: Plan, load_ms: float, recompute_ms: float) -> None:
        """A plan was carried out: reading and placing took `load_ms`, all passes of the model `recompute_ms`."""
        scattered = int(plan.budget * plan.num_candidates)
        passes = 2 if plan.num_candidates and plan.question_inside else 1
        computed = passes * plan.missed_tokens + scattered
        with self._lock:
            prefill = self._prefill_ms
            if prefill is None:
                if computed == 0 or recompute_ms <= 0:
                    return
                # Gaps are computed in one piece, the rest scattered: one time for both, split by the known ratio.
                prefill = recompute_ms / (passes * plan.missed_tokens + scattered * self._scattered_ratio)
            if prefill <= 0:
                return
            if plan.reused_tokens and load_ms > 0:
                self._load_ratio = self._blend(self._load_ratio, load_ms / plan.reused_tokens / prefill)
            if scattered and self._prefill_ms is not None:
                rest = recompute_ms - passes * plan.missed_tokens * prefill
                self._scattered_ratio = self._blend(self._scattered_ratio, max(rest / scattered / prefill, 0.5))

    def _blend(self, past: float, seen: float) -> float:
        return self._memory * past + (1 - self._memory) * seen

    def _forget(self) -> None:
        with self._lock:
            self._load_ratio += 0.05 * (self._prior.load / self._prior.prefill - self._load_ratio)
            self._scattered_ratio += 0.05 * (self._prior.scattered / self._prior.prefill - self._scattered_ratio)

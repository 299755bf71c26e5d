import numpy as np
import pytest

from tests.blend.brute_force import records_of
from tests.blend.test_analyzer import words
from ucm_ray.blend.analyzer import ChunkAnalyzer
from ucm_ray.blend.cost_model import CostModel
from ucm_ray.blend.plan import Decline, Plan, Planner


def plan_for(reused: int, new: int, model: CostModel | None, **arguments):
    document = words(1, reused)
    prompt = np.concatenate((words(2, new), document, words(3, 40)))
    chunks = ChunkAnalyzer().analyze(prompt, records_of(document, "a" * 32, position=500))
    return Planner(cost_model=model).plan(prompt, chunks, 0, **arguments)


def test_long_reuse_is_worth_it_whatever_the_gaps():
    assert isinstance(plan_for(1000, 0, CostModel()), Plan)
    assert isinstance(plan_for(1000, 1000, CostModel(), policy="boundary"), Plan)


def test_little_reuse_is_declined_with_the_numbers():
    declined = plan_for(40, 1000, CostModel())
    assert isinstance(declined, Decline)
    assert "40 of 1080 tokens reusable" in declined.reason and "computing is cheaper" in declined.reason


@pytest.mark.parametrize("policy", ["none", "boundary", "hkvd", "query"])
def test_recomputing_everything_is_never_cheaper(policy):
    declined = plan_for(1000, 0, CostModel(), policy=policy, budget=1.0)
    assert isinstance(declined, Plan if policy == "none" else Decline)


def test_slow_storage_is_learnt_and_forgotten():
    model = CostModel()
    plan = plan_for(1000, 0, None)
    model.observe_prefill(1000, 700.0)
    for _ in range(30):
        model.observe(plan, load_ms=5000.0, recompute_ms=150.0)
    assert isinstance(plan_for(1000, 0, model), Decline)
    tries = 0
    while isinstance(plan_for(1000, 0, model), Decline):
        tries += 1
        assert tries < 200
    for _ in range(30):
        model.observe(plan, load_ms=50.0, recompute_ms=150.0)
    assert model.costs.load == pytest.approx(50 / 1000 / 0.7, rel=0.05)


def test_observations_without_a_prefill_or_without_work_are_harmless():
    model = CostModel()
    before = model.costs
    model.observe(plan_for(1000, 0, None, policy="none"), load_ms=10.0, recompute_ms=0.0)
    model.observe_prefill(0, 5.0)
    assert model.costs == before
    model.observe(plan_for(1000, 0, None), load_ms=60.0, recompute_ms=150.0)
    assert model.costs.load != before.load

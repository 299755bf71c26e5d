from dataclasses import replace

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
    for _ in range(30):
        model.observe(plan, load_ms=5000.0, recompute_ms=150.0)
    assert isinstance(plan_for(1000, 0, model), Decline)
    tries = 0
    while isinstance(plan_for(1000, 0, model), Decline):
        model.forget()
        tries += 1
        assert tries < 200
    for _ in range(60):
        model.observe(plan, load_ms=50.0, recompute_ms=150.0)
    computed = 2 * plan.missed_tokens + 1.5 * 100
    assert model.costs.load == pytest.approx(50 / 1000 / (150 / computed), rel=0.05)


def test_one_disturbed_measurement_declines_no_plan():
    model = CostModel()
    model.observe(plan_for(64, 0, None), load_ms=500.0, recompute_ms=30.0)
    assert model.costs.load < 2 * CostModel().costs.load
    assert isinstance(plan_for(1000, 0, model), Plan)


def test_asking_again_forgets_nothing():
    model = CostModel()
    for _ in range(30):
        model.observe(plan_for(1000, 0, None), load_ms=5000.0, recompute_ms=150.0)
    learnt = model.costs
    for _ in range(50):
        declined = plan_for(1000, 0, model)
        assert declined.by_cost
    assert model.costs == learnt
    assert not plan_for(20, 0, model).by_cost


def test_observations_without_work_or_with_next_to_none_are_harmless():
    model = CostModel()
    before = model.costs
    model.observe(plan_for(1000, 0, None, policy="none"), load_ms=10.0, recompute_ms=0.0)
    few = replace(plan_for(1000, 0, None, policy="none"), must_compute=((1000, 1004),), question=None, end=1004)
    model.observe(few, load_ms=10.0, recompute_ms=30.0)
    assert model.costs == before
    model.observe(plan_for(1000, 0, None), load_ms=60.0, recompute_ms=150.0)
    assert model.costs.load != before.load

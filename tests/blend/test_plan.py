import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.blend.brute_force import NAMESPACE, records_of
from tests.blend.test_analyzer import stores_and_prompts, words
from ucm_ray.blend.analyzer import ChunkAnalyzer
from ucm_ray.blend.chunk import Chunk, ChunkType
from ucm_ray.blend.plan import Decline, Plan, Planner
from ucm_ray.blend.policies import get_policy, policy_names, positions_to_ranges

POLICIES = ["none", "boundary", "hkvd", "query", "hkvd@1"]


def planned(prompt, records, num_computed=0, **arguments) -> Plan:
    chunks = ChunkAnalyzer().analyze(prompt, records)
    plan = Planner(namespace_hex=NAMESPACE).plan(prompt, chunks, num_computed, **arguments)
    assert isinstance(plan, Plan), plan
    return plan


def shuffled_prompt(question: int = 30):
    """Three documents stored behind other text, in another order, with a question."""
    documents = [words(seed, 200) for seed in range(3)]
    records = [record for number, document in enumerate(documents)
               for record in records_of(document, f"{number:032x}", position=500)]
    pieces = words(9, 10), documents[2], documents[0], words(8, 4), documents[1], words(7, question)
    return np.concatenate(pieces), records


def check_plan(plan: Plan, prompt, num_computed: int):
    assert plan.start == num_computed and plan.start < plan.end <= len(prompt) - 1
    for spans in ([(run.start, run.end) for run in plan.runs], plan.must_compute,
                  [(chunk.start_idx, chunk.end_idx) for chunk in plan.chunks]):
        assert all(start < end for start, end in spans)
        assert all(plan.start <= start and end <= plan.end for start, end in spans)
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    reused, computed = set(plan.reused_positions().tolist()), {p for r in plan.must_compute for p in range(*r)}
    assert not reused & computed
    assert reused | computed == set(range(plan.start, plan.end))
    assert plan.reused_tokens == len(reused) and plan.missed_tokens == len(computed)
    chunk_of = {p: chunk for chunk in plan.chunks for p in range(chunk.start_idx, chunk.end_idx)}
    for run in plan.runs:
        for position in range(run.start, run.end):
            assert (chunk_of[position].source_id, chunk_of[position].delta) == (run.source_id, run.delta)


@settings(max_examples=200, deadline=None)
@given(stores_and_prompts(), st.sampled_from(POLICIES), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_plans_are_sorted_disjoint_inside_the_span_and_keep_the_budget(
    store_and_prompt, policy, budget, computed, seed
):
    prompt, records = store_and_prompt
    num_computed = int(computed * max(0, len(prompt) - 1))
    chunks = ChunkAnalyzer(8, 0.6, 3).analyze(prompt, records)
    planner = Planner({"min_run_tokens": 3, "min_reused_tokens": 1, "min_question_tokens": 2, "question_tokens": 5})
    plan = planner.plan(prompt, chunks, num_computed, policy, budget)
    if isinstance(plan, Decline):
        assert plan.reason
        return
    check_plan(plan, prompt, num_computed)
    assert pickle.loads(pickle.dumps(plan)) == plan
    if plan.question:
        start, end = plan.question
        assert end == len(prompt) - 1 and 2 <= end - start <= 5 and start >= plan.runs[-1].end
    scores = np.random.default_rng(seed).standard_normal(plan.reused_tokens)
    chosen = get_policy(plan.policy).select(plan, scores)
    assert chosen.dtype == np.int64 and (np.diff(chosen) > 0).all()
    assert len(chosen) <= plan.budget * plan.num_candidates + 1e-6
    assert set(chosen.tolist()) <= set(plan.candidate_positions().tolist())
    exact = [range(run.start, run.end) for run in plan.runs if run.exact]
    assert not any(position in span for span in exact for position in chosen)
    if plan.policy != "none":
        assert len(chosen) == int(plan.budget * plan.num_candidates + 1e-9)


def test_a_plan_for_the_question_reaches_to_the_last_token_but_one():
    prompt, records = shuffled_prompt()
    plan = planned(prompt, records)
    assert (plan.policy, plan.budget, plan.end) == ("query", 0.10, len(prompt) - 1)
    assert plan.question == (len(prompt) - 30, len(prompt) - 1) and plan.question_inside
    assert plan.must_compute[-1] == plan.question
    boundary = planned(prompt, records, policy="boundary")
    assert boundary.end == len(prompt) - 30 and not boundary.question_inside


def test_a_long_question_is_its_last_128_tokens():
    prompt, records = shuffled_prompt(question=400)
    assert planned(prompt, records).question == (len(prompt) - 129, len(prompt) - 1)


def test_boundary_takes_over_when_the_question_comes_before_the_documents():
    prompt, records = shuffled_prompt(question=3)
    plan = planned(prompt, records)
    assert plan.policy == "boundary" and "no question" in plan.reason
    assert plan.end == len(prompt) - 3


def test_a_question_seen_before_is_computed_not_reused():
    prompt, records = shuffled_prompt(question=30)
    records += records_of(prompt[-30:], "f" * 32, position=900)
    plan = planned(prompt, records)
    assert plan.policy == "query" and plan.question == (len(prompt) - 30, len(prompt) - 1)
    assert plan.runs[-1].end == len(prompt) - 30 and "question" in plan.reason


def test_the_same_prompt_again_is_one_exact_run_and_recomputes_nothing():
    prompt = words(1, 300)
    plan = planned(prompt, records_of(prompt, "a" * 32))
    assert [(run.start, run.end, run.delta, run.exact) for run in plan.runs] == [(0, 299, 0, True)]
    assert plan.exact and plan.end == 299 and plan.must_compute == ()
    for name in POLICIES:
        assert get_policy(name).select(plan, np.ones(plan.reused_tokens)).size == 0


def test_an_exact_run_continues_the_prefix_hit():
    prompt = words(1, 300)
    plan = planned(prompt, records_of(prompt[:256], "a" * 32), num_computed=128)
    assert [(run.start, run.end, run.exact) for run in plan.runs] == [(128, 256, True)]


def test_a_run_behind_the_same_context_is_exact_whatever_its_source():
    prompt = words(1, 300)
    first, second = records_of(prompt[:128], "a" * 32), records_of(prompt[:256], "b" * 32)[2:]
    plan = planned(prompt, first + second)
    assert [(run.start, run.end, run.source_id[0], run.exact) for run in plan.runs] == [
        (0, 128, "a", True), (128, 256, "b", True)]
    changed = prompt.copy()
    changed[5] += 1
    plan = planned(changed, first + second)
    assert [run.exact for run in plan.runs if run.source_id[0] == "b"] == [False]


def test_a_run_is_exact_only_up_to_its_first_difference():
    prompt = words(1, 300)
    changed = prompt.copy()
    changed[100] += 1
    plan = planned(changed, records_of(prompt[:256], "a" * 32))
    assert [(run.start, run.end, run.exact) for run in plan.runs] == [(0, 100, True), (100, 256, False)]
    assert plan.must_compute[0] == (100, 101)
    assert not plan.exact


def test_text_at_its_old_position_behind_other_text_is_not_exact():
    document = words(2, 200)
    records = records_of(np.concatenate((words(3, 64), document)), "a" * 32)
    plan = planned(np.concatenate((words(4, 64), document, words(5, 20))), records)
    assert [(run.delta, run.exact) for run in plan.runs] == [(0, False)]


def test_the_boundary_grows_from_both_ends_of_each_run():
    prompt, records = shuffled_prompt()
    plan = planned(prompt, records, policy="boundary", budget=12 / 600)
    chosen = get_policy("boundary").select(plan)
    assert positions_to_ranges(chosen) == [(10, 12), (208, 212), (408, 410), (414, 416), (612, 614)]
    odd = planned(prompt, records, policy="boundary", budget=9 / 600)
    assert positions_to_ranges(get_policy("boundary").select(odd))[0] == (10, 12)


def test_the_least_boundary_holds_for_the_deployments_policy_and_for_the_requests():
    prompt, records = shuffled_prompt()
    chunks = ChunkAnalyzer().analyze(prompt, records)
    planner = Planner({"policy": "boundary", "budget": 0.0, "recompute_boundary": 3}, namespace_hex=NAMESPACE)
    for policy in (None, "boundary"):
        plan = planner.plan(prompt, chunks, 0, policy)
        assert plan.budget * plan.num_candidates == pytest.approx(3 * 2 * len(plan.runs))
    assert Planner({"budget": 0.0}).plan(prompt, chunks, 0).budget == 0.0


def test_the_question_policy_takes_the_first_two_tokens_of_runs_and_the_highest_scores():
    prompt, records = shuffled_prompt()
    plan = planned(prompt, records, budget=10 / 600)
    scores = np.zeros(plan.reused_tokens)
    scores[[50, 60, 333, 599]] = [4, 3, 2, 1]
    positions = plan.reused_positions()
    expected = {10, 11, 210, 211, 414, 415} | set(positions[[50, 60, 333, 599]].tolist())
    assert set(get_policy("query").select(plan, scores).tolist()) == expected


def test_key_deviation_takes_the_highest_scores():
    prompt, records = shuffled_prompt()
    plan = planned(prompt, records, policy="hkvd", budget=0.5)
    scores = np.random.default_rng(0).random(plan.reused_tokens)
    scores[:5] = np.nan
    chosen = get_policy("hkvd").select(plan, scores)
    assert set(chosen.tolist()) == set(plan.reused_positions()[np.argsort(-np.nan_to_num(scores))[:300]].tolist())
    assert get_policy("hkvd@1").check_layer == 1 and get_policy("hkvd").check_layer == 3


def test_too_little_reuse_is_declined():
    plan = Planner().plan(words(0, 100), [Chunk(0, 20, ChunkType.FULL_MATCH, "a", 7, 0, "s")], 0)
    assert isinstance(plan, Decline) and "too few reusable tokens: 20" in plan.reason
    assert isinstance(Planner().plan(words(0, 100), [Chunk(0, 100, ChunkType.NO_MATCH)], 0), Decline)
    assert isinstance(Planner().plan([], [], 0), Decline)


def test_a_few_shifted_tokens_are_not_worth_the_exactness_of_the_rest():
    exact = Chunk(0, 64, ChunkType.FULL_MATCH, "a", 0, 0, "s")
    few = Chunk(64, 84, ChunkType.FULL_MATCH, "b", 7, 0, "t")
    plan = Planner().plan(words(0, 200), [exact, few], 0)
    assert plan.exact and (plan.reused_tokens, plan.end) == (64, 64) and plan.chunks == (exact,)
    many = Chunk(64, 100, ChunkType.FULL_MATCH, "b", 7, 0, "t")
    assert Planner().plan(words(0, 200), [exact, many], 0).reused_tokens == 100


def test_reuse_below_the_prefix_hit_does_not_count():
    prompt, records = shuffled_prompt()
    assert planned(prompt, records, num_computed=210).runs[0].start == 210
    chunks = ChunkAnalyzer().analyze(prompt, records)
    assert isinstance(Planner().plan(prompt, chunks, len(prompt) - 31), Decline)


def test_wrong_controls_are_named():
    prompt, records = shuffled_prompt()
    with pytest.raises(ValueError, match="expected one of.*boundary.*query"):
        planned(prompt, records, policy="magic")
    with pytest.raises(ValueError, match="budget: found 2"):
        planned(prompt, records, budget=2)
    with pytest.raises(ValueError, match="no argument"):
        get_policy("none@3")
    with pytest.raises(ValueError, match="scores have shape"):
        get_policy("query").select(planned(prompt, records), np.ones(3))
    assert policy_names() == ["boundary", "hkvd", "none", "query"]

"""ESA that is off in a worker is off in the scheduler, too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ucm_ray.integration.vllm.esa_meta import EsaReport
from ucm_ray.integration.vllm.esa_scheduler import EsaScheduler
from ucm_ray.integration.vllm.meta import WorkerReport


@pytest.fixture
def scheduler() -> EsaScheduler:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), speculative_config=None,
        model_config=SimpleNamespace(use_mla=False, is_hybrid=False, is_attention_free=False),
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto"))
    return EsaScheduler(config, {"min_blocks": 2})


def request(name: str) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, num_prompt_tokens=2000, num_tokens=2000, max_tokens=100, mm_features=[],
                           pooling_params=None, prompt_embeds=None, _block_hasher=None, all_token_ids=[0] * 2000)


def step_of(*names: str) -> SimpleNamespace:
    new = [SimpleNamespace(req_id=name, num_computed_tokens=0, block_ids=([1, 2],)) for name in names]
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 64), finished_req_ids=set(),
                           preempted_req_ids=None, scheduled_new_reqs=new, scheduled_cached_reqs=cached)


def test_requests_are_dense_once_a_worker_says_that_esa_is_off(scheduler):
    scheduler.on_request(request("before"))
    assert scheduler.build_step(step_of("before")).requests
    scheduler.update(EsaReport({"before": {"blocks_read": 3}}))
    scheduler.update(EsaReport(disabled="RuntimeError: no kernel"))
    late = request("late")
    scheduler.on_request(late)
    step = scheduler.build_step(step_of("late"))
    assert step.gone == ["before"] and not step.requests
    assert not scheduler.build_step(step_of())
    assert scheduler.num_exact_tokens(late) == 2000
    before = request("before")
    before.num_tokens = 2090
    assert scheduler.num_exact_tokens(before) < 2090, "it may have been decoded sparsely before"
    assert scheduler.receipt("before") == {"blocks_read": 3, "reason": "RuntimeError: no kernel"}
    assert scheduler.receipt("late")["reason"] == "RuntimeError: no kernel"
    assert not scheduler.build_step(step_of())


def test_one_rank_that_is_off_is_enough():
    for reports in ((None, EsaReport(disabled="why")), (EsaReport({"r": {}}), EsaReport(disabled="why")),
                    (EsaReport(disabled="why"), None), (EsaReport(disabled="why"), EsaReport({"r": {}}))):
        merged = WorkerReport(esa=reports[0]).aggregate(WorkerReport(esa=reports[1]))
        assert merged and merged.esa.disabled == "why"

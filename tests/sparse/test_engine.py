"""ESA inside vLLM: one engine run, many questions about it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def found(model_dir, tmp_path_factory):
    """What engine_scenarios.py wrote."""
    folder = tmp_path_factory.mktemp("esa")
    documents = ROOT / "ucm_ray" / "bench" / "data" / "documents.jsonl"
    command = [
        sys.executable,
        str(Path(__file__).with_name("engine_scenarios.py")),
        str(model_dir),
        str(folder / "store"),
        str(documents),
        str(folder / "found.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


def tokens(results):
    return [result["tokens"] for result in results]


def test_lexical_blocks_are_chosen_by_the_tokens_that_were_really_said(found):
    assert found["token_ids_seen"] == found["token_ids"]


def test_ratio_one_and_switched_off_give_exactly_dense_tokens(found):
    assert tokens(found["ratio_one"]) == tokens(found["dense"])
    assert tokens(found["off"]) == tokens(found["dense"])
    assert all(len(result["tokens"]) == 64 for result in found["dense"])


def test_dense_requests_beside_sparse_ones_and_prefills_keep_their_tokens(found):
    assert found["mixed"][1]["tokens"] == found["dense"][1]["tokens"]
    assert found["mixed"][3]["tokens"] == found["dense"][3]["tokens"]


def test_sparse_requests_read_less_and_their_receipts_say_so(found):
    for result in (found["mixed"][0], found["mixed"][2], *found["turn_one"]):
        receipt = result["receipt"]
        assert 0 < receipt["blocks_read"] < receipt["blocks_total"]
        assert receipt["sparse_steps"] > 0 and receipt["fallbacks"] == 0 and 1 <= receipt["max_staleness"] <= 2
    assert found["mixed"][1]["receipt"]["reason"] == "off"
    assert found["mixed"][3]["receipt"]["reason"] == "ratio 1.0"


def test_sparse_decode_of_natural_text_stays_near_dense_decode(found):
    same = [
        one == other
        for name in (0, 2)
        for one, other in zip(found["mixed"][name]["tokens"], found["dense"][name]["tokens"], strict=True)
    ]
    assert any(same[:8]) and found["mixed"][0]["tokens"][0] == found["dense"][0]["tokens"][0]


def test_below_min_blocks_tokens_are_dense(found):
    assert tokens(found["short_esa"]) == tokens(found["short_dense"])
    assert len(found["tiny"][0]["tokens"]) == 8


def test_the_next_turn_without_esa_is_exactly_plain_vllm(found):
    assert tokens(found["turn_two"]) == tokens(found["turn_two_plain"])
    exact_prompt_blocks = 300 // 32 * 32
    assert found["turn_two"][0]["cached"] == exact_prompt_blocks, "exactly the prompt is reused"


def test_preempted_requests_finish_and_freed_blocks_serve_others_exactly(found):
    assert found["preemptions"] > 0
    assert all(len(result["tokens"]) == 90 for result in found["preempted"])
    assert [result["tokens"][:16] for result in found["dense"][:2]] == tokens(found["after_preemption"])


def test_an_aborted_request_leaves_nothing_behind(found):
    assert found["aborted"][0] is None or len(found["aborted"][0]["tokens"]) < 40
    assert len(found["aborted"][1]["tokens"]) == 40
    assert [result["tokens"][:16] for result in found["dense"][:2]] == tokens(found["after_abort"])
    assert found["left_over"] == [0, 0, 0]


def test_no_error_switched_esa_off(found):
    assert found["disabled"] == ""


def test_a_broken_worker_is_told_to_the_scheduler_which_then_treats_requests_as_dense(found):
    """No more taints: the answer's blocks are vLLM's own to reuse."""
    for result in (*found["broken"], *found["after_broken"]):
        assert "broken on purpose" in result["receipt"]["reason"] and len(result["tokens"]) == 40
    assert found["after_broken"][0]["tokens"] == found["dense"][1]["tokens"][:40]
    assert found["after_broken_dense"][0]["cached"] == (323 + 40 - 1) // 32 * 32
    assert found["left_over_broken"] == [0, 0, 0]

"""Blend across processes: tensor parallelism, restarts, other weights, compiled mode, preemption.

Small random models.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.vllm.small_model import save_small_llama

pytestmark = pytest.mark.engine


def run_engine(folder: Path, job: dict, timeout_s: float = 300) -> list[list[dict]]:
    """Answers of `blend_process.py` to a job."""
    path = folder / f"job-{random.random()}.json"
    path.write_text(json.dumps(job))
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if job.get("llm", {}).get("tensor_parallel_size", 1) > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if (os.cpu_count() or 1) > 1 else "0|0"
    root = Path(__file__).parents[2]
    command = [sys.executable, str(Path(__file__).with_name("blend_process.py")), str(path)]
    done = subprocess.run(command, cwd=root, env=environment | {"PYTHONPATH": str(root)}, capture_output=True,
                          text=True, timeout=timeout_s)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, f"the engine gave no answer:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return json.loads(lines[0].removeprefix("ANSWERS "))


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> Path:
    return save_small_llama(tmp_path_factory.mktemp("small-llama"))


def words(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(2, 510) for _ in range(count)]


DOCUMENTS = [words(seed, 128) for seed in range(4)]
QUESTION = words(99, 24)
PLAIN = {"blend": False, "save": False}
SAVE = {"ucm": {"blend": False}, "prompts": [words(50, 64) + sum(DOCUMENTS, [])], "max_tokens": 1}
PROMPT = words(51, 10) + DOCUMENTS[2] + DOCUMENTS[0] + DOCUMENTS[3] + QUESTION


def test_tensor_parallel_ranks_blend_alike_restart_warm_and_survive_one_ranks_bad_file(small_model, tmp_path):
    job = {"model": str(small_model), "store": str(tmp_path / "store"), "llm": {"tensor_parallel_size": 2}}
    ask = [{"prompts": [PROMPT], "ucm": {"policy": policy, "budget": 0.2, "save": False}}
           for policy in ("query", "hkvd@1", "boundary")]
    everything = {"prompts": [PROMPT], "ucm": {"policy": "query", "budget": 1.0, "save": False}}
    plain = {"prompts": [PROMPT], "ucm": PLAIN, "forget_prefixes": True}
    first = run_engine(tmp_path, job | {"turns": [SAVE, *ask, everything, plain]})
    for (answer,) in first[1:5]:
        assert answer["receipt"]["reused_tokens"] > 300, answer
    assert first[4][0]["tokens"] == first[5][0]["tokens"]
    assert first[4][0]["logprobs"] == pytest.approx(first[5][0]["logprobs"], abs=1e-3)
    # a new process finds the store warm; rank 1 cannot read one of its files
    files = sorted((tmp_path / "store").rglob("*.1of2.kv"))
    assert files and len(files) == len(list((tmp_path / "store").rglob("*.0of2.kv")))
    for path in files[:3]:
        path.write_bytes(path.read_bytes()[:-7])
    second = run_engine(tmp_path, job | {"turns": [everything, plain]})
    found = second[0][0]["receipt"]
    assert found["failed_chunks"] >= 1 and found["reused_tokens"] >= 128
    assert second[0][0]["tokens"] == first[5][0]["tokens"]
    assert second[0][0]["logprobs"] == pytest.approx(first[5][0]["logprobs"], abs=1e-3)


SEED_YAML = """
kv_connector: "BlendConnector"
kv_connector_module_path: "ucm_ray.integration.vllm.blend_connector"
kv_connector_extra_config:
  store_pipeline: "Cache|Posix"
  storage_backends: "%s"
  blend_chunk_size: 64
  min_match_ratio: 0.8
  position_correction: true
  recompute_boundary: 2
  rope_theta: 10000.0
  head_dim: 128
"""


def test_compiled_with_the_seeds_yaml_blends_and_a_preempted_request_answers_the_same(tmp_path):
    """One engine, three promises: a compiled model, UCM's YAML on Llama-2's head geometry, preemption and resume."""
    model = save_small_llama(tmp_path / "llama-2", heads=2, kv_heads=2, head_dim=128)
    extra = yaml.safe_load(SEED_YAML % (tmp_path / "store"))["kv_connector_extra_config"]
    prompts = [words(60 + i, 10) + DOCUMENTS[i % 4] + DOCUMENTS[(i + 1) % 4] + QUESTION for i in range(4)]
    everything = {"prompts": [PROMPT], "ucm": {"policy": "query", "budget": 1.0, "save": False}}
    plain = {"prompts": [PROMPT], "ucm": PLAIN, "forget_prefixes": True}
    # everything recomputed, so that any KV gone wrong on the way shows in the tokens
    ask = {"prompts": prompts, "max_tokens": 120, "ucm": {"policy": "query", "budget": 1.0, "save": False}}
    # requests begin with 10 blocks and grow to 13: 35 blocks make some of them wait, lose their blocks and come back
    turns = [SAVE, everything, plain, *({**ask, "prompts": [prompt], "forget_prefixes": True} for prompt in prompts),
             {**ask, "forget_prefixes": True}]
    answers = run_engine(tmp_path, {
        "model": str(model), "store": str(tmp_path / "store"), "turns": turns, "extra": extra,
        "llm": {"num_gpu_blocks_override": 35, "scheduler_reserve_full_isl": False, "enforce_eager": False}})
    assert answers[1][0]["receipt"]["reused_tokens"] > 300
    assert answers[1][0]["tokens"] == answers[2][0]["tokens"]
    assert answers[1][0]["logprobs"] == pytest.approx(answers[2][0]["logprobs"], abs=1e-3)
    alone = [answer["tokens"] for (answer,) in answers[3:7]]
    together = answers[7]
    assert [answer["tokens"] for answer in together] == alone
    assert all(answer["receipt"]["reused_tokens"] > 150 for answer in together)
    assert sum(answer["preemptions"] for answer in together) > 0

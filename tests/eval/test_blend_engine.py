"""The measurements on a real engine, small: four documents a prompt, two prompts."""

import numpy as np
import pytest

from ucm_ray.bench.blend import FULL, NOISE, Quality, Row, Speed, divergence, measure_quality, measure_speed, summarize
from ucm_ray.bench.data import evaluation_prompts, load_documents
from ucm_ray.config import load_settings
from ucm_ray.integration.vllm.measuring import FULL_PREFILL, MeasuringEngine

pytestmark = pytest.mark.engine

ROWS = [Row("none", 0.0), *(Row(policy, 0.10) for policy in ("boundary", "hkvd@1", "hkvd@3", "query"))]
ROWS.append(Row("query", 1.0))


@pytest.fixture(scope="module")
def prompts(engine):
    return evaluation_prompts(engine.tokenizer, count=2, documents_per_prompt=4)


@pytest.fixture(scope="module")
def engine(model_dir):
    settings = load_settings(overrides={"model": str(model_dir), "engine.cpu_kv_cache_gib": 1})
    with MeasuringEngine(settings, dtype="float32", max_model_len=2048) as running:
        prompts = evaluation_prompts(running.tokenizer, count=2, documents_per_prompt=4)
        wanted = {name for prompt in prompts for name in prompt.document_ids}
        running.ingest([document.stored_text for document in load_documents() if document.id in wanted])
        yield running


def test_forcing_the_greedy_answer_gives_the_same_distributions(engine, prompts):
    token_ids = prompts[0].token_ids
    greedy = engine.greedy(token_ids, 8)
    forced = engine.forced(token_ids, greedy.token_ids, [FULL_PREFILL])[0]
    assert forced.token_ids == greedy.token_ids
    assert greedy.log_probs.shape == (8, 49152)
    assert np.allclose(np.exp(greedy.log_probs.astype(np.float64)).sum(-1), 1, atol=1e-4)
    assert divergence(greedy.log_probs, forced.log_probs).max() < 1e-6


def test_forced_tokens_are_generated_whatever_the_model_would_say(engine, prompts):
    answer = engine.tokenizer.encode("Purple ladders sing about the umbrella of Thursday.")
    forced = engine.forced(prompts[0].token_ids, answer, [FULL_PREFILL, {"blend": True, "policy": "none"}])
    assert [found.token_ids for found in forced] == [answer, answer]


def test_quality_and_speed_of_each_row_come_from_what_the_row_is_named_for(engine, prompts):
    qualities = {row: Quality() for row in [FULL, NOISE, *ROWS]}
    for prompt in prompts:
        measure_quality(engine, prompt, qualities)
    speeds = {row: Speed() for row in [FULL, *ROWS]}
    measure_speed(engine, prompts[1], speeds)
    kl = {row: np.mean(quality.kl) for row, quality in qualities.items()}
    assert kl[FULL] == 0 and qualities[FULL].agreement == [1.0, 1.0]
    assert kl[NOISE] < 1e-4
    assert kl[Row("query", 1.0)] < 1e-4
    assert 1e-4 < kl[Row("query", 0.10)] < kl[Row("none", 0.0)]
    rows = {(row["policy"], row["budget"]): row for row in summarize(ROWS[:-1], speeds, qualities)["rows"]}
    reused = sum(end - start for start, end in prompts[1].document_spans)
    assert rows["query", 0.10]["reused_tokens"] == reused
    assert rows["query", 0.10]["recomputed_tokens"] == int(0.10 * reused)
    assert rows["none", 0.0]["recomputed_tokens"] == rows["full", 1.0]["reused_tokens"] == 0

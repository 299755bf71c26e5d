import json

import numpy as np
import pytest
import typer

from ucm_ray.bench.blend import (
    FULL,
    NOISE,
    Quality,
    Row,
    Speed,
    agreement,
    better_layers,
    divergence,
    parse_budgets,
    rows_of,
    summarize,
    wins,
)
from ucm_ray.eval.blend import draw, read_measured

BUDGETS = (0.05, 0.10)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.fixture
def qualities():
    """`query` best, `hkvd@3` better than `hkvd@1` at 5%, worse at 10%."""
    kl = {"boundary": [0.10, 0.12], "hkvd@1": [0.20, 0.20], "hkvd@3": [0.15, 0.15], "query": [0.05, 0.13]}
    found = {row: Quality([value * (1 - row.budget) for value in kl[row.policy]], [0.9, 1.0])
             for row in rows_of(BUDGETS) if row.policy != "none"}
    found[Row("hkvd@1", 0.10)] = Quality([0.1, 0.1], [0.9, 0.9])
    found[Row("none", 0.0)] = Quality([0.3, 0.3], [0.8, 0.8])
    return found | {FULL: Quality([0.0, 0.0], [1.0, 1.0]), NOISE: Quality([0.001, 0.001], [1.0, 1.0])}


@pytest.fixture
def speeds():
    return {row: Speed([0.2 + row.budget] * 3, [50.0] * 3, [100.0] * 3, [int(row.budget * 3000)] * 3, [3000] * 3)
            for row in [FULL, *rows_of(BUDGETS)]}


def test_divergence_of_a_distribution_from_itself_is_zero_and_else_positive():
    generator = np.random.default_rng(0)
    p, q = (log_softmax(generator.normal(size=(5, 100))).astype(np.float32) for _ in range(2))
    assert np.allclose(divergence(p, p), 0)
    expected = (np.exp(p.astype(np.float64)) * (p.astype(np.float64) - q)).sum(-1)
    assert np.allclose(divergence(p, q), expected, rtol=1e-4) and (divergence(p, q) > 0).all()


def test_divergence_is_not_moved_by_the_rounding_of_normalization():
    p = log_softmax(np.random.default_rng(1).normal(size=(3, 100)))
    assert np.allclose(divergence(p + 1e-4, p - 1e-4), 0, atol=1e-12)


def test_agreement_ignores_tokens_that_were_not_allowed():
    log_probs = log_softmax(np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]], np.float32))
    assert agreement(log_probs, [0, 0]) == 0.5
    assert agreement(log_probs, [1, 2], suppressed=[0]) == 1.0


def test_hkvd_is_the_layer_of_lower_mean_kl_at_each_budget(qualities):
    chosen = better_layers(rows_of(BUDGETS), qualities)
    assert chosen == {0.05: Row("hkvd@3", 0.05), 0.10: Row("hkvd@1", 0.10)}


def test_wins_are_counted_prompt_by_prompt(qualities):
    rows = rows_of(BUDGETS)
    counted = {(line["budget"], line["against"]): line["wins"] for line in
               wins(rows, better_layers(rows, qualities), qualities)}
    assert counted == {(0.05, "hkvd"): 2, (0.05, "boundary"): 1, (0.10, "hkvd"): 1, (0.10, "boundary"): 1}


def test_the_report_has_one_row_a_policy_and_budget_with_every_field(qualities, speeds):
    report = summarize(rows_of(BUDGETS), speeds, qualities)
    named = [(row["policy"], row["budget"]) for row in report["rows"]]
    assert len(set(named)) == len(named) == 9
    assert {name for name, _ in named} == {"full", "rounding_noise", "none", "boundary", "hkvd", "query"}
    for row in report["rows"]:
        if row["policy"] != "rounding_noise":
            assert all(row[key] is not None for key in ("ttft_s", "speedup", "recomputed_tokens", "reused_tokens",
                                                        "kl_mean", "kl_max", "agreement"))
    query = next(row for row in report["rows"] if row["policy"] == "query" and row["budget"] == 0.05)
    assert query["speedup"] == pytest.approx(1.2 / 0.25)
    assert query["rest_ms"] == pytest.approx(250 - 150)
    assert query["kl_max"] == pytest.approx(0.13 * 0.95)
    json.dumps(report, allow_nan=False)


def test_speed_and_quality_can_be_reported_alone(qualities, speeds):
    assert summarize(rows_of(BUDGETS), {}, qualities)["rows"][0]["ttft_s"] is None
    assert summarize(rows_of(BUDGETS), speeds, {})["wins"] == []


@pytest.mark.parametrize("text", ["", "0.1,x", "0", "1.5"])
def test_budgets_that_are_no_shares_are_refused(text):
    with pytest.raises(typer.BadParameter, match="budgets: found"):
        parse_budgets(text)


def test_the_picture_is_drawn_from_a_file_of_the_benchmark(tmp_path, qualities, speeds):
    pytest.importorskip("matplotlib")
    path = tmp_path / "blend.json"
    path.write_text(json.dumps(summarize(rows_of(BUDGETS), speeds, qualities)))
    draw(read_measured(path), tmp_path / "curves" / "blend.png")
    assert (tmp_path / "curves" / "blend.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_no_result_is_refused_by_name(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(typer.BadParameter, match="found no 'rows'"):
        read_measured(path)


def test_policies_that_are_left_out_are_neither_rows_nor_compared_with(qualities):
    rows = rows_of(BUDGETS, ("boundary", "query"))
    assert {row.policy for row in rows} == {"none", "boundary", "query"}
    assert better_layers(rows, qualities) == {}
    assert {found["against"] for found in wins(rows, {}, qualities)} == {"boundary"}
    assert summarize(rows_of(BUDGETS, ("hkvd",)), {}, qualities)["wins"] == []

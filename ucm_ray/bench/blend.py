"""Speed and quality of blending, by recompute policy and budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np

    from ucm_ray.bench.data import Prompt
    from ucm_ray.integration.vllm.measuring import MeasuringEngine

DEFAULT_BUDGETS = "0.02,0.05,0.10,0.15,0.30"
BudgetsOption = Annotated[str, typer.Option(help="Shares of the reused tokens, comma-separated.")]
POLICIES = ("boundary", "hkvd", "query")
HKVD_LAYERS = (1, 3)
ANSWER_TOKENS = 24
QUALITY_DTYPE = "float32"
PAIRED_AGAINST = ("hkvd", "boundary")
COLUMNS = ("policy", "budget", "ttft_s", "speedup", "load_ms", "recompute_ms", "rest_ms", "recomputed_tokens",
           "reused_tokens", "kl_mean", "kl_max", "agreement")


@dataclass(frozen=True)
class Row:
    """One way to serve a prompt; `hkvd@1` is `hkvd` looking at layer 1."""

    policy: str
    budget: float

    @property
    def controls(self) -> dict[str, Any]:
        """`kv_transfer_params["ucm"]` of its requests."""
        if self.policy == "full":
            return {"blend": False, "save": False}
        return {"blend": True, "save": False, "policy": self.policy, "budget": self.budget}


FULL = Row("full", 1.0)
NOISE = Row("rounding_noise", 1.0)


@dataclass
class Speed:
    """Measurements of one row, one entry per repetition; receipts' tokens are the same in each."""

    ttft_s: list[float] = field(default_factory=list)
    load_ms: list[float] = field(default_factory=list)
    recompute_ms: list[float] = field(default_factory=list)
    recomputed_tokens: list[int] = field(default_factory=list)
    reused_tokens: list[int] = field(default_factory=list)


@dataclass
class Quality:
    """Of one row, one entry per prompt: mean KL over the answer's tokens, share of tokens whose argmax is the same."""

    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)


def rows_of(budgets: Sequence[float], policies: Sequence[str] = POLICIES) -> list[Row]:
    """Every row that is blended: `none` once, the other policies at each budget, HKVD at both layers."""
    names = [name for policy in policies
             for name in ([f"hkvd@{layer}" for layer in HKVD_LAYERS] if policy == "hkvd" else [policy])]
    return [Row("none", 0.0), *(Row(name, budget) for name in names for budget in budgets)]


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; default: $UCM_RAY_CONFIG.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts that quality is measured on.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Prompts that TTFT is measured on, after one to warm up.")] = 8,
    budgets: BudgetsOption = DEFAULT_BUDGETS,
    policies: Annotated[str, typer.Option(help="Beside `none`, comma-separated.")] = ",".join(POLICIES),
    held_out: Annotated[bool, typer.Option(help="Measure quality on the held-out prompts.")] = False,
    speed: Annotated[bool, typer.Option(help="Measure TTFT, in the engine's own dtype.")] = True,
    quality: Annotated[bool, typer.Option(help="Measure KL and agreement, in float32.")] = True,
) -> None:
    """Speed and quality of blending: 12 documents of about 260 tokens in shuffled order, and a question.

    TTFT: one request alone in the engine, vLLM's own prefix cache empty, median over prompts, rows measured in turn.
    Quality: KL(full prefill, blended) and top-1 agreement over 24 teacher-forced answer tokens, float32; `hkvd` is the
    better of layers 1 and 3; `rounding_noise` is full prefill split in another way.
    """
    from ucm_ray.bench.report import write_json

    shares, names = parse_budgets(budgets), policies.split(",")
    if unknown := sorted(set(names) - set(POLICIES)):
        raise typer.BadParameter(f"policies: found {unknown[0]!r}, expected some of {', '.join(POLICIES)}")
    found = measure(config, prompts, repeat, shares, held_out, speed, quality, typer.echo,
                    keep=lambda report: write_json(json_path, report), policies=names)
    print_report(found)


def parse_budgets(text: str) -> tuple[float, ...]:
    try:
        budgets = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"budgets: found {text!r}, expected numbers such as 0.05,0.10") from None
    if not all(0 < budget <= 1 for budget in budgets):
        raise typer.BadParameter(f"budgets: found {text!r}, expected numbers above 0, up to 1")
    return budgets


@dataclass
class Results:
    """What has been measured so far; `report` can be taken at any time."""

    rows: list[Row]
    settings: dict[str, Any]
    """Of the measurement: model, dtypes and so on, for the report."""
    speeds: dict[Row, Speed] = field(default_factory=dict)
    qualities: dict[Row, Quality] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Everything `bench blend` writes: `rows`, `hkvd_layers`, `wins`, and the settings."""
        speeds = self.speeds if self.speeds and self.speeds[FULL].ttft_s else {}
        qualities = self.qualities if self.qualities and self.qualities[FULL].kl else {}
        return summarize(self.rows, speeds, qualities) | self.settings | {
            "prompt_tokens_mean": _mean(self.prompt_tokens),
            "answer_tokens": ANSWER_TOKENS,
            "ttft_prompts": len(speeds[FULL].ttft_s) if speeds else 0,
            "quality_prompts": len(qualities[FULL].kl) if qualities else 0,
        }


def measure(config: Path | None, prompts: int, repeat: int, budgets: Sequence[float], held_out: bool = False,
            speed: bool = True, quality: bool = True, progress: Callable[[str], None] = print,
            keep: Callable[[dict[str, Any]], None] = lambda report: None,
            policies: Sequence[str] = POLICIES) -> dict[str, Any]:
    """Run the measurements and return the report.

    `keep` is given the report after every prompt, so that a long run that is interrupted is not lost.
    """
    from ucm_ray.bench.data import evaluation_prompts, held_out_prompts
    from ucm_ray.config import load_settings
    from ucm_ray.integration.vllm.measuring import served_dtype

    settings = load_settings(config)
    served = served_dtype(settings)
    results = Results(rows_of(budgets, policies), {
        "model": settings.model, "dtype_ttft": served, "dtype_quality": QUALITY_DTYPE, "held_out": held_out})
    # where the service runs in float32 too, one engine does for both
    for dtype in dict.fromkeys([served] * speed + [QUALITY_DTYPE] * quality):
        with _engine(settings, dtype, progress) as engine:
            if speed and dtype == served:
                cases = evaluation_prompts(engine.tokenizer, repeat + 1)
                _measure_speeds(engine, cases, results, progress, keep)
            if quality and dtype == QUALITY_DTYPE:
                build = held_out_prompts if held_out else evaluation_prompts
                _measure_qualities(engine, build(engine.tokenizer, prompts), results, progress, keep)
    return results.report()


def _measure_speeds(engine: MeasuringEngine, prompts: Sequence[Prompt], results: Results,
                    progress: Callable[[str], None], keep: Callable[[dict[str, Any]], None]) -> None:
    """The first prompt warms up. Rows take turns, so that drift hits all alike."""
    results.prompt_tokens += [len(prompt.token_ids) for prompt in prompts]
    measure_speed(engine, prompts[0], {row: Speed() for row in [FULL, *results.rows]})
    results.speeds = {row: Speed() for row in [FULL, *results.rows]}
    for number, prompt in enumerate(prompts[1:], 1):
        measure_speed(engine, prompt, results.speeds)
        keep(results.report())
        latest = _latest({row: found.ttft_s for row, found in results.speeds.items()})
        progress(f"TTFT in s, prompt {number} of {len(prompts) - 1}: {latest}")


def _measure_qualities(engine: MeasuringEngine, prompts: Sequence[Prompt], results: Results,
                       progress: Callable[[str], None], keep: Callable[[dict[str, Any]], None]) -> None:
    results.prompt_tokens += [len(prompt.token_ids) for prompt in prompts]
    results.qualities = {row: Quality() for row in [FULL, NOISE, *results.rows]}
    for number, prompt in enumerate(prompts, 1):
        measure_quality(engine, prompt, results.qualities)
        keep(results.report())
        latest = _latest({row: found.kl for row, found in results.qualities.items()})
        progress(f"KL, prompt {number} of {len(prompts)}: {latest}")


def _latest(values: dict[Row, list[float]]) -> str:
    return ", ".join(f"{row.policy} {row.budget:g} {found[-1]:.4f}" for row, found in values.items())


@contextmanager
def _engine(settings: Any, dtype: str, progress: Callable[[str], None]):
    """An engine that holds every document's canonical KV."""
    from ucm_ray.bench.data import load_documents
    from ucm_ray.integration.vllm.measuring import MeasuringEngine

    texts = [document.stored_text for document in load_documents()]
    with MeasuringEngine(settings, dtype=dtype) as engine:
        progress(f"storing {len(texts)} documents behind the sink passage ({dtype})")
        engine.ingest(texts)
        yield engine


def measure_speed(engine: MeasuringEngine, prompt: Prompt, found: dict[Row, Speed]) -> None:
    """Add one prompt's TTFT, one request of each row that `found` has."""
    for row, speed in found.items():
        first = engine.first_token(prompt.token_ids, row.controls)
        _check_receipt(row, first.receipt)
        _note_speed(speed, first)


def _note_speed(speed: Speed, first: Any) -> None:
    speed.ttft_s.append(first.ttft_s)
    for name in ("load_ms", "recompute_ms", "recomputed_tokens", "reused_tokens"):
        getattr(speed, name).append(first.receipt.get(name, 0))


def _check_receipt(row: Row, receipt: dict[str, Any]) -> None:
    """A row must have done what its name says, or the table would lie."""
    if row is FULL:
        if receipt.get("reused_tokens"):
            raise RuntimeError(f"row full: the receipt says {receipt['reused_tokens']} reused tokens, expected 0")
        return
    if receipt.get("policy") != row.policy or not receipt.get("reused_tokens"):
        raise RuntimeError(f"row {row.policy} at {row.budget}: found receipt {receipt}, expected a blended request")


def measure_quality(engine: MeasuringEngine, prompt: Prompt, found: dict[Row, Quality], at_once: int = 7) -> None:
    """Add one prompt's teacher-forced KL and agreement against its full prefill, for every row that `found` has."""
    reference = engine.greedy(prompt.token_ids, ANSWER_TOKENS)
    _note_quality(found[FULL], reference, reference, engine.end_ids)
    split = len(prompt.token_ids) // 3
    noise = engine.forced(prompt.token_ids, reference.token_ids, [FULL.controls], computed_prefix=split)[0]
    _note_quality(found[NOISE], reference, noise, engine.end_ids)
    blended = [row for row in found if row not in (FULL, NOISE)]
    for start in range(0, len(blended), at_once):
        batch = blended[start : start + at_once]
        answers = engine.forced(prompt.token_ids, reference.token_ids, [row.controls for row in batch])
        for row, answer in zip(batch, answers, strict=True):
            _check_receipt(row, answer.receipt)
            _note_quality(found[row], reference, answer, engine.end_ids)


def _note_quality(quality: Quality, reference: Any, other: Any, suppressed: list[int]) -> None:
    if other.token_ids != reference.token_ids:
        raise RuntimeError(f"teacher forcing: found tokens {other.token_ids}, expected {reference.token_ids}")
    quality.kl.append(float(divergence(reference.log_probs, other.log_probs).mean()))
    quality.agreement.append(agreement(other.log_probs, reference.token_ids, suppressed))


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """KL(p, q) of each step in nats. Both `[steps, vocab_size]`.

    Normalized again in float64: in float32 a distribution over a vocabulary sums to 1 within some 1e-5 only, which is
    more than two full prefills differ by.
    """
    import numpy as np

    log_p, log_q = _normalized(log_p), _normalized(log_q)
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def _normalized(log_probs: np.ndarray) -> np.ndarray:
    import numpy as np

    exact = log_probs.astype(np.float64)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def agreement(log_probs: np.ndarray, token_ids: Sequence[int], suppressed: Sequence[int] = ()) -> float:
    """Share of steps whose most likely token is the forced one; `suppressed` ids were not allowed there either."""
    import numpy as np

    allowed = log_probs.copy()
    allowed[:, list(suppressed)] = -np.inf
    return float((allowed.argmax(-1) == np.asarray(token_ids)).mean())


def summarize(rows: Sequence[Row], speeds: dict[Row, Speed], qualities: dict[Row, Quality]) -> dict[str, Any]:
    """Table rows, the two layers of HKVD apart, and how often `query` beats others prompt by prompt."""
    full_s = _median(speeds[FULL].ttft_s) if speeds else None
    lines = {row: _line(row, speeds.get(row), qualities.get(row), full_s) for row in [FULL, *rows]}
    noise = _line(NOISE, None, qualities.get(NOISE), full_s)
    noise |= {"ttft_s": full_s, "speedup": 1.0 if speeds else None}  # it is a full prefill
    chosen = better_layers(rows, qualities)
    shown = [lines[FULL], noise]
    for row in rows:
        if not row.policy.startswith("hkvd@"):
            shown.append(lines[row])
        elif row in chosen.values():
            shown.append(lines[row] | {"policy": "hkvd", "layer": int(row.policy.partition("@")[2])})
    shown.sort(key=lambda line: _ORDER.index(line["policy"]))
    layers = [lines[row] for row in rows if row.policy.startswith("hkvd@")]
    return {"rows": shown, "hkvd_layers": layers, "wins": wins(rows, chosen, qualities) if qualities else []}


_ORDER = ("full", "rounding_noise", "none", "boundary", "hkvd", "query")


def better_layers(rows: Sequence[Row], qualities: dict[Row, Quality]) -> dict[float, Row]:
    """For each budget the HKVD row of lower mean KL; without quality the deeper layer."""
    chosen: dict[float, Row] = {}
    for row in rows:
        if not row.policy.startswith("hkvd@"):
            continue
        other = chosen.get(row.budget)
        if other is None or not qualities or _mean(qualities[row].kl) < _mean(qualities[other].kl):
            chosen[row.budget] = row
    return chosen


def wins(rows: Sequence[Row], chosen: dict[float, Row], qualities: dict[Row, Quality]) -> list[dict[str, Any]]:
    """On how many prompts `query` has a lower KL than another policy at the same budget."""
    found = []
    for budget in dict.fromkeys(row.budget for row in rows if row.policy == "query"):
        for name in PAIRED_AGAINST:
            other = chosen.get(budget) if name == "hkvd" else Row(name, budget)
            if other not in rows:
                continue  # left out by --policies
            ours, theirs = qualities[Row("query", budget)].kl, qualities[other].kl
            won = sum(mine < other_kl for mine, other_kl in zip(ours, theirs, strict=True))
            found.append({"budget": budget, "against": name, "wins": won, "prompts": len(ours)})
    return found


def _line(row: Row, speed: Speed | None, quality: Quality | None, full_s: float | None) -> dict[str, Any]:
    line: dict[str, Any] = dict.fromkeys(COLUMNS)
    line |= {"policy": row.policy, "budget": row.budget}
    if speed:
        ttft_s, load_ms, recompute_ms = (_median(part) for part in (speed.ttft_s, speed.load_ms, speed.recompute_ms))
        line |= {
            "ttft_s": ttft_s, "speedup": full_s / ttft_s, "load_ms": load_ms, "recompute_ms": recompute_ms,
            "rest_ms": ttft_s * 1e3 - load_ms - recompute_ms,
            "recomputed_tokens": round(_median(speed.recomputed_tokens)),
            "reused_tokens": round(_median(speed.reused_tokens)),
        }
    if quality:
        line |= {"kl_mean": _mean(quality.kl), "kl_max": max(quality.kl), "agreement": _mean(quality.agreement)}
    return line


def _median(values: Sequence[float]) -> float:
    from ucm_ray.bench.report import median

    return median(values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def print_report(found: dict[str, Any]) -> None:
    from ucm_ray.bench.report import table

    for title, rows in (("Blending", found["rows"]), ("HKVD by layer", found["hkvd_layers"])):
        if rows:
            table(rows, title, [column for column in COLUMNS if any(column in row for row in rows)])
    if found["wins"]:
        table(found["wins"], "Prompts on which query has the lower KL")

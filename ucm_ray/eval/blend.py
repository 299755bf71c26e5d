"""Quality and TTFT of blending, drawn over policies and budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ucm_ray.bench.blend import DEFAULT_BUDGETS, BudgetsOption, measure, parse_budgets, print_report

DRAWN = ("boundary", "hkvd", "query")


def main(
    png: Annotated[Path, typer.Option(help="The picture to write.")] = Path("blend.png"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    measured: Annotated[Path | None, typer.Option("--from", help="Draw this file of `bench blend --json`; "
                                                                  "measure nothing.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; default: $UCM_RAY_CONFIG.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts that quality is measured on.")] = 16,
    repeat: Annotated[int, typer.Option(min=1, help="Prompts that TTFT is measured on.")] = 8,
    budgets: BudgetsOption = DEFAULT_BUDGETS,
    held_out: Annotated[bool, typer.Option(help="Measure quality on the held-out prompts.")] = False,
) -> None:
    """Draw KL and agreement against TTFT and budget for every recompute policy, as PNG and table."""
    from ucm_ray.bench.report import write_json

    _require_matplotlib()
    if measured is not None:
        found = read_measured(measured)
    else:
        found = measure(config, prompts, repeat, parse_budgets(budgets), held_out, progress=typer.echo)
        write_json(json_path, found)
    print_report(found)
    draw(found, png)
    typer.echo(f"curves in {png}")


def read_measured(path: Path) -> dict[str, Any]:
    """What `bench blend --json` wrote. Raises `typer.BadParameter` naming what is missing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path}: cannot be read: {error}") from error
    missing = [key for key in ("rows", "hkvd_layers", "wins") if not isinstance(found, dict) or key not in found]
    if missing:
        raise typer.BadParameter(f"{path}: found no {missing[0]!r}, expected a file of `bench blend --json`")
    return found


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise typer.BadParameter("matplotlib is not installed; pip install 'ucm-ray[plots]'") from None


def draw(found: dict[str, Any], png: Path) -> None:
    """Three panels: KL over budget, KL over TTFT, agreement over budget. A panel without numbers stays empty."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = found["rows"]
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    by_budget, by_time, agreeing = figure.subplots(1, 3)
    _curves(by_budget, rows, "budget", "kl_mean")
    _curves(by_time, rows, "ttft_s", "kl_mean")
    _curves(agreeing, rows, "budget", "agreement")
    by_budget.set(xlabel="recomputed share of reused tokens", ylabel="KL(full prefill, blended), nats", yscale="log")
    by_time.set(xlabel="time to first token, s", ylabel="KL(full prefill, blended), nats", xscale="log", yscale="log")
    agreeing.set(xlabel="recomputed share of reused tokens", ylabel="top-1 agreement with full prefill")
    full_s = next((row["ttft_s"] for row in rows if row["policy"] == "full"), None)
    if full_s:
        by_time.axvline(full_s, color="black", linestyle=":", label="full prefill")
    noise = next((row["kl_mean"] for row in rows if row["policy"] == "rounding_noise"), None)
    measured = [row["kl_mean"] for row in rows if row["policy"] in (*DRAWN, "none") and row["kl_mean"]]
    for axes in (by_budget, by_time):
        if noise and measured and noise < min(measured) / 10:  # the curves would be flat if it were in the picture
            axes.plot([], [], color="grey", linestyle="--", label=f"rounding noise: {noise:.0e}, far below")
        elif noise:
            axes.axhline(noise, color="grey", linestyle="--", label="rounding noise")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(_some_minor)
    by_time.xaxis.set_major_formatter("{x:g}")
    by_time.xaxis.set_minor_formatter(_some_minor)
    for axes in (by_budget, by_time, agreeing):
        axes.grid(alpha=0.3)
    by_label = {label: handle for axes in (by_budget, by_time, agreeing)
                for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=6)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=120)


def _some_minor(value: float, position: int | None = None) -> str:
    """Labels between powers of ten on a logarithmic axis: 2 and 5."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _curves(axes: Any, rows: list[dict[str, Any]], x: str, y: str) -> None:
    for number, policy in enumerate(DRAWN):
        points = sorted((row[x], row[y]) for row in rows
                        if row["policy"] == policy and row[x] is not None and row[y] is not None)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=f"C{number}", label=policy)
    none = [(row[x], row[y]) for row in rows if row["policy"] == "none" and row[x] is not None and row[y] is not None]
    if none:
        axes.plot(*zip(*none, strict=True), marker="s", linestyle="", color="black", label="none")

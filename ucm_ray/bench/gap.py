"""How long a decoding request waits while a long prompt arrives: plain chunked prefill against blending."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ucm_ray.bench.data import Prompt
    from ucm_ray.integration.vllm.measuring import MeasuringEngine

DECODED_BEFORE = 8
DECODED_AFTER = 16


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; default: $UCM_RAY_CONFIG.")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Prompts measured, after one to warm up.")] = 5,
) -> None:
    """Longest gap between two tokens of a request that decodes while a prompt of about 3,100 tokens is served.

    The same engine and the same prompts for both rows; vLLM's own prefix cache is empty. `ratio` is blend over plain.
    """
    from ucm_ray.bench.report import table, write_json

    found = measure(config, repeat, typer.echo)
    table(found["rows"])
    typer.echo(f"ratio of longest gaps, blend / plain: {found['ratio']:.2f}")
    write_json(json_path, found)


def measure(config: Path | None, repeat: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """`{"rows": [{"mode", "longest_gap_ms", "median_gap_ms", "ttft_s"}], "ratio"}`: medians over prompts."""
    from ucm_ray.bench.data import evaluation_prompts, load_documents
    from ucm_ray.bench.report import median
    from ucm_ray.config import load_settings
    from ucm_ray.integration.vllm.measuring import FULL_PREFILL, MeasuringEngine

    settings = load_settings(config)
    modes = {"plain": FULL_PREFILL, "blend": {"blend": True}}
    seen: dict[str, list[tuple[float, float, float]]] = {mode: [] for mode in modes}
    with MeasuringEngine(settings) as engine:
        engine.ingest([document.stored_text for document in load_documents()])
        prompts = evaluation_prompts(engine.tokenizer, repeat + 1)
        for number, prompt in enumerate(prompts):
            for mode, controls in modes.items():
                one = gaps_beside(engine, prompt, controls)
                if number:
                    seen[mode].append(one)
            progress(f"prompt {number} of {repeat}")
    names = ("longest_gap_ms", "median_gap_ms", "ttft_s")
    rows = [{"mode": mode, **{name: median([one[index] for one in values]) for index, name in enumerate(names)}}
            for mode, values in seen.items()]
    return {"rows": rows, "ratio": rows[1]["longest_gap_ms"] / rows[0]["longest_gap_ms"]}


def gaps_beside(engine: MeasuringEngine, prompt: Prompt, controls: dict[str, Any]) -> tuple[float, float, float]:
    """Longest and median gap (ms) of a decoding request from the arrival of `prompt` to some tokens after its first
    token, and that prompt's time to first token (s)."""
    engine.forget_prefixes()
    core = engine.llm.llm_engine
    begin = engine.tokenizer.encode("Once upon a time there was a house by the sea")
    core.add_request("decoding", {"prompt_token_ids": begin}, engine._parameters({"blend": False}, max_tokens=4096))
    times: list[float] = []
    arrived = first = 0.0
    stop = 0
    while not first or len(times) < stop:
        for output in core.step():
            now = time.perf_counter()
            if output.request_id == "decoding":
                times.append(now)
            elif not first:
                first, stop = now, len(times) + DECODED_AFTER
        if len(times) == DECODED_BEFORE and not arrived:
            arrived = time.perf_counter()
            core.add_request("arriving", {"prompt_token_ids": list(prompt.token_ids)}, engine._parameters(controls, 1))
    core.abort_request(["decoding"])
    while core.has_unfinished_requests():
        core.step()
    since = times[DECODED_BEFORE - 1 :]
    gaps = sorted(1e3 * (later - earlier) for earlier, later in zip(since, since[1:], strict=False))
    return gaps[-1], gaps[len(gaps) // 2], first - arrived

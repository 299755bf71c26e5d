"""Time per output token: dense against sparse decode, in the same engine run."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

DTYPE = "float32"  # without AVX512-BF16 or AMX the 16-bit matrix products of CPU builds are several times slower
STRIDE = 5
COLUMNS = ("geometry", "context", "batch", "ratio", "tpot_dense_ms", "tpot_esa_ms", "speedup")


@dataclass(frozen=True)
class Geometry:
    """A model to time. `layers` of a named architecture with random weights, or the default model."""

    name: str
    config: dict[str, Any] | None  # of `LlamaConfig`; None for the default model
    max_context: int

    def folder(self, parent: Path) -> Path:
        """A folder vLLM can read the geometry from."""
        if self.config is None:
            from ucm_ray.models import default_model

            return default_model()
        from transformers import LlamaConfig

        LlamaConfig(architectures=["LlamaForCausalLM"], torch_dtype=DTYPE, **self.config).save_pretrained(parent)
        return parent


# 4 of the 32 layers of Llama-2-7B
_LLAMA_2_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 65536,
}
GEOMETRIES = {
    "llama-2-7b": Geometry("llama-2-7b", _LLAMA_2_7B, 65536),
    # an eighth of the vocabulary as well: the language head has the share of a step it has in the whole model
    "llama-2-7b-eighth": Geometry("llama-2-7b-eighth", _LLAMA_2_7B | {"vocab_size": 4000}, 65536),
    "default": Geometry("default", None, 8192),
}


def main(
    geometry: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(GEOMETRIES)}.")] = ",".join(
        GEOMETRIES
    ),
    contexts: Annotated[str, typer.Option(help="Tokens of context; those above a geometry's maximum are left out.")] = (
        "1024,4096,16384"
    ),
    batches: Annotated[str, typer.Option(help="Requests decoding together.")] = "1,4",
    ratios: Annotated[str, typer.Option(help="Shares of the middle blocks that are read.")] = "0.1,0.3",
    rounds: Annotated[int, typer.Option(help="Repetitions; dense and sparse take turns, the median counts.")] = 3,
    stride: Annotated[int, typer.Option(help="Decode steps per selection.")] = STRIDE,
    min_saved_bytes: Annotated[int | None, typer.Option(help="ESA's own threshold; default: the product's.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
) -> None:
    """Time per output token of dense and of sparse decode, over context length x batch x ratio.

    The KV cache is filled with noise instead of being computed; selection and indexing are part of the time.
    """
    from ucm_ray.bench.report import table, write_json

    rows, notes = [], {}
    for name in geometry.split(","):
        if name not in GEOMETRIES:
            raise typer.BadParameter(f"geometry: found {name!r}, expected one of {', '.join(GEOMETRIES)}")
        job = {
            "geometry": name,
            "contexts": _numbers(contexts, int),
            "batches": _numbers(batches, int),
            "ratios": _numbers(ratios, float),
            "rounds": rounds,
            "stride": stride,
            "min_saved_bytes": min_saved_bytes,
        }
        found = _in_a_process(job)
        rows += found["rows"]
        notes[name] = {"threads": found["threads"], "dtype": DTYPE, "block_size": 32}
    table([{column: row[column] for column in COLUMNS} for row in rows])
    crossover = crossovers(rows)
    for line in crossover:
        typer.echo(
            f"{line['geometry']}, batch {line['batch']}, ratio {line['ratio']}: "
            f"faster from {line['faster_from'] or 'nowhere'} tokens of those measured"
        )
    write_json(json_path, {"rows": rows, "crossover": crossover, "engines": notes})


def crossovers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each geometry, batch and ratio the smallest context from which on ESA is faster in every measured one."""
    found = []
    for key in sorted({(row["geometry"], row["batch"], row["ratio"]) for row in rows}):
        mine = sorted(
            (row for row in rows if (row["geometry"], row["batch"], row["ratio"]) == key),
            key=lambda row: row["context"],
        )
        faster_from = None
        for row in reversed(mine):
            if row["speedup"] <= 1.0:
                break
            faster_from = row["context"]
        found.append(dict(zip(("geometry", "batch", "ratio", "faster_from"), (*key, faster_from), strict=True)))
    return found


def _numbers(text: str, kind: type) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"found {text!r}, expected numbers joined by commas") from None


def _in_a_process(job: dict[str, Any]) -> dict[str, Any]:
    """One engine per process: vLLM's state is per process, and its memory must be gone before the next one."""
    import subprocess
    import sys

    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_KVCACHE_SPACE": str(_cache_gib(job)),
        }
        code = "import sys; from ucm_ray.bench.esa import run_engine; run_engine(sys.argv[1], sys.argv[2])"
        subprocess.run([sys.executable, "-c", code, json.dumps(job), str(answer)], env=environment, check=True)
        return json.loads(answer.read_text())


def _cache_gib(job: dict[str, Any]) -> int:
    """Room for the largest batch, in whole GiB."""
    from transformers import AutoConfig

    geometry = GEOMETRIES[job["geometry"]]
    if geometry.config is None:
        config = AutoConfig.from_pretrained(geometry.folder(Path()))
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        dim = config.hidden_size // config.num_attention_heads
    else:
        layers, heads, dim = geometry.config["num_hidden_layers"], geometry.config["num_key_value_heads"], 128
    tokens = max(context for context in job["contexts"] if context <= geometry.max_context) + 256
    return -(-tokens * max(job["batches"]) * layers * heads * dim * 2 * 4 // 2**30)


def run_engine(job_json: str, answer: str) -> None:
    """Time one geometry; runs in a process of its own."""
    import torch
    from vllm import LLM
    from vllm.config import KVTransferConfig

    job = json.loads(job_json)
    geometry = GEOMETRIES[job["geometry"]]
    contexts = [context for context in job["contexts"] if context <= geometry.max_context - 256]
    esa = {"retrieval_stride": job["stride"]}
    if job["min_saved_bytes"] is not None:
        esa["min_saved_bytes"] = job["min_saved_bytes"]
    transfer = KVTransferConfig(
        kv_connector="FillConnector",
        kv_connector_module_path="ucm_ray.integration.vllm.esa_fill",
        kv_role="kv_both",
        kv_connector_extra_config={"ucm_sparse_config": {"ESA": esa}},
    )
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            str(geometry.folder(Path(folder))),
            dtype=DTYPE,
            load_format="auto" if geometry.config is None else "dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            block_size=32,
            enable_prefix_caching=False,
            seed=0,
            max_model_len=max(contexts) + 256,
            max_num_seqs=max(job["batches"]),
            kv_transfer_config=transfer,
            max_num_batched_tokens=max(512, max(job["batches"])),
            async_scheduling=False,
            disable_log_stats=True,
        )
    rows = []
    for context in contexts:
        for batch in job["batches"]:
            rows += time_batch(llm, job, context, batch)
    Path(answer).write_text(json.dumps({"rows": rows, "threads": torch.get_num_threads()}))


def time_batch(llm, job: dict[str, Any], context: int, batch: int) -> list[dict[str, Any]]:
    """Dense and every ratio in turn, `rounds` times. A round is a mean over whole strides; the median counts."""
    ratios = [1.0, *job["ratios"]]
    times: dict[float, list[float]] = {ratio: [] for ratio in ratios}
    for _ in range(job["rounds"]):
        for ratio in ratios:
            times[ratio].append(_decode(llm, context, batch, ratio, 2 * job["stride"]))
    dense = statistics.median(times[1.0])
    return [
        {
            "geometry": job["geometry"],
            "context": context,
            "batch": batch,
            "ratio": ratio,
            "tpot_dense_ms": dense * 1e3,
            "tpot_esa_ms": statistics.median(times[ratio]) * 1e3,
            "speedup": dense / statistics.median(times[ratio]),
            "rounds_dense_ms": [value * 1e3 for value in times[1.0]],
            "rounds_esa_ms": [value * 1e3 for value in times[ratio]],
        }
        for ratio in job["ratios"]
    ]


def _decode(llm, context: int, batch: int, ratio: float, steps: int) -> float:
    """Seconds per decode step of `batch` requests of `context` tokens."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    for index in range(batch):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=steps + 8,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"ucm": {"sparse_ratio": ratio}}},
        )
        prompt = {"prompt_token_ids": [(index + 7 * position) % 3000 + 3 for position in range(context)]}
        engine.add_request(f"{context}-{batch}-{ratio}-{index}-{time.monotonic_ns()}", prompt, params)
    for _ in range(3):  # the last prompt token, the first selection, a first decode step
        engine.step()
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = (time.perf_counter() - begun) / steps
    while engine.has_unfinished_requests():
        engine.step()
    return seconds

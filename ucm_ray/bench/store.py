"""Speed of the store: loading against a plain read, saving, and what saving costs requests that decode meanwhile."""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ucm_ray.bench.report import median, table, write_json

NAMESPACE = "be" * 16
# the default model
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 30, 3, 64
DECODING_REQUESTS = 4
FULL_AT_BYTES = 64 * 2**20


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to write; default: the temporary folder.")] = None,
    chunks: Annotated[int, typer.Option(help="Chunks to save and load.", min=1)] = 48,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk.", min=1)] = 64,
    threads: Annotated[int, typer.Option(help="Threads that read, of the store and of the plain read.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds of loading; the median counts.", min=1)] = 31,
    decode_rounds: Annotated[int, typer.Option(help="Pairs of decoding with and without saving.", min=0)] = 20,
    decode_tokens: Annotated[int, typer.Option(help="Tokens of each request in a round.", min=2)] = 24,
) -> None:
    """Speed of saving and loading chunks, and what saving adds to TPOT."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="ucm-bench-store-") as root:
        result = _measure_files(Path(root) / "files", chunks, chunk_tokens, threads, rounds)
        _show(result)
        if decode_rounds:
            decoding = _measure_decoding(Path(root) / "decode", chunk_tokens, decode_rounds, decode_tokens)
            _show(decoding)
            result |= decoding
    write_json(json_path, result)


def _show(numbers: dict) -> None:
    table([{"what": name, "value": value} for name, value in numbers.items()])


def _dtype() -> str:
    """What the engine computes in on this machine."""
    import torch

    from ucm_ray.models import cpu_dtype

    return "bfloat16" if torch.cuda.is_available() else cpu_dtype()


def _metas(count: int, chunk_tokens: int, prefix: str) -> Iterator:
    import numpy as np

    from ucm_ray.store import ChunkMeta

    token_ids, dtype = np.arange(chunk_tokens), _dtype()
    for index in range(count):
        yield ChunkMeta(f"{index:08x}{prefix}", NAMESPACE, token_ids, "be" * 8, 128, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM,
                        dtype)


def _kv(chunk_tokens: int):
    import torch

    from ucm_ray.store.base import DTYPES

    return torch.randn(NUM_LAYERS, 2, chunk_tokens, NUM_KV_HEADS, HEAD_DIM).to(DTYPES[_dtype()])


def _measure_files(root: Path, chunks: int, chunk_tokens: int, threads: int, rounds: int) -> dict[str, float]:
    """Save, then load and plainly read the same files in turn, all in page cache.

    The plain read is `readinto` of each whole file into its place in one warm buffer that holds them all, as the
    loaded chunks do.
    """
    from ucm_ray.store import UcmConnectorFactory

    metas, kv = list(_metas(chunks, chunk_tokens, "f0" * 12)), _kv(chunk_tokens)
    store = UcmConnectorFactory.create_connector(
        {"store_pipeline": "Posix", "storage_backends": str(root), "io_threads": threads,
         "cache_capacity_bytes": 2 * chunks * (kv.nbytes + 2**17)}, rank=0)
    store.save_queue_bytes = 2 * chunks * kv.nbytes
    start = time.perf_counter()
    for meta in metas:
        store.save_async(meta, kv)
    store.flush()
    save_s = time.perf_counter() - start

    keys = [meta.key for meta in metas]
    paths = [store.posix.folder_of(key).path(NAMESPACE, key, 0) for key in keys]
    loads, reads = [], []
    with ThreadPoolExecutor(threads) as pool, _places(paths) as places:
        for _ in range(rounds + 2):
            start = time.perf_counter()
            loaded = store.load_many(NAMESPACE, keys)
            loads.append(time.perf_counter() - start)
            assert None not in loaded
            del loaded
            start = time.perf_counter()
            _read_all(pool, threads, places)
            reads.append(time.perf_counter() - start)
    store.close()
    loads, reads = loads[2:], reads[2:]
    load_bytes, read_bytes = chunks * kv.nbytes, sum(map(len, (view for _, view in places)))
    return {
        "load_gb_s": load_bytes / median(loads) / 1e9,
        "raw_read_gb_s": read_bytes / median(reads) / 1e9,
        # of neighbours in time, so that a machine that gets slower or faster meanwhile does not matter
        "load_ratio": median([read / load for load, read in zip(loads, reads, strict=True)]),
        "save_gb_s": load_bytes / save_s / 1e9,
        "chunk_bytes": kv.nbytes,
        "threads": threads,
    }


@contextmanager
def _places(paths: list[str]) -> Iterator[list[tuple[str, memoryview]]]:
    """Each file with its place in one warm buffer."""
    import torch

    sizes = [os.path.getsize(path) for path in paths]
    buffer = torch.ones(sum(sizes), dtype=torch.uint8)
    view, position, places = memoryview(buffer.numpy()), 0, []
    for path, size in zip(paths, sizes, strict=True):
        places.append((path, view[position:position + size]))
        position += size
    yield places


def _read_all(pool: ThreadPoolExecutor, threads: int, places: list[tuple[str, memoryview]]) -> None:
    todo = deque(places)

    def work() -> None:
        while True:
            try:
                path, view = todo.popleft()
            except IndexError:
                return
            with open(path, "rb", buffering=0) as file:
                assert file.readinto(view) == len(view)

    helpers = [pool.submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.result()


class _Saver:
    """Saves chunks out of the engine's paged cache as the connector does, as fast as the engine could compute them."""

    def __init__(self, llm, store, chunk_tokens: int, tokens_per_s: float) -> None:
        import numpy as np
        from vllm.config import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention import Attention

        from ucm_ray.integration.vllm.paged_kv import paged_kv_for
        from ucm_ray.integration.vllm.placement import Placer

        self.saved = 0
        self._store, self._interval_s, self._chunk_tokens = store, chunk_tokens / tokens_per_s, chunk_tokens
        paged = paged_kv_for(get_layers_from_vllm_config(llm.llm_engine.vllm_config, Attention))
        self._placer = Placer(paged, None)
        self._blocks, self._block_size = np.arange(paged.num_blocks), paged.block_size
        self._metas = _metas(2**31, chunk_tokens, "f1" * 12)
        self._due_s = 0.0

    def __enter__(self) -> _Saver:
        self._due_s = time.perf_counter()
        return self

    def after_step(self) -> None:
        """Copy out what has become due, on the engine's thread; the rest is the store's threads'."""
        while time.perf_counter() >= self._due_s:
            self._due_s += self._interval_s
            meta = next(self._metas)
            # some blocks or other, on from those of the chunk before
            start = int(meta.key[:8], 16) * self._chunk_tokens % (len(self._blocks) // 2 * self._block_size)
            kv = self._store.buffer(meta)
            self._placer.copy_out(self._blocks, start, kv)
            self._store.save_async(meta, kv).add_done_callback(self._count)

    def _count(self, future) -> None:
        self.saved += bool(future.result())

    def __exit__(self, *_: object) -> None:
        self._store.flush()

    def close(self) -> None:
        self._store.close()


def _measure_decoding(root: Path, chunk_tokens: int, rounds: int, decode_tokens: int) -> dict[str, float]:
    """TPOT of a real engine with and without saving, in turn, in one process: the saving threads share its Python.

    A step with saving includes what the connector does on the engine's thread. Chunks are saved at the rate at which
    this engine prefills: no engine can have more to save.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    from ucm_ray.models import default_model
    from ucm_ray.store import UcmConnectorFactory

    llm = LLM(model=str(default_model()), dtype=_dtype(), max_model_len=2048, enforce_eager=True,
              enable_prefix_caching=False, max_num_seqs=DECODING_REQUESTS, disable_log_stats=True)
    _decode(llm, 8)
    tokens_per_s = _prefill_rate(llm)
    # host memory that is full, its oldest chunks making room, as it is most of the time; and memory that still grows,
    # where every chunk pays for the first touch of its pages
    full, growing = (
        _Saver(llm, UcmConnectorFactory.create_connector({"storage_backends": str(root / name), **config}, rank=0),
               chunk_tokens, tokens_per_s)
        for name, config in (("full", {"cache_capacity_bytes": FULL_AT_BYTES}), ("growing", {})))
    with full:
        while full.saved * _kv(chunk_tokens).nbytes < FULL_AT_BYTES:
            _decode(llm, decode_tokens, full.after_step)
    savers = (None, full, growing)
    seconds: dict[_Saver | None, list[float]] = {saver: [] for saver in savers}
    for index in range(rounds):
        # another one goes first in every round: a machine that gets slower meanwhile favours none
        for saver in savers[index % 3:] + savers[:index % 3]:
            with saver or nullcontext():
                seconds[saver].append(_decode(llm, decode_tokens, saver.after_step if saver else None))
    for saver in (full, growing):
        saver.close()
    del llm
    ratios = {saver: median([b / a for a, b in zip(seconds[None], seconds[saver], strict=True)]) for saver in savers}
    return {
        "tpot_ratio_while_saving": ratios[full],
        "tpot_ratio_while_growing": ratios[growing],
        "tpot_ms": median(seconds[None]) * 1e3,
        "tpot_ms_while_saving": median(seconds[full]) * 1e3,
        "saved_tokens_per_s": tokens_per_s,
        "saved_chunks": full.saved + growing.saved,
    }


def _prompt(num_tokens: int) -> dict:
    return {"prompt_token_ids": [5 + index * 37 % 4000 for index in range(num_tokens)]}


def _prefill_rate(llm) -> float:
    """Tokens per second of one long prompt, the best of three: other work on the machine only slows it down."""
    from vllm import SamplingParams

    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        llm.generate([_prompt(1500)], SamplingParams(max_tokens=1), use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return 1500 / min(seconds)


def _decode(llm, decode_tokens: int, after_step: Callable[[], None] | None = None) -> float:
    """Seconds per token of requests that decode together, from the first token of the last one on."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=decode_tokens, min_tokens=decode_tokens, ignore_eos=True)
    for index in range(DECODING_REQUESTS):
        engine.add_request(f"decode-{index}", _prompt(48 + index), params)
    steps = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        if after_step is not None:
            after_step()
        if len(outputs) == DECODING_REQUESTS and min(len(output.outputs[0].token_ids) for output in outputs) > 1:
            steps.append(time.perf_counter() - start)
    return sum(steps) / len(steps)

"""`ucm-ray bench retrieval`: one step's block queries, answered by the seed's thread pool, one torch call, the local
worker and Ray shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from ucm_ray.retrieval import Geometry, PackedQuery

_CALLS_A_TURN = 10


def main(
    layers: Annotated[int, typer.Option(min=1, help="Layers queried at once.")] = 30,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 3,
    head_dim: Annotated[int, typer.Option(min=2, help="Channels of a head.")] = 64,
    group_size: Annotated[int, typer.Option(min=1, help="Query heads of a KV head.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests of the step.")] = 8,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of a request.")] = 500,
    k: Annotated[int, typer.Option(min=0, help="Blocks chosen per request and layer.")] = 150,
    representation: Annotated[str, typer.Option(help="Block representation.")] = "mean",
    dtype: Annotated[str, typer.Option(help="How worker and shards store: bfloat16, float16, float32.")] = "bfloat16",
    shards: Annotated[str, typer.Option(help="Numbers of Ray shards, comma separated; empty: no Ray.")] = "1,2,4",
    repeat: Annotated[int, typer.Option(min=3, help="Timed calls of each kind.")] = 200,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file.")] = None,
) -> None:
    """Time to answer one packed query, and how fast representations are read beside this machine's memory.

    All kinds do the same work on the same numbers; `seed_threadpool` and `packed_torch` store float32. `gb_s` is bytes
    of representations, as stored, by p50. Kinds take turns, some calls each, so that a busy moment hits all of them.
    """
    from ucm_ray.bench import report
    from ucm_ray.retrieval import Geometry

    geometry = Geometry(layers, kv_heads, head_dim, representation, dtype).check()
    work = _Work(geometry, requests, blocks, k, group_size)
    counts = [int(count) for count in shards.split(",") if count.strip()]
    bandwidth = memory_bandwidth()
    calls, score, close = _contestants(work, counts)
    try:
        work.check(calls)
        seconds = _take_turns(calls, repeat)
        scoring = report.median(report.time_calls(score, repeat=repeat, warm_up=10))
    finally:
        close()
    bandwidth = max(bandwidth, memory_bandwidth())
    rows = [_row(name, seconds[name], work.bytes(name)) for name in calls]
    p50 = {row["name"]: row["p50_ms"] for row in rows}
    result = {
        "memory_bandwidth_gb_s": bandwidth,
        "scoring_alone": {"dtype": dtype, "p50_ms": scoring * 1e3, "gb_s": work.bytes("local") / scoring / 1e9,
                          "share_of_memory_bandwidth": work.bytes("local") / scoring / 1e9 / bandwidth},
        "local_over_seed": p50["seed_threadpool"] / p50["local"],
        "local_over_packed_torch": p50["packed_torch"] / p50["local"],
        "ray_extra_ms": {f"ray-{count}": p50[f"ray-{count}"] - p50["local"] for count in counts},
        "work": {**geometry._asdict(), "requests": requests, "blocks": blocks, "k": k, "group_size": group_size},
        "rows": rows,
    }
    report.table(rows)
    typer.echo(
        f"scoring alone ({dtype}): {result['scoring_alone']['gb_s']:.1f} GB/s of {bandwidth:.1f} GB/s memory bandwidth "
        f"({result['scoring_alone']['share_of_memory_bandwidth']:.0%}); local is {result['local_over_seed']:.1f} times "
        f"as fast as the seed's thread pool, {result['local_over_packed_torch']:.1f} times as one packed float32 call"
    )
    report.write_json(json_path, result)


def memory_bandwidth(rounds: int = 5) -> float:
    """GB/s of the best float32 sum over 1 GiB with all threads torch has."""
    import torch

    from ucm_ray.bench import report

    ones = torch.ones(2 ** 28)
    return 2 ** 30 / min(report.time_calls(ones.sum, repeat=rounds)) / 1e9


class _Work:
    """Random blocks and queries, and what the right answer is."""

    def __init__(self, geometry: Geometry, requests: int, blocks: int, k: int, group_size: int):
        import torch

        from ucm_ray.retrieval import PackedQuery

        self.geometry, self.requests, self.blocks, self.k = geometry, requests, blocks, k
        generator = torch.Generator().manual_seed(0)
        shape = (geometry.method.num_stats, geometry.num_layers, requests * blocks, geometry.num_kv_heads,
                 geometry.head_dim)
        # Already rounded to the stored dtype, so that all kinds see the same numbers.
        self.stats = torch.randn(shape, generator=generator).abs().to(geometry.torch_dtype).float()
        self.keys = [f"block {at}" for at in range(requests * blocks)]
        self.names = [f"request {at}" for at in range(requests)]
        heads = geometry.num_kv_heads * group_size
        vectors = torch.randn((requests, geometry.num_layers, heads, geometry.head_dim), generator=generator)
        self.query: PackedQuery = PackedQuery.build(self.names, vectors, geometry, k)

    def lists(self) -> dict[str, list[str]]:
        return {name: self.keys[at * self.blocks:(at + 1) * self.blocks] for at, name in enumerate(self.names)}

    def stacked(self) -> torch.Tensor:
        """float32 `[requests, layers, blocks, width]`, contiguous: each row of work as one matrix."""
        stats, layers, _, heads, dim = self.stats.shape
        rows = self.stats.view(stats, layers, self.requests, self.blocks, heads, dim).permute(2, 1, 3, 4, 0, 5)
        return rows.reshape(self.requests, layers, self.blocks, heads * stats * dim).contiguous()

    def bytes(self, name: str) -> int:
        itemsize = 4 if name in ("seed_threadpool", "packed_torch") else self.geometry.torch_dtype.itemsize
        return self.stats.numel() * itemsize

    def check(self, calls: dict[str, Callable[[], Any]]) -> None:
        """Every kind must choose the same blocks; torch's rounding may swap two that score alike."""
        import numpy as np

        chosen = {name: np.asarray(call()).reshape(self.requests, self.geometry.num_layers, -1)
                  for name, call in calls.items()}
        for name, blocks in chosen.items():
            same = (np.sort(blocks, -1) == chosen["local"]).mean()
            if same < (0.99 if name in ("seed_threadpool", "packed_torch") else 1.0):
                raise RuntimeError(f"{name} chose other blocks than local: {same:.2%} agree")


def _contestants(work: _Work, counts: list[int]) -> tuple[dict[str, Callable[[], Any]], Callable, Callable]:
    """The kinds by name, the local worker's scoring alone, and what ends them all."""
    from ucm_ray.retrieval import RetrievalWorker

    local = RetrievalWorker({"retrieval_cache_size": len(work.keys)}, geometry=work.geometry)
    local.publish(work.keys, work.stats, work.lists())
    seed, end_seed = _seed_threadpool(work)
    rows, query = work.stacked(), _vectors(work)

    def packed_torch():
        import torch

        return torch.matmul(rows, query).squeeze(-1).topk(min(work.k, work.blocks), dim=-1).indices

    calls = {"seed_threadpool": seed, "packed_torch": packed_torch,
             "local": lambda: local.submit(work.query).result().blocks}
    ends = [end_seed, local.close]
    if counts:
        ray_calls, end_ray = _ray_shards(work, counts)
        calls.update(ray_calls)
        ends.append(end_ray)
    return calls, lambda: local.bank.answer(work.query, select=False), lambda: [end() for end in ends]


def _vectors(work: _Work) -> torch.Tensor:
    """float32 `[requests, layers, width, 1]`."""
    import torch

    return torch.from_numpy(work.query.grouped_features.reshape(work.requests, work.geometry.num_layers, -1, 1))


def _seed_threadpool(work: _Work) -> tuple[Callable, Callable]:
    """The seed's worker: four threads, a task per request and layer, a stored vector per block, stacked per task."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    threads = ThreadPoolExecutor(4)
    cache = {(layer, key): vector.clone() for layer in range(work.geometry.num_layers)
             for key, vector in zip(work.keys, work.stats[:, layer].permute(1, 2, 0, 3).flatten(2), strict=True)}
    lists = list(work.lists().values())
    query = _vectors(work).view(work.requests, work.geometry.num_layers, work.geometry.num_kv_heads, -1)

    def retrieve(request: int, layer: int):
        stacked = torch.stack([cache[layer, key] for key in lists[request]])
        scores = torch.einsum("hd,nhd->n", query[request, layer], stacked)
        return scores.topk(min(work.k, work.blocks)).indices.tolist()

    def call():
        futures = [threads.submit(retrieve, request, layer) for request in range(work.requests)
                   for layer in range(work.geometry.num_layers)]
        return [future.result() for future in futures]

    return call, threads.shutdown


def _ray_shards(work: _Work, counts: list[int]) -> tuple[dict[str, Callable], Callable]:
    """A pool and a client for each number of shards, in a Ray of our own."""
    import logging
    import os

    import ray

    from actors.retrieval_pool import PoolSettings, start_pool, stop_pool
    from ucm_ray.retrieval.client import RetrievalClient

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
             namespace="bench", object_store_memory=256 * 2 ** 20)
    cores = len(os.sched_getaffinity(0))
    clients = {}
    for count in counts:
        name = f"bench-{count}"
        settings = PoolSettings(shards=count, device="cpu", num_threads=max(1, cores // count),
                                capacity_bytes=2 * work.bytes("local"))
        start_pool(settings, name=name, namespace="bench", wait_s=120)
        clients[count] = RetrievalClient.connect(
            namespace="bench", pool=name, geometry=work.geometry, config={"retrieval_cache_size": len(work.keys)},
            fallbacks=("dense",), deadline_s=10.0)
        clients[count].publish(work.keys, work.stats, work.lists())
        clients[count].wait_ready(60)

    def caller(client):
        def call():
            answer = client.submit(work.query).result()
            if not answer.is_exact:
                raise RuntimeError(f"the shards did not answer: {answer.reason}")
            return answer.blocks
        return call

    def end():
        for count, client in clients.items():
            client.close()
            stop_pool(f"bench-{count}", "bench")
        ray.shutdown()

    return {f"ray-{count}": caller(client) for count, client in clients.items()}, end


def _take_turns(calls: dict[str, Callable], repeat: int) -> dict[str, list[float]]:
    from ucm_ray.bench import report

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(math.ceil(repeat / _CALLS_A_TURN)):
        for name, call in calls.items():
            # The seed's way takes a hundred times longer; fewer calls tell as much.
            calls_now = 1 if name == "seed_threadpool" else _CALLS_A_TURN
            # Threads of the one before may still spin, and its data is in the cache: the first call does not count.
            seconds[name] += report.time_calls(call, repeat=calls_now, warm_up=2)
    return seconds


def _row(name: str, seconds: list[float], num_bytes: int) -> dict[str, Any]:
    from ucm_ray.bench import report

    p50 = report.median(seconds)
    return {"name": name, "p50_ms": p50 * 1e3, "p99_ms": report.percentile(seconds, 99) * 1e3,
            "gb_s": num_bytes / p50 / 1e9, "calls_s": 1 / p50, "calls": len(seconds)}

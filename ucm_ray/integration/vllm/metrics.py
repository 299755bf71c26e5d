"""Counters of the connector, summed over steps and exposed by vLLM under `/metrics`."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests_blended": "Requests that reused stored KV through a plan.",
    "requests_not_blended": "Requests that reused nothing through a plan.",
    "reused_tokens": "Prompt tokens whose stored KV was placed.",
    "recomputed_tokens": "Reused tokens that a policy recomputed.",
    "missed_tokens": "Prompt tokens of blended requests that had no stored KV.",
    "saved_tokens": "Tokens whose KV was handed to the store.",
    "ingested_tokens": "Tokens computed behind the sink passage after their request had finished.",
    "failed_chunks": "Chunks of plans that were missing, corrupt or not what was planned.",
    "load_ms": "Milliseconds spent reading and placing stored KV.",
    "recompute_ms": "Milliseconds spent recomputing inside plans.",
    "analysis_s": "Seconds spent searching prompts for stored text.",
}


class BlendStats(KVConnectorStats):
    """A dictionary of sums."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class BlendPromMetrics(KVConnectorPromMetrics):
    """`vllm:ucm_blend_<counter>_total`, one per engine."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = metric_types[Counter](name=f"vllm:ucm_blend_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            per_engine = self._counters.get(name)
            if per_engine is not None and value > 0:
                per_engine[engine_idx].inc(value)

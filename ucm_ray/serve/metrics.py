"""Receipts, summed: Prometheus metrics of the ingress, named as vLLM names its own."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class ServiceMetrics:
    """Counters of one ingress replica, in a registry of their own; add them up over replicas."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = Counter(
            "vllm:ucm_prompt_tokens", "Prompt tokens by where their KV came from: the engine's exact prefix cache, "
            "stored chunks as they were, stored chunks repaired, or computed.", ["source"], registry=self.registry)
        self.requests = Counter(
            "vllm:ucm_requests", "Finished requests: blended, or not and why.", ["outcome", "reason"],
            registry=self.registry)
        self.missed_tokens = Counter(
            "vllm:ucm_missed_tokens", "Prompt tokens of blended requests that had no stored KV.",
            registry=self.registry)
        self.load_seconds = Histogram(
            "vllm:ucm_load_seconds", "Reading, rotating and placing stored KV, per blended request.",
            buckets=_SECONDS, registry=self.registry)
        self.recompute_seconds = Histogram(
            "vllm:ucm_recompute_seconds", "Repairing reused KV, per blended request.", buckets=_SECONDS,
            registry=self.registry)
        self.esa_blocks = Counter(
            "vllm:ucm_esa_blocks", "KV blocks seen by sparse decode: read, and all there were.", ["kind"],
            registry=self.registry)
        self.esa_fallbacks = Counter(
            "vllm:ucm_esa_fallbacks", "Answers of the retrieval that came too late and were replaced.",
            registry=self.registry)
        self.ingested_tokens = Counter(
            "vllm:ucm_ingested_tokens", "Tokens of documents ingested over HTTP.", registry=self.registry)
        self.stored_chunks = Gauge("vllm:ucm_stored_chunks", "Chunks the directory knows.", registry=self.registry)
        self.stored_bytes = Gauge(
            "vllm:ucm_stored_bytes", "Bytes of KV the directory knows.", registry=self.registry)
        self.directory_up = Gauge(
            "vllm:ucm_directory_up", "1 while the chunk directory answers.", registry=self.registry)
        self.store_reads = Gauge(
            "vllm:ucm_store_reads", "Chunks asked of a stage of a replica's store since it started: found, or not.",
            ["replica", "stage", "result"], registry=self.registry)
        self.store_bytes = Gauge(
            "vllm:ucm_store_bytes", "Bytes of KV in a stage of a replica's store.", ["replica", "stage"],
            registry=self.registry)
        self.store_loaded_bytes = Gauge(
            "vllm:ucm_store_loaded_bytes", "Bytes of KV a stage of a replica's store has read since it started.",
            ["replica", "stage"], registry=self.registry)
        self.stream_failures = Counter(
            "vllm:ucm_stream_failures", "Streams that ended with an error after their first token.",
            registry=self.registry)

    def observe(self, receipt: dict[str, Any]) -> None:
        """Count one finished request."""
        blend, esa = receipt.get("blend") or {}, receipt.get("esa") or {}
        reused, recomputed = blend.get("reused_tokens", 0), blend.get("recomputed_tokens", 0)
        prefix = blend.get("prefix_tokens", 0)
        computed = max(blend.get("prompt_tokens", 0) - prefix - reused, 0)
        sources = {"prefix": prefix, "reused": max(reused - recomputed, 0), "recomputed": min(recomputed, reused),
                   "computed": computed}
        for source, tokens in sources.items():
            self.prompt_tokens.labels(source).inc(tokens)
        if reused:
            self.requests.labels("blended", "").inc()
            self.load_seconds.observe(blend.get("load_ms", 0.0) / 1e3)
            self.recompute_seconds.observe(blend.get("recompute_ms", 0.0) / 1e3)
        else:
            self.requests.labels("not_blended", _bounded(blend.get("reason", ""))).inc()
        self.missed_tokens.inc(blend.get("missed_tokens", 0) if reused else 0)
        self.esa_blocks.labels("read").inc(esa.get("blocks_read", 0))
        self.esa_blocks.labels("total").inc(esa.get("blocks_total", 0))
        self.esa_fallbacks.inc(esa.get("fallbacks", 0))

    def observe_store(self, replica: str, numbers: dict[str, float]) -> None:
        """Take over what a replica's store counts, as `{"Cache.hits": ...}`."""
        for name, value in numbers.items():
            stage, _, what = name.partition(".")
            if what in ("hits", "misses"):
                self.store_reads.labels(replica, stage, what).set(value)
            elif what == "bytes":
                self.store_bytes.labels(replica, stage).set(value)
            elif what == "loaded_bytes":
                self.store_loaded_bytes.labels(replica, stage).set(value)

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def names(self) -> set[str]:
        """Names as they stand in the exposition, for checking dashboards and alerts."""
        found = set()
        for family in self.registry.collect():
            suffix = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            found.update(family.name + end for end in suffix)
        return found


def _bounded(reason: str) -> str:
    """A label has few values: the words of a reason up to its first number."""
    words = []
    for word in reason.split():
        if any(character.isdigit() for character in word):
            break
        words.append(word)
    return " ".join(words).rstrip(":,;(")[:80]

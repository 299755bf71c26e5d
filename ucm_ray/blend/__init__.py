"""Blend: find stored KV of any text in a prompt, plan its reuse, choose what to recompute. No vLLM, no Ray."""

from importlib import import_module

_HOMES = {
    "Blend": "blend", "Chunk": "chunk", "ChunkAnalyzer": "analyzer", "ChunkIndex": "index", "ChunkRecord": "chunk",
    "ChunkType": "chunk", "CostModel": "cost_model", "Decline": "plan", "Plan": "plan", "Planner": "plan",
    "PositionCorrector": "position", "RopeParameters": "rope", "Run": "chunk", "get_policy": "policies",
    "policy_names": "policies", "positions_to_ranges": "policies",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """Public names load their module on first use: the scheduler's side needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

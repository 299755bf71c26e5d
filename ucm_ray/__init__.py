"""Retrieval and blend service for vLLM on Ray."""

__version__ = "0.1.0"


def __getattr__(name: str):
    """`ucm_ray.Client` and `ucm_ray.AsyncClient`, imported when they are asked for."""
    if name in ("Client", "AsyncClient"):
        from ucm_ray import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

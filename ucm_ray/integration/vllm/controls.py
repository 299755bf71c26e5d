"""What a request may ask of us, in `kv_transfer_params["ucm"]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ucm_ray.config import ConfigError, parse_controls

SWITCHED_OFF = "switched off by the request"  # the receipt's reason, of every good ingest too


@dataclass(frozen=True)
class Controls:
    """None keeps the deployment's value. `error` is set if the parameters could not be understood: then the request
    is served without blending and without saving; HTTP refuses it before it gets here."""

    blend: bool | None = None
    policy: str | None = None
    budget: float | None = None
    save: bool | None = None
    esa: bool | None = None
    sparse_ratio: float | None = None
    trace: bool | None = None
    ingest_from: int | None = None
    """Position from which on the prompt is a document to store; what stands before is the sink passage."""
    error: str = ""


def parse_ucm_params(params: Any) -> Controls:
    """Never raises: what is not understood becomes `error`."""
    if params is None:
        return Controls()
    if not isinstance(params, Mapping):
        return Controls(blend=False, save=False, error=f"kv_transfer_params: found {params!r:.80}, expected a mapping")
    try:
        found = parse_controls(params.get("ucm"))
        names = [name for name in Controls.__dataclass_fields__ if name != "error"]
        return Controls(**{name: getattr(found, name, None) for name in names})
    except (ConfigError, TypeError, ValueError, RecursionError) as error:
        return Controls(blend=False, save=False, error=f"{error}"[:300])

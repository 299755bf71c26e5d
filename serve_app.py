"""`serve run serve_app:app [config=FILE] [section.key=value ...]`: the whole service from one YAML file."""

from __future__ import annotations

from typing import Any


def app(args: dict[str, Any]) -> Any:
    """The Ray Serve application that `args` describe; without `config`, that of $UCM_RAY_CONFIG or the defaults."""
    from ucm_ray.serve.app import build_app

    return build_app(args)

"""`serve run serve_app:app [config=FILE] [section.key=value ...]`: the whole service from one YAML file."""

from ucm_ray.serve.app import build_app as app

__all__ = ["app"]

"""The command line `ucm-ray`. Nothing heavy is imported before a command needs it."""

from ucm_ray.cli.app import app, main

__all__ = ["app", "main"]

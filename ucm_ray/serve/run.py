"""Runs the service in the foreground: what `make serve` does. Ray is started and stopped with it."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from ucm_ray.config import Settings, load_settings

logger = logging.getLogger(__name__)


def run_service(args: Mapping[str, Any], address: str | None = None, quiet: bool = False) -> None:
    """Serve until SIGINT or SIGTERM. `args` as for `serve_app:app`; `address` None starts a Ray of our own.

    Raises `ConfigError`, `ModelError`, or `RuntimeError` when the service does not come up.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    arguments = dict(args)
    settings = load_settings(arguments.pop("config", None), arguments)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _stop(stop))

    started = time.monotonic()
    _say("starting Ray and the engine (about a minute on two cores) ...", quiet)
    import ray
    from ray import serve

    from ucm_ray.serve.app import application

    # before the application is built: Ray Serve LLM asks Ray for its runtime context while building
    ray.init(address=address or "local", namespace="serve", log_to_driver=not quiet)
    try:
        app = application(settings)
        serve.start(http_options={"host": settings.service.host, "port": settings.service.port})
        serve.run(app, name="default", route_prefix="/")
        _say(ready_text(settings, time.monotonic() - started), quiet=False)
        stop.wait()
    except KeyboardInterrupt:
        pass  # stopped while starting: there is nothing to report, only to clean up
    finally:
        _say("stopping ...", quiet)
        serve.shutdown()
        ray.shutdown()


def ready_text(settings: Settings, seconds: float) -> str:
    """The address and a request to try, ready to paste."""
    service = settings.service
    host = "127.0.0.1" if service.host in ("0.0.0.0", "::") else service.host
    key = "-H 'Authorization: Bearer '$UCM_RAY_API_KEY " if service.api_keys else ""
    body = shlex.quote(
        f'{{"model": "{service.model_id}", "max_tokens": 32, '
        '"messages": [{"role": "user", "content": "What is the capital of Latvia?"}]}'
    )
    return (
        f"\nReady after {seconds:.0f} s at http://{host}:{service.port}/v1 (stop with Ctrl-C). Try:\n\n"
        f"  curl {key}http://{host}:{service.port}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {body}\n"
    )


def _stop(stop: threading.Event) -> None:
    """First signal: leave the wait, or the start-up by KeyboardInterrupt."""
    if stop.is_set():
        return
    stop.set()
    raise KeyboardInterrupt


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)

"""Runs the service in the foreground: what `make serve` does. Ray is started and stopped with it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ucm_ray.config import Settings, load_settings

_APP = "default"
_PROGRESS_S = 15.0
_GRACE_S = 10.0
_JOIN_S = 10.0


class StartError(RuntimeError):
    """The service did not come up; the message says why and where the logs are."""


def run_service(args: Mapping[str, Any], address: str | None = None, verbose: bool = False) -> None:
    """Serve until SIGINT or SIGTERM. `args` as for `serve_app:app`; `address` None starts a Ray of our own.

    Raises `ConfigError`, `ModelError` or `StartError`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    arguments = dict(args)
    settings = load_settings(arguments.pop("config", None), arguments)
    address = None if address in ("", "local") else address
    if address is not None:
        check_address(address)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _interrupt(stop))

    started_s = time.monotonic()
    deployed = ready = False
    try:
        with _progress(started_s):
            import ray
            from ray import serve

            from ucm_ray.serve.app import application
            from ucm_ray.serve.http_address import disagreement, http_address

            # before the application is built: Ray Serve LLM asks Ray for its runtime context while building
            _connect(ray, address, verbose)
            if _APP in serve.status().applications:
                raise StartError(f"an application called {_APP!r} runs on the Ray cluster at {address} already; "
                                 "`serve deploy` replaces it, `serve shutdown` ends it")
            app = application(settings)
            serve.start(http_options={"host": settings.service.host, "port": settings.service.port})
            deployed = True
            _deploy(serve, app)
        ready = True
        host, port = http_address()
        if ignored := disagreement(settings.service, host, port):
            _say(ignored)
        _say(ready_text(settings, host, port, time.monotonic() - started_s))
        stop.wait()
    except KeyboardInterrupt:
        pass  # Ctrl-C is how this ends
    finally:
        _say("stopping ...")
        _stop(settings, deployed, ready, own_ray=address is None)


def check_address(address: str) -> None:
    """Raise `StartError` where no Ray can be: Ray itself would try for minutes, and log as it does."""
    host, sign, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    if not (sign and host and port.isdigit()):
        raise StartError(f"Ray cluster address: found {address!r}, expected HOST:PORT or 'auto'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_JOIN_S).close()
    except (OSError, OverflowError) as error:
        raise StartError(f"no Ray cluster answers at {address} ({error}); give the address of a running one with "
                         "--address or RAY_ADDRESS, or neither to start one") from None


def _stop(settings: Settings, deployed: bool, ready: bool, own_ray: bool) -> None:
    """Let requests in flight finish, then end our application, our Ray and whatever of ours is still there.

    On a Ray that others use, too, nothing but our application and its retrieval pools is ended.
    """
    import psutil
    import ray
    from ray import serve

    ours = psutil.Process().children(recursive=True)
    if ray.is_initialized():
        if own_ray and ready:
            serve.shutdown()
        elif not own_ray and deployed:
            serve.delete(_APP)
            _end_pools(settings)
        ray.shutdown()
    # an engine whose replica was killed while loading would go on loading
    _, left = psutil.wait_procs(ours, timeout=_GRACE_S)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _end_pools(settings: Settings) -> None:
    """The actors of the retrieval pools are detached: they would outlive the application and keep their memory."""
    if settings.retrieval.backend != "ray":
        return
    from actors.retrieval_pool import end_pools

    try:
        end_pools(settings.retrieval.namespace, _APP)
    except Exception as error:  # the rest has to be ended all the same
        _say(f"the retrieval pools could not be ended: {error}")


def _connect(ray: Any, address: str | None, verbose: bool) -> None:
    try:
        ray.init(address=address or "local", namespace="serve", log_to_driver=verbose)
    except Exception as error:  # Ray raises bare Exception for a node that comes up too slowly
        if not address:
            raise StartError(f"starting Ray failed: {error} `ucm-ray doctor` checks the machine.") from error
        raise StartError(f"joining the Ray cluster at {address} failed: {' '.join(str(error).split())}; one that asks "
                         "for a token is joined with RAY_AUTH_MODE=token") from error


def _deploy(serve: Any, app: Any) -> None:
    try:
        serve.run(app, name=_APP, route_prefix="/")
    except RuntimeError as error:
        import ray

        logs = os.path.join(ray._private.worker._global_node.get_session_dir_path(), "logs", "serve")
        raise StartError(f"the service did not come up: {error}\nThe logs are in {logs}; `ucm-ray doctor` checks the "
                           "machine, `ucm-ray serve --verbose` shows the engine's log.") from error


def ready_text(settings: Settings, host: str, port: int, seconds: float) -> str:
    """The address and a request to try, ready to paste."""
    service = settings.service
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    key = "-H \"Authorization: Bearer $UCM_RAY_API_KEY\" " if service.api_keys else ""
    body = shlex.quote(
        f'{{"model": "{service.model_id}", "max_tokens": 32, "temperature": 0, '
        '"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    )
    return (
        f"\nReady after {seconds:.0f} s at http://{host}:{port}/v1 (stop with Ctrl-C). Try:\n\n"
        f"  curl {key}http://{host}:{port}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {body}\n"
    )


@contextmanager
def _progress(started_s: float) -> Iterator[None]:
    """A line every 15 s while Ray and the engine start, so that nobody wonders whether it hangs."""
    done = threading.Event()

    def tell() -> None:
        _say("starting Ray and the engine (about a minute on two cores) ...")
        while not done.wait(_PROGRESS_S):
            _say(f"  ... {time.monotonic() - started_s:.0f} s")

    threading.Thread(target=tell, name="progress", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _interrupt(stop: threading.Event) -> None:
    """First signal: leave the start-up or the wait. Later ones: let the clean-up finish."""
    if not stop.is_set():
        stop.set()
        raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

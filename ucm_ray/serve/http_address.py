"""Where Ray Serve listens, which the configuration of an application does not decide."""

from __future__ import annotations

from ucm_ray.config import ServiceSettings


def http_address() -> tuple[str, int]:
    """Host and port of the running Serve's proxies. Raises `RayServeException` where none runs."""
    # no public call tells them
    from ray.serve.context import _get_global_client

    options = _get_global_client().http_config
    return options.host or "", options.port


def disagreement(service: ServiceSettings, host: str, port: int) -> str | None:
    """One sentence where Serve listens elsewhere than somebody has set; None where it does not."""
    told = service.model_dump(include={"host", "port"}, exclude_defaults=True)
    real = {"host": host, "port": port}
    ignored = [f"service.{name}={value}" for name, value in told.items() if value != real[name]]
    if not ignored:
        return None
    return (f"{' and '.join(ignored)} {'has' if len(ignored) == 1 else 'have'} no effect: Ray Serve listens on "
            f"{host}:{port}, as it was started (`serve start --http-host --http-port`, or `http_options` of a Serve "
            "config file)")

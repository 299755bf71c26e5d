"""`ucm-ray serve`: the service in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ucm_ray.config import ConfigError, load_settings

app = typer.Typer(add_completion=False)


@app.command()
def serve(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as for `serve run`.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML; default: $UCM_RAY_CONFIG.")] = None,
    port: Annotated[int | None, typer.Option(help="Same as service.port=N.")] = None,
    address: Annotated[str | None, typer.Option(envvar="RAY_ADDRESS",
                                                help="Running Ray cluster; default: start one.")] = None,
    verbose: Annotated[bool, typer.Option(help="Show the logs of Ray and the engine.")] = False,
) -> None:
    """Check the set-up, start engines and HTTP, print the address, serve until Ctrl-C."""
    args: dict[str, Any] = {}
    for item in overrides or []:
        key, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"argument {item!r}: expected section.key=value")
        args[key] = value
    if port is not None:
        args["service.port"] = port
    if config is not None:
        args["config"] = str(config)

    from ucm_ray.doctor import stop_if_red

    settings = load_settings(config, {key: value for key, value in args.items() if key != "config"})
    stop_if_red(settings, address)

    from ucm_ray.serve.run import run_service

    run_service(args, address=address, verbose=verbose)

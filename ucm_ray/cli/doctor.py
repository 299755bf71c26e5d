"""`ucm-ray doctor`: is this machine ready, and if not, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML; default: $UCM_RAY_CONFIG.")] = None,
    port: Annotated[int | None, typer.Option(help="Same as service.port=N.")] = None,
    address: Annotated[str | None, typer.Option(envvar="RAY_ADDRESS",
                                                help="Running Ray cluster, as for `ucm-ray serve`.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the findings there, too.")] = None,
) -> None:
    """Check versions, device, model, store, port, memory, disk and Ray. Exit code 1 if anything is red.

    For a running Ray cluster this machine's device, port, memory and cores are not checked.
    """
    from ucm_ray.bench.report import write_json
    from ucm_ray.config import load_settings
    from ucm_ray.doctor import examine

    findings = examine(load_settings(config, {} if port is None else {"service.port": port}), address)
    for item in findings:
        label = typer.style(f"{item.state:8}", fg=_COLOURS[item.state])
        typer.echo(f"{label}{item.name:13}{item.found}")
        if item.remedy:
            typer.echo(f"{'':21}-> {item.remedy}")
    write_json(json_path, {"findings": [item._asdict() for item in findings]})
    if any(item.state == "error" for item in findings):
        raise typer.Exit(1)

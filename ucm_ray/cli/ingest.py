"""`ucm-ray ingest FILE...`: short for `ucm-ray cache ingest`."""

import typer

from ucm_ray.cli.cache import ingest

app = typer.Typer(add_completion=False)
app.command()(ingest)

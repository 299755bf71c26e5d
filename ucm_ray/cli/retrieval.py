"""`ucm-ray retrieval ...`: block representations of a running service, and which blocks a query needs most."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ucm_ray.cli.cache import DEFAULT_URL, ApiKey, AsJson, Url, ask_service, open_client, show_rows

app = typer.Typer(no_args_is_help=True, add_completion=False,
                  help="Store block representations in a running service and ask for the top-k of a query.")

Name = Annotated[str, typer.Argument(help="Name of the request or document the blocks belong to.")]
Array = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Array as numpy.save writes it (.npy).")]


@app.command()
def info(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """What blocks must look like, and how many this key has stored, as JSON."""
    with open_client(url, api_key) as client:
        typer.echo(ask_service(client.retrieval).model_dump_json(indent=2))


@app.command()
def upsert(name: Name, blocks: Array,
           append: Annotated[bool, typer.Option(help="Behind the blocks the name has, not in their place.")] = False,
           url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Store blocks (num_stats, num_layers, num_blocks, num_kv_heads, head_dim) under a name."""
    with open_client(url, api_key) as client:
        stored = ask_service(client.upsert_blocks, name, _read(blocks), append)
    typer.echo(f"{stored.name}: {stored.blocks} blocks")


@app.command()
def query(
    name: Name, queries: Array,
    k: Annotated[int, typer.Option("--k", "-k", min=1, help="Blocks a layer.")] = 8,
    start: Annotated[int, typer.Option(min=0, help="First block that may be chosen.")] = 0,
    stop: Annotated[int | None, typer.Option(min=0, help="First one behind those that may be chosen.")] = None,
    per_head: Annotated[bool, typer.Option("--per-head", help="Choose for every KV head by itself.")] = False,
    url: Url = DEFAULT_URL, api_key: ApiKey = None, as_json: AsJson = False,
) -> None:
    """The blocks of a name that a query (num_layers, num_heads, head_dim) needs most, a line per layer."""
    with open_client(url, api_key) as client:
        found = ask_service(client.top_k, name, _read(queries), k, start=start, stop=stop, per_head=per_head)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    show_rows([{"layer": layer} | ({"kv_head": head} if per_head else {}) | {"blocks": " ".join(map(str, blocks))}
               for layer, heads in enumerate(found.blocks) for head, blocks in enumerate(heads)], False)
    typer.echo(f"of {found.candidates} blocks, scored by {'the shards' if found.source == 'exact' else 'a local copy'}")


@app.command()
def evict(names: Annotated[list[str], typer.Argument(help="Names to drop with all their blocks.")],
          url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Drop names with all their blocks."""
    with open_client(url, api_key) as client:
        gone = ask_service(client.evict_blocks, names)
    typer.echo(f"{gone.names} names with {gone.blocks} blocks dropped")


def _read(path: Path) -> Any:
    import numpy as np

    try:
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
            raise ValueError
        return array
    except (ValueError, EOFError):
        typer.echo(f"{path}: expected an array of numbers as numpy.save writes it", err=True)
        raise typer.Exit(1) from None

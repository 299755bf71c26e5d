"""`ucm-ray cache ...`: the cache of a running service from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False,
                  help="Store, list, inspect, pin and delete chunks of a running service.")

Url = Annotated[str, typer.Option("--url", envvar="UCM_RAY_URL", help="Address of the service.")]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="UCM_RAY_API_KEY", help="Key, if it asks for one.")]
CacheSalt = Annotated[str | None, typer.Option("--cache-salt", help="Of the key's cache, the part with this salt.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the service's answer as JSON.")]
Keys = Annotated[list[str] | None, typer.Option("--key", "-k", help="Chunk key; may be repeated.")]
Documents = Annotated[list[str] | None, typer.Option("--document", "-d", help="Document id; may be repeated.")]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def ingest(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Text files, one document each.")],
    pin: Annotated[bool, typer.Option(help="Keep them whatever else needs room.")] = False,
    suffix: Annotated[str, typer.Option(help="Text that ends every document in prompts; \\n is a new line, \\t a tab."
                                        )] = "",
    url: Url = DEFAULT_URL, api_key: ApiKey = None, cache_salt: CacheSalt = None, as_json: AsJson = False,
) -> None:
    """Compute and store documents, so that the first prompt with them is blended already."""
    from ucm_ray.serve.api import MAX_DOCUMENTS

    ending = suffix.replace("\\n", "\n").replace("\\t", "\t")
    texts = [_read(file) + ending for file in files]
    with open_client(url, api_key, cache_salt) as client:
        done = [one for start in range(0, len(texts), MAX_DOCUMENTS)
                for one in ask_service(client.ingest, texts[start:start + MAX_DOCUMENTS], pin).data]
    rows = [{"file": str(file), **one.model_dump(exclude={"chunks"})} for file, one in zip(files, done, strict=True)]
    show_rows(rows, as_json)


@app.command("list")
def list_chunks(
    what: Annotated[str, typer.Argument(help="'documents' or 'chunks'.")] = "documents",
    document: Annotated[str | None, typer.Option(help="Only chunks of this document.")] = None,
    offset: int = 0, limit: int = 100, url: Url = DEFAULT_URL, api_key: ApiKey = None, cache_salt: CacheSalt = None,
    as_json: AsJson = False,
) -> None:
    """List stored documents or chunks."""
    if what not in ("documents", "chunks"):
        raise typer.BadParameter(f"found {what!r}, expected 'documents' or 'chunks'")
    with open_client(url, api_key, cache_salt) as client:
        page = (ask_service(client.documents, offset, limit) if what == "documents"
                else ask_service(client.chunks, document, offset, limit))
    show_rows([one.model_dump() for one in page.data], as_json)
    if not as_json:
        typer.echo(f"{len(page.data)} of {page.total} {what}")


@app.command()
def inspect(key: str, url: Url = DEFAULT_URL, api_key: ApiKey = None, cache_salt: CacheSalt = None) -> None:
    """One chunk with its text, as JSON."""
    with open_client(url, api_key, cache_salt) as client:
        typer.echo(ask_service(client.chunk, key).model_dump_json(indent=2))


@app.command()
def lookup(
    prompt: Annotated[str, typer.Argument(help="The prompt, or @FILE.")],
    url: Url = DEFAULT_URL, api_key: ApiKey = None, cache_salt: CacheSalt = None, as_json: AsJson = False,
) -> None:
    """What of a prompt would be reused, without running it."""
    text = _read(Path(prompt[1:])) if prompt.startswith("@") else prompt
    with open_client(url, api_key, cache_salt) as client:
        found = ask_service(client.lookup, text)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    typer.echo(f"{found.reusable_tokens} of {found.prompt_tokens} tokens are stored; {found.recomputed_tokens} of them "
               f"would be recomputed: {found.estimated_saving:.0%} of the prefill saved")


@app.command()
def pin(keys: Keys = None, documents: Documents = None,
        off: Annotated[bool, typer.Option("--off", help="Unpin.")] = False,
        url: Url = DEFAULT_URL, api_key: ApiKey = None, cache_salt: CacheSalt = None) -> None:
    """Pin or unpin chunks or documents."""
    with open_client(url, api_key, cache_salt) as client:
        changed = ask_service(client.pin, _some(keys, documents), documents or [], not off).chunks
    typer.echo(f"{changed} chunks {'unpinned' if off else 'pinned'}")


@app.command()
def delete(keys: Keys = None, documents: Documents = None, url: Url = DEFAULT_URL, api_key: ApiKey = None,
           cache_salt: CacheSalt = None) -> None:
    """Delete chunks or documents."""
    with open_client(url, api_key, cache_salt) as client:
        typer.echo(f"{ask_service(client.delete, _some(keys, documents), documents or []).chunks} chunks deleted")


@app.command()
def clear(yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, url: Url = DEFAULT_URL,
          api_key: ApiKey = None, cache_salt: CacheSalt = None) -> None:
    """Delete everything this API key has stored under one cache salt, or without one."""
    if not yes:
        part = f"under the cache salt {cache_salt!r}" if cache_salt else "without a cache salt"
        typer.confirm(f"Delete everything this key has stored {part}?", abort=True)
    with open_client(url, api_key, cache_salt) as client:
        typer.echo(f"{ask_service(client.clear).chunks} chunks deleted")


@app.command()
def stats(url: Url = DEFAULT_URL, api_key: ApiKey = None, cache_salt: CacheSalt = None) -> None:
    """Numbers of this key's cache (the part of one cache salt, or without one) and of its requests, as JSON."""
    with open_client(url, api_key, cache_salt) as client:
        typer.echo(ask_service(client.stats).model_dump_json(indent=2))


@app.command()
def receipt(request_id: str, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """The receipt of a request, by the id of its response."""
    with open_client(url, api_key) as client:
        typer.echo(json.dumps(ask_service(client.receipt, request_id), indent=2))


def open_client(url: str, api_key: str | None, cache_salt: str | None = None) -> Any:
    """The client of these options."""
    from ucm_ray.client import Client

    return Client(url, api_key=api_key, cache_salt=cache_salt)


def ask_service(method: Any, *arguments: Any, **options: Any) -> Any:
    """A refusal, the service's or our own check's, is one line and exit code 1."""
    from pydantic import ValidationError

    from ucm_ray.client import ClientError

    try:
        return method(*arguments, **options)
    except ValidationError as error:
        first = error.errors()[0]
        typer.echo(f"{'.'.join(map(str, first['loc'])) or method.__name__}: "
                   f"{first['msg'].removeprefix('Value error, ')}", err=True)
    except (ClientError, ValueError) as error:
        typer.echo(str(error), err=True)
    raise typer.Exit(1)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        typer.echo(f"{path}: cannot be read ({error.strerror})", err=True)
    except UnicodeDecodeError as error:
        typer.echo(f"{path}: expected UTF-8 text ({error.reason} at byte {error.start})", err=True)
    raise typer.Exit(1)


def _some(keys: list[str] | None, documents: list[str] | None) -> list[str]:
    if not keys and not documents:
        raise typer.BadParameter("expected at least one --key or --document")
    return keys or []


def show_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows as a table or as JSON."""
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from ucm_ray.bench.report import table

    table(rows)

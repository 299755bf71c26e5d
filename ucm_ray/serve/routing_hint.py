"""What the ingress tells the router of a prompt, by request id.

A module of its own: Ray Serve ships a router's module by value, so that globals beside the router class would be copies
that nobody else in the process ever fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class PromptChunk(NamedTuple):
    """A stored chunk in a prompt."""

    key: str
    num_tokens: int
    num_bytes: int


Chunks = list[PromptChunk]

_hints: dict[str, Chunks] = {}


@contextmanager
def routing_hint(request_id: str, chunks: Chunks) -> Iterator[None]:
    """While inside, the router knows the stored chunks of the request's prompt."""
    if chunks and request_id:
        _hints[request_id] = chunks
    try:
        yield
    finally:
        _hints.pop(request_id, None)


def hint_of(request_id: str) -> Chunks:
    """The stored chunks of a request's prompt; empty when nothing is known."""
    return _hints.get(request_id, [])

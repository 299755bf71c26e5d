"""What the ingress tells the router of a prompt, by request id.

A module of its own: Ray Serve ships a router's module by value, so that globals beside the router class would be copies
that nobody else in the process ever fills.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ucm_ray.serve.residency import Chunks, Residency


class RoutingHint(NamedTuple):
    """A prompt's chunks, and what is known of the replicas' memories."""

    stored: Chunks
    """In the store already, wherever they stand in the prompt."""
    fresh: Chunks
    """The rest of the prompt, cut as its KV will be saved: whoever computes it has it before the store lists it."""
    residency: Residency


_hints: dict[str, RoutingHint] = {}


@contextmanager
def routing_hint(request_id: str, hint: RoutingHint | None) -> Iterator[None]:
    """While inside, the router knows the chunks of the request's prompt."""
    if hint is not None and request_id:
        _hints[request_id] = hint
    try:
        yield
    finally:
        _hints.pop(request_id, None)


def hint_of(request_id: str) -> RoutingHint | None:
    """What is known of a request's prompt, if anything."""
    return _hints.get(request_id)

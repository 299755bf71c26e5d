"""API keys: who is let in, and that a caller's salt is the server's business."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ucm_ray.serve.auth import ApiKeyMiddleware, salt_of


def _call(
    keys: list[str], authorization: str | None, path: str = "/v1/models", method: str = "GET"
) -> tuple[int, str | None]:
    """Status and the salt that the application behind the middleware saw."""
    seen: dict[str, Any] = {}

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen["salt"] = scope["state"]["ucm_salt"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        seen.setdefault("status", message.get("status"))

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(ApiKeyMiddleware(inner, keys)(scope, None, send))
    return seen["status"], seen.get("salt")


def test_no_keys_configured_lets_everybody_in_without_a_salt() -> None:
    assert _call([], None) == (200, "")
    assert _call([], "Bearer anything") == (200, "")


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Bearer other", "Basic right", "right",
                                           "Bearer righ", "Bearer right2", "Bearer \xff"])
def test_without_a_known_key_nothing_is_reached(authorization: str | None) -> None:
    assert _call(["right"], authorization) == (401, None)


def test_each_key_has_its_own_lasting_salt() -> None:
    status, first = _call(["right", "also"], "Bearer right")
    _, second = _call(["right", "also"], "bearer also")
    assert status == 200 and first and second and first != second
    assert first == salt_of("right") == _call(["right"], "Bearer right")[1]
    assert "right" not in first


@pytest.mark.parametrize("path", ["/health", "/-/healthz"])
def test_health_needs_no_key(path: str) -> None:
    assert _call(["right"], None, path) == (200, "")


@pytest.mark.parametrize("path", ["/health/../v1/models", "/health/", "//health", "/v1/health"])
def test_only_exact_paths_are_open(path: str) -> None:
    assert _call(["right"], None, path)[0] == 401


def test_browsers_may_ask_what_is_allowed() -> None:
    assert _call(["right"], None, method="OPTIONS")[0] == 200

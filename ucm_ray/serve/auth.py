"""API keys: who may call, and under which salt a caller's KV is kept.

A key maps to a salt that never leaves the server. The salt becomes part of every KV key of the caller's requests, so
two callers with different keys share no cached text, neither in vLLM's prefix cache nor in the chunk store.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from blake3 import blake3

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# answered without a key: liveness for load balancers, and pages that hold no data
OPEN_PATHS = frozenset({"/health", "/-/healthz", "/-/routes"})


def salt_of(api_key: str) -> str:
    """32 hex characters, the same on every replica and after a restart; "" without a key."""
    return blake3(b"ucm_ray api key\0" + api_key.encode()).hexdigest()[:32] if api_key else ""


class ApiKeyMiddleware:
    """Plain ASGI middleware (streams pass through unbuffered): 401 without a known key.

    Puts the caller's salt into `request.state.ucm_salt` ("" where no keys are configured).
    """

    def __init__(self, app: Any, api_keys: Iterable[str] = (), open_paths: Iterable[str] = OPEN_PATHS):
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]
        self.open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["ucm_salt"] = ""
        if self.api_keys and scope["method"] != "OPTIONS" and scope["path"] not in self.open_paths:
            key = self._known_key(scope)
            if key is None:
                await _unauthorized(send)
                return
            state["ucm_salt"] = salt_of(key)
        await self.app(scope, receive, send)

    def _known_key(self, scope: Scope) -> str | None:
        given = b""
        for name, value in scope.get("headers", ()):
            if name.lower() == b"authorization" and value[:7].lower() == b"bearer ":
                given = value[7:].strip()
        # every key is compared in constant time, whether or not an earlier one matched
        matches = [known for known in self.api_keys if hmac.compare_digest(known, given)]
        return matches[0].decode() if matches else None


async def _unauthorized(send: Send) -> None:
    body = json.dumps({"error": {
        "message": "Missing or unknown API key; expected the header 'Authorization: Bearer <key>'",
        "type": "invalid_api_key", "param": None, "code": 401,
    }}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
               (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})

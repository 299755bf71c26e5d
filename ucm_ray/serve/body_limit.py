"""How much a request of our own routes may bring: what is larger is refused before it lies in memory as a whole."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ucm_ray.serve.api import MAX_BODY_BYTES
from ucm_ray.serve.auth import Receive, Scope, Send
from ucm_ray.serve.errors import error_body


class BodyLimitMiddleware:
    """Plain ASGI middleware: 413 for a body above `most_bytes`, by its declared length or as it comes in."""

    def __init__(self, app: Any, prefix: str = "/ucm/v1/", most_bytes: int = MAX_BODY_BYTES):
        self.app, self._prefix, self._most_bytes = app, prefix, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(self._prefix):
            await self.app(scope, receive, send)
            return
        declared = dict(scope.get("headers", ())).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._most_bytes:
            await JSONResponse(error_body(413, self._refusal), status_code=413)(scope, receive, send)
            return
        received = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most_bytes:
                # FastAPI reads the body, lets this one through and answers with it
                raise HTTPException(413, self._refusal)
            return message

        await self.app(scope, counted, send)

    @property
    def _refusal(self) -> str:
        return f"the request's body is too large, expected at most {self._most_bytes} bytes; send it in parts"

"""Errors as the OpenAI API words them, for every route of the service: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from ray.exceptions import RayActorError
from ray.llm._internal.common.errors import VLLM_CLIENT_ERRORS
from ray.llm._internal.serve.core.configs.openai_api_models import OpenAIHTTPException
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ucm_ray.config import ConfigError

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_UNAVAILABLE = (RayActorError, DeploymentUnavailableError, BackPressureError)


class ServiceError(OpenAIHTTPException):
    """An answer with a status and a message for the client; `param` names the field it is about."""

    def __init__(self, status_code: int, message: str, param: str | None = None):
        super().__init__(status_code=status_code, message=message, type=_type_of(status_code))
        self.param = param

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None) -> ServiceError:
    return ServiceError(400, message, param)


def not_found(message: str, param: str | None = None) -> ServiceError:
    return ServiceError(404, message, param)


def unavailable(error: BaseException) -> ServiceError | None:
    """503 for a replica or actor that is gone or overloaded; None for any other error."""
    if isinstance(error, _UNAVAILABLE):
        return ServiceError(503, f"the engine that served this request is not available ({type(error).__name__}); "
                                 "the request can be sent again")
    return None


def error_body(status: int, message: str, kind: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind or _type_of(status), "param": param, "code": status}}


def add_error_handlers(app: FastAPI) -> None:
    """Every error leaves as the same JSON; what nobody foresaw is logged and says nothing about our insides."""

    async def on_openai(request: Request, error: OpenAIHTTPException) -> JSONResponse:
        return _response(error.status_code, error.message, error.type, getattr(error, "param", None))

    async def on_http(request: Request, error: HTTPException) -> JSONResponse:
        return _response(error.status_code, str(error.detail), headers=error.headers)

    async def on_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0] if error.errors() else {"msg": "invalid request", "loc": ("body",)}
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        reason = first["msg"].removeprefix("Value error, ")
        return _response(400, f"{place}: {reason}" if place else reason, param=place or None)

    async def on_client_mistake(request: Request, error: Exception) -> JSONResponse:
        param = getattr(error, "parameter", None)
        return _response(400, str(error).removesuffix(f" (parameter={param})"), param=param)

    async def on_other(request: Request, error: Exception) -> JSONResponse:
        if gone := unavailable(error):
            return _response(gone.status_code, gone.message)
        request_id = getattr(request.state, "request_id", None)
        logger.error("request %s failed", request_id, exc_info=error)
        return _response(500, f"internal error; the log has more under request id {request_id}")

    app.add_exception_handler(OpenAIHTTPException, on_openai)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    # vLLM's request models raise these while FastAPI reads the body
    for kind in (ConfigError, *VLLM_CLIENT_ERRORS):
        app.add_exception_handler(kind, on_client_mistake)
    app.add_exception_handler(Exception, on_other)


def _type_of(status: int) -> str:
    return _TYPES.get(status, "service_error" if status >= 500 else "invalid_request_error")


def _response(status: int, message: str, kind: str | None = None, param: str | None = None,
              headers: Any = None) -> JSONResponse:
    return JSONResponse(error_body(status, message, kind, param), status_code=status, headers=headers)

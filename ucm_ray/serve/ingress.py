"""The HTTP ingress: Ray Serve LLM's OpenAI routes, with API keys, checked controls and clear errors.

To add routes: write their methods in a mixin, give it a place in `UcmIngress`'s bases and its routes in `ENDPOINTS`
(`{"method_name": lambda app: app.get("/ucm/v1/...")}`); `request.state.ucm_salt` is the caller's salt.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import FastAPI, Request
from ray.llm._internal.serve.core.configs.openai_api_models import ErrorResponse, OpenAIHTTPException
from ray.llm._internal.serve.core.ingress.ingress import DEFAULT_ENDPOINTS, make_fastapi_ingress
from ray.llm._internal.serve.core.ingress.middleware import SetRequestIdMiddleware
from ray.llm._internal.serve.observability.metrics.fast_api_metrics import (
    add_http_metrics_middleware,
    metrics_lifespan,
)
from starlette.responses import JSONResponse

from ucm_ray.config import ConfigError, ServiceSettings, Settings, parse_controls
from ucm_ray.serve.auth import OPEN_PATHS, ApiKeyMiddleware
from ucm_ray.serve.body_limit import BodyLimitMiddleware
from ucm_ray.serve.cache_service import CacheService
from ucm_ray.serve.errors import add_error_handlers, bad_request
from ucm_ray.serve.http_address import disagreement, http_address
from ucm_ray.serve.retrieval import RetrievalService
from ucm_ray.serve.routes import OPEN_ROUTES, ROUTES, UcmRoutes
from ucm_ray.serve.tokenizer import PromptTokenizer
from ucm_ray.serve.tracing import RequestTracer

logger = logging.getLogger("ray.serve")

Endpoint = Callable[[FastAPI], Callable[..., Any]]

# what a text model answers; Ray's embedding, scoring and audio routes would only fail on it
ENDPOINTS: dict[str, Endpoint] = {
    **{name: DEFAULT_ENDPOINTS[name] for name in ("models", "model_data", "completions", "chat", "tokenize",
                                                  "detokenize")},
    "health": lambda app: app.get("/health"),
    **ROUTES,
}


class UcmIngress(UcmRoutes):
    """One replica of the ingress. `settings` is `Settings.model_dump()` of the deployment."""

    def __init__(self, *args: Any, settings: dict[str, Any], llm_config: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.settings = Settings.model_validate(settings)
        if ignored := disagreement(self.settings.service, *http_address()):
            logger.warning(ignored)
        engines = self._default_serve_handles[llm_config.model_id]
        self.cache = CacheService(self.settings, engines, PromptTokenizer(llm_config))
        self.retrieval = RetrievalService(self.settings, self.cache)
        self.tracer = RequestTracer(self.settings.service.otlp_endpoint)

    async def health(self) -> JSONResponse:
        """Answered without a key; the ingress is up. Replicas are checked by Ray Serve."""
        return JSONResponse({"status": "ok"})

    async def _get_model_id(self, model: str | None) -> str:
        if model is not None and model not in self._model_cards:
            known = ", ".join(sorted(self._model_cards))
            raise OpenAIHTTPException(status_code=404, message=f"model: found {model!r}, expected one of: {known}",
                                      type="not_found_error")
        return await super()._get_model_id(model)

    async def _get_response(
        self, *, body: Any, call_method: str, raw_request: Request | None = None
    ) -> AsyncGenerator[Any, None]:
        self._check_controls(body)
        self._check_prompt(body)
        if raw_request is not None:
            self._apply_salt(body, getattr(raw_request.state, "ucm_salt", ""))
        async for response in super()._get_response(body=body, call_method=call_method, raw_request=raw_request):
            if isinstance(response, ErrorResponse):
                error = response.error
                raise OpenAIHTTPException(status_code=int(error.code), message=error.message, type=error.type)
            yield response

    @staticmethod
    def _check_controls(body: Any) -> None:
        """Nothing unchecked reaches the engine: a bad control is the client's error, never an engine's."""
        params = getattr(body, "kv_transfer_params", None)
        if params:
            try:
                parse_controls(params.get("ucm"))
            except ConfigError as error:
                raise bad_request(str(error), "kv_transfer_params") from None

    @staticmethod
    def _check_prompt(body: Any) -> None:
        if hasattr(body, "prompt") and getattr(body, "prompt_embeds", None) is None:
            prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
            if not prompts or any(prompt is None or prompt in ("", []) for prompt in prompts):
                raise bad_request("prompt: found an empty prompt, expected text or token ids", "prompt")
        if hasattr(body, "messages") and not body.messages:
            raise bad_request("messages: found an empty list, expected at least one message", "messages")

    @staticmethod
    def _apply_salt(body: Any, salt: str) -> None:
        """Keep the caller's own `cache_salt` apart inside the caller's space."""
        if salt and hasattr(body, "cache_salt"):
            body.cache_salt = f"{salt}.{body.cache_salt}" if body.cache_salt else salt


def fastapi_app(service: ServiceSettings) -> FastAPI:
    """The FastAPI application below the routes: errors, HTTP metrics, limits, API keys, ids (outermost last)."""
    app = FastAPI(title="ucm_ray", lifespan=metrics_lifespan)
    add_error_handlers(app)
    add_http_metrics_middleware(app)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(ApiKeyMiddleware, api_keys=service.api_keys, open_paths=OPEN_PATHS | set(OPEN_ROUTES))
    app.add_middleware(SetRequestIdMiddleware)
    return app


def ingress_class(service: ServiceSettings) -> type:
    """`UcmIngress` with its routes attached, ready for `serve.deployment`."""
    return make_fastapi_ingress(UcmIngress, endpoint_map=ENDPOINTS, app=fastapi_app(service))

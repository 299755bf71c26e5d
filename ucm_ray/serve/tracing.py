"""OpenTelemetry: one span a request with the numbers of its receipt, sent to an OTLP collector over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_DELAY_MS = 1000


class RequestSpan:
    """The span of one request; without a collector every call does nothing."""

    def __init__(self, span: Any = None):
        self._span = span

    def keep(self, response_id: str, receipt: Mapping[str, Any]) -> None:
        """Take over a receipt: `ucm.blend.reused_tokens` and all others that are numbers or words."""
        if self._span is None:
            return
        self._span.set_attribute("gen_ai.response.id", response_id)
        for part, values in receipt.items():
            for name, value in (values.items() if isinstance(values, Mapping) else ()):
                if isinstance(value, (bool, int, float, str)):
                    self._span.set_attribute(f"ucm.{part}.{name}", value)

    def fail(self, message: str) -> None:
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, message))


class RequestTracer:
    """Makes spans, and sends them from a thread of its own every second.

    Args:
        endpoint: of the collector, such as `http://collector:4318/v1/traces`; None: no spans.
        processor: takes the spans in the endpoint's stead.
    """

    def __init__(self, endpoint: str | None, processor: Any = None):
        self._tracer = None
        if endpoint is None and processor is None:
            return
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # a provider of our own: Ray Serve may set a global one for its spans
        provider = TracerProvider(resource=Resource.create({"service.name": "ucm_ray"}))
        provider.add_span_processor(
            processor or BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint), schedule_delay_millis=_DELAY_MS))
        self._tracer = provider.get_tracer("ucm_ray")

    @contextmanager
    def request(self, operation: str, request_id: str, model: str | None,
                headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        """The span of one request, child of the caller's where its `traceparent` header says so."""
        if self._tracer is None:
            yield RequestSpan()
            return
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({name.lower(): value for name, value in headers.items()})
        raw = self._tracer.start_span(f"ucm {operation}", context=context, kind=SpanKind.SERVER, attributes={
            "ucm.request_id": request_id, "gen_ai.operation.name": operation, "gen_ai.request.model": model or ""})
        span = RequestSpan(raw)
        try:
            yield span
        except GeneratorExit:
            span.fail("the client left")
            raise
        except BaseException as error:
            span.fail(getattr(error, "message", None) or type(error).__name__)
            raise
        finally:
            raw.end()

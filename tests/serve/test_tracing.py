"""OpenTelemetry spans: one a request, in memory and from the running service to a collector over HTTP."""

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.serve.conftest import KEYS, MODEL, eventually, messages_of
from ucm_ray.serve.errors import bad_request
from ucm_ray.serve.receipts import no_receipt
from ucm_ray.serve.tracing import RequestTracer

ERROR = 2
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_holds_the_receipts_numbers_and_how_the_request_ended():
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(None, SimpleSpanProcessor(exporter))
    with tracer.request("chat", "r1", "m", {"Traceparent": PARENT}) as span:
        span.keep("chatcmpl-r1", no_receipt("too short", 9))
    with pytest.raises(Exception, match="no messages"), tracer.request("chat", "r2", "m", {}):
        raise bad_request("no messages")
    done, failed = exporter.get_finished_spans()
    assert done.attributes["ucm.request_id"] == "r1" and done.attributes["gen_ai.response.id"] == "chatcmpl-r1"
    assert done.attributes["ucm.blend.prompt_tokens"] == 9 and done.attributes["ucm.blend.reason"] == "too short"
    assert f"{done.parent.span_id:016x}" == PARENT.split("-")[2] and failed.parent is None
    assert failed.status.status_code.value == ERROR and failed.status.description == "no messages"


def test_without_a_collector_nothing_is_made():
    with RequestTracer(None).request("chat", "r1", "m", {}) as span:
        span.keep("chatcmpl-r1", no_receipt("too short", 9))
        span.fail("anything")


@pytest.mark.service
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stream", [False, True])
def test_every_request_is_one_span_with_its_receipt(service, collector, documents, first, stream):
    first.ingest([document.stored_text for document in documents[:4]])
    name = f"traced-{stream}"
    answer = httpx.post(
        f"{service.url}/v1/chat/completions", timeout=120,
        headers={"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": name, "traceparent": PARENT},
        json={"model": MODEL, "messages": messages_of(documents[:4], "What?"), "max_tokens": 4, "stream": stream})
    assert answer.status_code == 200
    spans = eventually(lambda: [one for one in collector.attributes() if one.get("ucm.request_id") == name])
    assert len(spans) == 1 and spans[0]["name"] == "ucm chat" and spans[0]["gen_ai.request.model"] == MODEL
    assert (spans[0]["trace"], spans[0]["parent"]) == tuple(PARENT.split("-")[1:3])
    blend = first.receipt(name)["ucm"]["blend"]
    assert blend["reused_tokens"] > 900 and spans[0]["gen_ai.response.id"].endswith(name)
    told = {key: value for key, value in blend.items() if isinstance(value, (bool, int, float, str))}
    assert told == {key: spans[0][f"ucm.blend.{key}"] for key in told}


@pytest.mark.service
@pytest.mark.timeout(900)
def test_a_refused_request_is_a_span_with_the_error(service, collector):
    answer = httpx.post(
        f"{service.url}/v1/completions", timeout=60,
        headers={"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": "traced-refused"},
        json={"model": MODEL, "prompt": "hello " * 6000, "max_tokens": 1})
    assert answer.status_code == 400
    spans = eventually(lambda: [one for one in collector.attributes()
                                if one.get("ucm.request_id") == "traced-refused"])
    assert len(spans) == 1 and spans[0]["status"] == ERROR

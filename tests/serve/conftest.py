"""One running service for the whole room: two API keys, the default model, blend on, a retrieval pool, spans."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from openai import OpenAI

from ucm_ray.bench.data import load_documents
from ucm_ray.client import Client
from ucm_ray.serve.directory_copy import DirectoryCopy
from ucm_ray.serve.residency import Residency

KEYS = ("first-key", "second-key")
SYSTEM = "You answer questions about the documents you are given."


MODEL = "test-model"
ENGINE = {"device": "cpu", "max_model_len": 4096, "cpu_kv_cache_gib": 1}
STORE = {"refresh_s": 0.2, "cache_capacity_bytes": "512MiB"}
RETRIEVAL = {"backend": "ray", "capacity_bytes": "32MiB"}
_services: list = []


class Collector:
    """An OpenTelemetry collector: takes spans over OTLP/HTTP and keeps them."""

    def __init__(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans = spans = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/x-protobuf"
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments):
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, name="collector", daemon=True).start()

    def attributes(self) -> list[dict]:
        """Of every span so far, its name and status among them."""
        return [{"name": span.name, "status": span.status.code, "parent": span.parent_span_id.hex(),
                 "trace": span.trace_id.hex()}
                | {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}
                for span in list(self.spans)]


@pytest.fixture(scope="session")
def collector():
    collector = Collector()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


@pytest.fixture(scope="session")
def service(start_service, collector):
    _services.append(start_service({"engine": ENGINE, "store": STORE, "retrieval": RETRIEVAL, "service": {
        "api_keys": list(KEYS), "model_id": MODEL, "otlp_endpoint": collector.url}}))
    return _services[-1]


def stop_single_service() -> None:
    """Two cores are too few for it beside two replicas."""
    while _services:
        _services.pop().stop()


@pytest.fixture
def first(service) -> Client:
    with Client(service.url, api_key=KEYS[0]) as client:
        yield client


@pytest.fixture
def second(service) -> Client:
    with Client(service.url, api_key=KEYS[1]) as client:
        yield client


@pytest.fixture
def openai(service) -> OpenAI:
    return OpenAI(base_url=f"{service.url}/v1", api_key=KEYS[0], max_retries=0)


@pytest.fixture(scope="session")
def documents():
    """Twenty documents with questions."""
    return load_documents()[:20]


def messages_of(documents, question: str) -> list[dict]:
    text = "".join(document.stored_text for document in documents)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{text}Question: {question}"}]


@pytest.fixture
def copy():
    """The ingress' copy of a directory that nobody runs: tests tell it what there is."""
    def nobody():
        raise ValueError("no directory")

    copy = DirectoryCopy(nobody, 16, Residency(capacity_bytes=10_000))
    yield copy
    copy.close()


def eventually(check, timeout_s: float = 15.0):
    """The first true answer of `check`; the store is written in the background."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := check()):
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.1)
    return answer

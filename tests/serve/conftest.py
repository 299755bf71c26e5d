"""One running service for the whole room: two API keys, the default model, blend on."""

import time

import pytest
from openai import OpenAI

from ucm_ray.bench.data import load_documents
from ucm_ray.client import Client

KEYS = ("first-key", "second-key")
SYSTEM = "You answer questions about the documents you are given."


MODEL = "test-model"
ENGINE = {"device": "cpu", "max_model_len": 4096, "cpu_kv_cache_gib": 1}
STORE = {"refresh_s": 0.2, "cache_capacity_bytes": "512MiB"}
_services: list = []


@pytest.fixture(scope="session")
def service(start_service):
    _services.append(start_service({"engine": ENGINE, "store": STORE,
                                    "service": {"api_keys": list(KEYS), "model_id": MODEL}}))
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


def eventually(check, timeout_s: float = 15.0):
    """The first true answer of `check`; the store is written in the background."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := check()):
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.1)
    return answer

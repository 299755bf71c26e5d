"""The running service, driven by the official `openai` client; at the end nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import openai
import pytest

pytestmark = [pytest.mark.service, pytest.mark.timeout(900)]

MODEL = "smollm2-135m-instruct"
KEY = "first-test-key"
CONFIG = {
    "engine": {"max_model_len": 2048, "cpu_kv_cache_gib": 1, "max_num_seqs": 24},
    "store": {"cache_capacity_bytes": "256MiB", "posix_capacity_bytes": "1GiB"},
    "service": {"api_keys": [KEY, "second-test-key"]},
}


@pytest.fixture(scope="module")
def service(start_service):
    return start_service(CONFIG)


@pytest.fixture(scope="module")
def client(service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_completion_continues_a_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert "Paris" in answer.choices[0].text
    assert answer.usage.completion_tokens == 8


def test_chat_answers(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=16, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 24,
               "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**request).choices[0].message.content
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert len(chunks) > 1


def test_a_wrong_model_name_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"'gpt-none'.*{MODEL}"):
        client.completions.create(model="gpt-none", prompt="Hello", max_tokens=1)
    with pytest.raises(openai.NotFoundError, match="gpt-none"):
        client.chat.completions.create(model="gpt-none", messages=[{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize("prompt", ["", [], [""]])
def test_an_empty_prompt_is_400(client: openai.OpenAI, prompt: object) -> None:
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)


def test_no_messages_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=MODEL, messages=[])


@pytest.mark.parametrize("stream", [False, True])
def test_an_over_long_prompt_is_400_and_names_the_limit(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens"):
        client.completions.create(model=MODEL, prompt="hello " * 4000, max_tokens=1, stream=stream)


@pytest.mark.parametrize("controls, part", [
    ({"budget": 3}, "found 3"), ({"policy": "best"}, "'query'"), ({"budgt": 0.1}, "'budget'"), ("on", "mapping"),
])
def test_broken_controls_are_400(client: openai.OpenAI, controls: object, part: str) -> None:
    with pytest.raises(openai.BadRequestError, match=part):
        client.completions.create(model=MODEL, prompt="Hello", max_tokens=1,
                                  extra_body={"kv_transfer_params": {"ucm": controls}})


@pytest.mark.parametrize("field, value", [("max_tokens", "many"), ("temperature", -1.0), ("max_tokens", -3)])
def test_broken_parameters_are_400_and_name_the_field(client: openai.OpenAI, field: str, value: object) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        client.completions.create(model=MODEL, prompt="Hello", **{field: value})


@pytest.mark.parametrize("key", ["wrong-key", "first-test-ke"])
def test_without_a_known_key_it_is_401(service, key: str) -> None:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key, max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.completions.create(model=MODEL, prompt="Hello", max_tokens=1)


@pytest.mark.parametrize("path", ["/health", "/-/healthz"])
def test_health_is_open(service, path: str) -> None:
    with urllib.request.urlopen(service.url + path, timeout=30) as answer:
        assert answer.status == 200


def test_an_unknown_path_is_404_json(service) -> None:
    request = urllib.request.Request(service.url + "/v2/none", headers={"Authorization": f"Bearer {KEY}"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    assert error.value.code == 404 and json.load(error.value)["error"]["code"] == 404


@pytest.mark.parametrize("route", ["blocks", "top_k", "evict"])
def test_without_a_retrieval_pool_its_routes_are_503_and_name_the_key(service, route: str) -> None:
    one = {"shape": [1, 1, 1], "data": [0.5]}
    body = {"blocks": {"name": "a", "blocks": one}, "top_k": {"name": "a", "query": one, "k": 1},
            "evict": {"names": ["a"]}}[route]
    request = urllib.request.Request(f"{service.url}/ucm/v1/retrieval/{route}", json.dumps(body).encode(), headers={
        "Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=30)
    message = json.load(error.value)["error"]["message"]
    assert error.value.code == 503 and "no retrieval pool runs" in message and "retrieval.backend: local" in message


def test_twenty_parallel_requests_are_all_answered(service) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
            answers = await asyncio.gather(*(
                client.completions.create(model=MODEL, prompt=f"{number} plus one is", max_tokens=12, temperature=0)
                for number in range(20)
            ))
        return [answer.choices[0].text for answer in answers]

    texts = asyncio.run(ask())
    assert len(texts) == 20 and all(texts)


def test_stopping_leaves_no_process(service) -> None:
    """Last in this file: the service does not come back."""
    assert len(service.processes()) > 3
    assert service.stop() == []
    assert service.process.returncode == 0


def test_stopping_while_it_starts_leaves_no_process(start_service) -> None:
    starting = start_service(CONFIG, wait=False)
    deadline = time.monotonic() + 120
    while len(starting.processes()) < 4:  # Ray is coming up
        assert starting.process.poll() is None and time.monotonic() < deadline, starting.log.read_text()
        time.sleep(0.2)
    assert starting.stop(signal.SIGTERM) == []
    assert "Traceback" not in starting.log.read_text()

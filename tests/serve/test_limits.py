"""What requests of `/ucm/v1` may hold, and what is told to those that hold more; without a service."""

import asyncio

import pytest
from fastapi import FastAPI
from pydantic import ValidationError
from starlette.testclient import TestClient

from ucm_ray.serve import api
from ucm_ray.serve.auth import ApiKeyMiddleware
from ucm_ray.serve.body_limit import BodyLimitMiddleware
from ucm_ray.serve.errors import add_error_handlers, bad_request
from ucm_ray.serve.routes import UcmRoutes

JSON = {"Content-Type": "application/json"}
ONE = {"shape": [1, 1, 1], "data": [0.5]}


@pytest.fixture
def client():
    """Routes that take bodies of 1,000 bytes, behind a key."""
    app = FastAPI()
    add_error_handlers(app)
    app.add_middleware(BodyLimitMiddleware, most_bytes=1000)
    app.add_middleware(ApiKeyMiddleware, api_keys=["key"])

    @app.post("/ucm/v1/lookup")
    @app.post("/v1/completions")
    async def take(body: dict) -> dict:
        return {"length": len(body["text"])}

    with TestClient(app, headers={"Authorization": "Bearer key"}, raise_server_exceptions=False) as client:
        yield client


def streamed(length: int):
    yield b'{"text": "'
    for _ in range(length // 100):
        yield b"a" * 100
    yield b'"}'


def test_a_body_that_is_too_large_is_413_by_its_length_and_as_it_streams(client):
    assert client.post("/ucm/v1/lookup", json={"text": "a" * 900}).json() == {"length": 900}
    assert client.post("/ucm/v1/lookup", content=streamed(900), headers=JSON).json() == {"length": 900}
    for body in ({"json": {"text": "a" * 2000}}, {"content": streamed(2000), "headers": JSON}):
        refused = client.post("/ucm/v1/lookup", **body)
        assert refused.status_code == 413 and "expected at most 1000 bytes" in refused.json()["error"]["message"]


def test_only_our_routes_are_limited_and_only_behind_the_key(client):
    assert client.post("/v1/completions", json={"text": "a" * 2000}).json() == {"length": 2000}
    headers = {"Authorization": "Bearer other"}
    assert client.post("/ucm/v1/lookup", json={"text": "a" * 2000}, headers=headers).status_code == 401


@pytest.mark.parametrize("shape", [[10**200] * 8, [10**40], [api.MAX_VALUES] * 8, [api.MAX_VALUES, 2]])
def test_a_shape_without_bounds_is_a_mistake_and_no_crash(shape):
    with pytest.raises(ValidationError, match="at most|less than or equal"):
        api.Tensor(shape=shape, data=[0.0])


@pytest.mark.parametrize(("data", "words"), [([0] * (api.MAX_VALUES + 1), "numbers"),
                                             ("A" * (6 * api.MAX_VALUES), "base64 characters")])
def test_lists_and_base64_have_limits_of_their_own(data, words):
    with pytest.raises(ValidationError, match=f"{words}, expected at most") as error:
        api.Tensor(shape=[1], data=data)
    assert [item["loc"] for item in error.value.errors()] == [("data",)]


@pytest.mark.parametrize("bounds", [{"start": 2**31}, {"stop": 2**31}, {"start": 2**70}])
def test_blocks_are_numbered_by_32_bits(bounds):
    with pytest.raises(ValidationError, match="2147483647"):
        api.TopKRequest(name="a", query=ONE, k=1, **bounds)


def test_a_conversation_to_look_up_is_no_longer_than_a_text():
    message = {"role": "user", "content": "a" * (api.MAX_TEXT_CHARS // 2)}
    assert api.LookupRequest(messages=[message, message])
    with pytest.raises(ValidationError, match="1000001 characters, expected at most 1000000"):
        api.LookupRequest(messages=[message, message, {"role": "user", "content": "b"}])
    with pytest.raises(ValidationError, match="at most 4096"):
        api.LookupRequest(messages=[{"role": "user", "content": ""}] * 5000)


@pytest.mark.parametrize("ids", [[1, 2**31], [-1]])
def test_a_prompt_of_impossible_ids_is_the_callers_mistake(ids):
    class Body:
        prompt, echo, prompt_embeds = ids, False, None

    with pytest.raises(type(bad_request("")), match="prompt: found token ids"):
        asyncio.run(UcmRoutes._tokenise(None, Body()))

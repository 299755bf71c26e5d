"""Receipts in whole answers and in streams."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from ucm_ray.serve.metrics import ServiceMetrics
from ucm_ray.serve.receipts import (
    ReceiptBook,
    append_receipt,
    base_request_id,
    no_receipt,
    record_receipts,
    response_id,
    split_receipt,
)

RECEIPT = {"blend": {"prompt_tokens": 100, "prefix_tokens": 10, "reused_tokens": 60, "recomputed_tokens": 6,
                     "missed_tokens": 0, "runs": 2, "policy": "query", "budget": 0.1, "reason": "", "load_ms": 2.0,
                     "recompute_ms": 5.0}}


def event(**fields) -> str:
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"} | fields
    return f"data: {json.dumps(chunk)}\n\n"


STREAM = [[event(choices=[{"delta": {"content": "a"}}])], [event(choices=[{"delta": {"content": "b"}}])],
          [event(choices=[], usage={"prompt_tokens": 100}), "data: [DONE]\n\n"]]


async def collect(stream):
    return [item async for item in stream]


async def replay(items):
    for item in items:
        yield item


def test_the_receipt_is_the_last_chunk_of_a_stream_and_has_no_choices():
    items = asyncio.run(collect(append_receipt(replay(STREAM), {"chatcmpl-1": RECEIPT}.get)))
    events = [one for item in items for one in item]
    assert events[-1] == "data: [DONE]\n\n" and events[:-2] == [one for item in STREAM for one in item][:-1]
    last = json.loads(events[-2].removeprefix("data: "))
    assert last == {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [],
                    "kv_transfer_params": {"ucm": RECEIPT}}


def test_a_stream_without_the_receipt_is_what_the_engine_sent():
    items = asyncio.run(collect(append_receipt(replay(STREAM), {"chatcmpl-1": RECEIPT}.get)))
    split = [split_receipt(one) for item in items for one in item]
    assert "".join(rest for rest, _, _ in split) == "".join(one for item in STREAM for one in item)
    assert [(name, receipt) for _, name, receipt in split if receipt] == [("chatcmpl-1", RECEIPT)]


def test_generated_text_cannot_pass_for_a_receipt():
    text = 'data: {"id":"x","kv_transfer_params":{"ucm":{}}}\n\n'
    said = event(choices=[{"delta": {"content": text}}])
    assert split_receipt(said) == (said, None, None)


def test_a_stream_that_begins_with_an_error_passes_unchanged():
    broken = [['data: {"error": {"message": "no"}}\n\n', "data: [DONE]\n\n"]]
    assert asyncio.run(collect(append_receipt(replay(broken), lambda name: RECEIPT))) == broken


@pytest.mark.parametrize(("engine", "response", "bare"), [
    ("chatcmpl-ab-12", "chatcmpl-ab-12", "ab-12"),
    ("cmpl-ab-12-0", "cmpl-ab-12", "ab-12"),
    ("cmpl-ab-3", "cmpl-ab", "ab"),
])
def test_ids_of_engine_response_and_route_belong_together(engine, response, bare):
    assert response_id(engine) == response and base_request_id(response) == bare


def test_a_receipt_is_found_by_its_owner_only_and_old_ones_go():
    book = ReceiptBook(capacity=2)
    book.put("salt a", "chatcmpl-1", RECEIPT)
    assert book.get("salt a", "1")["blend"] == RECEIPT["blend"] == book.get("salt a", "chatcmpl-1")["blend"]
    assert book.get("salt b", "1") is None
    for number in range(2, 4):
        book.put("salt a", f"chatcmpl-{number}", RECEIPT)
    assert book.get("salt a", "1") is None and len(book) == 2


def test_recording_takes_the_receipt_of_the_last_output_and_closes_the_engine_stream():
    closed, put = [], {}

    async def generate(prompt, sampling_params, request_id):
        try:
            yield SimpleNamespace(finished=False, kv_transfer_params=None)
            yield SimpleNamespace(finished=True, kv_transfer_params={"ucm": RECEIPT})
        finally:
            closed.append(request_id)

    recorded = record_receipts(generate, put.__setitem__)
    assert len(asyncio.run(collect(recorded("p", None, "cmpl-1-0")))) == 2
    assert put == {"cmpl-1": RECEIPT}

    async def stop_early():
        stream = recorded("p", None, "cmpl-2-0")
        await anext(stream)
        await stream.aclose()

    asyncio.run(stop_early())
    assert closed == ["cmpl-1-0", "cmpl-2-0"] and "cmpl-2" not in put


def test_metrics_split_prompt_tokens_by_source_and_add_up_to_the_prompt():
    metrics = ServiceMetrics()
    metrics.observe(RECEIPT)
    metrics.observe(no_receipt("prompt of 100 tokens is too short", 100))
    text = metrics.render()[0].decode()
    for source, tokens in {"prefix": 10, "reused": 54, "recomputed": 6, "computed": 130}.items():
        assert f'vllm:ucm_prompt_tokens_total{{source="{source}"}} {tokens}.0' in text
    assert 'vllm:ucm_requests_total{outcome="not_blended",reason="prompt of"} 1.0' in text
    assert "vllm:ucm_prompt_tokens_total" in metrics.names()

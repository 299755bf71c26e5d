"""Receipts: what was reused, recomputed and computed for one request.

The engine puts a receipt into `kv_transfer_params["ucm"]` of its last output. Whole responses carry it as it is. Stream
chunks have no such field, so one more chunk with empty `choices` is put before `[DONE]`; whoever did not ask for usage
never sees it and asks `GET /ucm/v1/receipts/{id}` instead.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

DONE = "data: [DONE]"
# inside generated text these quotes would be escaped, so this cannot be met there
_MARK = '"kv_transfer_params":{"ucm"'
_PREFIX = re.compile(r"^(?:chatcmpl|cmpl)-")


def base_request_id(request_id: str) -> str:
    """`chatcmpl-ID` and `cmpl-ID`, as they stand in responses, -> `ID`."""
    return _PREFIX.sub("", request_id)


def response_id(engine_request_id: str) -> str:
    """The engine's id -> the response's: one completion request may hold several prompts, numbered at the end."""
    if engine_request_id.startswith("cmpl-"):
        return re.sub(r"-\d+$", "", engine_request_id)
    return engine_request_id


def no_receipt(reason: str, prompt_tokens: int = 0) -> dict[str, Any]:
    """The receipt of a request that no connector has seen."""
    blend = {"prompt_tokens": prompt_tokens, "prefix_tokens": 0, "reused_tokens": 0, "recomputed_tokens": 0,
             "missed_tokens": prompt_tokens, "runs": 0, "policy": None, "budget": 0.0, "reason": reason,
             "load_ms": 0.0, "recompute_ms": 0.0}
    return {"blend": blend}


class ReceiptBook:
    """The last `capacity` receipts by tenant and request id; thread safe."""

    def __init__(self, capacity: int = 4096):
        self._capacity = capacity
        self._receipts: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, tenant: str, request_id: str, receipt: dict[str, Any]) -> None:
        key = (tenant, base_request_id(request_id))
        with self._lock:
            self._receipts[key] = receipt | {"created_s": time.time()}
            self._receipts.move_to_end(key)
            while len(self._receipts) > self._capacity:
                self._receipts.popitem(last=False)

    def get(self, tenant: str, request_id: str) -> dict[str, Any] | None:
        with self._lock:
            return self._receipts.get((tenant, base_request_id(request_id)))

    def __len__(self) -> int:
        return len(self._receipts)


def record_receipts(generate: Callable[..., AsyncIterator[Any]], put: Callable[[str, dict], None]) -> Callable:
    """Wrap an engine client's `generate`: `put(response id, receipt)` when a request ends with a receipt."""

    async def recorded(prompt: Any, sampling_params: Any, request_id: str, *args: Any, **kwargs: Any):
        # closed at once when the caller stops early: that is what aborts the request in the engine
        async with aclosing(generate(prompt, sampling_params, request_id, *args, **kwargs)) as outputs:
            async for output in outputs:
                params = output.kv_transfer_params
                if output.finished and isinstance(params, dict) and isinstance(params.get("ucm"), dict):
                    put(response_id(request_id), params["ucm"])
                yield output

    return recorded


async def append_receipt(stream: AsyncIterator[Any], receipt: Callable[[str], dict | None]) -> AsyncIterator[Any]:
    """Put the receipt's chunk before `data: [DONE]` of a stream of server-sent events (or lists of them)."""
    head: dict[str, Any] | None = None
    async for item in stream:
        events = item if isinstance(item, list) else [item]
        if not all(isinstance(event, str) for event in events):
            yield item
            continue
        if head is None:
            head = _head(events[0])
        closing = next((index for index, event in enumerate(events) if event.startswith(DONE)), None)
        found = receipt(head["id"]) if closing is not None and head else None
        if found is not None:
            events = [*events[:closing], receipt_event(head, found), *events[closing:]]
        yield events if isinstance(item, list) else "".join(events)


def receipt_event(head: dict[str, Any], receipt: dict[str, Any]) -> str:
    chunk = head | {"choices": [], "kv_transfer_params": {"ucm": receipt}}
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def split_receipt(event: str) -> tuple[str, str | None, dict[str, Any] | None]:
    """`(event without its receipt chunk, request id, receipt)`; the last two None when there is none inside."""
    if _MARK not in event:
        return event, None, None
    rest, request_id, receipt = [], None, None
    for part in event.split("\n\n"):
        if _MARK in part and part.startswith("data: {"):
            chunk = json.loads(part[len("data: "):])
            request_id, receipt = chunk["id"], chunk["kv_transfer_params"]["ucm"]
        elif part:
            rest.append(part + "\n\n")
    return "".join(rest), request_id, receipt


def _head(event: str) -> dict[str, Any] | None:
    """What every chunk of a stream repeats, from its first one; None for an error event."""
    try:
        chunk = json.loads(event.split("\n\n")[0][len("data: "):])
    except ValueError:
        return None
    if "id" not in chunk:
        return None
    return {name: chunk[name] for name in ("id", "object", "created", "model") if name in chunk}

"""The client against a handle that is not there."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from ucm_ray.client import AsyncClient


class Never:
    """What a handle's call returns, and never an answer."""

    def __await__(self):
        return asyncio.sleep(20).__await__()


def test_a_handle_that_does_not_answer_is_given_up_after_the_clients_time():
    async def ask():
        handle = SimpleNamespace(cache_call=SimpleNamespace(remote=lambda *_: Never()))
        async with AsyncClient(handle=handle, timeout_s=0.05) as client:
            await client.stats()

    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    assert time.monotonic() - started_s < 15

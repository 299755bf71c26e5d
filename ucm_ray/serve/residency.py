"""Which chunks lie in which engine's host memory, as far as that can be known without asking."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class PromptChunk(NamedTuple):
    """A chunk of KV in a prompt."""

    key: str
    num_tokens: int
    num_bytes: int


Chunks = list[PromptChunk]


class Residency:
    """A replica has in memory what it computed and what was sent to it, until as many bytes of other chunks came.

    Replicas are named by their source prefix (`ucm_ray.keys.source_prefix`), which is also how every stored chunk says
    who computed it. Thread safe.
    """

    def __init__(self, capacity_bytes: int):
        self._capacity_bytes = capacity_bytes
        self._chunks: dict[str, OrderedDict[str, int]] = {}
        self._bytes: dict[str, int] = {}
        self._living: frozenset[str] | None = None
        self._lock = threading.Lock()

    def put(self, replica: str, chunks: Iterable[PromptChunk]) -> None:
        """A replica computed these chunks, or got a prompt with them. Ignored for one that is known to be gone."""
        with self._lock:
            if self._living is not None and replica not in self._living:
                return
            held = self._chunks.setdefault(replica, OrderedDict())
            for chunk in chunks:
                before = held.pop(chunk.key, 0)
                self._bytes[replica] = self._bytes.get(replica, 0) + chunk.num_bytes - before
                held[chunk.key] = chunk.num_bytes
            while self._bytes.get(replica, 0) > self._capacity_bytes and held:
                self._bytes[replica] -= held.popitem(last=False)[1]

    def tokens(self, replica: str, chunks: Iterable[PromptChunk]) -> int:
        """Tokens of a prompt that lie in a replica's host memory."""
        with self._lock:
            held = self._chunks.get(replica, {})
            return sum(chunk.num_tokens for chunk in chunks if chunk.key in held)

    def keep_only(self, replicas: frozenset[str]) -> None:
        """Forget replicas that are gone: a new one starts with empty memory."""
        with self._lock:
            if replicas == self._living:
                return
            self._living = replicas
            for replica in self._chunks.keys() - replicas:
                del self._chunks[replica]
                self._bytes.pop(replica, None)

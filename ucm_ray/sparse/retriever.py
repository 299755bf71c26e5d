"""Who answers which blocks a query needs: the retrieval interface as ESA uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from ucm_ray.retrieval.bank import BlockBank
from ucm_ray.retrieval.packed import Geometry, PackedAnswer, PackedQuery


class NewBlocks(NamedTuple):
    """Blocks of one request that have filled, following those published before.

    `records` `[len(keys), *geometry.record_shape]` in the geometry's dtype; equal keys mean equal content.
    """

    request_id: str
    keys: list[str]
    records: torch.Tensor


class Retriever(ABC):
    """Holds block representations and answers packed queries. No method waits for another machine."""

    geometry: Geometry

    @abstractmethod
    def publish(self, blocks: Sequence[NewBlocks]) -> None:
        """Add the blocks that filled in a step, of all requests at once."""

    @abstractmethod
    def ask(self, query: PackedQuery) -> Future[PackedAnswer]:
        """All layers and requests of a step in one question."""

    @abstractmethod
    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests ask no more."""

    def close(self) -> None:
        """Free threads and connections."""


class LocalRetriever(Retriever):
    """In this process: least recently used blocks give way when `num_blocks` are held. Answers at once."""

    def __init__(self, geometry: Geometry, num_blocks: int, num_threads: int | None = None):
        self.geometry = geometry
        self._bank = BlockBank(geometry, num_blocks * geometry.record_bytes, num_threads=num_threads)

    def publish(self, blocks: Sequence[NewBlocks]) -> None:
        for request_id, keys, records in blocks:
            self._bank.upsert(keys, records)
            self._bank.append(request_id, keys)

    def ask(self, query: PackedQuery) -> Future[PackedAnswer]:
        answer: Future[PackedAnswer] = Future()
        answer.set_result(self._bank.answer(query))
        return answer

    def forget(self, request_ids: Sequence[str]) -> None:
        self._bank.forget(request_ids)

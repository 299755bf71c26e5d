"""Where block representations lie and how they are scored: compiled kernels on the CPU, torch on any other device."""

import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from ucm_ray.retrieval.packed import Geometry, PackedAnswer, PackedQuery, Source


class Tables(NamedTuple):
    """Block lists of all requests, one row each; what a scorer needs to find a request's blocks in the arena.

    Attributes:
        slots, generations, positions: int32 `[max_requests, max_blocks]`.
        lengths: int32 `[max_requests]`.
    """

    slots: np.ndarray
    generations: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray


class Scorer(ABC):
    """Owns the arena: `num_slots` records, each holding one block."""

    @abstractmethod
    def write(self, slots: np.ndarray, records: torch.Tensor) -> None:
        """Stores records `[n, *record_shape]` (dtype of the geometry) in the given slots."""

    @abstractmethod
    def read(self, slots: np.ndarray) -> torch.Tensor:
        """Records of the given slots, `[n, *record_shape]`, a CPU copy."""

    @abstractmethod
    def answer(self, query: PackedQuery, rows: np.ndarray, stop: np.ndarray, tables: Tables, generations: np.ndarray,
               last_used: np.ndarray, tick: int, select: bool = True) -> PackedAnswer:
        """Scores and selects; see `kernels.answer_rows` for the meaning of the arguments."""


class CpuScorer(Scorer):
    """Arena in host memory; the rows of a query are split over `num_threads` threads, the caller being one of them."""

    DTYPES = {"bfloat16": np.uint32, "float16": np.uint16, "float32": np.float32}  # how the kernels see the arena

    def __init__(self, geometry: Geometry, num_slots: int, num_threads: int):
        from ucm_ray.retrieval import kernels  # compiled on first use, so importing the package stays cheap

        self._kernels = kernels
        self._geometry = geometry
        self._dtype = self.DTYPES[geometry.dtype]
        kernels.warm_up(self._dtype)
        units = geometry.record_bytes // geometry.num_layers // np.dtype(self._dtype).itemsize
        # Memory is committed by the system as slots are first written; numpy asks for huge pages, which matter here.
        self._arena = np.empty((num_slots, geometry.num_layers, units), self._dtype)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(max(1, num_threads - 1), thread_name_prefix="retrieval-score")
        self._scratch = [np.empty(0, np.uint8) for _ in range(num_threads)]

    def write(self, slots, records):
        self._arena[slots] = _as_numpy(records).view(self._dtype).reshape(len(slots), *self._arena.shape[1:])

    def read(self, slots):
        shape = (len(slots), *self._geometry.record_shape)
        if not len(slots):
            return torch.empty(shape, dtype=self._geometry.torch_dtype)
        return torch.from_numpy(self._arena[slots]).view(self._geometry.torch_dtype).view(shape)

    def answer(self, query, rows, stop, tables, generations, last_used, tick, select=True):
        # The kernels are compiled for plain writable arrays; broadcast or received ones would be compiled for anew.
        features, start, k = (np.require(array, requirements="CW") for array in (
            query.grouped_features, query.start, query.k))
        num_requests, num_layers, groups, width = features.shape
        answer = PackedAnswer(query.request_ids, np.empty((num_requests, num_layers, groups, query.max_k), np.int32),
                              np.empty((num_requests, num_layers, groups, query.max_k), np.float32),
                              np.zeros(num_requests, np.int32))
        needed = self._kernels.scratch_bytes(tables.slots.shape[1], num_layers, groups, width)
        borders = self._split(np.where(rows >= 0, tables.lengths[rows], 0), num_layers)

        def work(part: int) -> None:
            if self._scratch[part].size < needed:
                self._scratch[part] = np.empty(needed, np.uint8)
            self._kernels.answer_rows(
                self._arena, generations, last_used, tick, rows, tables.slots, tables.generations, tables.positions,
                tables.lengths, start, stop, k, features, borders[part], borders[part + 1], select,
                self._scratch[part], answer.blocks, answer.scores, answer.candidates)

        others = [self._threads.submit(work, part) for part in range(1, len(borders) - 1)]
        work(0)
        for other in others:
            other.result()
        return answer

    def _split(self, lengths: np.ndarray, num_layers: int) -> list[int]:
        """Borders of row ranges of about equal work, one range per thread that is worth waking."""
        work = np.repeat(lengths + 1, num_layers).cumsum()
        total_bytes = int(lengths.sum()) * self._geometry.record_bytes
        # Waking a thread costs about as much as scoring 128 KiB.
        parts = max(1, min(self._num_threads, len(work), total_bytes // (1 << 17)))
        inner = np.searchsorted(work, work[-1] * np.arange(1, parts) / parts) if len(work) else []
        return [0, *(int(border) for border in inner), len(work)]


class TorchScorer(Scorer):
    """Arena on any torch device; one gather and one batched product score all requests and layers.

    The reference for the CPU kernels, and what runs on CUDA.
    """

    def __init__(self, geometry: Geometry, num_slots: int, device: str):
        self._device = torch.device(device)
        self._arena = torch.zeros((num_slots, *geometry.record_shape), dtype=geometry.torch_dtype, device=self._device)

    def write(self, slots, records):
        self._arena[torch.from_numpy(slots).long().to(self._device)] = records.to(self._device)

    def read(self, slots):
        return self._arena[torch.from_numpy(slots).long().to(self._device)].cpu()

    def answer(self, query, rows, stop, tables, generations, last_used, tick, select=True):
        num_requests, num_layers, groups, width = query.grouped_features.shape
        answer = PackedAnswer.empty(query, Source.EXACT)
        longest = int(np.where(rows >= 0, tables.lengths[rows], 0).max()) if num_requests else 0
        if not longest:
            return answer
        slots, positions = tables.slots[rows, :longest], tables.positions[rows, :longest]
        valid = (np.arange(longest) < np.where(rows >= 0, tables.lengths[rows], 0)[:, None]) & (slots >= 0)
        valid &= generations[slots] == tables.generations[rows, :longest]
        valid &= (positions >= query.start[:, None]) & (positions < stop[:, None])
        last_used[slots[valid]] = tick
        answer.candidates[:] = valid.sum(1)
        gathered = self._arena[torch.from_numpy(np.where(valid, slots, 0)).long().to(self._device)]
        gathered = gathered.view(num_requests, longest, num_layers, groups, width).float()
        features = torch.from_numpy(query.grouped_features).to(self._device)
        scores = torch.einsum("rlgw,rnlgw->rlgn", features, gathered)
        scores.masked_fill_(~torch.from_numpy(valid).to(self._device)[:, None, None], -torch.inf)
        if select:
            self._select(scores, positions, query, answer)
        return answer

    @staticmethod
    def _select(scores: torch.Tensor, positions: np.ndarray, query: PackedQuery, answer: PackedAnswer) -> None:
        kept = min(query.max_k, scores.shape[-1])
        best, index = torch.sort(scores, dim=-1, descending=True, stable=True)
        limit = torch.from_numpy(np.minimum(query.k, answer.candidates)).to(scores.device)[:, None, None, None]
        chosen = torch.arange(kept, device=scores.device) < limit
        # A stable sort keeps the order of positions among equal scores; sorting the kept indices restores it for all.
        index, order = index[..., :kept].masked_fill(~chosen, scores.shape[-1]).sort(dim=-1)
        best = best[..., :kept].gather(-1, order).masked_fill(~chosen, -torch.inf).cpu().numpy()
        index, chosen = index.cpu().numpy(), chosen.expand(index.shape).cpu().numpy()
        requests = np.arange(len(positions))[:, None, None, None]
        answer.blocks[..., :kept] = np.where(chosen, positions[requests, np.where(chosen, index, 0)], -1)
        answer.scores[..., :kept] = best


def make_scorer(geometry: Geometry, num_slots: int, device: str, num_threads: int) -> Scorer:
    """The scorer for `device`: "cpu" (compiled kernels) or a torch device such as "cuda"."""
    if device == "cpu":
        return CpuScorer(geometry, num_slots, num_threads)
    return TorchScorer(geometry, num_slots, device)


def default_threads() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def _as_numpy(records: torch.Tensor) -> np.ndarray:
    """The bits of a contiguous CPU tensor; numpy has no bfloat16, so 2-byte types come as int16."""
    return (records.view(torch.int16) if records.element_size() == 2 else records).numpy()

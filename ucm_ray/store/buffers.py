"""Host memory for KV, reused from chunk to chunk so that reading does not pay for page faults."""

from __future__ import annotations

import math
import mmap
import weakref
from collections import defaultdict
from threading import RLock

import numpy as np
import torch

_GRAIN_BYTES = 64 * 1024
# half a page away from the page borders that payloads start at in files: some processors copy several times slower
# between addresses that are equal, or nearly so, modulo the page size
_SKEW_BYTES = 2048
# numpy has no bfloat16; integers of its size carry the bits
_CARRIERS = {torch.uint8: np.uint8, torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.int16}


class _Lease(weakref.ref):
    """Watches the array that a tensor keeps alive, and remembers the buffer it lies in."""

    __slots__ = ("buffer",)
    buffer: np.ndarray


class BufferPool:
    """Buffers that come back by themselves when the last tensor on them is gone.

    `max_free_bytes` bounds what is kept for reuse. With `pin_memory` the buffers are page-locked, so that a GPU copies
    from them without staging.
    """

    def __init__(self, max_free_bytes: int, pin_memory: bool = False) -> None:
        self.max_free_bytes = max_free_bytes
        self.pin_memory = pin_memory
        self.free_bytes = 0
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._leases: dict[int, _Lease] = {}
        # re-entrant: the garbage collector may return a buffer in the middle of `tensor`
        self._lock = RLock()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, memoryview]:
        """A contiguous tensor with undefined content, and its bytes to fill it through.

        The view must not outlive the tensor: the memory belongs to somebody else once the tensor is gone.
        """
        carrier = _CARRIERS[dtype]
        num_bytes = math.prod(shape) * dtype.itemsize
        size = self._size(num_bytes)
        with self._lock:
            same_size = self._free[size]
            buffer = same_size.pop() if same_size else None
            if buffer is not None:
                self.free_bytes -= size
        if buffer is None:
            buffer = self._allocate(size)
        lease = np.ndarray(shape, carrier, buffer, _SKEW_BYTES)
        reference = _Lease(lease, self._give_back)
        reference.buffer = buffer
        self._leases[id(reference)] = reference
        tensor = torch.from_numpy(lease)
        return tensor.view(dtype) if tensor.dtype != dtype else tensor, buffer.data[_SKEW_BYTES:_SKEW_BYTES + num_bytes]

    def prepare(self, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> None:
        """See to it that the next `count` tensors of this kind find memory that has been paid for: a first touch costs
        as much as several copies, and the caller of this has the time."""
        size = self._size(math.prod(shape) * dtype.itemsize)
        while True:
            with self._lock:
                if len(self._free[size]) >= count or self.free_bytes + size > self.max_free_bytes:
                    return
            buffer = self._allocate(size)
            buffer[::mmap.PAGESIZE] = 0
            with self._lock:
                self.free_bytes += size
                self._free[size].append(buffer)

    @staticmethod
    def _size(num_bytes: int) -> int:
        return -(-(num_bytes + _SKEW_BYTES) // _GRAIN_BYTES) * _GRAIN_BYTES

    def _allocate(self, size: int) -> np.ndarray:
        if self.pin_memory:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        # no huge pages: copies are as fast without, and where the system has to make them first (fragmented memory,
        # virtual machines) a first touch costs several times as much
        return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)

    def _give_back(self, lease: _Lease) -> None:
        buffer = lease.buffer
        with self._lock:
            del self._leases[id(lease)]
            if self.free_bytes + len(buffer) <= self.max_free_bytes:
                self.free_bytes += len(buffer)
                self._free[len(buffer)].append(buffer)

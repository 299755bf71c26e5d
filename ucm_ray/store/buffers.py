"""Host memory for KV, reused from chunk to chunk so that reading does not pay for page faults."""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from threading import RLock

import numpy as np
import torch

_GRAIN_BYTES = 64 * 1024
_HUGE_PAGE_BYTES = 2 * 1024 * 1024


class BufferPool:
    """Page-aligned buffers that come back by themselves when the last tensor on them is gone.

    `max_free_bytes` bounds what is kept for reuse. With `pin_memory` the buffers are page-locked, so that a GPU copies
    from them without staging.
    """

    def __init__(self, max_free_bytes: int, pin_memory: bool = False) -> None:
        self.max_free_bytes = max_free_bytes
        self.pin_memory = pin_memory
        self.free_bytes = 0
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        # re-entrant: the garbage collector may return a buffer in the middle of `tensor`
        self._lock = RLock()

    def tensor(self, num_bytes: int) -> tuple[torch.Tensor, memoryview]:
        """A uint8 tensor `[num_bytes]` with undefined content, and a view to fill it through.

        The view must not outlive the tensor: the memory belongs to somebody else once the tensor is gone.
        """
        size = -(-max(num_bytes, 1) // _GRAIN_BYTES) * _GRAIN_BYTES
        with self._lock:
            same_size = self._free[size]
            buffer = same_size.pop() if same_size else None
            if buffer is not None:
                self.free_bytes -= size
        if buffer is None:
            buffer = self._allocate(size)
        lease = buffer[:num_bytes]
        weakref.finalize(lease, self._give_back, buffer).atexit = False
        return torch.from_numpy(lease), memoryview(buffer)[:num_bytes]

    def _allocate(self, size: int) -> np.ndarray:
        if self.pin_memory:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, dtype=np.uint8)

    def _give_back(self, buffer: np.ndarray) -> None:
        with self._lock:
            if self.free_bytes + len(buffer) <= self.max_free_bytes:
                self.free_bytes += len(buffer)
                self._free[len(buffer)].append(buffer)

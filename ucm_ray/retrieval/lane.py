"""Memory that a client shares with the shards on its machine.

A step's query and the shards' answers are some hundred kilobytes; sent inside Ray calls they cost about as much time as
scoring. Through a lane the call carries only where they lie. The memory has no name in the file system, so nothing is
left behind when a client is killed: shards open it through the client's file descriptor, which also fails, as it must,
when they are on another machine, in another container or another user's.
"""

import mmap
import os
import secrets
import threading

import numpy as np

NUM_SLOTS = 4
SLOT_BYTES = 16 * 2 ** 20  # committed only as far as it is used
_TOKEN_BYTES = 16
_ALIGN = 64


class Lane:
    """The client's side: a few slots, each for one query and its answers, leased until all shards have answered."""

    def __init__(self):
        self.lane_id = secrets.token_hex(8)
        self._descriptor = os.memfd_create("ucm-retrieval", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, _ALIGN + NUM_SLOTS * SLOT_BYTES)
        self._map = mmap.mmap(self._descriptor, _ALIGN + NUM_SLOTS * SLOT_BYTES)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._map[:_TOKEN_BYTES] = self._token
        self._free = list(range(NUM_SLOTS))
        self._lock = threading.Lock()

    @property
    def invitation(self) -> tuple[str, str, bytes]:
        """What a shard needs to join: the lane's id, a path, and a token that proves it opened the right memory."""
        return self.lane_id, f"/proc/{os.getpid()}/fd/{self._descriptor}", self._token

    def lease(self, num_bytes: int) -> int | None:
        """Offset of a slot; None if all are in use or `num_bytes` is more than one holds."""
        with self._lock:
            return _ALIGN + self._free.pop() * SLOT_BYTES if self._free and num_bytes <= SLOT_BYTES else None

    def release(self, offset: int) -> None:
        """Gives a slot back. Only once nobody can still write to it."""
        with self._lock:
            self._free.append((offset - _ALIGN) // SLOT_BYTES)

    def array(self, offset: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """An array that lies in the lane."""
        return array_at(self._bytes, offset, shape, dtype)

    def close(self) -> None:
        """Closes the descriptor; the memory goes when the last array and the last shard let go of it."""
        os.close(self._descriptor)


def join(path: str, token: bytes) -> np.ndarray | None:
    """A shard's view of a lane, uint8; None if this process cannot reach that memory."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        shared = np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return shared if shared[:_TOKEN_BYTES].tobytes() == token else None


def array_at(memory: np.ndarray, offset: int, shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array of this shape and dtype at an offset of a lane."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return memory[offset:offset + size].view(dtype).reshape(shape)


def aligned(num_bytes: int) -> int:
    """Rounded up, so that what follows begins on a cache line of its own."""
    return -(-num_bytes // _ALIGN) * _ALIGN

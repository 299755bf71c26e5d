"""The contract of a store stage: what a stored chunk is, and what every stage can do with it."""

from __future__ import annotations

import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from threading import Lock

import numpy as np
import torch

from ucm_ray.config import ConfigError

logger = logging.getLogger("ucm_ray.store")

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

_HEX = re.compile(r"[0-9a-f]{4,128}")


class StoreError(ConfigError):
    """A store that cannot be built as asked: an unknown stage, a folder that cannot be written."""


StoredChunk = tuple["ChunkMeta", torch.Tensor]


def is_hex_name(name: object) -> bool:
    """Whether `name` may become part of a file name: lower-case hexadecimal, 4 to 128 characters."""
    return isinstance(name, str) and _HEX.fullmatch(name) is not None


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16". Raises ValueError for a dtype the store does not hold."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"KV dtype {name!r} cannot be stored, expected one of {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True, eq=False)
class ChunkMeta:
    """Everything about the KV of one chunk except its numbers.

    The KV itself is one contiguous CPU tensor `[num_layers, 2, num_tokens, num_kv_heads, head_dim]` (K = 0, V = 1) of
    `dtype`, K rotated for the positions `source_position ... source_position + num_tokens - 1`. `num_kv_heads` counts
    the heads of this rank only.
    """

    key: str
    namespace: str
    token_ids: np.ndarray
    source_id: str
    source_position: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    context: str = "request"
    context_key: str = ""  # `keys.context_key` of the tokens that stood before it, empty if unknown
    rank: int = 0
    world_size: int = 1
    created_s: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.ascontiguousarray(self.token_ids, dtype=np.int32))
        for name in ("source_position", "num_layers", "num_kv_heads", "head_dim", "rank", "world_size"):
            object.__setattr__(self, name, int(getattr(self, name)))
        for name in ("key", "namespace"):
            if not is_hex_name(getattr(self, name)):
                raise ValueError(f"{name} of a chunk is {getattr(self, name)!r}, expected 4 to 128 hexadecimal digits")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype of chunk {self.key} is {self.dtype!r}, expected one of {', '.join(DTYPES)}")
        if self.token_ids.ndim != 1 or not len(self.token_ids):
            raise ValueError(f"token_ids of chunk {self.key} have shape {self.token_ids.shape}, expected [num_tokens]")
        if min(self.num_layers, self.num_kv_heads, self.head_dim) < 1 or self.source_position < 0:
            raise ValueError(f"chunk {self.key} has shape {self.shape} at source position {self.source_position}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank of chunk {self.key} is {self.rank}, expected 0 to {self.world_size - 1}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChunkMeta):
            return NotImplemented
        return np.array_equal(self.token_ids, other.token_ids) and all(
            getattr(self, field.name) == getattr(other, field.name)
            for field in fields(self) if field.name != "token_ids")

    def __hash__(self) -> int:
        return hash((self.namespace, self.key, self.rank))

    @classmethod
    def trusted(cls, values: dict, token_ids: np.ndarray) -> ChunkMeta:
        """A meta from fields that were checked before, as those in a file whose checksum matches: no check again."""
        meta = object.__new__(cls)
        vars(meta).update(values, token_ids=token_ids)
        return meta

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @cached_property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`(num_layers, 2, num_tokens, num_kv_heads, head_dim)`"""
        return (self.num_layers, 2, self.num_tokens, self.num_kv_heads, self.head_dim)

    @cached_property
    def payload_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def origin(self) -> tuple[str, int]:
        """Where the KV was computed: `(source_id, source_position)`. Two ranks' halves belong together if equal."""
        return (self.source_id, self.source_position)


class Counters(Counter):
    """Named event counts that several threads increase."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self[name] += amount

    def add_all(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self[name] += amount


class KVStage(ABC):
    """One place that holds chunks. All methods may be called from any thread.

    Nothing here raises for the state of the stored data: what cannot be loaded is `None`, what cannot be saved is
    `False`, both are counted in `stats()`. Only wrong arguments and wrong settings raise, at construction.
    """

    name: str

    def __init__(self) -> None:
        self.counters = Counters()
        self.on_evict: list[Callable[[str, list[str]], None]] = []

    @abstractmethod
    def lookup(self, namespace: str, keys: Sequence[str]) -> np.ndarray:
        """bool `[len(keys)]`: which chunks are here, each answered on its own. Reads no payload."""

    @abstractmethod
    def load(self, namespace: str, key: str) -> StoredChunk | None:
        """Meta and KV, verified; the tensor may be shared with other readers: never write into it.

        Missing, truncated, corrupt or foreign: `None`, counted, and a bad file is removed. Never raises.
        """

    @abstractmethod
    def save(self, meta: ChunkMeta, kv: torch.Tensor) -> bool:
        """Keep the chunk; True also if it was already here. `kv` may be reused once this returns."""

    @abstractmethod
    def delete(self, namespace: str, keys: Sequence[str]) -> int:
        """Remove chunks, pinned ones too. Returns how many were here."""

    @abstractmethod
    def clear(self, namespace: str | None = None) -> int:
        """Remove everything, or everything of one namespace. Returns how many chunks were here."""

    @abstractmethod
    def pin(self, namespace: str, keys: Sequence[str]) -> None:
        """Protect chunks from eviction until as many `unpin` calls, or until this process ends."""

    @abstractmethod
    def unpin(self, namespace: str, keys: Sequence[str]) -> None: ...

    @abstractmethod
    def scan(self, namespace: str) -> Iterator[ChunkMeta]:
        """The metas of all chunks of a namespace, headers only."""

    @abstractmethod
    def namespaces(self) -> list[str]: ...

    @abstractmethod
    def stats(self) -> dict:
        """Plain numbers by name: `chunks`, `bytes`, `capacity_bytes`, and event counts."""

    def holds(self, meta: ChunkMeta) -> bool:
        """Whether saving this chunk would change nothing: one copy per content, whatever it was computed from."""
        return bool(self.lookup(meta.namespace, [meta.key])[0])

    def touch(self, namespace: str, keys: Sequence[str]) -> None:
        """Count as a use for LRU, because a faster stage answered for this one."""
        return None

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was accepted is stored. False after `timeout_s`."""
        return True

    def close(self) -> None:
        return None

    def evicted(self, namespace: str, keys: list[str]) -> None:
        """Tell the listeners that chunks vanished for capacity. A listener's error is logged, never raised."""
        self.counters.add("evictions", len(keys))
        for callback in self.on_evict:
            try:
                callback(namespace, keys)
            except Exception:
                logger.exception("a listener of evictions of the %s stage failed", self.name)

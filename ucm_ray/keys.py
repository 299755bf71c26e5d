"""Keys: whose KV it is (`Namespace`) and which text it belongs to (`chunk_key`, `context_key`).

All keys are blake3 digests of explicit bytes, so they are equal in every process, whatever `PYTHONHASHSEED`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from blake3 import blake3

KEY_BYTES = 16
SOURCE_PREFIX = 8  # hex characters of a source id that say which engine computed the KV


@dataclass(frozen=True)
class Namespace:
    """Everything besides the token ids that KV depends on. Two different namespaces never share anything.

    `rope` is canonical JSON of the RoPE parameters, `kv_layout` describes the whole model over all ranks, for example
    `layers=30,kv_heads=3,head_dim=64`; `salt` is the request's `cache_salt`.
    """

    model: str
    revision: str
    dtype: str
    rope: str
    kv_layout: str
    world_size: int = 1
    lora: str = ""
    salt: str = ""

    @cached_property
    def hex(self) -> str:
        """32 hex characters."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return blake3(canonical.encode()).hexdigest(KEY_BYTES)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Namespace:
        """Raises ValueError for unknown or missing fields."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"namespace: unknown fields {unknown}, expected some of {sorted(known)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"namespace: {error}, found the fields {sorted(values)}") from None


def canonical_json(values: dict[str, Any]) -> str:
    """JSON text that is equal for equal values: sorted keys, no spaces. For `Namespace.rope`."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)


def _digest(domain: bytes, namespace_hex: str, token_ids: np.ndarray | Iterable[int]) -> str:
    ids = np.ascontiguousarray(token_ids, dtype="<i4")
    if ids.ndim != 1:
        raise ValueError(f"token ids must have one dimension, found shape {ids.shape}")
    return blake3(domain + namespace_hex.encode() + ids.tobytes()).hexdigest(KEY_BYTES)


def chunk_key(namespace_hex: str, token_ids: np.ndarray | Iterable[int]) -> str:
    """32 hex characters for a text in a namespace. One copy per content: the context does not enter."""
    return _digest(b"", namespace_hex, token_ids)


def context_key(namespace_hex: str, token_ids: np.ndarray | Iterable[int]) -> str:
    """32 hex characters for *all* tokens that stand before a chunk in its sequence, from position 0 on (maybe none).

    Two chunks with equal keys and equal context keys have equal KV, so that such KV needs no repair at all.
    """
    return _digest(b"context:", namespace_hex, token_ids)


@lru_cache(maxsize=4096)
def source_prefix(engine_id: str) -> str:
    """The first 8 hex characters of every source id that an engine gives; `engine_id` is vLLM's, or Ray Serve's replica
    id."""
    return blake3(b"engine:" + engine_id.encode()).hexdigest()[:SOURCE_PREFIX]


def new_source_id(prefix: str) -> str:
    """32 hex characters, a name for one sequence whose KV was computed; the rest behind `prefix` is random."""
    return prefix + secrets.token_hex(KEY_BYTES)[len(prefix):]

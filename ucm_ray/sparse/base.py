"""The contract between a sparse attention method and whoever runs the attention kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Any

import torch


class UcmSparseRole(Enum):
    """Which side of the engine an object serves.

    SCHEDULER sees requests and block ids but no tensor; WORKER sees tensors; BOTH is one object that does both jobs
    in one process.
    """

    SCHEDULER = "scheduler"
    WORKER = "worker"
    BOTH = "both"

    @property
    def is_scheduler(self) -> bool:
        return self in (UcmSparseRole.SCHEDULER, UcmSparseRole.BOTH)

    @property
    def is_worker(self) -> bool:
        return self in (UcmSparseRole.WORKER, UcmSparseRole.BOTH)


class UcmSparseBase(ABC):
    """A method that changes what one attention layer reads (`attention_begin`) or returns (`attention_finished`).

    Worker side, in this order: `register_kv_caches` once; then for every step and every layer `attention_begin`, the
    caller's attention kernel, `attention_finished`. Both return values replace the caller's tensors; how many tensors
    `attention_begin` returns belongs to the method (ESA: query, key, value, output; Blend: query, key, value).
    """

    def __init__(self, role: UcmSparseRole, config: dict[str, Any]):
        if not isinstance(role, UcmSparseRole):
            raise TypeError(f"role: found {role!r}, expected one of {[str(r) for r in UcmSparseRole]}")
        self.role = role
        self.config = dict(config)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor] | list[torch.Tensor]) -> None:
        """Hand over the paged KV caches, one per layer in layer order. WORKER or BOTH only."""
        if not self.role.is_worker:
            raise RuntimeError(
                f"{type(self).__name__}: KV caches registered on role {self.role}, expected a worker role"
            )
        self.kv_caches: list[torch.Tensor] = list(kv_caches.values() if isinstance(kv_caches, dict) else kv_caches)

    @abstractmethod
    def attention_begin(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any
    ) -> tuple[Any, ...]:
        """Called before layer `layer_idx` attends. query `[num_tokens, num_heads, head_dim]`, key and value
        `[num_tokens, num_kv_heads, head_dim]`."""

    @abstractmethod
    def attention_finished(self, layer_idx: int, output: torch.Tensor) -> torch.Tensor:
        """Called after layer `layer_idx` attended; returns the output to use, `[num_tokens, num_heads, head_dim]`."""

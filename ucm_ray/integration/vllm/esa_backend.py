"""vLLM's CPU attention with two seams: an observer for blending, and a runtime that narrows what decode reads.

Without either, every call goes straight to vLLM's own implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

# Called as OBSERVER(layer, impl, query, kv_cache, attn_metadata) before a layer attends.
OBSERVER: Callable[..., None] | None = None
# The engine's EsaRuntime; one worker process holds one model.
RUNTIME: Any | None = None


class UcmCPUAttentionBackend(CPUAttentionBackend):
    """Takes the place of CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[UcmCPUAttentionImpl]:
        return UcmCPUAttentionImpl


class UcmCPUAttentionImpl(CPUAttentionBackendImpl):
    """Decode rows chosen by the runtime read their selected blocks, all other rows read everything."""

    @property
    def can_be_sparse(self) -> bool:
        """Whether leaving out blocks means what it should: plain causal self-attention without position biases."""
        return (
            self.attn_type == AttentionType.DECODER
            and self.sliding_window == -1
            and self.alibi_slopes is None
            and self.sinks is None
            and self.kv_sharing_target_layer_name is None
            and not self.is_fp8_kv_cache
        )

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> torch.Tensor:
        if attn_metadata is not None:
            if OBSERVER is not None:
                OBSERVER(layer, self, query, kv_cache, attn_metadata)
            if RUNTIME is not None:
                view = RUNTIME.attention_begin(layer, query, key, value, attn_metadata)
                if view is not None and RUNTIME.attend(self, layer, query, kv_cache, attn_metadata, output, view):
                    return RUNTIME.attention_finished(layer, output)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

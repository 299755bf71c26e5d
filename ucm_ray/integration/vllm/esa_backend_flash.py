"""The CUDA counterpart of `esa_backend`: FlashAttention whose decode rows may read selected blocks.

FlashAttention's usual cache keeps all KV heads of a token together, so one block table serves all heads: the selection
is shared by the heads of a layer here, and per KV head on CPU.
"""

from __future__ import annotations

from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from ucm_ray.integration.vllm import esa_backend


class UcmFlashAttentionBackend(FlashAttentionBackend):
    """Takes the place of FLASH_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[UcmFlashAttentionImpl]:
        return UcmFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[UcmFlashAttentionMetadataBuilder]:
        return UcmFlashAttentionMetadataBuilder


class UcmFlashAttentionMetadataBuilder(FlashAttentionMetadataBuilder):
    """A captured full graph would replay the block tables it was captured with, so with ESA there is none."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> AttentionCGSupport:
        transfer = vllm_config.kv_transfer_config
        extra = (transfer.kv_connector_extra_config or {}) if transfer is not None else {}
        if "ESA" in (extra.get("ucm_sparse_config") or {}):
            return AttentionCGSupport.NEVER
        return super().get_cudagraph_support(vllm_config, kv_cache_spec)


class UcmFlashAttentionImpl(FlashAttentionImpl):
    """Decode rows chosen by the runtime read their selected blocks, all other rows read everything."""

    @property
    def can_be_sparse(self) -> bool:
        """Whether leaving out blocks means what it should: plain causal self-attention without position biases."""
        return (
            self.attn_type == AttentionType.DECODER
            and tuple(self.sliding_window or (-1, -1)) == (-1, -1)
            and self.alibi_slopes is None
            and getattr(self, "sinks", None) is None
            and self.kv_sharing_target_layer_name is None
            and not self.kv_cache_dtype.startswith("fp8")
        )

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        if attn_metadata is not None:
            if esa_backend.OBSERVER is not None:
                esa_backend.OBSERVER(layer, self, query, kv_cache, attn_metadata)
            runtime = esa_backend.RUNTIME
            if runtime is not None and not attn_metadata.use_cascade:
                view = runtime.attention_begin(layer, query, key, value, attn_metadata)
                if view is not None and runtime.attend(self, layer, query, kv_cache, attn_metadata, output, view):
                    return runtime.attention_finished(layer, output)
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )

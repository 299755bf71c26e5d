"""What blending declines, and why: one sentence per reason, for the log and the receipt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request


def unsupported_engine(config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> str:
    """Why this engine cannot blend; empty if it can."""
    parallel, model = config.parallel_config, config.model_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is on"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        return "context parallelism is on"
    if parallel.data_parallel_size > 1 and model.get_num_experts() > 0:
        return "data parallelism of a mixture-of-experts model is on"
    if model.use_mla:
        return "the model uses multi-head latent attention (MLA)"
    if model.is_hybrid or model.is_attention_free:
        return "the model has Mamba or linear-attention layers"
    if model.uses_mrope:
        return "the model uses multimodal rotary positions (M-RoPE)"
    if "fp8" in str(config.cache_config.cache_dtype) or "int8" in str(config.cache_config.cache_dtype):
        return f"the KV cache is quantised ({config.cache_config.cache_dtype})"
    if config.speculative_config is not None:
        return "speculative decoding is on"
    if kv_cache_config is not None:
        return _unsupported_groups(kv_cache_config)
    return ""


def _unsupported_groups(kv_cache_config: KVCacheConfig) -> str:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the KV cache has {len(groups)} groups (hybrid or sliding-window attention), expected one"
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or isinstance(spec, MLAAttentionSpec):
        return f"the KV cache group is a {type(spec).__name__}, expected full attention"
    if spec.sliding_window is not None or spec.attention_chunk_size is not None:
        return "layers use sliding-window or chunked local attention"
    return ""


def own_layers(config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The engine's attention layers by name.

    Raises RuntimeError for caches that are not theirs: vLLM hands the worker of a second engine in the same process the
    connector of the first, which would then blend into the wrong cache.
    """
    layers = get_layers_from_vllm_config(config, Attention)
    layers = {name: layer for name, layer in layers.items() if name in kv_caches}
    if any(layer.kv_cache.data_ptr() != kv_caches[name].data_ptr() for name, layer in layers.items()):
        raise RuntimeError("this process already runs an engine with a KV connector, and vLLM keeps one connector a "
                           "process: start the second engine in its own (VLLM_ENABLE_V1_MULTIPROCESSING=1)")
    return layers


def unsupported_layers(layers: dict[str, Any]) -> str:
    """Why attention layers that are loaded cannot blend; empty if they can."""
    for name, layer in layers.items():
        impl = layer.impl
        if getattr(impl, "alibi_slopes", None) is not None:
            return f"{name} uses ALiBi"
        if getattr(impl, "sinks", None) is not None:
            return f"{name} has learned attention sinks"
        if getattr(impl, "kv_sharing_target_layer_name", None) is not None:
            return f"{name} shares the KV cache of another layer"
        if getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1)):
            return f"{name} uses sliding-window attention"
    return ""


def unsupported_request(request: Request) -> str:
    """Why this request is not blended; empty if it may be."""
    sampling = request.sampling_params
    if sampling is None:
        return "pooling requests are computed exactly"
    if request.mm_features:
        return "the prompt has multimodal inputs"
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "the prompt has embeddings instead of tokens"
    if sampling.prompt_logprobs is not None:
        return "prompt_logprobs need every prompt token computed"
    if request.skip_reading_prefix_cache:
        return "skip_reading_prefix_cache is set"
    if request.lora_request is not None:
        return "the request uses a LoRA adapter"
    if request.resumable:
        return "the request is a streaming-input session"
    return ""

"""Everything blending declines is declined with its reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ucm_ray.integration.vllm.support import own_layers, unsupported_engine, unsupported_layers, unsupported_request


def config(**changes) -> SimpleNamespace:
    parallel = dict(pipeline_parallel_size=1, prefill_context_parallel_size=1, decode_context_parallel_size=1,
                    data_parallel_size=1)
    model = dict(use_mla=False, is_hybrid=False, is_attention_free=False, uses_mrope=False, experts=0)
    cache, other = dict(cache_dtype="auto"), dict(speculative_config=None)
    for name, value in changes.items():
        next(group for group in (parallel, model, cache, other) if name in group)[name] = value
    experts = model.pop("experts")
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), cache_config=SimpleNamespace(**cache), **other,
                           model_config=SimpleNamespace(**model, get_num_experts=lambda: experts))


def groups(*specs) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


FULL = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=128)


def test_a_plain_engine_is_supported():
    assert unsupported_engine(config(), groups(FULL)) == ""


@pytest.mark.parametrize("changes, reason", [
    ({"pipeline_parallel_size": 2}, "pipeline"),
    ({"prefill_context_parallel_size": 2}, "context parallelism"),
    ({"decode_context_parallel_size": 2}, "context parallelism"),
    ({"data_parallel_size": 2, "experts": 8}, "mixture-of-experts"),
    ({"use_mla": True}, "MLA"),
    ({"is_hybrid": True}, "Mamba"),
    ({"is_attention_free": True}, "Mamba"),
    ({"uses_mrope": True}, "multimodal"),
    ({"cache_dtype": "fp8_e4m3"}, "quantised"),
    ({"speculative_config": object()}, "speculative"),
])
def test_engines_that_cannot_blend_say_why(changes, reason):
    assert reason in unsupported_engine(config(**changes), groups(FULL))


def test_sliding_window_and_hybrid_groups_are_declined():
    assert "SlidingWindowSpec" in unsupported_engine(config(), groups(WINDOW))
    assert "2 groups" in unsupported_engine(config(), groups(FULL, WINDOW))
    merged = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=64)
    assert "sliding-window" in unsupported_engine(config(), groups(merged))


@pytest.mark.parametrize("changes, reason", [
    ({"alibi_slopes": torch.ones(2)}, "ALiBi"),
    ({"sinks": torch.ones(2)}, "sinks"),
    ({"kv_sharing_target_layer_name": "layers.0"}, "shares"),
    ({"sliding_window": 64}, "sliding-window"),
])
def test_layers_that_cannot_blend_say_why(changes, reason):
    plain = dict(alibi_slopes=None, sinks=None, kv_sharing_target_layer_name=None, sliding_window=-1)
    layer = SimpleNamespace(impl=SimpleNamespace(**plain))
    odd = SimpleNamespace(impl=SimpleNamespace(**(plain | changes)))
    assert unsupported_layers({"a": layer}) == ""
    assert reason in unsupported_layers({"a": layer, "b": odd})


def test_caches_of_a_second_engine_in_the_process_are_refused(monkeypatch):
    """vLLM has one connector a process: it would be given another engine's caches, and blend into them."""
    mine, other = torch.zeros(2), torch.zeros(2)
    layers = {"a": SimpleNamespace(kv_cache=mine), "encoder": SimpleNamespace(kv_cache=other)}
    monkeypatch.setattr("ucm_ray.integration.vllm.support.get_layers_from_vllm_config", lambda config, kind: layers)
    assert list(own_layers(config(), {"a": mine})) == ["a"]
    with pytest.raises(RuntimeError, match="one connector a process"):
        own_layers(config(), {"a": other})


@pytest.mark.parametrize("changes, reason", [
    ({"sampling_params": None}, "pooling"),
    ({"mm_features": ["image"]}, "multimodal"),
    ({"prompt_embeds": torch.ones(1)}, "embeddings"),
    ({"sampling_params": SimpleNamespace(prompt_logprobs=1)}, "prompt_logprobs"),
    ({"skip_reading_prefix_cache": True}, "skip_reading_prefix_cache"),
    ({"lora_request": object()}, "LoRA"),
    ({"resumable": True}, "streaming"),
])
def test_requests_that_cannot_blend_say_why(changes, reason):
    plain = dict(sampling_params=SimpleNamespace(prompt_logprobs=None), mm_features=[], prompt_embeds=None,
                 prompt_token_ids=[1], skip_reading_prefix_cache=False, lora_request=None, resumable=False)
    assert unsupported_request(SimpleNamespace(**plain)) == ""
    assert reason in unsupported_request(SimpleNamespace(**(plain | changes)))

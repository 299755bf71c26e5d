"""Moved keys against vLLM's own rotary embedding at the target position."""

from types import SimpleNamespace

import pytest
import torch

from ucm_ray.blend.position import PositionCorrector
from ucm_ray.blend.rope import RopeParameters

MAX_POSITION = 4096
FACTORS = {"short_factor": [1.0 + i / 50 for i in range(32)], "long_factor": [1.5 + i / 4 for i in range(32)]}
FAMILIES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "partial": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "dynamic trained": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "max_trained_positions": 2048},
    "dynamic alpha": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 1024, "rope_theta": 500_000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e6},
    "yarn betas": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0,
                   "beta_fast": 16, "beta_slow": 2, "truncate": False, "attn_factor": 1.3},
    "partial yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
                     "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 1024, "rope_theta": 10000.0, **FACTORS},
}
HEAD_DIM, KV_HEADS, TOKENS = 64, 2, 37


@pytest.fixture(scope="module")
def vllm_rope():
    """rope(values, neox, max_model_len) -> function(positions, keys) with vLLM's rotary embedding in fp32."""
    import vllm.model_executor.layers.rotary_embedding as rotary
    from vllm.config import VllmConfig, set_current_vllm_config

    def make(values, is_neox_style=True, max_model_len=MAX_POSITION):
        config = VllmConfig()
        config.model_config = SimpleNamespace(max_model_len=max_model_len)
        rotary._ROPE_DICT.clear()
        with set_current_vllm_config(config):
            rope = rotary.get_rope(HEAD_DIM, MAX_POSITION, is_neox_style, dict(values), torch.float32)

        def apply(positions, keys):
            flat = keys.reshape(keys.shape[0], -1).clone()
            native = getattr(rope, "forward_native", rope.forward)
            return native(positions, flat.clone(), flat)[1].view_as(keys)

        return rope, apply

    return make


def corrector_for(values, is_neox_style=True, max_model_len=MAX_POSITION):
    return PositionCorrector(RopeParameters(values, HEAD_DIM, MAX_POSITION, max_model_len, is_neox_style))


def positions():
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, MAX_POSITION, (TOKENS,), generator=generator) for _ in range(2))


def keys():
    return torch.randn(TOKENS, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family, is_neox_style", [
    (family, style) for family in FAMILIES for style in (True, False) if style or family != "longrope"
])
def test_moved_keys_equal_vllm_at_the_target_position(vllm_rope, family, is_neox_style):
    values = FAMILIES[family]
    _, apply = vllm_rope(values, is_neox_style)
    source, target = positions()
    raw = keys()
    moved = corrector_for(values, is_neox_style).rotate(apply(source, raw), source, target)
    torch.testing.assert_close(moved, apply(target, raw), atol=5e-6, rtol=1e-5)
    assert not torch.allclose(moved, apply(source, raw), atol=1e-2)


@pytest.mark.parametrize("max_model_len", [512, 4096], ids=["short factors", "long factors"])
def test_longrope_takes_the_factors_of_the_longest_request(vllm_rope, max_model_len):
    values = FAMILIES["longrope"]
    _, apply = vllm_rope(values, max_model_len=max_model_len)
    source, target = (p % 512 for p in positions())
    moved = corrector_for(values, max_model_len=max_model_len).rotate(apply(source, keys()), source, target)
    torch.testing.assert_close(moved, apply(target, keys()), atol=5e-6, rtol=1e-5)


def test_far_positions_keep_full_precision(vllm_rope):
    values = {"rope_type": "linear", "factor": 32.0, "rope_theta": 10000.0}
    _, apply = vllm_rope(values)
    source = torch.arange(0, TOKENS)
    target = source + 131_000
    moved = corrector_for(values).rotate(apply(source, keys()), source, target)
    torch.testing.assert_close(moved, apply(target, keys()), atol=1e-3, rtol=0)


def test_values_stay_and_layers_move_alike():
    corrector = corrector_for(FAMILIES["default"])
    kv = torch.randn(3, 2, TOKENS, KV_HEADS, HEAD_DIM)
    before = kv.clone()
    source, target = positions()
    moved = corrector.correct_kv(kv, source, target)
    assert torch.equal(kv, before)
    assert torch.equal(moved[:, 1], kv[:, 1])
    for layer in range(3):
        assert torch.equal(moved[layer, 0], corrector.rotate(kv[layer, 0], source, target))
    assert corrector.correct_kv(kv, source, target, in_place=True) is kv and torch.equal(kv, moved)


def test_low_precision_keys_are_turned_in_fp32(vllm_rope):
    _, apply = vllm_rope(FAMILIES["default"])
    source, target = positions()
    stored = apply(source, keys()).bfloat16()
    moved = corrector_for(FAMILIES["default"]).rotate(stored, source, target)
    exact = corrector_for(FAMILIES["default"]).rotate(stored.float(), source, target)
    assert moved.dtype == torch.bfloat16 and torch.equal(moved, exact.bfloat16())


def test_dimensions_that_do_not_rotate_stay():
    source, target = positions()
    moved = corrector_for(FAMILIES["partial"]).rotate(keys(), source, target)
    assert torch.equal(moved[..., 32:], keys()[..., 32:]) and not torch.equal(moved[..., :32], keys()[..., :32])


def test_the_seeds_configuration(vllm_rope):
    corrector = PositionCorrector({"rope_theta": 10000.0, "head_dim": HEAD_DIM, "blend_chunk_size": 64})
    source, target = torch.arange(5, 5 + TOKENS), torch.arange(TOKENS)
    _, apply = vllm_rope(FAMILIES["default"])
    kv = torch.stack((apply(source, keys()), keys()))
    moved = corrector.correct_kv(kv, source_positions=source, target_positions=target)
    torch.testing.assert_close(moved, torch.stack((apply(target, keys()), keys())), atol=5e-6, rtol=1e-5)
    off = PositionCorrector({"rope_theta": 10000.0, "head_dim": HEAD_DIM, "position_correction": False})
    assert torch.equal(off.correct_kv(kv, source, target), kv)


def test_parameters_come_from_a_hugging_face_configuration():
    from transformers import LlamaConfig, Phi3Config

    rope = RopeParameters.from_hf_config(LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters={
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}))
    assert (rope.family, rope.theta, rope.head_dim) == ("llama3", 5e5, 64)
    phi = Phi3Config(hidden_size=128, num_attention_heads=2, original_max_position_embeddings=1024, rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, **FACTORS}, max_position_embeddings=4096)
    rope = RopeParameters.from_hf_config(phi, max_model_len=1024)
    assert rope.family == "longrope" and rope.inverse_frequencies().shape == (32,)
    old = SimpleNamespace(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 2.0}, hidden_size=64,
                          num_attention_heads=1, max_position_embeddings=2048)
    assert RopeParameters.from_hf_config(old).family == "linear"


def test_unknown_or_incomplete_parameters_are_named():
    with pytest.raises(ValueError, match="rope_type: found 'spiral'.*'yarn'"):
        corrector_for({"rope_type": "spiral"})
    with pytest.raises(ValueError, match="rope_parameters.factor: missing"):
        corrector_for({"rope_type": "linear"})
    with pytest.raises(ValueError, match="differ by layer type"):
        RopeParameters.from_hf_config(SimpleNamespace(rope_parameters={
            "full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}))
    with pytest.raises(ValueError, match="head_dim: found keys of 32, expected 64"):
        corrector_for({}).rotate(torch.zeros(1, 1, 32), torch.arange(1), torch.arange(1))
    with pytest.raises(ValueError, match="source_positions"):
        corrector_for({}).rotate(keys(), torch.arange(3), torch.arange(TOKENS))

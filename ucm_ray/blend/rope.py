"""Rotary frequencies of the RoPE families, as vLLM computes them.

Only the angles matter for moving keys: the attention factor (mscale) of yarn and longrope is in the keys already, so it
must not be applied again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_LEGACY_NAMES = {"su": "longrope"}


@dataclass(frozen=True)
class RopeParameters:
    """What the rotation of a model depends on.

    `values`: `rope_parameters` of the Hugging Face configuration (transformers 5 naming: `rope_type`, `rope_theta`,
    `partial_rotary_factor`, `factor`, ...). `max_position`: the configuration's `max_position_embeddings`.
    `max_model_len`: vLLM's longest request; decides between the short and long factors of longrope.
    """

    values: Mapping[str, Any]
    head_dim: int
    max_position: int = 8192
    max_model_len: int | None = None
    is_neox_style: bool = True

    @property
    def family(self) -> str:
        name = self.values.get("rope_type", self.values.get("type", "default"))
        return _LEGACY_NAMES.get(name, name)

    @property
    def theta(self) -> float:
        return float(self.values.get("rope_theta", 10000.0))

    @property
    def rotary_dim(self) -> int:
        if self.values.get("rope_dim"):
            return int(self.values["rope_dim"])
        factor = self.values.get("partial_rotary_factor", 1.0)
        if not 0 < factor <= 1:
            raise ValueError(f"partial_rotary_factor: found {factor}, expected a number above 0, at most 1")
        return int(self.head_dim * factor)

    @classmethod
    def from_hf_config(cls, hf_config: Any, head_dim: int | None = None, max_model_len: int | None = None,
                       is_neox_style: bool = True) -> RopeParameters:
        """From a text configuration of transformers 5, or an older one with `rope_theta` and `rope_scaling`.

        Raises ValueError for parameters that differ by layer type.
        """
        values = getattr(hf_config, "rope_parameters", None)
        if values is None:
            values = dict(getattr(hf_config, "rope_scaling", None) or {})
        values = dict(values)
        if values and all(isinstance(value, Mapping) for value in values.values()):
            raise ValueError(f"rope_parameters: differ by layer type {sorted(values)}, expected one set for all layers")
        for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            if name not in values and getattr(hf_config, name, None) is not None:
                values[name] = getattr(hf_config, name)
        if head_dim is None:
            head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
        return cls(values, head_dim, getattr(hf_config, "max_position_embeddings", 8192), max_model_len, is_neox_style)

    def inverse_frequencies(self) -> torch.Tensor:
        """Angle per position of each pair of dimensions: float32 `[rotary_dim / 2]`, on the CPU.

        Raises ValueError for a family that is not known or lacks a parameter, naming it.
        """
        if self.family not in FAMILIES:
            raise ValueError(f"rope_type: found {self.family!r}, expected one of {list(FAMILIES)}")
        if "mrope_section" in self.values:
            raise ValueError("mrope_section: multimodal rotary positions cannot be moved by one distance")
        return globals()[f"_{self.family}"](self)

    def need(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise ValueError(f"rope_parameters.{name}: missing, needed by rope_type {self.family!r}")
        return self.values[name]


def _powers(rope: RopeParameters, base: float) -> torch.Tensor:
    return base ** (torch.arange(0, rope.rotary_dim, 2, dtype=torch.float) / rope.rotary_dim)


def _default(rope: RopeParameters) -> torch.Tensor:
    return 1.0 / _powers(rope, rope.theta)


def _linear(rope: RopeParameters) -> torch.Tensor:
    return _default(rope) / float(rope.need("factor"))


def _dynamic(rope: RopeParameters) -> torch.Tensor:
    """Dynamic NTK with one static base, as in vLLM: the base does not follow the length of the request."""
    dim = rope.rotary_dim
    if rope.values.get("alpha") is not None:
        scale = float(rope.values["alpha"])
    else:
        factor = float(rope.need("factor"))
        trained = rope.values.get("max_trained_positions") or rope.max_position
        scale = factor * rope.max_position / trained - (factor - 1)
    return 1.0 / _powers(rope, rope.theta * scale ** (dim / (dim - 2)))


def _llama3(rope: RopeParameters) -> torch.Tensor:
    frequencies, factor = _default(rope), float(rope.need("factor"))
    low, high = float(rope.need("low_freq_factor")), float(rope.need("high_freq_factor"))
    original = rope.need("original_max_position_embeddings")
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low) if low != high else torch.zeros_like(wavelength)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelength > original / low, frequencies / factor, between)
    return torch.where(wavelength < original / high, frequencies, scaled)


def _yarn(rope: RopeParameters) -> torch.Tensor:
    powers, factor, dim = _powers(rope, rope.theta), float(rope.need("factor")), rope.rotary_dim
    original = rope.need("original_max_position_embeddings")

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.values.get("beta_fast") or 32), dimension_of(rope.values.get("beta_slow") or 1)
    if rope.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float) - low) / (high - low)).clamp(0, 1)
    kept = (1 - ramp) * float(rope.values.get("extrapolation_factor", 1))
    return (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _longrope(rope: RopeParameters) -> torch.Tensor:
    """Phi-3: vLLM takes the long factors for all positions as soon as requests may exceed the original length."""
    original = rope.need("original_max_position_embeddings")
    longest = rope.max_model_len if rope.max_model_len is not None else rope.max_position
    factors = torch.tensor(rope.need("long_factor" if longest > original else "short_factor"), dtype=torch.float32)
    return 1.0 / (factors * _powers(rope, rope.theta))

"""Moves keys to other positions: rotation by the difference of the angles of two positions."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch

from ucm_ray.blend.rope import RopeParameters

_LARGEST_SCRATCH = 1 << 22
"""Elements; 16 MiB a buffer."""
_local = threading.local()


def _scratch(shape: torch.Size, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two float32 buffers of this shape, kept by each thread: fresh pages would cost more than the rotation."""
    size = shape.numel()
    if device.type != "cpu" or size > _LARGEST_SCRATCH:
        return torch.empty(shape, device=device), torch.empty(shape, device=device)
    kept = getattr(_local, "buffers", None)
    if kept is None or kept.shape[1] < size:
        kept = _local.buffers = torch.empty(2, max(size, 1 << 16))
    return kept[0, :size].view(shape), kept[1, :size].view(shape)


class PositionCorrector:
    """Rotates stored keys from the positions they were computed at to the positions they are used at.

    The angle of a position is `position * inverse_frequency` in float32, as in vLLM; keys are turned by the difference
    of two such angles, so that the result carries the target's angle including its rounding. Turning is done in
    float32 whatever the keys' dtype.
    """

    def __init__(self, config: RopeParameters | Mapping[str, Any]):
        """`config`: RopeParameters, or the seed's configuration with the keys `rope_theta` and `head_dim`.

        With `position_correction: false` in the latter nothing is ever rotated.
        """
        self.enabled = True
        if not isinstance(config, RopeParameters):
            self.enabled = bool(config.get("position_correction", True))
            values = dict(config.get("rope_parameters") or {})
            values.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
            config = RopeParameters(
                values, int(config.get("head_dim") or 128), int(config.get("max_position_embeddings") or 8192),
                config.get("max_model_len"), bool(config.get("is_neox_style", True)),
            )
        self.rope = config
        self.head_dim = config.head_dim
        self.rotary_dim = config.rotary_dim
        self._inverse_frequencies = config.inverse_frequencies()

    @classmethod
    def from_hf_config(cls, hf_config: Any, **arguments: Any) -> PositionCorrector:
        """See `RopeParameters.from_hf_config`."""
        return cls(RopeParameters.from_hf_config(hf_config, **arguments))

    def correct_kv(self, kv_data: torch.Tensor, source_positions: torch.Tensor, target_positions: torch.Tensor,
                   in_place: bool = False) -> torch.Tensor:
        """KV `[.., 2, num_tokens, num_kv_heads, head_dim]` (K first) with K moved; V is what it was.

        `source_positions`, `target_positions`: integers `[num_tokens]`.
        """
        if kv_data.dim() < 4 or kv_data.shape[-4] != 2:
            found = tuple(kv_data.shape)
            raise ValueError(f"kv_data: found shape {found}, expected [.., 2, tokens, kv_heads, head_dim]")
        result = kv_data if in_place else kv_data.clone()
        self.rotate(result.select(-4, 0), source_positions, target_positions, in_place=True)
        return result

    def rotate(self, keys: torch.Tensor, source_positions: torch.Tensor, target_positions: torch.Tensor,
               in_place: bool = False) -> torch.Tensor:
        """Keys `[.., num_tokens, num_kv_heads, head_dim]` moved from source to target positions."""
        num_tokens = keys.shape[-3]
        for name, positions in (("source_positions", source_positions), ("target_positions", target_positions)):
            if positions.shape != (num_tokens,):
                raise ValueError(f"{name}: found shape {tuple(positions.shape)}, expected ({num_tokens},)")
        self._check(keys)
        result = keys if in_place else keys.clone()
        if not self.enabled or num_tokens == 0 or torch.equal(source_positions, target_positions):
            return result
        cos, sin = self.tables(source_positions, target_positions, keys.device)
        return self.apply(result, cos, sin)

    def tables(self, source_positions: torch.Tensor, target_positions: torch.Tensor,
               device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of the angles to turn by: float32 `[num_tokens, 1, rotary_dim / 2]`. Reusable for all layers."""
        frequencies = self._inverse_frequencies
        target = target_positions.cpu().float()[:, None] * frequencies
        source = source_positions.cpu().float()[:, None] * frequencies
        # In float64: the difference of two large angles, and its sine, would lose digits.
        angle = target.double() - source.double()
        return angle.cos().float().to(device)[:, None], angle.sin().float().to(device)[:, None]

    def apply(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turns keys in place by tables that broadcast to `[.., rotary_dim / 2]`. Returns the keys."""
        if not self.enabled:
            return keys
        half, neox = self.rotary_dim // 2, self.rope.is_neox_style
        wide_cos = torch.cat((cos, cos), -1) if neox else cos.repeat_interleave(2, -1)
        first = slice(0, half) if neox else slice(0, None, 2)
        second = slice(half, None) if neox else slice(1, None, 2)
        rotated = keys[..., : self.rotary_dim]
        # One leading index (layer) at a time on a CPU: the working set stays in its cache.
        for part in rotated.unbind(0) if keys.dim() > 3 and keys.device.type == "cpu" else (rotated,):
            before, after = _scratch(part.shape, part.device)
            before.copy_(part)
            torch.mul(before, wide_cos, out=after)
            after[..., first].addcmul_(before[..., second], sin, value=-1)
            after[..., second].addcmul_(before[..., first], sin)
            part.copy_(after)
        return keys

    def _check(self, keys: torch.Tensor) -> None:
        if keys.shape[-1] != self.head_dim:
            raise ValueError(f"head_dim: found keys of {keys.shape[-1]}, expected {self.head_dim}")

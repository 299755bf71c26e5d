"""Start-up proof that blending works on this very engine and model; without it blending stays off."""

from __future__ import annotations

import numpy as np
import torch

from ucm_ray.blend.position import PositionCorrector
from ucm_ray.integration.vllm.virtual_sequences import Row, VirtualSequences

TOKENS = 96
SHIFT = 37
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}


class SelfCheckFailed(RuntimeError):
    """This engine does not do what blending relies on."""


@torch.inference_mode()  # where vLLM made the cache in that mode, writing to it needs it too
def check_engine(virtual: VirtualSequences, corrector: PositionCorrector, vocab_size: int) -> None:
    """Raises `SelfCheckFailed` unless (1) keys and values read back as written, (2) ranges recomputed as rows give what
    one prefill gives, (3) rotating the first layer's keys gives what computing at the new position gives.

    Runs before the engine serves, so the whole cache is free; block 0 is vLLM's null block.
    """
    paged = virtual.paged
    needed = -(-(TOKENS + SHIFT) // paged.block_size)
    if paged.num_blocks < 1 + 2 * needed:
        raise SelfCheckFailed(f"the KV cache has {paged.num_blocks} blocks, the self-check needs {1 + 2 * needed}")
    tokens = (np.arange(TOKENS + SHIFT) * 7919 % max(2, vocab_size - 1)).astype(np.int32)
    first, second = np.arange(1, 1 + needed), np.arange(1 + needed, 1 + 2 * needed)
    _check_round_trip(paged, first)
    virtual.run([Row(0, TOKENS, tokens, first)])
    virtual.run([Row(0, TOKENS, tokens[::-1].copy(), second)])
    thirds = [Row(start, start + TOKENS // 3, tokens, second) for start in range(0, TOKENS, TOKENS // 3)]
    virtual.run(thirds)
    last = len(paged.names) - 1
    for layer in (0, last):
        whole, in_ranges = (_read(paged, layer, blocks, 0, TOKENS) for blocks in (first, second))
        for name, one, three in zip("KV", whole, in_ranges, strict=True):
            _expect_close(f"{name} of layer {layer} recomputed in ranges", one, three, paged.dtype)
    shifted = np.concatenate([tokens[:SHIFT], tokens[:TOKENS]])
    virtual.run([Row(0, TOKENS + SHIFT, shifted, second)], num_layers=1)
    moved, _ = _read(paged, 0, second, SHIFT, SHIFT + TOKENS)
    here, _ = _read(paged, 0, first, 0, TOKENS)
    rotated = corrector.rotate(here[None], torch.arange(TOKENS), torch.arange(SHIFT, SHIFT + TOKENS))[0]
    _expect_close("K of layer 0 rotated to another position", moved, rotated, paged.dtype)


def _check_round_trip(paged, blocks: np.ndarray) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (TOKENS, paged.num_kv_heads, paged.head_dim)
    key, value = (torch.randn(shape, generator=generator).to(paged.dtype).to(paged.device) for _ in "KV")
    paged.write(0, _slots(paged, blocks, 0, TOKENS), key, value)
    found = _read(paged, 0, blocks, 0, TOKENS)
    if not (torch.equal(found[0], key) and torch.equal(found[1], value)):
        raise SelfCheckFailed("keys or values do not read back as written: this KV layout is not understood")
    whole = paged.key_blocks(0, torch.from_numpy(blocks).to(paged.device))[..., :TOKENS]
    if not torch.equal(whole.permute(2, 0, 1), key):
        raise SelfCheckFailed("keys of whole blocks do not read back as written: this KV layout is not understood")


def _slots(paged, blocks: np.ndarray, start: int, end: int) -> torch.Tensor:
    positions = np.arange(start, end)
    slots = blocks[positions // paged.block_size] * paged.block_size + positions % paged.block_size
    return torch.from_numpy(slots).to(paged.device)


def _read(paged, layer: int, blocks: np.ndarray, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    return paged.read(layer, _slots(paged, blocks, start, end))


def _expect_close(what: str, expected: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest entry, in the norm: single entries round freely in 16 bits."""
    expected, found = expected.float(), found.float()
    error = float((expected - found).norm() / expected.norm().clamp_min(1e-6))
    if not error <= _TOLERANCE[dtype]:
        raise SelfCheckFailed(f"{what}: relative error {error:.3g}, expected at most {_TOLERANCE[dtype]}")

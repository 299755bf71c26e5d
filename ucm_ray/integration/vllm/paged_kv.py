"""Read and write tokens of vLLM's paged KV cache, one adapter per memory layout.

Every adapter speaks of slots: slot = block id * block size + offset. Keys and values are `[num_tokens, num_kv_heads,
head_dim]` in the cache's dtype. vLLM 0.29 gives each layer one tensor, logically `[num_blocks, num_kv_heads,
block_size, 2 * head_dim]`; what is inside a block is the attention backend's affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numba import njit
from vllm import _custom_ops as ops


class PagedKV(ABC):
    """The paged cache of all layers of one model on one device."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self.layers = layers
        self.names = list(layers)
        first = layers[self.names[0]].kv_cache
        self.num_blocks, self.num_kv_heads, self.block_size = first.shape[0], first.shape[1], first.shape[2]
        self.head_dim = first.shape[3] // 2
        self.dtype, self.device = first.dtype, first.device

    def slots(self, block_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of `positions` of a sequence whose blocks are `block_ids`; both int64, on the same device."""
        return block_ids[positions // self.block_size] * self.block_size + positions % self.block_size

    @abstractmethod
    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at `slots`, copied."""

    def copy_out(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Keys and values of all layers at `slots` (on the host) into host memory `[num_layers, 2, num_tokens,
        num_kv_heads, head_dim]`."""
        slots = slots.to(self.device)
        for layer in range(len(self.names)):
            out[layer, 0], out[layer, 1] = self.read(layer, slots)

    @abstractmethod
    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values at `slots`."""

    @abstractmethod
    def key_blocks(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys of whole blocks as `[num_kv_heads, head_dim, num_blocks * block_size]`."""


class CpuPagedKV(PagedKV):
    """vLLM's CPU attention: a block holds all keys, then all values, in an order the instruction set asks for.

    For the vector kernels keys lie transposed, `[head_dim, block_size]`; for AMX both halves are packed in tiles.
    Rather than knowing each packing, the adapter learns the permutation of a block by writing numbered elements
    through vLLM's own writer into a scratch cache and finding where they went.
    """

    def __init__(self, layers: dict[str, Any]) -> None:
        super().__init__(layers)
        self.isa = layers[self.names[0]].isa
        self._key_order, self._value_order = learn_block_order(self.isa, self.block_size, self.head_dim, self.dtype)
        size = self.block_size * self.head_dim
        self._transposed_keys = torch.equal(
            self._key_order, torch.arange(size).view(self.head_dim, self.block_size).T)
        # compiled now rather than in a step
        self.copy_out(torch.zeros(0, dtype=torch.int64),
                      torch.empty(len(layers), 2, 0, self.num_kv_heads, self.head_dim, dtype=self.dtype))

    def halves(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values, each `[num_blocks, num_kv_heads, block_size * head_dim]` in memory order."""
        cache = self.layers[self.names[layer]].kv_cache
        flat = cache.view(self.num_blocks, self.num_kv_heads, 2, self.block_size * self.head_dim)
        return flat[:, :, 0], flat[:, :, 1]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.halves(layer)
        block, offset = slots // self.block_size, slots % self.block_size
        return (self._gather(keys, block, self._key_order[offset]),
                self._gather(values, block, self._value_order[offset]))

    def _gather(self, half: torch.Tensor, block: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        heads = torch.arange(self.num_kv_heads)
        return half[block[:, None, None], heads[None, :, None], order[:, None, :]]

    def copy_out(self, slots: torch.Tensor, out: torch.Tensor) -> None:
        blocks, offsets = np.divmod(slots.numpy(), self.block_size)
        key_order, value_order = self._key_order.numpy(), self._value_order.numpy()
        shape = (self.num_blocks, self.num_kv_heads, 2, self.block_size * self.head_dim)
        for layer, name in enumerate(self.names):
            gather_tokens(bits(self.layers[name].kv_cache.view(shape)), blocks, offsets, key_order, value_order,
                          bits(out[layer]))

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        cache = self.layers[self.names[layer]].kv_cache
        view = cache.view(self.num_blocks, self.num_kv_heads, self.block_size * 2, self.head_dim)
        key_cache, value_cache = view.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key.contiguous(), value.contiguous(), key_cache, value_cache, slots, self.isa)

    def key_blocks(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        keys, _ = self.halves(layer)
        picked = keys[block_ids]
        if self._transposed_keys:
            blocks = picked.view(-1, self.num_kv_heads, self.head_dim, self.block_size)
        else:
            blocks = picked[:, :, self._key_order.T.reshape(-1)].view(
                -1, self.num_kv_heads, self.head_dim, self.block_size)
        return blocks.permute(1, 2, 0, 3).reshape(self.num_kv_heads, self.head_dim, -1)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's numbers as integers of their size: a copy needs no more, and numpy has no bfloat16."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()


@njit(nogil=True, cache=True)
def gather_tokens(cache, blocks, offsets, key_order, value_order, out):
    """Copy tokens of one layer out of its blocks, on the calling thread alone: torch's gather costs several times as
    much for the few tokens of a chunk, and wakes its team of threads between the engine's steps.

    `cache` `[num_blocks, num_kv_heads, 2, block_size * head_dim]`, `blocks` and `offsets` int64 `[num_tokens]`, orders
    int64 `[block_size, head_dim]` as of `learn_block_order`, `out` `[2, num_tokens, num_kv_heads, head_dim]`.
    """
    num_heads, head_dim = out.shape[2], out.shape[3]
    for half in range(2):
        order = key_order if half == 0 else value_order
        for token in range(len(blocks)):
            block, offset = blocks[token], offsets[token]
            for head in range(num_heads):
                for dim in range(head_dim):
                    out[half, token, head, dim] = cache[block, head, half, order[offset, dim]]


def learn_block_order(isa: str, block_size: int, head_dim: int,
                      dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Where vLLM's writer for `isa` puts element (token, dim) inside a block's key half and value half.

    Returns two int64 tensors `[block_size, head_dim]` of offsets. Numbers are written in two digits of base 128, which
    every floating dtype holds exactly. Raises ValueError if the writer's map is not a permutation of the block.
    """
    size, base = block_size * head_dim, 128
    index = torch.arange(size)
    digits = []
    for values in (index % base, index // base):
        scratch = torch.zeros(2, 1, block_size * 2, head_dim, dtype=dtype)
        key_cache, value_cache = scratch.chunk(2, dim=2)
        tokens = values.to(dtype).view(block_size, 1, head_dim)
        slots = torch.arange(block_size) + block_size
        ops.cpu_attn_reshape_and_cache(tokens, tokens, key_cache, value_cache, slots, isa)
        digits.append(scratch[1].view(2, size).long())
    found = digits[0] + base * digits[1]
    orders = []
    for half, name in zip(found, ("keys", "values"), strict=True):
        if not torch.equal(half.sort().values, index):
            raise ValueError(f"CPU attention {isa!r}: {name} of a block of {block_size} x {head_dim} are not a "
                             "permutation of what was written; this layout cannot be read")
        orders.append(half.argsort().view(block_size, head_dim))
    return orders[0], orders[1]


class InterleavedPagedKV(PagedKV):
    """FlashAttention and its kin: `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`, keys before values.

    Both physical orders (tokens before heads or heads before tokens) are strides of the same view.
    """

    def _at(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.layers[self.names[layer]].kv_cache, slots // self.block_size, slots % self.block_size

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache, block, offset = self._at(layer, slots)
        both = cache[block, :, offset]
        return both[..., : self.head_dim], both[..., self.head_dim :]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        cache, block, offset = self._at(layer, slots)
        cache[block, :, offset] = torch.cat([key, value], dim=-1)

    def key_blocks(self, layer: int, block_ids: torch.Tensor) -> torch.Tensor:
        cache = self.layers[self.names[layer]].kv_cache
        keys = cache[block_ids][..., : self.head_dim]
        return keys.permute(1, 3, 0, 2).reshape(self.num_kv_heads, self.head_dim, -1)


def paged_kv_for(layers: dict[str, Any]) -> PagedKV:
    """The adapter for these attention layers. Raises ValueError for a layout that is not known."""
    first = next(iter(layers.values()))
    name = first.attn_backend.get_name()
    if name == "CPU_ATTN":
        return CpuPagedKV(layers)
    if name == "FLASH_ATTN":
        return InterleavedPagedKV(layers)
    raise ValueError(f"attention backend {name!r}: its KV layout is not known, expected CPU_ATTN or FLASH_ATTN")

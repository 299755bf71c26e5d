"""Adapters for paged KV layouts read what vLLM's own writers wrote, and write what vLLM's readers expect."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ucm_ray.integration.vllm.paged_kv import CpuPagedKV, InterleavedPagedKV, learn_block_order, paged_kv_for

BLOCKS, HEADS, SIZE, DIM = 6, 3, 32, 64


def layer_of(cache: torch.Tensor, backend: str, isa: str = "vec") -> SimpleNamespace:
    return SimpleNamespace(kv_cache=cache, isa=isa, attn_backend=SimpleNamespace(get_name=lambda: backend))


def tokens(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    key, value = (torch.randn(count, HEADS, DIM, generator=generator).to(dtype) for _ in "KV")
    return key, value


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def cpu(request) -> CpuPagedKV:
    cache = torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM, dtype=request.param)
    return paged_kv_for({"layer": layer_of(cache, "CPU_ATTN")})


def interleaved(order: str) -> InterleavedPagedKV:
    if order == "tokens before heads":
        cache = torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2)
    else:
        cache = torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM)
    return paged_kv_for({"layer": layer_of(cache, "FLASH_ATTN")})


SLOTS = torch.tensor([40, 41, 63, 64, 5, 130, 190])


def check(paged) -> None:
    key, value = tokens(len(SLOTS), paged.dtype)
    paged.write(0, SLOTS, key, value)
    found = paged.read(0, SLOTS)
    assert torch.equal(found[0], key) and torch.equal(found[1], value)
    out = torch.empty(1, 2, len(SLOTS), HEADS, DIM, dtype=paged.dtype)
    paged.copy_out(SLOTS, out)
    assert torch.equal(out[0, 0], key) and torch.equal(out[0, 1], value)
    whole = paged.key_blocks(0, torch.tensor([1, 2]))
    assert whole.shape == (HEADS, DIM, 2 * SIZE)
    assert torch.equal(whole[..., 40 - SIZE], key[0].to(whole.dtype))
    assert torch.equal(whole[..., 64 - SIZE], key[3].to(whole.dtype))


def test_cpu_cache_reads_back_what_vllm_wrote(cpu):
    assert cpu._transposed_keys
    check(cpu)


def test_a_packed_order_is_followed_through_the_learnt_permutation(cpu):
    """As AMX packs: the adapter must not rely on keys being transposed."""
    cpu._transposed_keys = False
    check(cpu)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_the_learnt_order_is_a_permutation(isa):
    for order in learn_block_order(isa, SIZE, DIM, torch.float32):
        assert torch.equal(order.flatten().sort().values, torch.arange(SIZE * DIM))


@pytest.mark.parametrize("order", ["tokens before heads", "heads before tokens"])
def test_interleaved_cache_in_both_block_orders(order):
    paged = interleaved(order)
    check(paged)
    key, value = tokens(len(SLOTS), torch.float32)
    # as FlashAttention's own kernels see it
    keys, values = paged.layers["layer"].kv_cache.transpose(1, 2).split(DIM, dim=-1)
    assert torch.equal(keys[1, 8], key[0]) and torch.equal(values[1, 8], value[0])


def test_an_unknown_backend_is_refused_by_name():
    with pytest.raises(ValueError, match="'MY_ATTN'.*CPU_ATTN or FLASH_ATTN"):
        paged_kv_for({"layer": layer_of(torch.zeros(1, 1, 32, 128), "MY_ATTN")})

"""vLLM's own CPU kernel over ESA's block tables against plain torch. No engine."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm import _custom_ops as ops  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata, _get_attn_isa  # noqa: E402

from ucm_ray.integration.vllm.esa_backend import UcmCPUAttentionImpl  # noqa: E402
from ucm_ray.integration.vllm.esa_kernels import CpuSparseKernel, _schedule  # noqa: E402
from ucm_ray.sparse import ReqMeta, UcmSparseRole  # noqa: E402
from ucm_ray.sparse.esa import ESA, EsaMetadata  # noqa: E402
from ucm_ray.sparse.reference import attend  # noqa: E402

BLOCK, DIM, KV_HEADS, BLOCKS = 32, 64, 3, 120

if not current_platform.is_cpu():
    pytest.skip("vLLM's CPU kernels", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    current_platform.import_kernels()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("scheduled", [(1, 1, 1), (1, 40, 1), (7, 1, 1)])
def test_sparse_and_dense_rows_of_a_batch_equal_the_reference(group, scheduled):
    torch.manual_seed(0)
    heads = KV_HEADS * group
    plain = torch.randn(2, BLOCKS, BLOCK, KV_HEADS, DIM)
    impl = UcmCPUAttentionImpl(heads, DIM, DIM**-0.5, KV_HEADS, None, None, "auto")
    layer = SimpleNamespace(isa=_get_attn_isa(torch.float32, BLOCK, DIM), layer_name="layer")
    cache = as_cpu_cache(plain, layer.isa)

    esa = ESA(UcmSparseRole.WORKER, {"sparse_ratio": 0.3, "local_window_sz": 2})
    esa.register_kv_caches([plain])
    order = torch.randperm(BLOCKS).tolist()
    lengths = [700, 833, 512]
    blocks = [order[:30], order[30:60], order[60:90]]
    prompts = [700, 833, 512]
    prefill = EsaMetadata(
        [ReqMeta(str(row), row, 1, lengths[row] - 1, blocks[row], num_prompt_tokens=prompts[row]) for row in range(3)],
        [0, 1, 2, 3],
    )
    esa.attention_begin(0, torch.randn(3, heads, DIM), None, None, prefill)
    esa.finish_step()

    ratios = [None if count == 1 else 1.0 for count in scheduled]
    starts = torch.tensor([0, *scheduled]).cumsum(0).tolist()
    metas = [
        ReqMeta(
            str(row),
            row,
            count,
            lengths[row],
            blocks[row],
            num_prompt_tokens=prompts[row] if count == 1 else 2000,
            sparse_ratio=ratios[row],
        )
        for row, count in enumerate(scheduled)
    ]
    metadata = EsaMetadata(metas, starts)
    query = torch.randn(starts[-1], 2 * heads, DIM)[:, :heads]  # a slice of a fused projection, as in the engine
    esa.attention_begin(0, query, None, None, metadata)
    assert metadata.view.rows == [row for row, count in enumerate(scheduled) if count == 1]

    seq_lens = torch.tensor(
        [length + count for length, count in zip(lengths, scheduled, strict=True)], dtype=torch.int32
    )
    query_start = torch.tensor(starts, dtype=torch.int32)
    engine = CPUAttentionMetadata(
        num_actual_tokens=starts[-1],
        max_query_len=max(scheduled),
        query_start_loc=query_start,
        seq_lens=seq_lens,
        max_seq_len=int(seq_lens.max()),
        block_table=torch.tensor(blocks, dtype=torch.int32),
        slot_mapping=torch.zeros(starts[-1], dtype=torch.int64),
        scheduler_metadata=_schedule(impl, layer, seq_lens, query_start, heads, KV_HEADS, torch.float32),
    )
    output = torch.zeros(starts[-1], heads, DIM)
    CpuSparseKernel().attend(impl, layer, query, cache, engine, output, metadata.view)

    assert torch.allclose(output, attend(query, plain, metadata), atol=2e-5)
    assert engine.block_table.shape == (3, 30) and engine.seq_lens is seq_lens, "vLLM's metadata must stay as it is"


def as_cpu_cache(plain: torch.Tensor, isa: str) -> torch.Tensor:
    """`[2, blocks, block_size, kv_heads, head_dim]` written the way vLLM does."""
    cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * DIM)
    key_cache, value_cache = cache.view(BLOCKS, KV_HEADS, 2 * BLOCK, DIM).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        plain[0].flatten(0, 1).contiguous(),
        plain[1].flatten(0, 1).contiguous(),
        key_cache,
        value_cache,
        torch.arange(BLOCKS * BLOCK),
        isa,
    )
    return cache

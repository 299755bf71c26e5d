import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ucm_ray.retrieval.packed import PackedAnswer, Source
from ucm_ray.retrieval.retriever import RetrievalFuture
from ucm_ray.retrieval.worker import RetrievalWorker
from ucm_ray.sparse import EsaConfig, ReqMeta, UcmSparseFactory, UcmSparseRole
from ucm_ray.sparse.esa import ESA, EsaMetadata
from ucm_ray.sparse.lexical import followers
from ucm_ray.sparse.prompt_mass import prompt_block_mass

_spec = importlib.util.spec_from_file_location("esa_paged", Path(__file__).with_name("paged.py"))
paged = sys.modules.setdefault("esa_paged", importlib.util.module_from_spec(_spec))
_spec.loader.exec_module(paged)
BLOCK, DIM, HEADS, KV_HEADS, LAYERS, Paged = (
    paged.BLOCK,
    paged.DIM,
    paged.HEADS,
    paged.KV_HEADS,
    paged.LAYERS,
    paged.Paged,
)


def make_esa(retriever=None, **config) -> ESA:
    """With the seed's window: blocks are small here, and contexts short."""
    return ESA(UcmSparseRole.WORKER, {"local_window_sz": 2, **config}, retriever)


def test_the_seeds_usage_example_runs_as_written():
    kv_caches = [torch.randn(2, 8, 4, 2, 8)]
    query, key, value = torch.randn(1, 4, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    layer_idx = 0
    metadata = EsaMetadata([ReqMeta("r", 0, 1, 27, list(range(7)))], [0, 1])

    esa = UcmSparseFactory.create_sparse_method(
        "ESA", UcmSparseRole.WORKER, {"sparse_ratio": 0.3, "local_window_sz": 2}
    )
    esa.register_kv_caches(kv_caches)

    q, k, v, output = esa.attention_begin(layer_idx, query, key, value, metadata)
    output = paged.attend(q, kv_caches[layer_idx], metadata)
    output = esa.attention_finished(layer_idx, output)
    assert output.shape == query.shape


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.9])
def test_a_sparse_row_reads_windows_and_the_ratio_of_the_middle(ratio):
    cache = Paged(make_esa(sparse_ratio=ratio))
    cache.start("a", 60)
    cache.step({"a": 60})
    for _ in range(9):
        metadata, sparse, dense = cache.step({"a": 1})
        length = cache.lengths["a"]
        num_blocks = -(-length // BLOCK)
        for view in metadata.views:
            assert view is not None and view.is_whole_batch
            for row, table_length in zip(view.block_table, view.seq_lens.tolist(), strict=True):
                blocks = row[: -(-table_length // BLOCK)] // KV_HEADS
                read = [cache.blocks["a"].index(block) for block in blocks.tolist()]
                assert len(set(read)) == len(read)
                assert {0, num_blocks - 2, num_blocks - 1} <= set(read)
                assert read[-1] == num_blocks - 1, "the block being filled must come last"
                assert table_length == (len(read) - 1) * BLOCK + (length - 1) % BLOCK + 1
                assert len(read) <= 3 + -(-(num_blocks - 3) * ratio // 1) + 1
                assert set(read) <= set(metadata.requests[0].selected_blocks)
        assert any((one - other).abs().max() > 1e-3 for one, other in zip(sparse, dense, strict=True))


@pytest.mark.parametrize(("ratio", "prompt"), [(1.0, 60), (0.3, 6)])
def test_ratio_one_and_short_requests_are_read_densely(ratio, prompt):
    cache = Paged(make_esa(min_blocks=4))
    cache.start("a", prompt, ratio)
    cache.step({"a": prompt})
    for _ in range(8):
        metadata, sparse, dense = cache.step({"a": 1})
        assert metadata.views == [None] * LAYERS
        assert all(torch.equal(one, other) for one, other in zip(sparse, dense, strict=True))


def test_rows_of_prefill_and_of_other_ratios_are_dense_in_the_same_step():
    cache = Paged(make_esa())
    cache.start("sparse", 60)
    cache.start("dense", 50, 1.0)
    cache.step({"sparse": 60, "dense": 50})
    cache.start("prefill", 40)
    metadata, sparse, dense = cache.step({"prefill": 17, "sparse": 1, "dense": 1})
    for view, one, other in zip(metadata.views, sparse, dense, strict=True):
        assert view.rows == [1] and view.tokens.tolist() == [17] and not view.is_whole_batch
        assert torch.equal(one[:17], other[:17]) and torch.equal(one[18], other[18])
        assert not torch.allclose(one[17], other[17])


def test_a_prompt_in_chunks_and_shorter_than_a_block_starts_densely_and_grows():
    cache = Paged(make_esa())
    cache.start("a", 3)
    cache.step({"a": 2})
    cache.step({"a": 1})
    seen = [cache.step({"a": 1})[0].views[0] is not None for _ in range(40)]
    assert not seen[0] and seen[-1]
    first = 3 + seen.index(True)
    announced = EsaConfig(local_window_sz=2).first_sparse_position(3, 0.3, BLOCK)
    assert first >= announced, "the scheduler has tainted from the announced token on"


def planted(cache, request_id: str, block: int, direction: torch.Tensor) -> None:
    """Make the keys of one block point along `direction` `[kv_heads, dim]` in all layers."""
    for kv in cache.caches:
        kv[0, cache.blocks[request_id][block]] = direction


def test_the_block_whose_keys_answer_the_query_is_retrieved_per_head():
    cache = Paged(make_esa(sparse_ratio=0.07, static_share=0.0, retrieval_stride=1, retrieval_dtype="float32"))
    cache.start("a", 60)
    cache.step({"a": 30})
    direction = torch.zeros(KV_HEADS, DIM)
    direction[0, 0] = direction[1, 1] = 50.0
    cache.start("b", 8)
    for block in (5, 6):  # head 0 is answered by block 5, head 1 by block 6
        planted(cache, "a", block, direction * torch.tensor([[float(block == 5)], [float(block == 6)]]))
    esa = cache.esa
    esa.forget(["a"])  # what was indexed before the keys were planted
    cache.lengths["a"] = 0
    query = torch.zeros(60, HEADS, DIM)
    query[:, :2, 0] = query[:, 2:, 1] = 1.0
    blocks = [*cache.blocks["a"], *cache.free[:8]]
    metadata = EsaMetadata([ReqMeta("a", 0, 60, 0, blocks, num_prompt_tokens=60)], [0, 60])
    for layer in range(LAYERS):
        esa.attention_begin(layer, query, None, None, metadata)
    esa.finish_step()
    middle = esa.state("a").selection.middle
    assert middle.shape == (LAYERS, KV_HEADS, 1)
    assert middle[:, 0].unique().tolist() == [5] and middle[:, 1].unique().tolist() == [6]


def test_what_the_prompts_last_queries_attend_to_stays_for_good():
    cache = Paged(make_esa(static_share=1.0, sparse_ratio=0.3, retrieval_stride=1))
    cache.start("a", 60)
    cache.step({"a": 60})
    static = cache.esa.state("a").static.clone()
    for _ in range(12):
        cache.step({"a": 1})
    kept = cache.esa.state("a").selection.middle
    assert torch.equal(kept[..., : static.shape[-1]], static)


def test_a_block_given_to_another_request_is_known_by_its_new_content():
    cache = Paged(make_esa(static_share=0.0, retrieval_stride=1), num_blocks=18)
    cache.start("a", 60)
    cache.step({"a": 60})
    cache.step({"a": 1})
    cache.stop("a")
    cache.start("b", 60)
    cache.step({"b": 60})
    esa = cache.esa
    keys = esa._retriever.bank.request_keys("b")
    _, records = esa._retriever.bank.read(keys)
    blocks = torch.tensor(cache.blocks["b"][:15])
    for layer in range(LAYERS):
        mean = cache.caches[layer][0, blocks].mean(1)
        assert torch.allclose(records[:, layer, :, 0].float(), mean, atol=2e-2)


def test_a_preempted_request_starts_anew_and_its_output_counts_as_prompt():
    cache = Paged(make_esa())
    cache.start("a", 50)
    cache.step({"a": 50})
    for _ in range(6):
        cache.step({"a": 1})
    cache.stop("a")
    assert cache.esa.state("a") is None
    cache.start("a", 56)
    metadata, sparse, dense = cache.step({"a": 56})
    assert all(torch.equal(one, other) for one, other in zip(sparse, dense, strict=True))
    metadata, _, _ = cache.step({"a": 1})
    assert metadata.views[0] is not None


def test_a_request_that_starts_over_in_other_blocks_reads_those():
    cache = Paged(make_esa())
    for _ in range(2):  # the same name, the same length, other blocks
        cache.start("a", 60)
        cache.step({"a": 60})
        metadata, _, _ = cache.step({"a": 1})
        for view in metadata.views:
            read = view.block_table[:, : -(-int(view.seq_lens[0]) // BLOCK)] // KV_HEADS
            assert set(read.flatten().tolist()) <= set(cache.blocks["a"])
        before = cache.blocks["a"]
        cache.stop("a")
        cache.free = [block for block in cache.free if block not in before]


def test_tokens_taken_back_are_forgotten():
    cache = Paged(make_esa())
    cache.start("a", 50)
    cache.step({"a": 40})
    cache.lengths["a"] = 16
    cache.step({"a": 34})
    assert cache.esa.state("a").num_indexed == 50 // BLOCK
    assert cache.esa._retriever.bank.lengths(["a"]).tolist() == [50 // BLOCK]


class Scripted(RetrievalWorker):
    """A retriever whose answers fail, never come or say where they are from."""

    mode = "exact"

    def submit(self, query, deadline_s=None):
        future = RetrievalFuture()
        if self.mode == "failing":
            future.fail(ConnectionError("shard died"))
        elif self.mode == "dense":
            future.settle(PackedAnswer.empty(query, Source.DENSE, "no shard"))
        elif self.mode == "exact":
            future.settle(self.bank.answer(query))
        return future


def remote(monkeypatch, **config) -> tuple[Paged, Scripted]:
    """ESA with a retriever that counts as remote."""
    made = []

    def make(geometry):
        made.append(Scripted({}, geometry=geometry))
        return made[0]

    esa = make_esa(make, deadline_ms=1.0, **config)
    monkeypatch.setattr("ucm_ray.sparse.esa.RetrievalWorker", type(None))
    return Paged(esa), made[0]


@pytest.mark.parametrize("mode", ["failing", "dense", "silent"])
def test_without_any_answer_decode_is_dense(monkeypatch, mode):
    cache, retriever = remote(monkeypatch, fallback="dense")
    retriever.mode = mode
    cache.start("a", 60)
    cache.step({"a": 60})
    for _ in range(5):
        _, sparse, dense = cache.step({"a": 1})
        assert all(torch.equal(one, other) for one, other in zip(sparse, dense, strict=True))
    usage = cache.esa.state("a").usage
    assert usage.fallbacks >= 3 and usage.sparse_steps == 0 and usage.blocks_read == usage.blocks_total


@pytest.mark.parametrize("mode", ["failing", "dense", "silent"])
def test_the_last_selection_stands_in_for_an_answer_that_is_lost(monkeypatch, mode):
    cache, retriever = remote(monkeypatch, fallback="last", retrieval_stride=2)
    cache.start("a", 60)
    cache.step({"a": 60})
    cache.step({"a": 1})
    retriever.mode = mode
    for _ in range(12):
        cache.step({"a": 1})
    usage = cache.esa.state("a").usage
    assert usage.sparse_steps == 13 and usage.fallbacks > 0 and usage.max_staleness >= 10
    retriever.mode = "exact"
    for _ in range(6):
        cache.step({"a": 1})
    assert cache.esa.state("a").age <= 4


def test_staleness_is_bounded_by_the_stride():
    cache = Paged(make_esa(retrieval_stride=3))
    cache.start("a", 60)
    cache.step({"a": 60})
    for _ in range(20):
        cache.step({"a": 1})
    assert cache.esa.state("a").usage.max_staleness == 3


def test_drifting_queries_are_asked_for_again_before_the_stride_is_over():
    cache = Paged(make_esa(retrieval_stride=50, drift_cosine=0.99))  # random queries always drift
    cache.start("a", 60)
    cache.step({"a": 60})
    for _ in range(10):
        cache.step({"a": 1})
    assert cache.esa.state("a").usage.max_staleness == 1


def test_too_small_a_saving_is_not_taken():
    cache = Paged(make_esa(min_saved_bytes=1 << 30))
    cache.start("a", 60)
    cache.step({"a": 60})
    assert cache.step({"a": 1})[0].views[0] is None


def test_one_selection_for_all_heads_names_plain_blocks():
    cache = Paged(make_esa(per_head=False))
    cache.start("a", 60)
    cache.step({"a": 60})
    metadata, sparse, dense = cache.step({"a": 1})
    view = metadata.views[0]
    assert view.block_table.shape[0] == 1
    read = view.block_table[0, : -(-int(view.seq_lens[0]) // BLOCK)].tolist()
    assert set(read) <= set(cache.blocks["a"])


@pytest.mark.parametrize("heads_at_once", [1 << 40, 1])
def test_prompt_mass_is_softmax_attention_summed_by_block(monkeypatch, heads_at_once):
    monkeypatch.setattr("ucm_ray.sparse.prompt_mass._CHUNK_BYTES", heads_at_once)
    torch.manual_seed(0)
    n, num_tokens, length = 5, 18, 20
    queries, keys = torch.randn(n, HEADS, DIM), torch.randn(KV_HEADS, DIM, length)
    mass = prompt_block_mass(queries, keys, num_tokens, BLOCK, 0.3)
    expected = torch.zeros(KV_HEADS, length // BLOCK)
    for index in range(n):
        seen = num_tokens - n + index + 1
        for head in range(HEADS):
            weights = (queries[index, head] @ keys[head // 2, :, :seen] * 0.3).softmax(-1)
            for position, weight in enumerate(weights):
                expected[head // 2, position // BLOCK] += weight
    assert torch.allclose(mass, expected, atol=1e-5)


def test_blocks_that_repeat_the_last_tokens_are_read_once_each_whatever_was_selected():
    cache = Paged(make_esa(sparse_ratio=0.5, retrieval_stride=3, lexical_blocks=3))
    cache.token_ids["a"] = np.arange(400, dtype=np.int32)
    cache.token_ids["a"][[9, 21, 33, 45]] = 7  # what followed stands in blocks 2, 5, 8 and 11
    cache.start("a", 80)
    cache.step({"a": 80})
    for step in range(12):
        position = cache.lengths["a"]
        cache.token_ids["a"][position] = 7 if step % 2 == 0 else 1000 + step
        selection = cache.esa.state("a").selection
        ids = cache.token_ids["a"][: position + 1]
        wanted = set(followers(ids, BLOCK, 3, selection.init, selection.local_start).tolist())
        assert step != 0 or wanted == {5, 8, 11}
        metadata, _, _ = cache.step({"a": 1})
        for view in metadata.views:
            assert view is not None
            width = -(-view.max_seq_len // BLOCK)
            for row in (view.block_table[:, :width].long() // KV_HEADS).tolist():
                assert len(set(row)) == len(row), "a block read twice counts twice"
                read = {cache.blocks["a"].index(block) for block in row}
                assert wanted <= read
                assert read <= set(metadata.requests[0].selected_blocks)

"""The seed's three functions, with every edge."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_ray.retrieval import compute_block_representation, compute_similarity, select_top_k_blocks


def test_block_representation_is_the_mean_of_its_keys():
    block = torch.arange(24.0).view(4, 2, 3)
    assert torch.equal(compute_block_representation(block), block.mean(0))


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 3)])
def test_block_representation_refuses_what_has_no_mean(shape):
    with pytest.raises(ValueError, match=r"block_kv has shape .* expected \[block_size >= 1"):
        compute_block_representation(torch.zeros(shape))


def test_similarity_sums_dot_products_over_heads():
    query, blocks = torch.randn(4, 8), torch.randn(6, 4, 8)
    torch.testing.assert_close(compute_similarity(query, blocks), torch.einsum("hd,nhd->n", query, blocks))


def test_similarity_compares_grouped_query_heads_with_their_kv_head():
    query, blocks = torch.randn(4, 8), torch.randn(6, 2, 8)
    expected = compute_similarity(query, blocks.repeat_interleave(2, dim=1))
    torch.testing.assert_close(compute_similarity(query, blocks), expected)


def test_similarity_of_no_blocks_is_empty():
    assert compute_similarity(torch.randn(2, 8), torch.zeros(0, 2, 8)).shape == (0,)


def test_similarity_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"query_repr \[2, 8\] and block_reprs \[6, 2, 4\] do not fit"):
        compute_similarity(torch.randn(2, 8), torch.zeros(6, 2, 4))


@pytest.mark.parametrize("scores, k, local, init, expected", [
    ([0, 9, 1, 8, 0, 0], 5, 2, 1, [0, 1, 3, 4, 5]),
    ([0, 9, 1, 8, 0, 0], 2, 2, 1, [0, 4, 5]),           # k below the windows: the windows
    ([0, 9, 1, 8, 0, 0], 0, 2, 1, [0, 4, 5]),           # k = 0
    ([0, 9, 1, 8, 0, 0], 99, 2, 1, [0, 1, 2, 3, 4, 5]),  # k above the number of blocks
    ([0, 9, 1, 8, 0, 0], 2, 0, 0, [1, 3]),              # no windows
    ([0, 9, 1, 8, 0, 0], 4, 1, 2, [0, 1, 3, 5]),        # another init window
    ([3, 3, 3, 3, 3], 3, 1, 1, [0, 1, 4]),              # ties: the lower index
    ([-0.0, 0.0, -0.0, 0.0], 2, 0, 0, [0, 1]),          # signed zeros tie
    ([7], 1, 2, 1, [0]), ([7], 0, 2, 1, [0]),           # one block, inside both windows
    ([7, 8], 1, 2, 1, [0, 1]), ([], 3, 2, 1, []),
])
def test_selection_at_its_edges(scores, k, local, init, expected):
    assert select_top_k_blocks(torch.tensor(scores, dtype=torch.float32), k, local, len(scores), init) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_selection_refuses_scores_that_are_not_finite(bad):
    with pytest.raises(ValueError, match="scores holds 1 NaN or infinite values of 3"):
        select_top_k_blocks(torch.tensor([1.0, bad, 2.0]), 2, 1, 3)


def test_selection_refuses_scores_of_another_length():
    with pytest.raises(ValueError, match=r"scores has shape \[3\], expected \[4\]"):
        select_top_k_blocks(torch.zeros(3), 2, 1, 4)


@pytest.mark.parametrize("name", ["k", "local_window", "init_window"])
def test_selection_refuses_negative_arguments(name):
    arguments = {"k": 1, "local_window": 1, "init_window": 1, name: -1}
    with pytest.raises(ValueError, match=f"{name} is -1, expected >= 0"):
        select_top_k_blocks(torch.zeros(3), total_blocks=3, **arguments)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-3, 3), max_size=20), st.integers(0, 25), st.integers(0, 5), st.integers(0, 5))
def test_selection_is_sorted_unique_in_range_and_takes_the_best(scores, k, local, init):
    total = len(scores)
    chosen = select_top_k_blocks(torch.tensor(scores, dtype=torch.float32), k, local, total, init)
    windows = set(range(min(init, total))) | set(range(max(0, total - local), total))
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(range(total))
    assert windows <= set(chosen) and len(chosen) == max(len(windows), min(k, total))
    middle = sorted((index for index in range(total) if index not in windows), key=lambda i: (-scores[i], i))
    assert set(chosen) - windows == set(middle[:len(chosen) - len(windows)])

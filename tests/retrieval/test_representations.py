"""Each representation scores as its definition says, per KV head, for any leading dimensions."""

import pytest
import torch

from ucm_ray.retrieval import get_representation, representation_names

LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, GROUP, DIM = 2, 5, 4, 3, 2, 8


@pytest.fixture
def keys():
    return torch.randn(LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def query():
    return torch.randn(LAYERS, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(1))


def brute_force(name, query, keys):
    """Scores by plain loops over layers, heads and blocks, straight from the definitions."""
    scores = torch.zeros(LAYERS, KV_HEADS, BLOCKS)
    for layer in range(LAYERS):
        for head in range(KV_HEADS * GROUP):
            q = query[layer, head]
            for block in range(BLOCKS):
                k = keys[layer, block, :, head // GROUP]
                mean, var = k.mean(0), k.var(0, correction=0)
                scores[layer, head // GROUP, block] += {
                    "mean": q @ mean / DIM ** 0.5,
                    "minmax": torch.maximum(q * k.amin(0), q * k.amax(0)).sum() / DIM ** 0.5,
                    "mean_std": (q @ mean + q.abs() @ var.sqrt()) / DIM ** 0.5,
                    "cumulant": q @ mean / DIM ** 0.5 + 0.5 * (q ** 2) @ var / DIM,
                }[name]
    return scores


@pytest.mark.parametrize("name", representation_names())
def test_score_follows_the_definition_per_kv_head(name, query, keys):
    method = get_representation(name)
    stats = method.compute(keys)
    assert stats.shape == (method.num_stats, LAYERS, BLOCKS, KV_HEADS, DIM)
    torch.testing.assert_close(method.score(query, stats), brute_force(name, query, keys))


def test_minmax_bounds_the_best_logit_of_a_block(query, keys):
    method = get_representation("minmax")
    bound = method.score(query[:, ::GROUP], method.compute(keys))
    logits = torch.einsum("lhd,lnthd->lhnt", query[:, ::GROUP], keys) / DIM ** 0.5
    assert (bound >= logits.amax(-1) - 1e-5).all()


def test_cumulant_is_exact_for_a_block_of_equal_keys(query):
    keys = torch.randn(LAYERS, BLOCKS, 1, KV_HEADS, DIM).expand(-1, -1, BLOCK_SIZE, -1, -1)
    method = get_representation("cumulant")
    exact = torch.einsum("lhgd,lnhd->lhn", query.view(LAYERS, KV_HEADS, GROUP, DIM), keys[:, :, 0]) / DIM ** 0.5
    torch.testing.assert_close(method.score(query, method.compute(keys)), exact)


def test_mass_of_all_blocks_is_one_per_query_head(query, keys):
    method = get_representation("mean")
    mass = method.score(query, method.compute(keys), reduce="mass")
    torch.testing.assert_close(mass.sum(-1), torch.full((LAYERS, KV_HEADS), float(GROUP)))


def test_half_precision_keys_are_averaged_in_float32():
    keys = torch.full((1, 64, 1, 2), 300.0, dtype=torch.float16)
    assert get_representation("mean").compute(keys).unique().tolist() == [300.0]


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="'median'.*cumulant, mean, mean_std, minmax"):
        get_representation("median")


def test_heads_that_do_not_group_are_refused(keys):
    method = get_representation("mean")
    with pytest.raises(ValueError, match="4 query heads cannot be grouped onto 3 KV heads"):
        method.score(torch.randn(LAYERS, 4, DIM), method.compute(keys))


def test_a_wrong_number_of_statistics_is_refused(query, keys):
    with pytest.raises(ValueError, match="'cumulant' stores 2 statistics per block, got 1"):
        get_representation("cumulant").score(query, get_representation("mean").compute(keys))

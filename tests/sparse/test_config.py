import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm_ray.sparse import EsaConfig, UcmSparseFactory, UcmSparseRole


def test_defaults_are_the_seeds_but_for_the_window_which_is_as_long_as_the_seeds_in_tokens():
    config = EsaConfig()
    assert (config.sparse_ratio, config.init_window_sz, config.min_blocks) == (0.3, 1, 4)
    assert config.local_window_sz * 32 == 2 * 128
    assert (config.retrieval_stride, config.retrieval_workers, config.retrieval_cache_size) == (5, 4, 10000)


def test_the_seeds_configuration_block_is_read_as_it_stands():
    block = {"ucm_sparse_config": {"ESA": {"sparse_ratio": 0.2, "retrieval_stride": 3}}, "blend_chunk_size": 64}
    assert EsaConfig.from_dict(block) == EsaConfig(sparse_ratio=0.2, retrieval_stride=3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sparse_ratio", 1.5),
        ("static_share", -0.1),
        ("retrieval_stride", 0),
        ("min_blocks", -1),
        ("fallback", "never"),
    ],
)
def test_an_impossible_value_is_named(key, value):
    with pytest.raises(ValueError, match=rf"ESA\.{key}.*{value}"):
        EsaConfig(**{key: value})


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 400), st.floats(0, 1), st.integers(0, 4), st.integers(0, 4), st.integers(0, 8))
def test_a_budget_keeps_both_windows_and_at_least_one_middle_block(num_blocks, ratio, init, local, min_blocks):
    budget = EsaConfig(init_window_sz=init, local_window_sz=local, min_blocks=min_blocks).budget(num_blocks, ratio)
    if budget is None:
        return
    assert num_blocks > min_blocks and ratio < 1
    assert budget.init == init and budget.local_start <= num_blocks - max(1, local)
    assert 1 <= budget.num_middle < budget.local_start - budget.init


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 500), st.floats(0.01, 0.95), st.integers(0, 3), st.integers(0, 3), st.integers(0, 8))
def test_no_token_before_the_announced_first_one_has_a_budget(num_dense, ratio, init, local, min_blocks):
    config, block_size = EsaConfig(init_window_sz=init, local_window_sz=local, min_blocks=min_blocks), 16
    first = config.first_sparse_position(num_dense, ratio, block_size)
    assert first >= num_dense and config.budget(first // block_size + 1, ratio) is not None
    for num_blocks in range(num_dense // block_size + 1, first // block_size + (first % block_size > 0)):
        assert config.budget(num_blocks, ratio) is None


def test_with_ratio_one_no_token_is_ever_sparse():
    assert EsaConfig().first_sparse_position(10, 1.0, 16) is None


def test_an_unknown_method_lists_the_known():
    with pytest.raises(ValueError, match=r"'Quest'.*'Blend', 'ESA'"):
        UcmSparseFactory.create_sparse_method("Quest", UcmSparseRole.WORKER, {})


def test_a_method_can_be_registered_once():
    UcmSparseFactory.register("ESA2", "ucm_ray.sparse.esa", "ESA")
    try:
        assert (
            UcmSparseFactory.create_sparse_method("ESA2", UcmSparseRole.SCHEDULER, {}).role is UcmSparseRole.SCHEDULER
        )
        with pytest.raises(ValueError, match="already registered"):
            UcmSparseFactory.register("ESA2", "elsewhere", "ESA")
    finally:
        del UcmSparseFactory._registry["ESA2"]


def test_the_scheduler_role_takes_no_kv_caches():
    with pytest.raises(RuntimeError, match="worker role"):
        UcmSparseFactory.create_sparse_method("ESA", UcmSparseRole.SCHEDULER, {}).register_kv_caches([])

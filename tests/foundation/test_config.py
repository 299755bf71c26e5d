"""Configurations: what is read, and what a broken one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from ucm_ray.config import (
    ConfigError,
    EsaSettings,
    RetrievalSettings,
    Settings,
    load_settings,
    parse_controls,
    parse_settings,
)

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

# the YAML blocks of UCM's documents, as they stand there
UCM_ESA = """
ucm_sparse_config:
  ESA:
    sparse_ratio: 0.3
    local_window_sz: 2
    init_window_sz: 1
    min_blocks: 4
    retrieval_stride: 5
    retrieval_workers: 4
    retrieval_cache_size: 10000
"""
UCM_BLEND = """
kv_connector: "BlendConnector"
kv_connector_module_path: "ucm.integration.vllm.blend_connector"
kv_connector_extra_config:
  store_pipeline: "Cache|Posix"
  storage_backends: "/data/ucm_cache"
  blend_chunk_size: 64
  min_match_ratio: 0.8
  position_correction: true
  recompute_boundary: 2
  rope_theta: 10000.0
  head_dim: 128
"""

# broken YAML -> what its message must contain
BROKEN = {
    "unknown key with a near one": ("blend: {budgt: 0.2}", ["blend.budgt", "0.2", "unknown key", "'budget'"]),
    "unknown section": ("blnd: {budget: 0.2}", ["blnd", "unknown key", "'blend'"]),
    "key outside its section": ("sparse_ratio: 0.2", ["sparse_ratio", "0.2", "section 'esa'"]),
    "unlike any key": ("service: {qqq: 1}", ["service.qqq", "known keys", "model_id", "port"]),
    "value out of range": ("blend: {budget: 2}", ["blend.budget", "found 2", "less than or equal to 1"]),
    "KV that is not rotated": ("kv_connector_extra_config: {position_correction: false}",
                               ["blend.position_correction", "found False", "expected true", "always rotated"]),
    "wrong type": ("engine: {max_num_seqs: many}", ["engine.max_num_seqs", "'many'", "valid integer"]),
    "negative delay": ("service: {downscale_delay_s: -1}", ["service.downscale_delay_s", "found -1", "greater than"]),
    "number in quotes": ("service: {port: '80'}", ["service.port", "'80'", "valid integer"]),
    "not one of the allowed": ("blend: {policy: best}", ["blend.policy", "'best'", "'query'", "'hkvd'", "'boundary'"]),
    "an unknown representation": ("esa: {representation: best}", ["esa.representation", "'best'", "'mean_std'"]),
    "a date with a month 13": ("blend: {budget: 2024-13-01}", ["not valid YAML", "month"]),
    "section is a number": ("store: 3", ["store", "found 3", "expected a mapping"]),
    "size without a meaning": ("store: {cache_capacity_bytes: lots}", ["cache_capacity_bytes", "'lots'", "1GiB"]),
    "empty list": ("store: {storage_backends: []}", ["store.storage_backends", "found []", "at least 1"]),
    "bad pipeline": ("store: {store_pipeline: 'Cache||Posix'}", ["store_pipeline", "'Cache||Posix'", "'Cache|Posix'"]),
    "limits crossed": ("service: {min_replicas: 3}", ["max_replicas is 1", "min_replicas (3)"]),
    "limits crossed, shards": ("retrieval: {shards: 9}", ["max_shards is 4", "shards (9)"]),
    "block size on CPU": ("engine: {device: cpu, block_size: 16}", ["engine", "block_size is 16", "multiple of 32"]),
    "step too small": ("engine: {max_num_batched_tokens: 32, max_num_seqs: 64}",
                       ["max_num_batched_tokens is 32", "64"]),
    "another connector": ("kv_connector: LMCache", ["kv_connector", "'LMCache'", "'BlendConnector'"]),
    "unknown connector key": ("kv_connector_extra_config: {blend_chunk_sise: 64}",
                              ["kv_connector_extra_config.blend_chunk_sise", "'blend_chunk_size'"]),
    "another sparse method": ("ucm_sparse_config: {KVStar: {}}", ["ucm_sparse_config.KVStar", "ESA"]),
    "ESA value": ("ucm_sparse_config: {ESA: {sparse_ratio: 0}}", ["esa.sparse_ratio", "found 0", "greater than 0"]),
    "said twice": ("blend: {head_dim: 64}\nkv_connector_extra_config: {head_dim: 128}",
                   ["blend.head_dim", "64", "128", "once"]),
    "a list at the top": ("- blend", ["list", "expected a mapping"]),
    "no YAML": ("blend: {budget: 0.2", ["not valid YAML", "line 1"]),
}


@pytest.mark.parametrize("text, parts", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_configuration_is_told_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, parts: list[str]
) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_settings(file)
    for part in [str(file), *parts]:
        assert part in str(error.value)


@pytest.mark.parametrize("value", ["[x", "2024-13-01", "{a: b", "\t- x"])
def test_an_override_that_is_no_yaml_is_told_its_key(value: str) -> None:
    with pytest.raises(ConfigError, match="blend.policy: not valid YAML"):
        load_settings(overrides={"blend.policy": value})


def test_a_representation_that_registered_itself_can_be_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    from ucm_ray.retrieval import representations

    monkeypatch.setattr(representations, "_REGISTRY", dict(representations._REGISTRY))

    class Maximum(representations.Mean):
        name = "maximum"

    assert load_settings(overrides={"esa.representation": "maximum"}).esa.representation == Maximum.name


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        parse_settings({"blend": {"budget": -1, "polcy": "query"}, "model": 3})
    assert len(str(error.value).splitlines()) == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.yaml: no such file"):
        load_settings(tmp_path / "none.yaml")


def test_an_api_key_never_appears_in_a_message() -> None:
    with pytest.raises(ConfigError) as error:
        parse_settings({"service": {"api_keys": "secret-key"}})
    assert "secret-key" not in str(error.value) and "api_keys" in str(error.value)


def test_ucm_blocks_are_read_as_they_stand() -> None:
    settings = parse_settings(yaml.safe_load(UCM_ESA + UCM_BLEND))
    assert settings.esa == EsaSettings(enabled=True, local_window_sz=2)
    assert settings.store.storage_backends == ["/data/ucm_cache"]
    assert (settings.blend.rope_theta, settings.blend.head_dim) == (10000.0, 128)
    assert settings.blend.enabled


def test_esa_block_inside_the_connector_block() -> None:
    settings = parse_settings({"kv_connector_extra_config": yaml.safe_load(UCM_ESA)})
    assert settings.esa.enabled and settings.esa.retrieval_stride == 5


def test_the_connector_gets_back_what_the_settings_say() -> None:
    settings = parse_settings({"blend": {"budget": 0.2}, "esa": {"enabled": True}, "retrieval": {"backend": "ray"}})
    back = parse_settings({"kv_connector_extra_config": settings.connector_config()})
    assert (back.blend, back.esa, back.retrieval) == (settings.blend, settings.esa, settings.retrieval)


def test_a_cache_recomputes_what_cannot_be_loaded() -> None:
    transfer = Settings().kv_transfer_config()
    assert transfer and transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_module_path"] == "ucm_ray.integration.vllm.blend_connector"


def test_no_connector_when_both_are_off() -> None:
    assert parse_settings({"blend": {"enabled": False}}).kv_transfer_config() is None


def test_default_file_says_every_key_and_its_default() -> None:
    file = CONFIGS / "default.yaml"
    assert load_settings(file) == Settings()
    assert _keys(yaml.safe_load(file.read_text())) == _keys(Settings().model_dump())
    for section in Settings.model_fields.values():
        assert isinstance(section.annotation, type) and (section.annotation is str
                                                         or issubclass(section.annotation, BaseModel))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("gpu-*.yaml")), ids=lambda file: file.stem)
def test_gpu_examples_are_valid_and_leave_room(file: Path) -> None:
    settings = load_settings(file)
    assert settings.engine.device == "cuda"
    on_one_gpu = settings.service.replica_gpus + settings.retrieval.shards * settings.retrieval.num_gpus
    assert on_one_gpu == pytest.approx(1.0)
    if settings.retrieval.num_gpus:
        memory = 79.2 * 2**30
        assert settings.engine.gpu_memory_utilization * memory + settings.retrieval.capacity_bytes < 0.95 * memory


def test_the_environment_selects_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("blend: {policy: boundary}")
    monkeypatch.setenv("UCM_RAY_CONFIG", str(file))
    assert load_settings().blend.policy == "boundary"
    assert load_settings(overrides={"blend.policy": "none"}).blend.policy == "none"


def test_api_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCM_RAY_API_KEYS", "one, two")
    assert load_settings().service.api_keys == ["one", "two"]


@pytest.mark.parametrize("size, expected", [("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("10kB", 10_000), (7, 7)])
def test_sizes(size: object, expected: int) -> None:
    assert parse_settings({"store": {"cache_capacity_bytes": size}}).store.cache_capacity_bytes == expected


def test_overrides_reach_into_sections() -> None:
    settings = load_settings(overrides={"engine.extra.seed": "3", "service.port": 9000, "model": "facebook/opt-125m"})
    assert (settings.engine.extra, settings.service.port, settings.model) == ({"seed": 3}, 9000, "facebook/opt-125m")


@pytest.mark.parametrize("controls, part", [
    ({"budget": 3}, "less than or equal to 1"), ({"policy": "best"}, "'query'"), ({"budgt": 0.1}, "'budget'"),
    ({"blend": "yes"}, "valid boolean"), ({"sparse_ratio": 0}, "greater than 0"), ([1], "expected a mapping"),
])
def test_broken_controls_of_a_request(controls: object, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse_controls(controls)


def test_controls_left_out_keep_the_deployments() -> None:
    assert parse_controls(None).model_dump(exclude_none=True) == {}
    assert parse_controls({"budget": 0.05, "esa": True}).budget == 0.05


def test_section_defaults_are_the_documented_ones() -> None:
    settings = Settings()
    assert (settings.blend.enabled, settings.blend.policy, settings.blend.budget) == (True, "query", 0.10)
    assert not settings.esa.enabled and settings.retrieval == RetrievalSettings()


def _keys(tree: object) -> object:
    return {key: _keys(value) for key, value in tree.items()} if isinstance(tree, dict) else None

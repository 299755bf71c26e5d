"""From settings to what Ray Serve LLM and vLLM get."""

from __future__ import annotations

from pathlib import Path

import pytest

from ucm_ray.config import ConfigError, Settings, load_settings, parse_settings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def app():
    return pytest.importorskip("ucm_ray.serve.app")


@pytest.fixture
def cpu(model_dir: Path) -> dict:
    return {"model": str(model_dir), "engine": {"device": "cpu"}}


def test_autoscaling_limits_come_from_the_settings(app, cpu: dict) -> None:
    service = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 5, "downscale_delay_s": 60}
    config = app.llm_config(parse_settings(cpu | {"service": service}))
    scaling = config.deployment_config["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"], scaling["target_ongoing_requests"]) == (1, 3, 5)
    assert (scaling["upscale_delay_s"], scaling["downscale_delay_s"]) == (30, 60)


def test_an_address_that_serve_does_not_use_is_said_in_one_line() -> None:
    from ucm_ray.serve.http_address import disagreement

    told = load_settings(overrides={"service.port": 8001}).service
    assert disagreement(told, "0.0.0.0", 8001) is None
    said = disagreement(told, "0.0.0.0", 8000)
    assert "service.port=8001 has no effect: Ray Serve listens on 0.0.0.0:8000" in said and "\n" not in said
    assert disagreement(load_settings().service, "0.0.0.0", 9000) is None, "nobody asked for 8000"


def test_a_local_model_never_asks_a_hub(app, cpu: dict, model_dir: Path) -> None:
    config = app.llm_config(parse_settings(cpu))
    assert config.runtime_env["env_vars"]["HF_HUB_OFFLINE"] == "1"
    assert config.model_loading_config.model_source == str(model_dir)
    assert config.accelerator_config.kind == "cpu"


def test_blend_is_on_by_default_and_can_be_switched_off(app, cpu: dict) -> None:
    assert app.engine_kwargs(parse_settings(cpu))["kv_transfer_config"]["kv_connector"] == "BlendConnector"
    assert "kv_transfer_config" not in app.engine_kwargs(parse_settings(cpu | {"blend": {"enabled": False}}))


def test_engine_arguments_are_vllms(app, cpu: dict) -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in fields(AsyncEngineArgs)}
    assert set(app.engine_kwargs(parse_settings(cpu))) <= known


def test_extra_arguments_may_not_hide_a_key_of_ours(app, cpu: dict) -> None:
    settings = parse_settings(cpu | {"engine": {"device": "cpu", "extra": {"block_size": 16}}})
    with pytest.raises(ConfigError, match="engine.extra.block_size"):
        app.engine_kwargs(settings)


@pytest.mark.parametrize("name, expected", [
    ("gpu-shared", [{"CPU": 4, "GPU": 0.95}]),
    ("gpu-tensor-parallel", [{"CPU": 4, "GPU": 1.0}] * 4),
    ("gpu-replicas", [{"CPU": 4, "GPU": 1.0}]),
])
def test_gpu_examples_ask_ray_for_what_they_say(app, name: str, expected: list[dict]) -> None:
    settings = load_settings(CONFIGS / f"{name}.yaml")
    assert app.bundles(settings) == expected
    config = app.llm_config(settings)
    assert config.accelerator_config.kind == "gpu"
    assert "HF_HUB_OFFLINE" not in config.runtime_env["env_vars"]


def test_serve_run_arguments_reach_the_settings(app) -> None:
    args = {"blend": {"budget": 0.2}, "service.port": "9000", "engine": {"extra": {"seed": 1}}}
    settings = load_settings(overrides=app._dotted(args))
    assert (settings.blend.budget, settings.service.port, settings.engine.extra) == (0.2, 9000, {"seed": 1})


def test_settings_survive_the_way_to_a_replica() -> None:
    settings = parse_settings({"service": {"api_keys": ["a"]}, "store": {"storage_backends": ["x", "y"]}})
    assert Settings.model_validate(settings.model_dump()) == settings

"""`ucm-ray doctor` is red where a start would fail, says what to do, and is green otherwise."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ucm_ray.config import Settings, parse_settings
from ucm_ray.doctor import SetUpError, examine, stop_if_red


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def good(tmp_path: Path, free_port: int, model_dir: Path) -> dict:
    return {"model": str(model_dir), "engine": {"device": "cpu"},
            "store": {"storage_backends": str(tmp_path / "store")}, "service": {"port": free_port}}


def _states(settings: Settings) -> dict[str, str]:
    return {item.name: item.state for item in examine(settings)}


def _errors(settings: Settings) -> dict[str, str]:
    return {item.name: f"{item.found} {item.remedy}" for item in examine(settings) if item.state == "error"}


def test_green_where_everything_is_there(good: dict) -> None:
    settings = parse_settings(good)
    assert _errors(settings) == {}
    stop_if_red(settings)
    checked = set(_states(settings))
    assert {"python", "vllm", "ray", "torch", "device", "model", "store", "port", "memory", "disk"} <= checked


def test_red_without_the_model(good: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCM_RAY_CACHE", str(tmp_path / "empty"))
    errors = _errors(parse_settings(good | {"model": "default"}))
    assert set(errors) == {"model"} and "ucm-ray model" in errors["model"]


def test_red_with_a_read_only_store(good: dict) -> None:
    # /proc refuses every new file, for the superuser too
    errors = _errors(parse_settings(good | {"store": {"storage_backends": "/proc/ucm_ray_store"}}))
    assert set(errors) == {"store"} and "/proc/ucm_ray_store" in errors["store"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_red_with_a_folder_without_write_permission(good: dict, tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    assert set(_errors(parse_settings(good | {"store": {"storage_backends": str(folder)}}))) == {"store"}


def test_red_with_a_taken_port(good: dict, free_port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        settings = parse_settings(good)
        errors = _errors(settings)
        assert set(errors) == {"port"} and str(free_port) in errors["port"]
        with pytest.raises(SetUpError, match=str(free_port)):
            stop_if_red(settings)


def test_red_when_the_deployment_asks_for_more_cores_than_there_are(
    good: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    service = good["service"] | {"replica_cpus": 1000.0}
    errors = _errors(parse_settings(good | {"service": service}))
    assert set(errors) == {"ray"} and "service.replica_cpus" in errors["ray"]


def test_on_a_ray_that_is_joined_this_machine_is_not_what_counts(good: dict, free_port: int) -> None:
    """A GPU on another machine, a port of the cluster's, more cores than here."""
    service = good["service"] | {"replica_cpus": 1000.0}
    settings = parse_settings(good | {"engine": {"device": "cuda"}, "service": service})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        stop_if_red(settings, "10.0.0.1:6379")
        for own in (None, "", "local"):
            with pytest.raises(SetUpError, match="port: .*\n.*service.replica_cpus"):
                stop_if_red(settings, own)
    unwritable = parse_settings(good | {"store": {"storage_backends": "/proc/ucm_ray_store"}})
    with pytest.raises(SetUpError, match="store"):
        stop_if_red(unwritable, "auto")


def test_examining_leaves_nothing_behind(good: dict, tmp_path: Path) -> None:
    examine(parse_settings(good))
    assert list(tmp_path.iterdir()) == []


def test_the_exit_code_tells(good: dict, tmp_path: Path, free_port: int) -> None:
    import yaml

    file = tmp_path / "good.yaml"
    file.write_text(yaml.safe_dump(good))
    command = [sys.executable, "-m", "ucm_ray", "doctor", "--config", str(file)]
    green = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert green.returncode == 0, green.stdout + green.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port))
        taken.listen()
        red = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert red.returncode == 1
    assert "error   port" in red.stdout and "-> Stop what listens there" in red.stdout

"""The default model is prepared once, completely or not at all."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from ucm_ray import models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UCM_RAY_CACHE", str(tmp_path))
    return tmp_path


def _write_slowly(gguf: Path, folder: Path) -> None:
    """Stands in for the 30 seconds of dequantising: one file, a pause, another file."""
    (folder / "model.safetensors").write_bytes(b"w" * 1000)
    (folder.parents[1] / "half-written").touch()
    time.sleep(float(os.environ.get("CONVERT_S", "0")))
    (folder / "config.json").write_text("{}")


def test_the_real_conversion_is_complete_and_loads(model_dir: Path) -> None:
    assert models.is_complete(model_dir)
    config = json.loads((model_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {path.name for path in model_dir.iterdir()}


def test_killed_while_converting_leaves_no_model_and_the_next_try_mends_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_convert", _write_slowly)
    monkeypatch.setenv("CONVERT_S", "60")
    process = multiprocessing.get_context("fork").Process(target=models.default_model)
    process.start()
    deadline = time.monotonic() + 20
    while not (cache / "models" / "half-written").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert not models.default_model_folder().exists()

    monkeypatch.setenv("CONVERT_S", "0")
    assert models.is_complete(models.default_model())
    assert [path.name for path in (cache / "models").glob(".*")] == []


def test_two_processes_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(gguf: Path, folder: Path) -> None:
        with open(cache / "conversions", "a") as log:
            log.write("x")
        (folder / "config.json").write_text("{}")
        time.sleep(0.5)

    monkeypatch.setattr(models, "_convert", count)
    processes = [multiprocessing.get_context("fork").Process(target=models.default_model) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=20)
    assert (cache / "conversions").read_text() == "x"


def test_a_damaged_file_is_noticed_and_converted_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_convert", _write_slowly)
    folder = models.default_model()
    os.truncate(folder / "model.safetensors", 10)
    assert not models.is_complete(folder)
    assert models.is_complete(models.default_model())
    assert (folder / "model.safetensors").stat().st_size == 1000


def test_a_full_disk_is_said_before_converting(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_NEEDED_BYTES", 1 << 60)
    with pytest.raises(models.ModelError, match="MiB free, expected"):
        models.default_model()


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(models.ModelError, match="config.json"):
        models.resolve_model(str(tmp_path))
    with pytest.raises(models.ModelError, match="no folder"):
        models.resolve_model(str(tmp_path / "none"))
    assert models.resolve_model("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize("flags, dtype", [
    ("fpu avx2 fma", "float32"), ("avx512f avx512_bf16", "bfloat16"), ("amx_tile amx_bf16", "bfloat16"),
    ("avx512f avx512vl", "float32"),
])
def test_dtype_follows_what_the_cpu_multiplies(tmp_path: Path, flags: str, dtype: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name : some CPU\nflags : {flags}\n")
    assert models.cpu_dtype(tmp_path / "cpuinfo") == dtype
    assert models.cpu_dtype(tmp_path / "none") == "float32"

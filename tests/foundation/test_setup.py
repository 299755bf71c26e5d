"""`scripts/setup` stops with one clear sentence when something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "dirname", "uname", "df", "awk", "cat", "sha256sum", "cut", "readlink", "grep", "sed", "tail", "env",
         "gcc")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with what the script reads, and no environment."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    (folder / "requirements").mkdir()
    for name in ("scripts/setup", "requirements/cpu.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with the named tools and nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, f"{name} is not installed"
        (folder / name).symlink_to(found)
    return folder


def _setup(checkout: Path, path: Path, **environment: str) -> subprocess.CompletedProcess:
    base = {"PATH": str(path), "HOME": str(checkout)}
    return subprocess.run([str(checkout / "scripts/setup")], env=base | environment, capture_output=True, text=True,
                          timeout=240)


def _script(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


def _real_python() -> str:
    return os.path.realpath(Path(sys.base_prefix) / "bin" / "python3.11")


def test_without_python_311(checkout: Path, tools: Path) -> None:
    _script(tools / "python3", "exit 1\n")
    result = _setup(checkout, tools)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines() == [
        "setup: no Python 3.11 found; install it, or name it: make setup PYTHON=/path/to/python3.11"]


def test_on_another_platform(checkout: Path, tools: Path) -> None:
    _script(tools / "uname", 'case "$1" in -s) echo Darwin;; *) echo arm64;; esac\n')
    result = _setup(checkout, tools, PYTHON=_real_python())
    assert result.returncode == 1 and "found Darwin on arm64, expected Linux on x86_64" in result.stderr


def test_without_a_compiler(checkout: Path, tools: Path) -> None:
    (tools / "gcc").unlink()
    result = _setup(checkout, tools, PYTHON=_real_python())
    assert result.returncode == 1 and "no gcc found" in result.stderr


def test_with_a_full_disk(checkout: Path, tools: Path) -> None:
    _script(tools / "df", "echo head; echo / 100 100 2097152 100% /\n")
    result = _setup(checkout, tools, PYTHON=_real_python())
    assert result.returncode == 1 and "2 GiB of disk free" in result.stderr and "expected 6 GiB" in result.stderr


def test_without_a_network(checkout: Path, tools: Path) -> None:
    nowhere = "http://127.0.0.1:9/simple"
    result = _setup(checkout, tools, PYTHON=_real_python(), PIP_CONFIG_FILE="/dev/null", PIP_INDEX_URL=nowhere,
                    TORCH_INDEX=nowhere, PIP_RETRIES="1")
    assert result.returncode == 1
    assert "no network while installing torch" in result.stderr.splitlines()[-1]
    assert not (checkout / ".venv" / "setup.done").exists()


def test_an_environment_of_another_python_is_not_touched(checkout: Path, tools: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    _script(checkout / ".venv/bin/python", '[ "$1" = --version ] && echo Python 3.12.1\nexit 1\n')
    result = _setup(checkout, tools)
    assert result.returncode == 1 and "has Python 3.12.1, expected Python 3.11; remove .venv" in result.stderr

"""`pip install .` in another environment gives a working command line and registers the plugin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built from a copy of the sources and installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("package")
    source, target = folder / "source", folder / "site"
    source.mkdir()
    for name in ("ucm_ray", "actors"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "serve_app.py"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index",
               "--target", str(target), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return target


def _run(installed: Path, folder: Path, *command: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "UCM_RAY_CONFIG")}
    result = subprocess.run(command, cwd=folder, env=environment | {"PYTHONPATH": str(installed)}, text=True,
                            capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_command_line_works_elsewhere(installed: Path, tmp_path: Path) -> None:
    assert "ucm-ray 0.1.0" in _run(installed, tmp_path, sys.executable, str(installed / "bin" / "ucm-ray"), "version")
    assert "blend:" in _run(installed, tmp_path, sys.executable, str(installed / "bin" / "ucm-ray"), "config")
    where = _run(installed, tmp_path, sys.executable, "-c", "import ucm_ray, serve_app; print(ucm_ray.__file__)")
    assert where.splitlines()[-1].startswith(str(installed))


def test_everything_that_runs_is_packed(installed: Path) -> None:
    modules = {path.relative_to(ROOT) for name in ("ucm_ray", "actors") for path in (ROOT / name).rglob("*.py")}
    data = {path.relative_to(ROOT) for folder, pattern in (("ucm_ray/bench/data", "*"), ("ucm_ray/serve", "*.html"))
            for path in (ROOT / folder).rglob(pattern) if path.is_file() and "__pycache__" not in path.parts}
    missing = [str(path) for path in sorted(modules | data) if not (installed / path).exists()]
    assert missing == []


def test_the_plugin_is_registered(installed: Path) -> None:
    text = next(installed.glob("ucm_ray-*.dist-info")).joinpath("entry_points.txt").read_text()
    assert "[vllm.general_plugins]\nucm_ray = ucm_ray.integration.vllm.plugin:register" in text

"""The command line: discovered commands, one-sentence errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ucm_ray.cli import app


def _ucm_ray(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "ucm_ray", *arguments], capture_output=True, text=True, timeout=240)


def test_benchmarks_are_found_by_their_module_name() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    for name in ("store", "analyzer", "retrieval"):
        assert name in result.stdout
    assert "report" not in result.stdout


def test_every_benchmark_and_evaluation_takes_json() -> None:
    from ucm_ray.cli.app import BenchGroup, EvalGroup

    for group in (BenchGroup(name="bench"), EvalGroup(name="eval")):
        for name in group.list_commands(None):
            result = CliRunner().invoke(app, [group.name, name, "--help"])
            assert result.exit_code == 0 and "--json" in result.stdout, (group.name, name, result.output)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from ucm_ray.cli import app; "
        "assert CliRunner().invoke(app, ['--help']).exit_code in (0, 2); "
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert out.strip() == "[]"


def test_a_broken_configuration_is_one_sentence_and_exit_code_2(tmp_path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text("blend: {budgt: 1}")
    result = _ucm_ray("config", str(file))
    assert result.returncode == 2
    assert "did you mean 'budget'" in result.stderr and "Traceback" not in result.stderr


def test_config_prints_every_section() -> None:
    result = _ucm_ray("config")
    assert result.returncode == 0
    for section in ("engine:", "store:", "blend:", "esa:", "retrieval:", "service:"):
        assert section in result.stdout


@pytest.mark.parametrize("arguments", [["bench", "nothing"], ["nothing"]])
def test_unknown_commands_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2

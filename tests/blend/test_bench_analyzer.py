import json

import typer
from typer.testing import CliRunner

from ucm_ray.bench.analyzer import main


def test_bench_analyzer_writes_its_numbers(tmp_path):
    app = typer.Typer()
    app.command()(main)
    target = tmp_path / "analyzer.json"
    options = ["--prompt-tokens", "4096", "--chunks", "20000", "--repeat", "3", "--json", str(target)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    numbers = json.loads(target.read_text())
    assert (numbers["prompt_tokens"], numbers["chunks"]) == (4096, 20000)
    assert numbers["ms"] > 0 and numbers["bytes_per_anchor"] <= 64
    reused = {row["prompt"]: row["reused_tokens"] for row in numbers["rows"] if row["chunks"] == 20000}
    assert reused.pop("one token repeated") > 4000
    assert reused == {"reused": 4096, "half new": 2048, "all new": 0}

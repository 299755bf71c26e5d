"""`ucm-ray cache` against a client that only notes what it is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from ucm_ray.cli import app
from ucm_ray.client import Client
from ucm_ray.serve import api

STORED = api.IngestedDocument(id="a" * 8, num_tokens=1, num_chunks=1, num_bytes=1, new_chunks=1, chunks=[], seconds=0.0)
ANSWERS = {"ingest": api.IngestResponse(data=[STORED]), "list_documents": api.DocumentPage(total=0, offset=0, data=[]),
           "clear_chunks": api.Affected(chunks=7), "pin_chunks": api.Affected(chunks=1),
           "statistics": api.Statistics(chunks=1, tokens=1, bytes=1, pinned=0, requests={}, directory={})}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    made: list = []

    def send(self, call):
        made.append(call)
        return ANSWERS[call.route]

    monkeypatch.setattr(Client, "_send", send)
    return made


def run(*arguments: str):
    return CliRunner().invoke(app, ["cache", *arguments])


@pytest.mark.parametrize(("arguments", "place"), [
    (["stats"], "parameters"), (["list"], "parameters"), (["clear", "--yes"], "parameters"),
    (["pin", "-k", "abcd"], "body"), (["ingest", __file__], "body")])
def test_every_command_can_mean_one_part_of_the_keys_cache(calls: list, arguments: list[str], place: str) -> None:
    for salt in (None, "apart"):
        done = run(*arguments, *(["--cache-salt", salt] if salt else []))
        assert done.exit_code == 0, done.output
        given = getattr(calls[-1], place)
        assert (given.get("cache_salt") if place == "parameters" else given.cache_salt) == salt


def test_clearing_says_which_part_it_means(calls: list) -> None:
    assert "without a cache salt" in CliRunner().invoke(app, ["cache", "clear"], input="n").output
    asked = CliRunner().invoke(app, ["cache", "clear", "--cache-salt", "apart"], input="y")
    assert "under the cache salt 'apart'" in asked.output and "7 chunks deleted" in asked.output


def test_a_suffix_is_read_as_it_is_typed_but_for_new_lines_and_tabs(calls: list, tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_text("Grüße", encoding="utf-8")
    assert run("ingest", str(file), "--suffix", "\\n– Ende –\\t\\x41").exit_code == 0
    assert calls[-1].body.documents[0].text == "Grüße\n– Ende –\t\\x41"


def test_files_that_cannot_be_read_are_one_line(calls: list, tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Grüße".encode("latin-1"))
    for arguments, words in ((["lookup", f"@{tmp_path}/missing"], "cannot be read"),
                             (["lookup", f"@{latin}"], "UTF-8"), (["ingest", str(latin)], "UTF-8")):
        done = run(*arguments)
        assert done.exit_code == 1 and words in done.stderr and done.stderr.count("\n") == 1, done.output
    assert calls == []

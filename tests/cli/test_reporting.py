"""``report``, ``compare`` and ``--fail-if`` on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import rankscope
from tests.runs.builders import make_run, profile


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    for name, last in (("a", 0.5), ("b", 0.3)):
        run = make_run(profile({"relative_residual": [0.9, last]}).table())
        read = replace(run.provenance, inputs="3 texts", inputs_hash="0" * 64)
        replace(run, provenance=read).save(tmp_path / name)
    return tmp_path / "a", tmp_path / "b"


def test_report_writes_one_file_and_says_so(cli, saved: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "out" / "page.html"
    outcome = cli("report", *map(str, saved), "-o", str(page), "--title", "Two <runs>")
    assert outcome.code == 0
    assert outcome.out == ""
    assert outcome.err.startswith(f"wrote {page} (")
    assert "Two &lt;runs&gt;" in page.read_text(encoding="utf-8")
    assert cli("report", str(saved[0]), "-o", str(page), "-q").err == ""


def test_report_of_a_folder_without_a_run(cli, tmp_path: Path) -> None:
    outcome = cli("report", str(tmp_path), "-o", str(tmp_path / "r.html"))
    assert outcome.code == 2
    assert "There is no run in" in outcome.err


def test_compare_as_table_json_figure_and_page(cli, saved: tuple[Path, Path], tmp_path: Path) -> None:
    words = [str(folder) for folder in saved]
    shown = cli("compare", *words)
    assert "-0.200*" in shown.out
    answer = json.loads(cli("compare", *words, "--json", "--level", "0.9").out)
    assert (answer["kind"], answer["level"], answer["paired"]) == ("compare", 0.9, True)
    files = tmp_path / "c.html", tmp_path / "c.png"
    outcome = cli("compare", *words, "-o", str(files[0]), "--figure", str(files[1]), "-q")
    assert outcome.out.count("\n") == 1
    assert all(file.stat().st_size > 5000 for file in files)
    assert "compare · b − a" in files[0].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("condition", "code", "says"),
    [
        ("relative_residual@block.out < 0.6", 1, "failed: any relative_residual@block.out < 0.6 holds at block 1"),
        ("relative_residual@block.out < 0.1", 0, ""),
        ("relative_residual@mlp.out < 0.1", 2, "error: There is no site"),
        ("rank is low", 2, "is not a condition"),
    ],
)
def test_fail_if(cli, monkeypatch: pytest.MonkeyPatch, condition: str, code: int, says: str) -> None:
    run = make_run(profile({"relative_residual": [0.9, 0.5]}).table())
    monkeypatch.setitem(vars(rankscope), "measure", lambda *_, **__: run)
    outcome = cli("measure", "init:tiny-bert", "-q", "--fail-if", condition)
    assert outcome.code == code
    assert says in outcome.err
    if code == 1:
        assert outcome.out == f"{run.verdict}\n", "the result is printed all the same"

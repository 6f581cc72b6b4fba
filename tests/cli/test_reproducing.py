"""``rankscope reproduce``: the list, a small run written and drawn again, and wrong use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankscope._citations import Cite
from rankscope.ext.papers._spec import REPRODUCTIONS, Reproduction, Settings
from rankscope.ext.papers.measuring.parts import RowRecorder, finished_run
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run


def test_the_list(cli) -> None:
    assert "dong2021-fig2" in cli("reproduce", "--list").out
    answer = json.loads(cli("reproduce", "--list", "--json").out)
    assert answer["kind"] == "reproductions"
    assert {"name", "title", "cites", "paper"} <= set(answer["entries"][0])


def test_a_run_is_written_and_can_be_described_again(cli, tmp_path: Path) -> None:
    first = cli("reproduce", "dong2021-path-census", "--small", "--out", str(tmp_path))
    assert first.code == 0
    assert first.out == (tmp_path / "text.md").read_text(encoding="utf-8")
    assert "figure.svg" in first.err
    again = cli("reproduce", "--from", str(tmp_path))
    assert again.out == first.out
    rows = json.loads(cli("reproduce", "dong2021-path-census", "--small", "--json").out)["rows"]
    assert {row["metric"] for row in rows} == {"path_share", "path_count"}


def test_wrong_use_is_answered(cli) -> None:
    assert "--list" in cli("reproduce").err
    unknown = cli("reproduce", "dong2021-fig3")
    assert unknown.code == 2
    assert "dong2021-fig2" in unknown.err
    assert "bert" in cli("reproduce", "dong2021-path-census", "--bert", "x").err


def test_a_declaration_is_all_a_reproduction_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli) -> None:
    def measure(settings: Settings) -> Run:
        writer = RowWriter(coordinates=("seed",))
        RowRecorder(writer).add("answer", 42.0, "paths", seed=0)
        return finished_run(settings, writer, Provenance(model="none", origin="memory"), {}, small=settings.small)

    class Tiny:
        def judge(self, run: Run) -> str:
            return f"It reads {run.table['value'][0]}."

        def describe(self, run: Run) -> str:
            return "One number."

        def draw(self, run: Run) -> dict[str, Any]:
            return {}

    entry = Reproduction(
        name="tiny-2026",
        title="How small can a reproduction be?",
        cites=(Cite("dong2021attention"),),
        paper="Nothing is claimed.",
        run=lambda: measure,
        show=Tiny,
    )
    assert "tiny-2026" not in REPRODUCTIONS
    monkeypatch.setitem(REPRODUCTIONS._entries, "tiny-2026", entry)
    assert "tiny-2026" in cli("reproduce", "--list").out
    first = cli("reproduce", "tiny-2026", "--small", "--out", str(tmp_path))
    assert first.out.startswith("# How small can a reproduction be?\n\nIt reads 42.0.\n")
    assert cli("reproduce", "--from", str(tmp_path)).out == first.out

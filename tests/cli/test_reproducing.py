"""``rankscope reproduce``: the list, a small run written and drawn again, and wrong use."""

from __future__ import annotations

import json
from pathlib import Path


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

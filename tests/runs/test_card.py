"""The block for a model card: the values of the run, and harmless with hostile names."""

from __future__ import annotations

import dataclasses

import pytest

import rankscope as rs
from rankscope.errors import ResultError
from rankscope.views import number


@pytest.fixture(scope="module")
def run() -> rs.Run:
    return rs.measure("init:tiny-bert", rs.Inputs(sequences=2, tokens=16))


def test_it_has_the_verdict_and_the_values_at_both_ends(run: rs.Run) -> None:
    card = run.card()
    curve = run.curve("relative_residual", "block.out").mean
    assert card.startswith("### Rank collapse: init:tiny-bert\n")
    assert run.verdict.split(":")[0] in card
    (row,) = [line for line in card.splitlines() if "`relative_residual`" in line]
    assert [part.strip() for part in row.split("|")[2:4]] == [number(float(curve[end])) for end in (0, -1)]


def test_a_saved_run_gives_the_same_card(run: rs.Run, tmp_path) -> None:
    run.save(tmp_path / "run")
    assert rs.load_run(tmp_path / "run").card() == run.card()


def test_hostile_names_stay_text(run: rs.Run) -> None:
    name = "</svg><script>alert(1)</script> | [x](javascript:y) `a`\n# b"
    card = dataclasses.replace(run, provenance=dataclasses.replace(run.provenance, model=name)).card()
    assert "<script>" not in card.replace("\\<script\\>", "")
    assert card.splitlines()[0].endswith("\\# b")


def test_a_run_without_blocks_is_refused(run: rs.Run) -> None:
    with pytest.raises(ResultError, match="by block"):
        dataclasses.replace(run, table=run.table.slice(0, 0)).card()

"""The page about verdicts says what the code does."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rankscope._types import Status
from rankscope.runs.curves import curve
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.verdicts.axes import AXES
from rankscope.verdicts.states import MEANINGS, THRESHOLDS, State

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "verdicts.md").read_text(encoding="utf-8")


def test_the_page_lists_every_state_in_order() -> None:
    rows = [f"| `{state.code}` | {MEANINGS[state]} |" for state in State]
    assert "\n".join(rows) in PAGE


def test_the_page_has_the_table_of_thresholds() -> None:
    rows = [f"| {one.axis} | `{one.state}` | {one.condition} | {one.value:g} | {one.reason} |" for one in THRESHOLDS]
    assert "\n".join(rows) in PAGE


def test_thresholds_name_states() -> None:
    assert {one.state for one in THRESHOLDS} <= {state.code for state in State}
    assert {one.axis for one in THRESHOLDS} <= set(AXES)


def test_averages_hold_what_the_page_about_statuses_says() -> None:
    """``ok``, ``at the float floor`` and ``estimated`` enter a mean and mark it; the others do not."""
    writer = RowWriter()
    statuses = [Status.OK, Status.FLOOR, Status.ESTIMATE, Status.UNDEFINED, Status.NOT_FINITE]
    place = {"metric": "relative_residual", "site": "block.out", "stack": None, "layer": 0, "first_sequence": 0}
    codes = np.array([STATUS_CODE[status] for status in statuses])
    writer.add(values=np.array([1.0, 2.0, 6.0, 100.0, 100.0]), statuses=codes, head_axis=False, **place)
    line = curve(writer.table(), "relative_residual", "block.out")
    assert (line.mean.tolist(), line.n.tolist()) == ([3.0], [3])
    assert line.any_floor.tolist() == line.any_estimate.tolist() == [True]
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    assert "the values that are `ok`, `at the float floor` or `estimated`, and is marked" in page

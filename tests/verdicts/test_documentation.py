"""The page about verdicts says what the code does."""

from __future__ import annotations

from pathlib import Path

from rankscope.verdicts.states import MEANINGS, THRESHOLDS, State

PAGE = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text(encoding="utf-8")


def test_the_page_lists_every_state_in_order() -> None:
    rows = [f"| `{state.code}` | {MEANINGS[state]} |" for state in State]
    assert "\n".join(rows) in PAGE


def test_the_page_has_the_table_of_thresholds() -> None:
    rows = [f"| `{one.state}` | {one.condition} | {one.value:g} | {one.reason} |" for one in THRESHOLDS]
    assert "\n".join(rows) in PAGE


def test_thresholds_name_states() -> None:
    assert {one.state for one in THRESHOLDS} <= {state.code for state in State}

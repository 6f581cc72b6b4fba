"""A sentence claims of all blocks, sequences or heads only what holds of all of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.runs.rows import RowWriter, only
from rankscope.verbs.exact.judge import judge_exact
from rankscope.verdicts import judge_rows
from rankscope.verdicts.battery import read_battery
from rankscope.verdicts.classifying import classify
from rankscope.verdicts.reading import SEEN_OR_NOT
from rankscope.verdicts.states import State

LEVELS = (0.9, 0.3, 0.02, 1e-4)
"""Relative residuals of healthy tokens, of tokens with a common vector, and of collapsed ones."""


def table_of(grid: np.ndarray, metric: str = "relative_residual", **at: str) -> RowWriter:
    """Values by block and sequence."""
    writer = RowWriter(tuple(at))
    for layer, row in enumerate(grid):
        writer.add(metric=metric, site="block.out", stack=None, layer=layer, first_sequence=0, values=row,
                   statuses=np.zeros(row.shape, int), head_axis=False, at=at)  # fmt: skip
    return writer


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 5).flatmap(
        lambda blocks: st.integers(1, 4).flatmap(
            lambda count: st.lists(
                st.lists(st.sampled_from(LEVELS), min_size=count, max_size=count), min_size=blocks, max_size=blocks
            )
        )
    )
)
def test_states_of_some_blocks_and_sequences(levels: list[list[float]]) -> None:
    grid = np.array(levels)
    table = table_of(grid).table()
    verdict = judge_rows(table)
    battery = read_battery(table)
    assert battery is not None
    states = classify(battery)
    code = next(state for state in State if state.code == verdict.code)
    if code is State.COLLAPSING:
        return  # a trend over depth; not a state of single blocks
    wanted = SEEN_OR_NOT if code in SEEN_OR_NOT else (code,)
    held = np.isin(states, [int(state) for state in wanted])
    first = str(verdict).split(". ")[0]
    members = held.any(axis=0)
    counted = re.search(r"in (\d+) of (\d+) sequences", first)
    if code is not State.HEALTHY:
        # Sequences: all are meant, or their number is said.
        assert counted is not None or members.all(), first
        if counted:
            assert (int(counted[1]), int(counted[2])) == (members.sum(), members.size)
        # Blocks: "every" and "from .. on" hold for each sequence that is meant, or the share is said.
        share = re.search(r"\(in (half|some) of (the sequences|these)", first)
        if "in every block" in first and share is None:
            assert held[:, members].all(), (first, grid)
        if (start := re.search(r"from block (\d+) on", first)) and share is None:
            assert held[int(start[1]) :, members].all(), (first, grid)
    if code is State.COLLAPSED:
        # The value quoted is that of collapsed tokens, never a mean with others.
        value = next(item["value"] for item in verdict.evidence if item.get("code") == "collapsed")
        assert value <= 0.03, (first, grid)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from((3.0, 1.0, 2.0)), min_size=2, max_size=7), st.integers(0, 2))
def test_orders_of_some_blocks(orders: list[float], before: int) -> None:
    """Blocks above 10^-3 have no order; each other block has its own."""
    relative = np.where(np.arange(len(orders)) < before, -1.6, -4.0 - np.arange(len(orders)))[:, None]
    parts = {"log10_relative_residual": relative, "log10_residual": relative + 1, "order": np.array(orders)[:, None],
             "factor": np.full((len(orders), 1), 0.5)}  # fmt: skip
    writer = RowWriter(("arithmetic",))
    for metric, values in parts.items():
        for piece in table_of(values, metric, arithmetic="exact").pieces:
            writer.replace([*writer.pieces, piece])
    table = writer.table()
    sentence = str(judge_exact(table, {"float64": 1e-15}))
    judged = orders[before:]
    if "each block cubes" in sentence:
        assert set(judged) == {3.0}
    if "each block multiplies" in sentence:
        assert set(judged) == {1.0}
    for order in (3.0, 1.0):
        named = re.search(rf"order {order:.0f} in blocks? ([0-9, -]+)", sentence)
        if named and "more spans" not in sentence and len(set(judged)) > 1:
            listed: set[int] = set()
            for word in named[1].strip(" ,").split(","):
                ends = [int(end) for end in word.split("-")]
                listed |= set(range(ends[0], ends[-1] + 1))
            assert listed == {place for place in range(before, len(orders)) if orders[place] == order}, sentence
    assert only(table, metric="order").num_rows == len(orders)


@pytest.mark.parametrize(
    ("orders", "words"),
    [
        ([3, 1, 3, 1, 3], "order 3 in blocks 0, 2, 4, order 1 in blocks 1, 3"),
        ([1, 3, 1, 3, 1], "order 1 in blocks 0, 2, 4, order 3 in blocks 1, 3"),
        ([3, 3, 3], "each block cubes the distance between tokens (order 3)"),
        ([1, 1], "each block multiplies the distance between tokens, by 0.5 late in depth (order 1)"),
    ],
)
def test_orders_in_words(orders: list[int], words: str) -> None:
    relative = -4.0 - np.arange(len(orders))[:, None]
    parts = {"log10_relative_residual": relative, "log10_residual": relative, "order": np.array(orders)[:, None],
             "factor": np.full((len(orders), 1), 0.5)}  # fmt: skip
    writer = RowWriter(("arithmetic",))
    for metric, values in parts.items():
        writer.replace([*writer.pieces, *table_of(values, metric, arithmetic="exact").pieces])
    assert words in str(judge_exact(writer.table(), {"float64": 1e-15}))

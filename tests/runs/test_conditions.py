"""Conditions for CI use: what they read, when they hold, what is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.errors import InputError, UnknownNameError
from rankscope.runs.conditions import OPERATORS, parse_condition
from tests.runs.builders import profile

TABLE = profile({"relative_residual": [0.9, 1e-4, 0.5], "stable_rank": [5.0, 4.0, 3.0]}, sequences=1).table()


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("relative_residual@block.out < 1e-3", "block 1"),
        ("any relative_residual@block.out<0.001", "block 1"),
        ("all relative_residual@block.out < 1e-3", None),
        ("all stable_rank@block.out >= 3", "block 0"),
        ("last stable_rank@block.out <= 3", "block 2"),
        ("last relative_residual@block.out < 1e-3", None),
        ("relative_residual@block.out@0,2 < 1e-3", None),
        ("relative_residual@block.out@1 < 1e-3", "block 1"),
        ("stable_rank@block.out > 4.5", "block 0"),
    ],
)
def test_when_a_condition_holds(words: str, where: str | None) -> None:
    held = parse_condition(words).where_met(TABLE)
    assert held is None if where is None else held is not None and where in held


def test_stacks_are_looked_at_one_by_one() -> None:
    writer = profile({"relative_residual": [0.9, 0.9]}, stack="encoder")
    profile({"relative_residual": [0.9, 0.01]}, stack="decoder", writer=writer)
    held = parse_condition("last relative_residual@block.out < 0.1").where_met(writer.table())
    assert held is not None
    assert "decoder block 1" in held


def test_a_check_that_cannot_be_made_does_not_pass() -> None:
    nothing = profile({"relative_residual": [float("nan")] * 2}).table()
    with pytest.raises(InputError, match="cannot be judged"):
        parse_condition("relative_residual@block.out < 1").where_met(nothing)
    with pytest.raises(InputError, match="cannot be judged"):
        parse_condition("relative_residual@block.out@99 < 1").where_met(TABLE)
    with pytest.raises(UnknownNameError, match="relative_residual"):
        parse_condition("relativ_residual@block.out < 1").where_met(TABLE)
    with pytest.raises(UnknownNameError, match="site"):
        parse_condition("stable_rank@mlp.out < 1").where_met(TABLE)


@pytest.mark.parametrize(
    "words",
    ["", "relative_residual < 1", "a@b == 1", "a@b.c < nan", "a@b.c < 1 or True", "__import__('os')@b < 1",
     "a@b.c < 1.2.3", "a@b.c@x < 1", "every a@b.c < 1", "a@b.c < 1" + " " * 600, "a@b.c < 1e999"],
)  # fmt: skip
def test_anything_else_is_refused(words: str) -> None:
    with pytest.raises(InputError, match="is not a condition"):
        parse_condition(words)


@given(st.sampled_from(["any", "all", "last"]), st.sampled_from(list(OPERATORS)), st.floats(-1e6, 1e6),
       st.lists(st.integers(0, 500), max_size=4))  # fmt: skip
def test_what_is_written_reads_back(quantifier: str, sign: str, value: float, layers: list[int]) -> None:
    at = "@" + ",".join(map(str, layers)) if layers else ""
    found = parse_condition(f"{quantifier} stable_rank@block.out{at} {sign} {value!r}")
    assert (found.quantifier, found.comparison, found.value) == (quantifier, sign, value)
    assert found.layers == (tuple(layers) or None)


@given(st.text(max_size=60))
def test_no_text_does_anything_but_parse_or_be_refused(words: str) -> None:
    with suppress(InputError):
        assert parse_condition(words).comparison in OPERATORS

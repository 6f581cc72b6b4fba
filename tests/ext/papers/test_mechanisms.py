"""The table of mechanisms: its rows build, orders come out as they must, and lines are what the values say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope.errors import InputError, UnknownNameError
from rankscope.exact_arithmetic.float64 import WideArithmetic
from rankscope.ext.papers._spec import Settings
from rankscope.ext.papers.mechanisms.rows import GROUPS, IN_SMALL, MECHANISMS, SMALL
from rankscope.ext.papers.mechanisms.run import (
    CHANGES,
    COORDINATES,
    built,
    drawn_together,
    inputs_of,
    measure,
    structure,
)
from rankscope.ext.papers.mechanisms.show import MechanismLine, end_words, lines_of, log10_words
from rankscope.ext.papers.reproducing import reproduce
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed


@pytest.fixture(scope="module")
def lines() -> dict[tuple[str, str], MechanismLine]:
    run = measure(Settings("mechanisms", small=True, only=("bert", "sinks", "relative-bias", "fourier")))
    return {(line.mechanism.name, line.change): line for line in lines_of(run)}


def test_at_least_as_many_rows_as_promised() -> None:
    assert len(MECHANISMS) >= 25
    assert {entry.group for entry in MECHANISMS.values()} == set(GROUPS)
    assert set(IN_SMALL) <= set(MECHANISMS)
    assert {change.mechanism for change in CHANGES} <= set(MECHANISMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MECHANISMS)
def test_blocks_are_found_and_deep_enough(name: str) -> None:
    loaded = built(MECHANISMS[name], SMALL, 0)
    view = structure(loaded.model, inputs_of(loaded, SMALL, None)[0])
    assert [stack.depth for stack in view.stacks] == [SMALL.depth]
    assert all(plan.skips for stack in view.stacks for plan in stack.plans)


def test_orders_of_the_three_ways(lines: dict[tuple[str, str], MechanismLine]) -> None:
    assert lines["bert", "none"].order["cut"] == 3
    assert lines["relative-bias", "none"].order["cut"] == 1
    assert lines["fourier", "none"].order["cut"] == 0
    assert lines["bert", "none"].order["full"] == 1
    assert lines["bert", "none"].order_read["cut"] == "exact"


def test_the_component_that_explains_a_row_does(lines: dict[tuple[str, str], MechanismLine]) -> None:
    assert lines["relative-bias", "no bias"].order["cut"] == 3
    assert lines["sinks", "none"].order["cut"] == 0
    assert lines["sinks", "no sinks"].order["cut"] == 1
    assert lines["sinks", "none"].level["cut"] > 1e-3


@pytest.mark.parametrize("factor", [0.0, 0.01])
def test_tokens_are_drawn_together_at_the_first_block_only(factor: float) -> None:
    loaded = built(MECHANISMS["llama"], SMALL, 0)
    batch = inputs_of(loaded, SMALL, None)[0]
    view, seen = structure(loaded.model, batch), {}

    def observe(ref: object, x: torch.Tensor) -> None:
        seen.setdefault(len(seen), x.detach().clone())

    with undisturbed(loaded.model), WideArithmetic():
        sites = SiteSelection.parse(("block.in",))
        with trace(view, sites, observe):
            batch.run(loaded.model)
        with drawn_together(view, factor), trace(view, sites, observe):
            batch.run(loaded.model)
        with trace(view, sites, observe):
            batch.run(loaded.model)
    plain, drawn, after = (seen[0], seen[1]), (seen[2], seen[3]), (seen[4], seen[5])
    mean = plain[0].mean(dim=1, keepdim=True)
    torch.testing.assert_close(drawn[0], mean + factor * (plain[0] - mean), rtol=1e-14, atol=1e-16)
    assert not torch.equal(drawn[1], plain[1])
    assert all(torch.equal(a, b) for a, b in zip(plain, after, strict=True))


def test_a_sparse_pattern_is_still_sparse_after_it_was_probed() -> None:
    loaded = built(MECHANISMS["big-bird"], SMALL, 0)
    structure(loaded.model, inputs_of(loaded, SMALL, None)[0])
    assert loaded.model.attention_type == "block_sparse"


def made_up(values: dict[tuple[str, str, str], list[float]], depth: int) -> Run:
    """A run with these values by (variant, arithmetic, metric), one seed, one value per block."""
    writer = RowWriter(coordinates=COORDINATES)
    rest = {"site": "block.out", "stack": None, "first_sequence": 0, "statuses": np.array([0]), "head_axis": False}
    for (variant, arithmetic, metric), numbers in values.items():
        at = {"mechanism": "llama", "change": "none", "variant": variant, "arithmetic": arithmetic, "seed": 0}
        for layer, value in enumerate(numbers):
            writer.add(metric=metric, layer=layer, values=np.array([value]), at=at, **rest)
    size = {"depth": depth, "seeds": 1, "width": 8, "heads": 2, "tokens": 4, "vocabulary": 9}
    return Run(
        kind="reproduce:mechanisms",
        provenance=Provenance(model="made up", origin="memory"),
        floor={"dtype": "float64", "relative": 1e-15, "meaning": ""},
        verdict="",
        table=writer.table(),
        extra={"size": size},
    )


def test_a_line_is_what_its_values_say() -> None:
    run = made_up(
        {
            ("full", "float64", "mu_over_norm"): [0.9, 0.8, 0.7, 0.6],
            ("cut", "float64", "mu_over_norm"): [0.1, 1e-3, 1e-5, 1e-7],
            ("cut", "exact", "log10_relative_residual"): [-1.0, -3.0, -5.0, -7.0],
            ("cut", "exact", "order"): [1.0, 1.0, 1.0, 1.0],
            ("cut", "exact", "log10_near_collapse"): [-90.0, -91.0, -91.5, -92.0],
        },
        depth=4,
    )
    (line,) = lines_of(run)
    assert 10 ** line.ends["full"].log10 == pytest.approx(0.6)
    assert (line.ends["cut"].log10, line.ends["cut"].arithmetic) == (-7.0, "exact")
    assert line.order["cut"] == 1
    assert line.factor["cut"] == pytest.approx(10**-0.5)


def test_tokens_that_do_not_last_are_told_from_tokens_that_are_equal() -> None:
    nan = math.nan
    run = made_up(
        {
            ("full", "float64", "mu_over_norm"): [0.9, 0.8, 0.7, 0.6],
            ("cut", "float64", "mu_over_norm"): [0.1, 1e-3, nan, nan],
            ("cut", "float64", "log10_token_size"): [-3.0, -20.0, -300.0, nan],
        },
        depth=4,
    )
    (line,) = lines_of(run)
    assert line.ends["cut"].lost_after == 2
    assert line.ends["cut"].fate == "vanish"
    assert end_words(line.ends["cut"]) == "10<sup>−3.0</sup> at block 2, then tokens vanish"
    assert line.order["cut"] is None


def test_words_for_a_number_given_by_its_logarithm() -> None:
    assert log10_words(-0.5) == "0.316"
    assert log10_words(-17.29) == "10<sup>−17.3</sup>"
    assert log10_words(-531154.2) == "10<sup>−531154</sup>"


def test_rows_that_are_not_there_are_answered() -> None:
    with pytest.raises(UnknownNameError, match="longformer"):
        reproduce("mechanisms", small=True, only=["longfromer"])
    with pytest.raises(InputError, match="is not a table"):
        reproduce("dong2021-path-census", small=True, only=["bert"])

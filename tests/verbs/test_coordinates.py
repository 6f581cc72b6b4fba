"""``Run.curve`` and ``Run.select`` on a run of every verb: rows of one network, or a refusal."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest

import rankscope as rs
from rankscope.errors import InputError, UnknownNameError
from rankscope.runs.curves import USABLE
from rankscope.runs.run import Run
from rankscope.verbs._spec import VERBS

SMALL = {"sequences": 2, "tokens": 8}
RUNS: dict[str, Callable[[], Run]] = {
    "measure": lambda: rs.measure("init:tiny-bert", rs.Inputs(**SMALL)),
    "measure, two stacks": lambda: rs.measure("init:tiny-t5", rs.Inputs(**SMALL)),
    "exact": lambda: rs.exact("init:tiny-bert", rs.Inputs(**SMALL), rs.Surgery(skip=0, mlp="drop")),
    "ablate": lambda: rs.ablate("init:tiny-bert", rs.Inputs(**SMALL), masks=["own", "causal"]),
    "bound": lambda: rs.bound("init:tiny-bert", rs.Inputs(**SMALL)),
    "decompose": lambda: rs.decompose("init:tiny-bert", rs.Inputs(**SMALL)),
    "remedy": lambda: rs.remedy("init:tiny-bert", rs.Inputs(**SMALL), remedies=["residual_scale"]),
    "predict": lambda: rs.predict("init:tiny-bert", seeds=2, tokens=8),
}
AVERAGED = ("metric", "site", "layer", "head", "sequence", "value", "status", "low", "high")


@cache
def run_of(name: str) -> tuple[Run, pd.DataFrame]:
    run = RUNS[name]()
    return run, run.to_frame()


def choices(frame: pd.DataFrame, names: list[str]) -> Iterator[dict[str, Any]]:
    """Up to four combinations of values that occur, for every subset of the coordinates."""
    for size in range(len(names) + 1):
        for few in itertools.combinations(names, size):
            for row in frame[list(few)].drop_duplicates()[:4].itertuples(index=False):
                yield {name: None if pd.isna(value) else value for name, value in zip(few, row, strict=True)}


def matching(frame: pd.DataFrame, at: dict[str, Any]) -> pd.DataFrame:
    for name, value in at.items():
        frame = frame[frame[name].isna() if value is None else frame[name] == value]
    return frame


def test_every_verb_that_makes_runs_is_here() -> None:
    assert {name for name, verb in VERBS.items() if verb.makes_runs} == {name.partition(",")[0] for name in RUNS}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RUNS)
def test_one_value_or_a_refusal(name: str) -> None:
    run, frame = run_of(name)
    coordinates = [column for column in frame.columns if column not in AVERAGED]
    declared = {column for column in VERBS[run.kind].columns if column in frame.columns and column not in AVERAGED}
    assert declared <= set(coordinates)
    answered = refused = 0
    for (metric, site), rows in frame.groupby(["metric", "site"], observed=True):
        varying = [column for column in coordinates if rows[column].nunique(dropna=False) > 1]
        for at in choices(rows, varying):
            wanted = matching(rows, at)
            mixed = [column for column in coordinates if wanted[column].nunique(dropna=False) > 1]
            if mixed:
                refused += 1
                # The message is enough to go on: the coordinate, and a value of it in the syntax of the call.
                for call in (run.curve, run.select):
                    with pytest.raises(InputError, match=rf"values of {mixed[0]} \(.*Choose one, as in {mixed[0]}="):
                        call(metric=metric, site=site, **at)
                continue
            answered += 1
            values = run.select(metric=metric, site=site, **at)["value"].to_numpy()
            np.testing.assert_array_equal(np.sort(values), np.sort(wanted["value"].to_numpy()))
            usable = wanted[wanted["status"].isin(USABLE) & (wanted["value"].notna())]
            line = run.curve(metric, site, **at)
            expected = usable.groupby("layer")["value"].mean().reindex(line.layers).to_numpy()
            np.testing.assert_allclose(line.mean, expected, rtol=1e-12)
            assert line.n.tolist() == usable.groupby("layer").size().reindex(line.layers, fill_value=0).tolist()
    assert answered
    assert bool(refused) == any(
        rows[column].nunique(dropna=False) > 1
        for _, rows in frame.groupby(["metric", "site"], observed=True)
        for column in coordinates
    )


def test_columns_and_values_that_a_run_does_not_have() -> None:
    run, frame = run_of("ablate")
    with pytest.raises(UnknownNameError, match="Did you mean 'variant'"):
        run.curve("relative_residual", "block.out", varian="pure")
    with pytest.raises(UnknownNameError, match=r"variant among these rows named 'pur'\. Did you mean 'pure'"):
        run.select(metric="relative_residual", site="block.out", variant="pur")
    both = run.select(metric="relative_residual", site="block.out", variant=["pure", "full"], mask="own")
    twin = frame[(frame.metric == "relative_residual") & (frame.site == "block.out") & (frame["mask"] == "own")]
    assert both.num_rows == twin["variant"].isin(["pure", "full"]).sum()
    with pytest.raises(InputError, match="values of variant"):  # a mean over both is not on offer
        run.curve("relative_residual", "block.out", variant=["pure", "full"], mask="own")
    one = run.curve("relative_residual", "block.out", variant="full", mask="own", sequence=1)
    alone = twin[(twin["variant"] == "full") & (twin["sequence"] == 1)].sort_values("layer")["value"]
    np.testing.assert_array_equal(one.mean, alone.to_numpy())

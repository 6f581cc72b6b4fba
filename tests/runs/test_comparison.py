"""Differences and their intervals: closed forms, a slow reference, coverage, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from rankscope import Inputs, Run, compare, measure
from rankscope.errors import InputError, UnknownNameError
from rankscope.runs.comparison import by_sequence
from rankscope.runs.curves import names_in
from rankscope.runs.intervals import mean_differences
from rankscope.runs.rows import RowWriter
from tests.flat_calls import flat
from tests.runs.builders import make_run, profile


def read(run: Run, **facts: object) -> Run:
    return dataclasses.replace(run, provenance=dataclasses.replace(run.provenance, **facts))


def run_with(values: np.ndarray, metric: str = "relative_residual", **given: object):
    """A run of one metric with the values ``(layers, sequences)``."""
    writer = RowWriter()
    for layer, row in enumerate(values):
        writer.add(metric=metric, site="block.out", stack=None, layer=layer, first_sequence=0, values=row,
                   statuses=np.where(np.isnan(row), 2, 0), head_axis=False)  # fmt: skip
    return read(make_run(writer.table(), **given), inputs="built-in sample text", inputs_hash="0" * 64)


def test_a_constant_shift_between_pairs_is_known_exactly() -> None:
    a = np.random.default_rng(1).normal(size=(4, 12))
    found = mean_differences(a, a + 0.25, paired=True, level=0.95)
    assert found.difference == pytest.approx(np.full(4, 0.25))
    assert found.low == pytest.approx(np.full(4, 0.25))
    assert found.high == pytest.approx(np.full(4, 0.25))


def test_pairing_removes_the_spread_of_the_sequences() -> None:
    random = np.random.default_rng(2)
    a = 10 * random.normal(size=(1, 20))
    b = a + 0.1 * random.normal(size=(1, 20))
    paired = mean_differences(a, b, paired=True, level=0.95)
    apart = mean_differences(a, b, paired=False, level=0.95)
    assert (paired.high - paired.low)[0] < 0.05 * (apart.high - apart.low)[0]


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_intervals_are_those_of_scipy(level: float) -> None:
    random = np.random.default_rng(3)
    a, b = random.normal(size=15), random.normal(1.0, 2.0, size=15)
    b[3] = np.nan
    both = np.isfinite(b)
    paired = mean_differences(a[None], b[None], paired=True, level=level)
    expected = stats.ttest_rel(b[both], a[both]).confidence_interval(level)
    assert (paired.low[0], paired.high[0]) == pytest.approx(tuple(expected), rel=1e-9)
    apart = mean_differences(a[None], b[None], paired=False, level=level)
    expected = stats.ttest_ind(b[both], a, equal_var=False).confidence_interval(level)
    assert (apart.low[0], apart.high[0]) == pytest.approx(tuple(expected), rel=1e-9)


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("sequences", [4, 8, 30])
def test_intervals_cover_the_truth(sequences: int, paired: bool) -> None:
    random = np.random.default_rng(4)
    a, b = random.normal(size=(2000, sequences)), random.normal(0.5, 1.0, size=(2000, sequences))
    found = mean_differences(a, b, paired=paired, level=0.95)
    covered = float(((found.low <= 0.5) & (found.high >= 0.5)).mean())
    # 2000 cases have a standard error of 0.005.
    assert 0.93 < covered < 0.97


def test_undefined_values_leave_their_pair_out() -> None:
    a = np.array([[1.0, 2.0, np.nan, 4.0]])
    b = np.array([[2.0, np.nan, 3.0, 5.0]])
    found = mean_differences(a, b, paired=True, level=0.95)
    assert (found.count_a[0], found.count_b[0]) == (2, 2)
    assert found.difference[0] == 1.0


def test_one_sequence_has_no_interval() -> None:
    found = mean_differences(np.ones((1, 1)), np.full((1, 1), 3.0), paired=True, level=0.95)
    assert found.difference[0] == 2.0
    assert np.isnan(found.low[0])
    one = run_with(np.array([[0.5], [0.4]]))
    assert compare(one, one).verdict.startswith("No interval")


def test_compare_two_runs() -> None:
    random = np.random.default_rng(6)
    base = random.uniform(0.4, 0.6, size=(3, 8))
    answer = compare(run_with(base), run_with(base - np.array([[0.0], [0.1], [0.2]])))
    assert answer.paired
    assert answer.table["difference"].to_pylist() == pytest.approx([0.0, -0.1, -0.2])
    assert answer.verdict.startswith("In b the relative residual at block 2 is lower: -0.200 [-0.200, -0.200].")
    assert "2 of 3 differences" in answer.verdict
    assert "-0.200*" in str(answer)
    assert json.loads(json.dumps(answer.to_json()))["rows"][1]["difference"] == pytest.approx(-0.1)
    assert compare(run_with(base), run_with(base)).table == compare(run_with(base), run_with(base)).table


def test_a_notebook_shows_it_escaped() -> None:
    run = run_with(np.ones((2, 3)), model="<script>")
    shown = compare(run, run)._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown


def test_other_lengths_are_not_paired() -> None:
    base = np.random.default_rng(7).uniform(size=(2, 4))
    answer = compare(run_with(base), run_with(base[:, :3]))
    assert not answer.paired
    assert answer.table["sequences_b"].to_pylist() == [3, 3]
    assert compare(run_with(base), run_with(base[:, :3]), paired=True).table["sequences_a"].to_pylist() == [3, 3]


def test_item_9_runs_that_read_different_tokens_are_not_paired() -> None:
    run = run_with(np.random.default_rng(7).uniform(size=(2, 4)))
    other = read(run, inputs="random tokens, seed 0", inputs_hash="1" * 64)
    answer = compare(run, other)
    assert not answer.paired
    assert "did not read the same tokens" in str(answer)
    assert "The inputs differ: a read built-in sample text, b random tokens, seed 0." in answer.verdict
    asked = compare(run, other, paired=True)
    assert asked.paired
    assert "although the runs did not read the same tokens" in str(asked)
    assert "The inputs differ" in asked.verdict
    assert "The inputs differ" not in compare(run, run).verdict


def test_item_9_a_run_of_an_earlier_version_is_not_paired() -> None:
    run = run_with(np.random.default_rng(7).uniform(size=(2, 4)))
    old = read(run, inputs=None, inputs_hash=None)
    for pair in ((run, old), (old, run), (old, old)):
        assert not compare(*pair).paired
        assert "does not say what it read" in str(compare(*pair))


def test_item_9_text_against_random_tokens() -> None:
    """The whole way: the same model, as many sequences of the same length."""
    options = {"sequences": 3, "tokens": 12, "metrics": ["relative_residual"]}
    text, random = (flat(measure, "init:tiny-bert", random_tokens=chosen, **options) for chosen in (False, True))
    assert text.provenance.lengths == random.provenance.lengths
    assert not compare(text, random).paired
    assert compare(text, flat(measure, "init:tiny-bert", seed=1, batch=2, **options)).paired, (
        "other weights, same tokens"
    )


def test_saved_runs_and_depths_that_differ(tmp_path: Path) -> None:
    base = np.random.default_rng(8).uniform(size=(5, 4))
    run_with(base).save(tmp_path / "a")
    run_with(base[:3]).save(tmp_path / "b")
    assert compare(tmp_path / "a", tmp_path / "b").table["layer"].to_pylist() == [0, 1, 2]


def test_what_only_one_run_has_is_said() -> None:
    """Networks of different depth share their first blocks only."""
    short, deep = (make_run(profile({"relative_residual": [0.5] * depth}).table()) for depth in (2, 6))
    found = compare(short, deep)
    assert found.table["layer"].to_pylist() == [0, 1]
    assert found.verdict.endswith(
        "Not compared, because the other run has no counterpart: 4 of the 6 values of b (blocks 2 to 5)."
    )
    more = make_run(profile({"relative_residual": [0.5] * 2, "mean_cosine": [0.1, 0.2]}).table())
    assert (
        "2 of the 4 values of a (metric mean_cosine); 4 of the 6 values of b (blocks 2 to 5)"
        in compare(more, deep).verdict
    )
    assert "Not compared" not in compare(deep, deep).verdict


def test_what_does_not_compare_is_refused() -> None:
    one, other = run_with(np.ones((2, 3))), run_with(np.ones((2, 3)), metric="stable_rank")
    with pytest.raises(InputError, match="share no value"):
        compare(one, other)
    with pytest.raises(UnknownNameError, match="stable_rank"):
        compare(one, one, metrics=["stable_rank"])
    with pytest.raises(InputError, match="between 0 and 1"):
        compare(one, one, level=95)
    exact = make_run(one.table)
    object.__setattr__(exact, "kind", "exact")
    with pytest.raises(InputError, match="two runs of one verb"):
        compare(one, exact)


def test_heads_are_averaged_within_a_sequence() -> None:
    writer = RowWriter()
    values = np.arange(6.0).reshape(2, 3)
    writer.add(metric="m", site="s", stack=None, layer=0, first_sequence=0, values=values,
               statuses=np.zeros((2, 3), dtype=int), head_axis=True)  # fmt: skip
    assert by_sequence(writer.table()).values.tolist() == [[1.0, 4.0]]


def test_the_figure_has_a_panel_per_metric() -> None:
    writer = profile({"relative_residual": [0.9, 0.8], "stable_rank": [3.0, 2.0]})
    other = profile({"relative_residual": [0.7, 0.6], "stable_rank": [3.0, 2.5]})
    figure = compare(make_run(writer.table()), make_run(other.table())).plot()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["relative residual", "stable rank"]
    line = figure.axes[0].lines[0]
    assert line.get_ydata() == pytest.approx([-0.2, -0.2])


def test_ranks_at_different_lengths_are_not_compared() -> None:
    """Effective rank grows with the number of tokens in any model; the relative residual does not."""
    one, other = (
        measure("init:tiny-gpt2", Inputs(sequences=3, tokens=tokens), metrics=["effective_rank", "relative_residual"])
        for tokens in (12, 24)
    )
    found = compare(one, other)
    assert names_in(found.table, "metric") == ["relative_residual"]
    assert (
        "different numbers of tokens (12 and 24). effective_rank depend on that and were not compared." in found.verdict
    )
    with pytest.raises(
        InputError, match="effective_rank depends on the number of tokens, and the runs counted 12 and 24"
    ):
        compare(one, other, metrics=["effective_rank"])
    assert compare(one, other, metrics=["relative_residual"]).table.num_rows == found.table.num_rows
    assert "not compared" not in compare(one, one).verdict

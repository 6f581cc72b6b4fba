"""A run is frozen, says the same in every form, and survives the disk."""

from __future__ import annotations

import builtins
import dataclasses
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest

from rankscope._types import Status
from rankscope.errors import InputError, MissingExtraError, UnknownNameError
from rankscope.runs.run import Run, load_run
from tests.runs.builders import make_run, profile


@pytest.fixture
def run() -> Run:
    writer = profile({"relative_residual": [0.9, 0.5, math.nan], "mean_cosine": [0.1, 0.2, 0.3]})
    writer.add(
        metric="attention_entropy",
        site="attention.probs",
        stack=None,
        layer=0,
        first_sequence=0,
        values=np.array([[0.25, 0.75]] * 3),
        statuses=np.zeros((3, 2), int),
        head_axis=True,
    )
    return make_run(writer.table(), null={"relative_residual": {"mean": 0.99, "sd": 0.01, "draws": 4}}, notes=("n",))


def test_json_has_exactly_the_promised_shape(run: Run) -> None:
    answer = json.loads(json.dumps(run.to_json(), allow_nan=False))
    assert list(answer) == [
        *("schema", "kind", "provenance", "floor", "verdict", "code", "next_steps", "evidence", "null", "rows")
    ]
    always = {"metric", "site", "layer", "sequence", "value", "status"}
    for row in answer["rows"]:
        assert always <= set(row) <= always | {"head"}
        assert (row["value"] is None) == (row["status"] == "undefined")
        assert ("head" in row) == (row["metric"] == "attention_entropy")
    assert len(answer["rows"]) == run.table.num_rows == 3 * 3 * 2 + 6


def test_round_trips(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path / "deep" / "folder")
    for again in (load_run(tmp_path / "deep" / "folder"), pickle.loads(pickle.dumps(run))):
        assert again.to_json() == run.to_json()
        assert again.notes == run.notes
        assert again.table.schema.equals(run.table.schema)


def test_nothing_can_be_changed(run: Run) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.verdict = "fine"  # type: ignore[misc]
    with pytest.raises(TypeError):
        run.floor["relative"] = 0.0  # type: ignore[index]
    with pytest.raises(TypeError):
        run.evidence[0]["value"] = 0.0  # type: ignore[index]


def test_select(run: Run) -> None:
    assert run.select(metric="mean_cosine", layer=1)["value"].to_pylist() == [0.2] * 3
    assert run.select(status=Status.UNDEFINED).num_rows == 3
    assert run.select(site="attention.probs").num_rows == 6
    with pytest.raises(UnknownNameError, match="stack"):
        run.select(stack="encoder")
    with pytest.raises(ValueError, match="fine"):
        run.select(status="fine")


def test_curve_uses_usable_values_only(run: Run) -> None:
    line = run.curve("relative_residual", "block.out")
    assert line.layers.tolist() == [0, 1, 2]
    assert line.n.tolist() == [3, 3, 0]
    assert line.mean[:2] == pytest.approx([0.9, 0.5], rel=1e-14)
    assert math.isnan(line.mean[2])
    assert (line.low[:2] <= line.mean[:2]).all()
    assert (line.mean[:2] <= line.high[:2]).all()
    assert run.curve("attention_entropy", "attention.probs").n.tolist() == [6]


def test_floor_values_count_and_are_marked() -> None:
    run = make_run(profile({"relative_residual": [0.5, 1e-8]}, floor_below=1e-7).table())
    line = run.curve("relative_residual", "block.out")
    assert line.any_floor.tolist() == [False, True]
    assert line.mean[1] == pytest.approx(1e-8, rel=1e-12)


def test_curve_errors(run: Run) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'mean_cosine'"):
        run.curve("mean_cosin", "block.out")
    with pytest.raises(UnknownNameError, match="site"):
        run.curve("mean_cosine", "block.ou")
    both = profile({"m": [0.1]}, stack="encoder", writer=profile({"m": [0.2]}, stack="decoder")).table()
    with pytest.raises(InputError, match="stack='decoder'"):
        make_run(both).curve("m", "block.out")
    assert make_run(both).curve("m", "block.out", stack="encoder").mean.tolist() == pytest.approx([0.1])


def test_frame_has_all_rows(run: Run) -> None:
    frame = run.to_frame()
    assert list(frame.columns) == run.table.column_names
    assert len(frame) == run.table.num_rows


@pytest.mark.parametrize(("call", "extra"), [("to_frame", "frames"), ("plot", "plot")])
def test_a_missing_extra_names_its_install_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, call: str, extra: str
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.split(".")[0] in ("pandas", "matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=rf"pip install 'rankscope\[{extra}\]'"):
        getattr(run, call)()

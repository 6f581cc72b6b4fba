"""Figures hold what they should for short, long, many-stacked and empty runs."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rankscope.errors import UnknownNameError
from tests.runs.builders import make_run, profile

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]


def words_of(figure) -> list[str]:
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def drawn(figure) -> int:
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=50)
    return target.tell()


@pytest.mark.parametrize("layers", [1, 2, 12, 200])
def test_any_depth_is_drawn(layers: int) -> None:
    curves = {"relative_residual": np.linspace(0.9, 0.5, layers).tolist(), "stable_rank": [5.0] * layers}
    figure = make_run(profile(curves).table()).plot()
    assert len(figure.axes) == 2
    assert drawn(figure) > 1000
    assert figure.axes[0].lines[0].get_ydata() == pytest.approx(curves["relative_residual"])


def test_residuals_over_decades_get_a_log_axis_and_the_floor() -> None:
    table = profile({"relative_residual": [0.9, 1e-3, 1e-7], "mean_cosine": [0.1, 0.9, 1.0]}, floor_below=3e-7).table()
    residual, cosine = make_run(table).plot().axes
    assert residual.get_yscale() == "log"
    assert cosine.get_yscale() == "linear"
    words = [text.get_text() for text in residual.texts]
    assert words == ["float32 cannot see below 4.77e-07"]


def test_the_null_is_a_dashed_line() -> None:
    run = make_run(
        profile({"stable_rank": [3.0, 2.0]}).table(), null={"stable_rank": {"mean": 23.4, "sd": 1.0, "draws": 4}}
    )
    (axes,) = run.plot().axes
    assert any("same-shape random 23.4" in text.get_text() for text in axes.texts)
    assert axes.get_ylim()[1] > 23.4


def test_stacks_are_named_in_a_legend() -> None:
    writer = profile({"relative_residual": [0.9, 0.5]}, stack="encoder")
    figure = make_run(profile({"relative_residual": [0.9, 0.5]}, stack="decoder", writer=writer).table()).plot()
    assert {"encoder", "decoder"} <= set(words_of(figure))
    assert drawn(figure) > 1000


def test_nothing_defined_says_so() -> None:
    figure = make_run(profile({"relative_residual": [math.nan] * 3}).table()).plot()
    assert "undefined in every block" in words_of(figure)
    assert drawn(figure) > 1000


def test_panels_can_be_chosen() -> None:
    run = make_run(profile({"a": [1.0], "b": [2.0], "c": [3.0]}).table())
    assert [axes.get_title(loc="left") for axes in run.plot(metrics=["c", "a"], site="block.out").axes] == ["c", "a"]
    with pytest.raises(UnknownNameError):
        run.plot(metrics=["d"])
    with pytest.raises(UnknownNameError):
        run.plot(site="final")


def test_title_is_the_model_and_the_verdict() -> None:
    run = make_run(profile({"relative_residual": [0.9]}).table(), model="my-model")
    words = words_of(run.plot())
    assert any(text.startswith("my-model") for text in words)
    first, _, others = run.verdict.partition(". ")
    assert {f"{first}.", others} <= {text.replace("\n", " ") for text in words}


def test_pyplot_is_left_alone() -> None:
    code = (
        "import sys; from tests.runs.builders import *; make_run(profile({'m': [1.0]}).table()).plot(); "
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"

"""Heatmaps as pictures."""

from __future__ import annotations

import logging
import math
import sys

import numpy as np
import pytest

from rankscope.monitor import Heatmap
from rankscope.monitor.sinks.pictures import Painter
from rankscope.views.palette import UNKNOWN, VERMILION
from tests.monitor.sinks.readings import heatmap


def rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def has(picture: np.ndarray, colour: str) -> bool:
    return bool((picture == rgb(colour)).all(-1).any())


def of(values: tuple[tuple[float, ...], ...], *, alarms: tuple[tuple[int, int, str], ...] = ()) -> Heatmap:
    return Heatmap("stable_rank", None, tuple(range(len(values))), tuple(range(len(values[0]))), values, alarms)


def test_a_picture_is_red_green_and_blue() -> None:
    picture = Painter()(heatmap())
    assert picture is not None
    assert (picture.shape, picture.dtype) == ((320, 640, 3), np.uint8)


def test_alarms_are_marked_and_only_alarms() -> None:
    marked, bare = Painter()(of(((1.0, 2.0),), alarms=((1, 0, "token_collapse"),))), Painter()(of(((1.0, 2.0),)))
    assert marked is not None
    assert bare is not None
    assert has(marked, VERMILION)
    assert not has(bare, VERMILION)


def test_what_was_not_measured_is_grey() -> None:
    picture = Painter()(of(((1.0, math.nan),)))
    assert picture is not None
    known, unknown = picture[150, 150], picture[150, 450]
    assert tuple(unknown) == rgb(UNKNOWN)
    assert tuple(known) != rgb(UNKNOWN)


def test_without_matplotlib_it_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    paint = Painter()
    with caplog.at_level(logging.WARNING, logger="rankscope.monitor"):
        assert paint(heatmap()) is None
        assert paint(heatmap()) is None
    assert [record.getMessage().count("pip install 'rankscope[plot]'") for record in caplog.records] == [1]


def test_alike_is_dark_and_a_value_has_the_same_colour_in_every_picture() -> None:
    """On the declared range of a metric, whichever end of it is collapse."""

    def colour(metric: str, *values: float) -> np.ndarray:
        picture = Painter()(Heatmap(metric, None, (0,), tuple(range(len(values))), (values,)))
        assert picture is not None
        return picture[150, 150].astype(int)

    assert colour("relative_residual", 0.1).sum() < colour("relative_residual", 0.9).sum()
    assert colour("inputs_relative_residual", 0.1).sum() < colour("inputs_relative_residual", 0.9).sum()
    assert colour("mean_cosine", 0.9).sum() < colour("mean_cosine", 0.1).sum()
    assert (colour("relative_residual", 0.5, 0.6) == colour("relative_residual", 0.5, 0.9)).all()

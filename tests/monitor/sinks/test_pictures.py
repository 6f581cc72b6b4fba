"""Heatmaps as pictures."""

from __future__ import annotations

import logging
import math
import sys

import numpy as np
import pytest

from rankscope.monitor import Heatmap
from rankscope.monitor.sinks.pictures import Painter, draw
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


def test_an_alarm_of_a_layer_that_is_not_drawn_is_left_out() -> None:
    assert len(draw(of(((1.0, 2.0),), alarms=((1, 7, "token_collapse"),))).axes[0].collections) == 0


def test_what_was_not_measured_is_grey() -> None:
    picture = Painter()(of(((1.0, math.nan),)))
    assert picture is not None
    known, unknown = picture[150, 150], picture[150, 450]
    assert tuple(unknown) == rgb(UNKNOWN)
    assert tuple(known) != rgb(UNKNOWN)


@pytest.mark.parametrize(
    ("values", "limits", "logarithmic"),
    [
        (((0.5, 0.7),), (0.0, 1.0), False),
        (((0.5, 1e-4),), (1e-4, 0.5), True),
        (((2.0, 9.0),), (2.0, 9.0), False),
        (((0.0, 9.0),), (0.0, 9.0), False),
        (((3.0, 3.0),), (3.0, 6.0), False),
        (((-1.0, 0.5),), (-1.0, 0.5), False),
    ],
)
def test_the_colour_scale_fits(
    values: tuple[tuple[float, ...]], limits: tuple[float, float], logarithmic: bool
) -> None:
    (image,) = draw(of(values)).axes[0].images
    assert (image.norm.vmin, image.norm.vmax) == limits
    assert (type(image.norm).__name__ == "LogNorm") == logarithmic


def test_nothing_known_is_said_in_words() -> None:
    figure = draw(of(((math.nan, math.nan),)))
    assert "undefined" in figure.axes[0].texts[0].get_text()
    assert Painter()(Heatmap("stable_rank", None, (), (), ())) is None


def test_without_matplotlib_it_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    paint = Painter()
    with caplog.at_level(logging.WARNING, logger="rankscope.monitor"):
        assert paint(heatmap()) is None
        assert paint(heatmap()) is None
    assert [record.getMessage().count("pip install 'rankscope[plot]'") for record in caplog.records] == [1]

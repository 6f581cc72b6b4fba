"""The HTML of a picture: readable numbers, one axis for all sizes, and nothing of a stranger's in it."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from itertools import pairwise

import pytest

from rankscope.ext.playground.choices import Choices
from rankscope.ext.playground.page import NAMES, answer
from rankscope.ext.playground.rendering import refusal, rendered
from rankscope.ext.playground.scales import DepthAxis, exponent
from rankscope.ext.playground.simulating import simulate

SMALL = {"depth": 5, "tokens": 8, "width": 16, "heads": 2}


def values(**changed: object) -> list[object]:
    usual = Choices(**SMALL)
    return [changed.get(name, getattr(usual, name)) for name in NAMES]


def test_the_answer_names_the_order_and_the_floors() -> None:
    page = answer(*values(skip_gain=0.0))
    assert 'data-order="3"' in page
    assert ">order 3<" in page
    assert "bf16 goes blind" in page
    assert ">order 1<" in answer(*values(mask="causal", skip_gain=0.0))


def test_frames_reach_the_script() -> None:
    picture = simulate(Choices(**SMALL))
    held = re.search(r'data-frames="([^"]*)"', rendered(picture))
    assert held is not None
    frames = json.loads(unescape(held[1]))["frames"]
    assert len(frames) == 6
    assert frames[2]["s"][:3] == [round(1000 * value) for value in picture.frames[2].sphere[0]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["<img src=x onerror=alert(1)>", None, math.nan, [1], {"a": 1}, -1e308, "\u202e9"])
def test_whatever_is_sent_is_answered_and_escaped(name: str, value: object) -> None:
    page = answer(*values(**{name: value}))
    assert 'role="alert"' in page
    assert "<img" not in page


def test_too_few_values_are_a_defect_and_not_an_answer() -> None:
    with pytest.raises(ValueError, match="argument"):
        answer(1, 2)


def test_a_refusal_is_escaped() -> None:
    assert "<b>" not in refusal("<b>")


def test_a_remedy_that_cannot_be_is_explained() -> None:
    assert "not possible here" in answer(*values(norm_place="pre", remedy="pre_norm"))


def test_nothing_undefined_is_written() -> None:
    tiny = Choices(depth=1, tokens=2, width=16, heads=1)
    for chosen in (tiny, Choices(**SMALL), Choices(**SMALL, skip_gain=0.0, norm="none", mlp="none")):
        words = set(re.findall(r"[a-z]+", rendered(simulate(chosen)).lower()))
        assert not words & {"nan", "inf", "undefined"}


def test_axis_is_straight_for_what_a_float_holds_and_stretched_below() -> None:
    near, far = DepthAxis.holding([0.0, -12.0, -math.inf]), DepthAxis.holding([0.0, -1e9])
    assert not near.stretched
    assert far.stretched
    for axis in (near, far):
        places = [axis.place(value) for value in (0.0, -1.0, -5.0, axis.bottom)]
        assert places == sorted(places)
        assert (places[0], places[-1]) == (0.0, 1.0)
        assert 3 <= len(axis.ticks()) <= 9


def test_doubly_exponential_decay_is_a_straight_line_when_stretched() -> None:
    axis = DepthAxis.holding([-(3.0**20)])
    places = [axis.place(-(3.0**k)) for k in range(10, 21)]
    steps = [after - before for before, after in pairwise(places)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-4)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-0.25, "−0.25"), (-12.34, "−12.3"), (-99999.0, "−99,999"), (-1e6, "−10⁶"), (-9.99e9, "−10¹⁰")],
)
def test_exponents(value: float, text: str) -> None:
    assert exponent(value) == text

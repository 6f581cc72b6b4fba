"""What may be chosen: every value is checked by whoever makes the choices, and no message repeats a flood."""

from __future__ import annotations

import math

import pytest

from rankscope.errors import InputError
from rankscope.ext.playground.choices import MOST_SCORES, OPTIONS, RANGES, Choices, choices_from
from rankscope.ext.playground.scenes import SCENES
from rankscope.remedies import REMEDIES

HOSTILE = [None, "", "24", "<script>alert(1)</script>", [], {}, b"1", True, math.nan, math.inf, -math.inf, 10**30, -1e9]


@pytest.mark.parametrize("name", [*RANGES, *OPTIONS, "remedy"])
@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_no_stranger_gets_in(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{name} is"):
        Choices(**{name: value})


@pytest.mark.parametrize("name", RANGES)
def test_ranges_end_where_they_say(name: str) -> None:
    low, high = RANGES[name]
    small = {"heads": 1, "tokens": 2, "depth": 1}
    for good in (low, high):
        assert getattr(Choices(**{**small, name: good}), name) == good
    for bad in (low - 1, high + 1):
        with pytest.raises(InputError):
            Choices(**{**small, name: bad})


def test_a_long_value_is_cut_short_in_the_message() -> None:
    with pytest.raises(InputError) as told:
        Choices(mask="x" * 10_000)
    assert len(str(told.value)) < 300


def test_too_much_work_is_refused_before_any_is_done() -> None:
    with pytest.raises(InputError, match="attention scores"):
        Choices(depth=48, heads=16, tokens=128)
    largest = Choices(depth=48, heads=4, tokens=128)
    assert largest.depth * largest.heads * largest.tokens**2 <= MOST_SCORES


def test_what_does_not_fit_together() -> None:
    with pytest.raises(InputError, match="Expected one of"):
        Choices(width=16, heads=3)
    with pytest.raises(InputError, match="odd"):
        Choices(width=16, heads=16, positions="rope")


def test_floats_that_are_whole_become_whole() -> None:
    chosen = Choices(depth=3.0, seed=2.0)  # type: ignore[arg-type]
    assert (chosen.depth, chosen.seed) == (3, 2)
    assert isinstance(chosen.depth, int)


def test_the_line_of_python_makes_the_same_choices() -> None:
    for scene in SCENES.values():
        assert eval(scene.call(), {"Choices": Choices}) == scene


def test_words_of_the_command_line() -> None:
    assert choices_from(["depth = 3", "mask=causal_window(4) | sink(1)"]).depth == 3
    for word in ("depth", "=3", "deep=3", "depth=many"):
        with pytest.raises(InputError):
            choices_from([word])


def test_every_remedy_can_be_chosen() -> None:
    assert [Choices(remedy=name).remedy for name in REMEDIES] == list(REMEDIES)


def test_without_a_norm_its_place_does_not_matter() -> None:
    assert Choices(norm="none", norm_place="pre").design() == Choices(norm="none", norm_place="post").design()

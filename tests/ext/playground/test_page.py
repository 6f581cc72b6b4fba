"""The page without a browser."""

from __future__ import annotations

import sys

import pytest

from rankscope.errors import MissingExtraError
from rankscope.ext.playground.controls import LABELS, ROWS
from rankscope.ext.playground.page import NAMES, build


def test_without_gradio_the_line_that_installs_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rankscope\[play\]'"):
        build()


def test_every_choice_has_one_control_and_a_label() -> None:
    assert sorted(name for row in ROWS for name in row) == sorted(NAMES) == sorted(LABELS)

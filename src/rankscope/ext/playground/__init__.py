"""The playground: configure a small transformer and follow its tokens through every block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of
from rankscope.extensions import Extension

if TYPE_CHECKING:
    from rankscope.ext.playground.choices import Choices
    from rankscope.ext.playground.page import AT_ONCE, LOCAL, serve
    from rankscope.ext.playground.simulating import simulate

__all__ = [
    "AT_ONCE",
    "LOCAL",
    "Choices",
    "serve",
    "simulate",
]

__getattr__ = names_of(__name__)


def _commands() -> None:
    from rankscope.ext.playground import command  # noqa: F401 registers it


EXTENSION = Extension(
    name="playground",
    summary="play: a page on which you build a small transformer and watch its tokens.",
    requires=("theory",),
    adds={"command": _commands},
)

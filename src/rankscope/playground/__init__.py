"""The playground: configure a small transformer and follow its tokens through every block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.playground.choices import Choices
    from rankscope.playground.page import AT_ONCE, LOCAL, serve
    from rankscope.playground.simulating import simulate

__all__ = [
    "AT_ONCE",
    "LOCAL",
    "Choices",
    "serve",
    "simulate",
]

_HOME = {
    "AT_ONCE": "rankscope.playground.page",
    "LOCAL": "rankscope.playground.page",
    "Choices": "rankscope.playground.choices",
    "serve": "rankscope.playground.page",
    "simulate": "rankscope.playground.simulating",
}

__getattr__ = names_of(__name__, _HOME)

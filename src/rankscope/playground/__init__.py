"""The playground: a small transformer of one's own choice, its tokens followed through every block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.playground.choices import Choices
    from rankscope.playground.simulating import simulate

__all__ = [
    "Choices",
    "simulate",
]

_HOME = {
    "Choices": "rankscope.playground.choices",
    "simulate": "rankscope.playground.simulating",
}

__getattr__ = names_of(__name__, _HOME)

"""Paths: a network frozen at its inputs, and what single paths, or all of one length, carry through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of
from rankscope.extensions import Extension

if TYPE_CHECKING:
    from rankscope.ext.paths.capture import freeze_network
    from rankscope.ext.paths.decompose.judge import through_heads
    from rankscope.ext.paths.effectiveness import path_effectiveness
    from rankscope.ext.paths.lengths import length_sums
    from rankscope.ext.paths.marginals import Pick, through
    from rankscope.ext.paths.network import FrozenNetwork
    from rankscope.ext.paths.single import sample_paths

__all__ = [
    "FrozenNetwork",
    "Pick",
    "freeze_network",
    "length_sums",
    "path_effectiveness",
    "sample_paths",
    "through",
    "through_heads",
]

__getattr__ = names_of(__name__)


def _verbs() -> None:
    from rankscope.ext.paths import decompose  # noqa: F401 registers the verb


def _sections() -> None:
    from rankscope.ext.paths.decompose import sections  # noqa: F401


EXTENSION = Extension(
    name="paths",
    summary="decompose: what single paths, or all of one length, carry through a network.",
    adds={"verb": _verbs, "section": _sections},
)

"""Theory: what theorems, graphs of masks and limits at initialisation say about collapse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of
from rankscope.extensions import Extension

if TYPE_CHECKING:
    from rankscope.ext.theory.bound.judge import grid_of

__all__ = ["EXTENSION", "grid_of"]

__getattr__ = names_of(__name__)


def _verbs() -> None:
    from rankscope.ext.theory import bound, masks, predict  # noqa: F401 each registers its verb


def _sections() -> None:
    from rankscope.ext.theory.bound import sections  # noqa: F401


def _listings() -> None:
    from rankscope.ext.theory import listing  # noqa: F401


EXTENSION = Extension(
    name="theory",
    summary="bound, predict and graph: theorems, graphs of masks, and limits at initialisation.",
    requires=("paths",),
    adds={"verb": _verbs, "section": _sections, "listing": _listings},
)

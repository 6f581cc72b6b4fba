"""Theory: what theorems, graphs of masks and limits at initialisation say about collapse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of
from rankscope.extensions import Extension

if TYPE_CHECKING:
    from rankscope.ext.theory.bound.judge import grid_of

__all__ = ["EXTENSION", "grid_of"]

__getattr__ = names_of(__name__)

EXTENSION = Extension(
    name="theory",
    summary="bound, predict and graph: theorems, graphs of masks, and limits at initialisation.",
    requires=("paths",),
    adds={
        "verb": tuple(f"rankscope.ext.theory.{name}" for name in ("bound", "masks", "predict")),
        "section": ("rankscope.ext.theory.bound.sections",),
        "listing": ("rankscope.ext.theory.listing",),
    },
)

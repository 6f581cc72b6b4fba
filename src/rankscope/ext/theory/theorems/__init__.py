"""Theorems on collapse: one file per statement, found by name in ``THEOREMS``."""

from rankscope.ext.theory.theorems._quantities import (
    MOST_ROUNDING,
    HeadSizes,
    LayerQuantities,
    Network,
    Passage,
    StreamState,
)
from rankscope.ext.theory.theorems._spec import THEOREMS, Evaluation, Hypothesis, LayerBound, Theorem

__all__ = [
    "MOST_ROUNDING",
    "THEOREMS",
    "Evaluation",
    "HeadSizes",
    "Hypothesis",
    "LayerBound",
    "LayerQuantities",
    "Network",
    "Passage",
    "StreamState",
    "Theorem",
]

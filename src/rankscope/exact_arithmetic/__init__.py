"""Exact arithmetic: tensors that know by how little their tokens differ, and the rules operations act on them by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of

if TYPE_CHECKING:
    from rankscope.exact_arithmetic.registry import rule
    from rankscope.exact_arithmetic.tensor import Deviation
    from rankscope.exact_arithmetic.terms import Term

__all__ = [
    "Deviation",
    "Term",
    "rule",
]

__getattr__ = names_of(__name__)

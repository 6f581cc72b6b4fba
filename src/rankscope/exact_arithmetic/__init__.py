"""Exact arithmetic: tensors that know by how little their tokens differ, and the rules operations act on them by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.exact_arithmetic.registry import rule
    from rankscope.exact_arithmetic.tensor import Deviation
    from rankscope.exact_arithmetic.terms import Term

__all__ = [
    "Deviation",
    "Term",
    "rule",
]

_HOME = {
    "Deviation": "rankscope.exact_arithmetic.tensor",
    "Term": "rankscope.exact_arithmetic.terms",
    "rule": "rankscope.exact_arithmetic.registry",
}

__getattr__ = names_of(__name__, _HOME)

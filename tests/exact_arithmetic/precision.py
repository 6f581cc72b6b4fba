"""One operation in exact arithmetic held against hundreds of digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import torch
from hypothesis import strategies as st
from torch import Tensor

from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term, exp

DEEPEST = -700.0
"""Below this scale nothing of second order is left in 16 digits, and the reference need not go deeper."""

scales = st.one_of(
    st.floats(-5.0, 0.0), st.floats(-40.0, -5.0), st.floats(-690.0, -40.0), st.sampled_from([-745.2, -1e4, -1e6])
)
seeds = st.integers(0, 2**32 - 1)


def tokens(seed: int, log_scale: float, shape: tuple[int, ...] = (4, 6), *, shift: float = 0.0) -> Deviation:
    """One base row, deviations of order one at this scale."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(*(1,) * (len(shape) - 1), shape[-1], dtype=torch.float64, generator=generator)
    values = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return Deviation(base.abs() + shift if shift else base, (Term(log_scale, values),))


def in_digits(x: Deviation) -> list[list[Any]]:
    """The rows of ``x``, no deeper than :data:`DEEPEST`."""
    scale, values = x.terms[0]
    factor = mp.exp(mp.mpf(max(scale, DEEPEST)))
    base = x.base.expand(x.shape).reshape(-1, x.shape[-1]).tolist()
    rows = values.expand(x.shape).reshape(-1, x.shape[-1]).tolist()
    return [
        [mp.mpf(b) + factor * mp.mpf(v) for b, v in zip(p, q, strict=True)] for p, q in zip(base, rows, strict=True)
    ]


def differences(out: Tensor, log_unit: float) -> Tensor:
    """Every row minus the first, in units of ``e^log_unit``."""
    assert isinstance(out, Deviation)
    rows = (out.base.expand(out.shape).reshape(-1, out.shape[-1])) * exp(-log_unit) if _differ(out.base) else 0.0
    for scale, values in out.terms:
        rows = rows + values.expand(out.shape).reshape(-1, out.shape[-1]) * exp(scale - log_unit)
    return torch.zeros(1, out.shape[-1], dtype=torch.float64) if isinstance(rows, float) else rows - rows[:1]


def _differ(base: Tensor) -> bool:
    return any(size > 1 for size in base.shape[:-1])


def error(out: Tensor, expected: list[list[Any]], x: Deviation, order: int = 1) -> float:
    """Largest error of the differences between rows, as a share of the largest difference."""
    scale = x.terms[0].log_scale
    unit = mp.exp(-order * mp.mpf(max(scale, DEEPEST)))
    want = [[(value - first) * unit for value, first in zip(row, expected[0], strict=True)] for row in expected]
    got = differences(out, order * scale).tolist()
    wrong = max(abs(mp.mpf(g) - w) for p, q in zip(got, want, strict=True) for g, w in zip(p, q, strict=True))
    largest = max(abs(w) for row in want for w in row)
    return float(wrong / largest) if largest else float(wrong)


def entrywise(function: Callable[[Any], Any]) -> Callable[[list[list[Any]]], list[list[Any]]]:
    """A function of numbers as one of rows."""
    return lambda rows: [[function(value) for value in row] for row in rows]

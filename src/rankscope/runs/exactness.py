"""Curves and order of an exact run."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.rows import of_stack, only

SMALL = -3.0
"""log10 of the relative residual below which the leading term dominates, so that order and factor have their meaning.
Not a threshold of collapse, which is reached before."""
NEAR = 0.05
"""How near a block's order must come to 3 or 1 to be called that."""


def exact_curves(table: pa.Table, metric: str, stack: str | None, site: str = "block.out") -> dict[str, Curve]:
    """``metric`` over depth for each arithmetic that has it."""
    rows = only(table, metric=metric)
    found = {}
    for arithmetic in names_in(rows, "arithmetic"):
        mine = of_stack(only(rows, arithmetic=arithmetic), stack)
        if site in names_in(mine, "site"):
            found[arithmetic] = curve(mine, metric, site)
    return found


def order_of(table: pa.Table, stack: str | None) -> tuple[int | None, float]:
    """The order of the stack in its collapsed part (3, 1, or None where it does not collapse) and its last factor."""
    relative = exact_curves(table, "log10_relative_residual", stack)["exact"]
    orders = exact_curves(table, "order", stack)["exact"]
    factors = exact_curves(table, "factor", stack)["exact"]
    small = np.isfinite(orders.mean) & (relative.mean < SMALL)
    if not small.any():
        return None, float(factors.mean[-1])
    middle = float(np.median(orders.mean[small]))
    order = next((whole for whole in (3, 1) if abs(middle - whole) < NEAR), None)
    return order, float(factors.mean[np.flatnonzero(small)[-1]])

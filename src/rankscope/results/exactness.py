"""Order, factor and depth of a collapse, drawn from an exact run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.results.curves import Curve, curve, names_in
from rankscope.results.summary import stacks_of

SMALL = -3.0
"""log10 of the relative residual below which tokens are as good as one and order and factor have their meaning."""
NEAR = 0.05
"""How near a block's order must come to 3 or 1 to be called that."""
BARELY = 0.2
"""Decades by which a residual may fall over all depth and still be called kept."""


def exact_curves(table: pa.Table, metric: str, stack: str | None, site: str = "block.out") -> dict[str, Curve]:
    """``metric`` over depth for each arithmetic that has it."""
    rows = table.filter(pc.equal(table["metric"], metric))
    found = {}
    for arithmetic in names_in(rows, "arithmetic"):
        mine = rows.filter(pc.fill_null(pc.equal(rows["arithmetic"], arithmetic), False))
        if stack is not None:
            mine = mine.filter(pc.fill_null(pc.equal(mine["stack"], stack), False))
        if site in names_in(mine, "site"):
            found[arithmetic] = curve(mine, metric, site)
    return found


def judge_exact(table: pa.Table, floors: Mapping[str, float]) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """One sentence per stack: the order, how small the residual becomes, and where each float format stops seeing."""
    sentences, evidence = [], []
    stacks = stacks_of(table)
    for stack in stacks:
        prefix = f"{str(stack).capitalize()}: " if len(stacks) > 1 else ""
        sentences.append(prefix + _sentence(table, stack, floors))
        evidence += list(_evidence(table, stack))
    return " ".join(sentences), tuple(evidence)


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


def _sentence(table: pa.Table, stack: str | None, floors: Mapping[str, float]) -> str:
    residuals = exact_curves(table, "log10_residual", stack)["exact"]
    relative = exact_curves(table, "log10_relative_residual", stack)["exact"]
    last, depth = float(residuals.mean[-1]), int(residuals.layers[-1])
    order, factor = order_of(table, stack)
    seen = _stops_seeing(relative, floors)
    end = f"the residual of block {depth} is 10^{last:.1f} (relative 10^{float(relative.mean[-1]):.1f})"
    if order == 3:
        return f"Order 3: each block cubes the residual; {end}. {seen}"
    if order == 1:
        return f"Order 1: each block multiplies the residual, late in depth by {factor:.4g}; {end}. {seen}"
    if float(relative.mean[-1]) < SMALL:
        return f"The residual falls without a settled order; {end}. {seen}"
    fall = float(relative.mean[0] - relative.mean[-1])
    words = "No collapse" if fall < BARELY else "No collapse yet"
    return f"{words}: {end}, {'down' if fall > 0 else 'up'} from 10^{float(relative.mean[0]):.1f} at the first. {seen}"


def _stops_seeing(relative: Curve, floors: Mapping[str, float]) -> str:
    words = []
    for name, floor in floors.items():
        below = relative.layers[relative.mean <= np.log10(floor)]
        words.append(f"{name} stops seeing at block {below[0]}" if below.size else f"{name} sees it all")
    return "; ".join(words) + "."


def _evidence(table: pa.Table, stack: str | None) -> Iterator[dict[str, Any]]:
    for metric in ("log10_residual", "log10_relative_residual", "order", "factor"):
        line = exact_curves(table, metric, stack).get("exact")
        if line is not None and np.isfinite(line.mean[-1]):
            layer, value = int(line.layers[-1]), float(line.mean[-1])
            yield {"metric": metric, "site": "block.out", "stack": stack, "layer": layer, "value": value}

"""Curves and order of an exact run."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope._types import Status
from rankscope.runs.curves import Curve, curve, names_in

SMALL = -3.0
"""log10 of the relative residual below which the leading term dominates, so that order and factor have their meaning.
Not a threshold of collapse, which is reached before."""
NEAR = 0.05
"""How near a block's order must come to 3 or 1 to be called that."""

SPARE = -6.0
"""log10 of the relative residual above which a float64 pass has at least nine digits of it."""
AGREEMENT = 1e-4
"""By how much log10 of the residual may differ between exact and float64 arithmetic above :data:`SPARE`."""


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


def cross_checked(table: pa.Table) -> tuple[pa.Table, tuple[str, ...]]:
    """Compare exact residuals with those of a plain float64 pass where float64 has digits to spare.

    If the two disagree, one of them is wrong, and the exact values of that sequence are marked from that block on.

    Returns:
        The table, and a note per stack in which something was marked.
    """
    rows = table.select(["metric", "site", "stack", "layer", "sequence", "arithmetic", "value", "status"]).to_pylist()
    places: dict[tuple[str | None, int], dict[int, dict[str, int]]] = {}
    for number, row in enumerate(rows):
        if row["metric"] == "log10_relative_residual" and row["site"] == "block.out" and row["status"] == Status.OK:
            found = places.setdefault((row["stack"], row["sequence"]), {}).setdefault(row["layer"], {})
            found[row["arithmetic"]] = number
    first: dict[tuple[str | None, int], int] = {}
    notes: dict[str | None, str] = {}
    for (stack, sequence), layers in places.items():
        for layer in sorted(layers):
            exact, plain = (layers[layer].get(name) for name in ("exact", "float64"))
            if exact is None or plain is None:
                continue
            ours, theirs = rows[exact]["value"], rows[plain]["value"]
            if theirs > SPARE and not abs(ours - theirs) <= AGREEMENT:
                first[stack, sequence] = layer
                notes.setdefault(
                    stack,
                    f"exact and float64 arithmetic disagree at block {layer}{f' of the {stack}' if stack else ''} "
                    f"(relative residual 10^{ours:.4f} and 10^{theirs:.4f}, sequence {sequence}): the exact values "
                    "are marked from there on. This is a defect of rankscope; please report the model.",
                )
                break
    if not first:
        return table, ()
    statuses = [
        str(Status.FLOOR)
        if row["arithmetic"] == "exact"
        and row["site"] == "block.out"
        and row["status"] == Status.OK
        and row["layer"] >= first.get((row["stack"], row["sequence"]), row["layer"] + 1)
        else row["status"]
        for row in rows
    ]
    column = table.schema.get_field_index("status")
    marked = pa.array(statuses).cast(pa.string())
    kind = table.schema.field(column).type
    marked = marked.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else marked
    return table.set_column(column, table.schema.field(column), marked), tuple(notes.values())


def order_of(table: pa.Table, stack: str | None) -> tuple[int | None, float]:
    """The order of the stack in its collapsed part (3, 1, or None) and its last factor there.

    Blocks in which exact arithmetic ran out of digits do not count.
    """
    relative = exact_curves(table, "log10_relative_residual", stack)["exact"]
    orders = exact_curves(table, "order", stack)["exact"]
    factors = exact_curves(table, "factor", stack)["exact"]
    small = np.isfinite(orders.mean) & (relative.mean < SMALL) & ~orders.any_floor
    if not small.any():
        return None, float(factors.mean[-1])
    settled = (float(np.median(orders.mean[small])), float(orders.mean[small][-1]))
    order = next((whole for whole in (3, 1) if all(abs(found - whole) < NEAR for found in settled)), None)
    return order, float(factors.mean[np.flatnonzero(small)[-1]])

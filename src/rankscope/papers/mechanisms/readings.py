"""What is read of one network: how far its tokens are apart at every block, and what happens near collapse.

Near collapse: tokens drawn so close together that a block answers with the leading power of their distance. That power
is its order; 0 means that tokens which enter equal leave unequal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rankscope._types import Status
from rankscope.exact_arithmetic.registry import refuse
from rankscope.exact_arithmetic.running import exact_stream
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.papers.mechanisms.building import drawn_together
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace

LOG10 = math.log(10.0)
Orders = dict[SiteRef, float]
SITES = SiteSelection.parse(("block.in@0", "block.out"))
NEAR, NEARER = -200.0, -201.0
"""Natural logarithms of the two factors by which tokens are drawn together in exact arithmetic."""
CLOSE, CLOSER = 1e-2, 1e-3
"""The same factors in float64, where less room is left."""
UNEQUAL = 1e-12
"""Relative residual above which tokens that entered equal have left unequal; their rounding stays near 1e-15."""
STILL = 1e-3
"""A change of a logarithm below this is none."""
BELOW_ROUNDING = math.log(1e-13)
"""A block of order 1 that shrinks a deviation by more than this does so with rows of attention that differ by rounding
alone: nothing behind it can be told."""


@dataclass
class Rows:
    """Writes readings of one network under fixed coordinates."""

    writer: RowWriter
    at: dict[str, str | int | None]

    def add(self, metric: str, ref: SiteRef, value: float, arithmetic: str, status: Status = Status.OK) -> None:
        """One value of the first sequence; one that is not finite is undefined."""
        if not math.isfinite(value):
            value, status = math.nan, Status.UNDEFINED
        self.writer.add(
            metric=metric,
            site=ref.site,
            stack=ref.stack,
            layer=ref.layer,
            first_sequence=0,
            values=np.array([value]),
            statuses=np.array([STATUS_CODE[status]]),
            head_axis=False,
            at={**self.at, "arithmetic": arithmetic},
        )

    def note(self, metric: str, value: float, note: str | None = None) -> None:
        """A fact about the whole network, kept at its first block."""
        self.writer.add(
            metric=metric,
            site="block.in",
            stack=None,
            layer=0,
            first_sequence=0,
            values=np.array([value]),
            statuses=np.array([STATUS_CODE[Status.OK]]),
            head_axis=False,
            at={**self.at, "note": note},
        )


def read_in_float(view: ModelView, batch: Batch, rows: Rows) -> bool:
    """Order near collapse and what equal tokens become, in float64, of the first sequence.

    Returns:
        Whether the first block already makes equal tokens unequal.
    """
    equal = _relative(view, batch, 0.0)
    close, closer = (_relative(view, batch, factor) for factor in (CLOSE, CLOSER))
    floor = float_floor(next(view.model.parameters()).dtype)
    before: SiteRef | None = None
    for ref in close:
        if ref.site == "block.out":
            assert before is not None
            status = Status.FLOOR if equal[ref] <= UNEQUAL else Status.OK
            rows.add("equal_tokens", ref, equal[ref], "float64", status)
            if equal[ref] > UNEQUAL:
                rows.add("order", ref, 0.0, "float64")
            elif closer[ref] > 1e3 * floor:
                slope = _slope(close[ref], closer[ref]) / _slope(close[before], closer[before])
                rows.add("order", ref, slope, "float64")
                rows.add("log10_near_collapse", ref, math.log10(closer[ref]), "float64")
        before = ref
    return next(value for ref, value in equal.items() if ref.site == "block.out") > UNEQUAL


def _slope(close: float, closer: float) -> float:
    return math.log(close / closer) if close > 0 and closer > 0 else math.nan


def _relative(view: ModelView, batch: Batch, factor: float) -> dict[SiteRef, float]:
    found: dict[SiteRef, float] = {}

    def observe(ref: SiteRef, x: Tensor | AttentionCall) -> None:
        assert isinstance(x, Tensor)
        found[ref] = float(Tokens(x[:1], None).relative_deviation[0])

    with drawn_together(view, factor), trace(view, SITES, observe):
        batch.run(view.model)
    return found


def read_order_exactly(view: ModelView, batch: Batch, rows: Rows) -> Orders:
    """The order of every block near collapse, and the relative residual there, in exact arithmetic.

    Raises:
        UnsupportedArithmeticError: the model does something that has no rule.
    """
    near, near_norms = _log_residuals(view, batch, NEAR)
    nearer, _ = _log_residuals(view, batch, NEARER)
    orders = _orders(near, nearer)
    _check_orders(orders)
    for ref, order in orders.items():
        rows.add("order", ref, order, "exact")
    if min(orders.values()) > 0.5:
        _write_until_rounding(rows, "log10_near_collapse", near, near_norms, orders)
    return orders


def read_residuals_exactly(view: ModelView, batch: Batch, rows: Rows, orders: Orders) -> None:
    """The relative residual at every block in exact arithmetic, however small.

    Raises:
        UnsupportedArithmeticError: the model does something that has no rule.
    """
    logs, norms = _log_residuals(view, batch, 0.0)
    _write_until_rounding(rows, "log10_relative_residual", logs, norms, orders)


def _orders(near: dict[SiteRef, float], nearer: dict[SiteRef, float]) -> Orders:
    """By how many times the logarithm of a block's output follows that of its input; 0 where it does not follow."""
    step, orders = NEARER - NEAR, {}
    for ref in (ref for ref in near if ref.site == "block.out"):
        change = nearer[ref] - near[ref]
        if not math.isfinite(change):
            break
        orders[ref] = change / step if abs(change) > STILL and abs(step) > STILL else 0.0
        step = change
    return orders


def _check_orders(orders: Orders) -> None:
    """Refuse orders that are no leading power a block can have: some cancellation on the way was not kept exact."""
    odd = {ref: order for ref, order in orders.items() if min(abs(order - known) for known in (0, 1, 3)) > 0.05}
    if odd:
        ref, order = next(iter(odd.items()))
        refuse(f"a cancellation in {ref}", f"near collapse it reads order {order:.2f}, which is neither 0, 1 nor 3")


def _write_until_rounding(
    rows: Rows, metric: str, logs: dict[SiteRef, float], norms: dict[SiteRef, float], orders: Orders
) -> None:
    last = math.inf
    for ref, value in logs.items():
        relative = value - norms[ref]
        if ref.site == "block.out":
            beyond = relative - last < BELOW_ROUNDING and orders.get(ref, 1.0) < 2
            if beyond or not math.isfinite(relative):
                return
            rows.add(metric, ref, relative / LOG10, "exact")
        last = relative


def _log_residuals(
    view: ModelView, batch: Batch, log_shrink: float
) -> tuple[dict[SiteRef, float], dict[SiteRef, float]]:
    logs: dict[SiteRef, float] = {}
    norms: dict[SiteRef, float] = {}

    def observe(number: int, ref: SiteRef, x: Deviation, keep: Tensor | None) -> None:
        logs[ref], norms[ref] = x.log_residual(keep), x.log_norm(keep)

    exact_stream(view, batch, observe, sites=SITES, log_shrink=log_shrink)
    return logs, norms

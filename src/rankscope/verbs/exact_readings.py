"""Residuals read in exact arithmetic, and in float beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rankscope._types import Status
from rankscope.deviation.float64 import WideArithmetic, in_float64
from rankscope.deviation.running import exact_stream
from rankscope.deviation.tensor import Deviation
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics.residual import residual
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.results.rows import STATUS_CODE, RowWriter
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observer, trace
from rankscope.verbs.reader import SiteReader

LOG10 = math.log(10.0)
SHRINK = -1.0
"""Natural log of the factor between the two runs from which the order is read; any small number would do."""
FAR = -200.0
"""Natural log of a residual so small that a block acts on it linearly."""


class State(NamedTuple):
    """The stream where it enters a block: its common token, and what departs from it at which scale."""

    base: Tensor
    direction: Tensor
    log_scale: float


@dataclass
class Readings:
    """Writes the rows of one sequence."""

    sequence: int
    writer: RowWriter
    written: dict[tuple[str, SiteRef], float] = field(default_factory=dict)

    def add(self, metric: str, ref: SiteRef, value: float, arithmetic: str, status: Status = Status.OK) -> None:
        """One value; one that does not exist is undefined, or so far below the float floor that it reads zero."""
        if not math.isfinite(value):
            value, status = math.nan, Status.FLOOR if status is Status.FLOOR else Status.UNDEFINED
        self.writer.add(
            metric=metric,
            site=ref.site,
            stack=ref.stack,
            layer=ref.layer,
            first_sequence=self.sequence,
            values=np.array([value]),
            statuses=np.array([STATUS_CODE[status]]),
            head_axis=False,
            at={"arithmetic": arithmetic},
        )


Lane = Callable[[str], AbstractContextManager[None]]
"""A network that runs through part of a model, by name: what it is to begin with, and where its stream is left."""


def _whole(lane: str) -> AbstractContextManager[None]:
    return nullcontext()


def read_exactly(
    view: ModelView, batch: Batch, readings: Readings, *, stability: bool, through: Lane = _whole
) -> dict[SiteRef, State]:
    """Residual, order and factor of every block in exact arithmetic; returns the states in which blocks were entered.

    The order of a block is how many times the logarithm of its output's residual follows that of its input: two runs
    whose inputs differ in scale alone tell it, whatever the constant.
    """
    states: dict[SiteRef, State] = {}
    with through("exact"):
        logs, norms = _log_residuals(view, batch, 0.0, states)
    with through("shrunk"):
        shrunk, _ = _log_residuals(view, batch, SHRINK)
    far: dict[SiteRef, float] = {}
    if stability:
        with through("far"):
            far, _ = _log_residuals(view, batch, FAR)
    for ref, value in logs.items():
        if ref.site == "block.in" and ref.layer > 0:
            continue
        readings.add("log10_residual", ref, value / LOG10, "exact")
        readings.add("log10_relative_residual", ref, (value - norms[ref]) / LOG10, "exact")
        before = SiteRef(ref.stack, ref.layer, "block.in")
        if ref.site != "block.out":
            continue
        order = _ratio(shrunk[ref] - value, shrunk[before] - logs[before])
        readings.add("order", ref, order, "exact")
        readings.add("factor", ref, _factor(value, logs[before], order), "exact")
        if stability:
            readings.add("linear_factor", ref, math.exp(far[ref] - far[before]), "exact")
    return states


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0 and math.isfinite(numerator) else math.nan


def _factor(log_after: float, log_before: float, order: float) -> float:
    """The constant in front: of the cube for a block of order 3, of the residual itself otherwise."""
    power = 3 if order > 2 else 1
    exponent = log_after - power * log_before
    return math.exp(exponent) if exponent < 700 else math.inf


def _log_residuals(
    view: ModelView, batch: Batch, log_shrink: float, states: dict[SiteRef, State] | None = None
) -> tuple[dict[SiteRef, float], dict[SiteRef, float]]:
    logs: dict[SiteRef, float] = {}
    norms: dict[SiteRef, float] = {}

    def observe(number: int, ref: SiteRef, x: Deviation, keep: Tensor | None) -> None:
        logs[ref], norms[ref] = x.log_residual(keep), x.log_norm(keep)
        if states is not None and ref.site == "block.in" and keep is None:
            recentred = x.recentred()
            if recentred.terms:
                term = recentred.terms[0]
                direction = term.values.expand(recentred.shape)[0]
                states[ref] = State(recentred.base.reshape(-1, x.shape[-1])[0], direction, term.log_scale)

    exact_stream(view, batch, observe, sites=SiteSelection.parse(("block.in", "block.out")), log_shrink=log_shrink)
    return logs, norms


def read_plainly(
    view: ModelView, batch: Batch, readings: Readings, counted: SiteReader, through: Lane = _whole
) -> None:
    """The same residuals in the model's own format."""
    sites = SiteSelection.parse(("block.in@0", "block.out"))
    counted.start(batch)
    with through("own"), trace(view, sites, _plain_observer(readings, counted)):
        batch.run(view.model)


def read_in_float64(
    view: ModelView, batch: Batch, readings: Readings, counted: SiteReader, through: Lane = _whole
) -> None:
    """The same residuals in float64."""
    sites = SiteSelection.parse(("block.in@0", "block.out"))
    counted.start(batch)

    observe = _plain_observer(readings, counted)
    with through("float64"), in_float64(view.model), WideArithmetic(), trace(view, sites, observe):
        batch.run(view.model)


def _plain_observer(readings: Readings, counted: SiteReader) -> Observer:
    def observe(ref: SiteRef, x: Tensor | AttentionCall) -> None:
        assert isinstance(x, Tensor)
        counted.note(ref, x)
        tokens = Tokens(x, counted.kept(x))
        value, relative = float(residual(tokens)[0]), float(tokens.relative_deviation[0])
        status = Status.FLOOR if relative <= float_floor(x.dtype) else Status.OK
        name = str(x.dtype).removeprefix("torch.")
        readings.add("log10_residual", ref, _log10(value), name, status)
        readings.add("log10_relative_residual", ref, _log10(relative), name, status)

    return observe


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf

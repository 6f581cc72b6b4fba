"""The rows of ``exact`` at each block: logarithms of residuals, orders, factors, and predictions of the cubic law."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rankscope._types import Status
from rankscope.errors import UnsupportedConfigError
from rankscope.exact_arithmetic.float64 import WideArithmetic, in_float64, widened
from rankscope.exact_arithmetic.rounding import last_digits_moved
from rankscope.exact_arithmetic.running import exact_stream
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.linalg.cubic_law import cubic_step
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics.residual import residual
from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.inputs import Batch
from rankscope.models.loading import LoadedModel
from rankscope.models.view import ModelView
from rankscope.runs.rows import STATUS_CODE, RowWriter
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, Observer, trace
from rankscope.surgery.session import operations_on
from rankscope.verbs.reader import SiteReader

LOG10 = math.log(10.0)
SHRINK = -1.0
"""Natural log of the factor between the two runs that determine the order; any small number would do."""
FAR = -200.0
"""Natural log of a residual so small that a block acts on it linearly."""

AGREEMENT = 1e-7
"""Tolerated change of the log residual if the last digits of all numbers change; relative for values above 1."""


class EntryState(NamedTuple):
    """The stream at the input of a block: the common token, the deviation from it, and its scale."""

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
        """One value.

        Minus infinity with status ``ok`` is the logarithm of an exact zero. Any other value that is not finite is
        undefined, unless the status already says why: so far below the float floor that it is computed as zero, or of a
        stream that is not finite itself.
        """
        exact_zero = value == -math.inf and status is Status.OK
        if not math.isfinite(value) and not exact_zero:
            value, status = math.nan, Status.UNDEFINED if status is Status.OK else status
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


Through = Callable[[str], AbstractContextManager[None]]
"""Runs a named network through part of a model: its initial stream, and where to leave the stream."""


def _whole(variant_key: str) -> AbstractContextManager[None]:
    return nullcontext()


def read_exactly(
    view: ModelView, batch: Batch, readings: Readings, *, stability: bool, through: Through = _whole
) -> dict[SiteRef, EntryState]:
    """Residual, order and factor of every block in exact arithmetic; returns the states in which blocks were entered.

    The order of a block is the slope of the log residual of its output against that of its input. Two runs whose inputs
    differ only in scale determine it, whatever the constant.
    """
    states: dict[SiteRef, EntryState] = {}
    main = _checked(view, batch, 0.0, "exact", through, states)
    shrunk = _checked(view, batch, SHRINK, "shrunk", through)
    far = _checked(view, batch, FAR, "far", through) if stability else None
    for ref, value in main.logs.items():
        if ref.site == "block.in" and ref.layer > 0:
            continue
        lost = main.status(ref)
        readings.add("log10_residual", ref, value / LOG10, "exact", lost)
        readings.add("log10_relative_residual", ref, (value - main.norms[ref]) / LOG10, "exact", lost)
        before = SiteRef(ref.stack, ref.layer, "block.in")
        if ref.site != "block.out":
            continue
        order = _ratio(shrunk.logs[ref] - value, shrunk.logs[before] - main.logs[before])
        doubted = _doubt((main, before), (main, ref), (shrunk, before), (shrunk, ref))
        readings.add("order", ref, order, "exact", doubted)
        readings.add("factor", ref, _factor(value, main.logs[before], order), "exact", doubted)
        if far is not None:
            lost = _doubt((far, before), (far, ref))
            readings.add("linear_factor", ref, math.exp(far.logs[ref] - far.logs[before]), "exact", lost)
    return states


class _Checked(NamedTuple):
    """Logarithms of residuals and sizes by site, and the sites at which they are only rounding."""

    logs: dict[SiteRef, float]
    norms: dict[SiteRef, float]
    lost: frozenset[SiteRef]

    def status(self, ref: SiteRef) -> Status:
        if math.isnan(self.norms[ref]) or self.norms[ref] == math.inf:
            return Status.NOT_FINITE
        return Status.FLOOR if ref in self.lost else Status.OK


def _doubt(*read: tuple[_Checked, SiteRef]) -> Status:
    """The first status that is not ``ok`` of the values that another one is computed from."""
    return next((status for run, ref in read if (status := run.status(ref)) is not Status.OK), Status.OK)


def _checked(
    view: ModelView,
    batch: Batch,
    log_shrink: float,
    variant_key: str,
    through: Through,
    states: dict[SiteRef, EntryState] | None = None,
) -> _Checked:
    """One pass, and the same pass with every last digit perturbed: residuals that differ are rounding."""
    with through(variant_key):
        logs, norms = _log_residuals(view, batch, log_shrink, states)
    with through(f"{variant_key}, moved"), last_digits_moved():
        again, _ = _log_residuals(view, batch, log_shrink)
    lost: set[SiteRef] = set()
    for ref, value in logs.items():  # in the order of the pass: after a loss of precision a later zero may not be exact
        if not _agree(value, again[ref]) or (lost and value == -math.inf):
            lost.add(ref)
    return _Checked(logs, norms, frozenset(lost))


def _agree(value: float, again: float) -> bool:
    """Whether two logarithms agree; two minus infinities agree, and so do two NaNs."""
    if value == again or (math.isnan(value) and math.isnan(again)):
        return True
    return math.isfinite(value) and abs(value - again) <= AGREEMENT * max(1.0, abs(value))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator != 0 and math.isfinite(numerator) else math.nan


def _factor(log_after: float, log_before: float, order: float) -> float:
    """The prefactor: of the cubed residual for a block of order 3, otherwise of the residual itself."""
    power = 3 if order > 2 else 1
    exponent = log_after - power * log_before
    return math.exp(exponent) if exponent < 700 else math.inf


def _log_residuals(
    view: ModelView, batch: Batch, log_shrink: float, states: dict[SiteRef, EntryState] | None = None
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
                states[ref] = EntryState(recentred.base.reshape(-1, x.shape[-1])[0], direction, term.log_scale)

    exact_stream(view, batch, observe, sites=SiteSelection.parse(("block.in", "block.out")), log_shrink=log_shrink)
    return logs, norms


def read_plainly(
    view: ModelView, batch: Batch, readings: Readings, counted: SiteReader, through: Through = _whole
) -> None:
    """The same residuals in the model's own dtype."""
    sites = SiteSelection.parse(("block.in@0", "block.out"))
    counted.start(batch)
    with through("own"), trace(view, sites, _plain_observer(readings, counted)):
        batch.run(view.model)


def read_in_float64(
    view: ModelView, batch: Batch, readings: Readings, counted: SiteReader, through: Through = _whole
) -> None:
    """The same residuals in float64."""
    sites = SiteSelection.parse(("block.in@0", "block.out"))
    counted.start(batch)

    observe = _plain_observer(readings, counted)
    with through("float64"), in_float64(view.model), WideArithmetic(), trace(view, sites, observe):
        widened(batch).run(view.model)


def _plain_observer(readings: Readings, counted: SiteReader) -> Observer:
    def observe(ref: SiteRef, x: Observed) -> None:
        assert isinstance(x, Tensor)
        counted.note(ref, x)
        tokens = Tokens(x, counted.valid(x))
        value, relative = float(residual(tokens)[0]), float(tokens.relative_deviation[0])
        status = Status.FLOOR if relative <= float_floor(x.dtype) else Status.OK
        status = status if math.isfinite(value) else Status.NOT_FINITE
        name = str(x.dtype).removeprefix("torch.")
        readings.add("log10_residual", ref, _log10(value), name, status)
        readings.add("log10_relative_residual", ref, _log10(relative), name, status)

    return observe


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else -math.inf if value == 0 else math.nan


_PURE: Mapping[str, object] = {"attention_skip": 0.0, "mlp_skip": 0.0, "mlp": "drop", "norm": "identity"}


def predict_blocks(
    loaded: LoadedModel, view: ModelView, states: Mapping[SiteRef, EntryState], readings: Readings
) -> bool:
    """Write the prediction of the law for every block, if its hypotheses hold; returns whether it covers all blocks.

    The hypotheses are those of pure attention: no skip, MLP or norm (:func:`is_pure`), a complete mask
    (:func:`sees_everything`) and position-free scores. The head weights must be known too. Otherwise nothing is
    written.
    """
    modules = view.modules()
    for stack in view.stacks:
        for call in stack.calls:
            ref = SiteRef(stack.name, call.first_layer, "block.in")
            heads = _heads(loaded, modules[call.module_name])
            if heads is None or ref not in states:
                return False
            state = states[ref]
            step = cubic_step(state.direction, heads, state.log_scale, base=state.base)
            after = SiteRef(stack.name, call.first_layer, "block.out")
            readings.add("log10_residual", after, float(step.log_residual) / LOG10, "law")
    return True


def is_pure(loaded: LoadedModel) -> bool:
    """Whether the active operation leaves only attention, unmasked."""
    described = operations_on(loaded.model)
    return loaded.config is not None and len(described) == 1 and described[0] == _PURE


def _heads(loaded: LoadedModel, block: object) -> HeadWeights | None:
    try:
        heads = head_weights(block, loaded.config)  # type: ignore[arg-type]
    except UnsupportedConfigError:
        return None
    return None if heads.rotary or heads.qk_norm or heads.notes else heads


def sees_everything(view: ModelView, batch: Batch) -> bool:
    """Whether every query of every head sees every key."""
    complete = True

    def look(ref: SiteRef, seen: Observed) -> None:
        nonlocal complete
        assert isinstance(seen, AttentionCall)
        support = seen.support()
        complete = complete and (support is None or bool(support.all()))

    with trace(view, SiteSelection.parse(("attention.probs", "cross_attention.probs")), look):
        batch.run(view.model)
    return complete

"""One reading of a model: find its structure once, run the probe, compute the metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from rankscope._types import Status
from rankscope.errors import DiscoveryError, InputError, LayoutError, RankscopeError, SiteError
from rankscope.examination import Finding, examine, find
from rankscope.metrics import METRICS, MetricSpec
from rankscope.models.inputs import Batch, Inputs, Prepared, TokensPolicy, distinct_in, prepare_planned
from rankscope.models.loading import load
from rankscope.models.model import Model
from rankscope.models.view import ModelView
from rankscope.models.wrapping import needs_all_ranks
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.gradients import BlockProjections, find_projections, gradient_values
from rankscope.monitor.isolation import beside_training, examining, full_precision
from rankscope.monitor.motion import WeightMotion
from rankscope.monitor.parameters import (
    ParameterNorms,
    bad_entries,
    block_row,
    calling_order,
    homes_of,
    parameter_norms,
    watching_modules,
)
from rankscope.monitor.readings import LayerValue, fact
from rankscope.monitor.same_code import SameCode
from rankscope.monitor.schedules import Linear
from rankscope.monitor.underflow import lost_to_underflow
from rankscope.runs.rows import STATUS_CODE, STATUSES, Piece, RowWriter
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection, sites_of_sides
from rankscope.stream.tracer import Observed, Unreadable, trace
from rankscope.stream.viewing import view_of
from rankscope.surgery.session import is_operating
from rankscope.verbs.between_inputs import SITE, Pooling
from rankscope.verbs.doctor.reaching import batch_for
from rankscope.verbs.reader import SiteReader
from rankscope.verdicts.inputs import averaging_residual
from rankscope.verdicts.states import LEAST_INPUTS

DEFAULT_METRICS = (
    "relative_residual",
    "mean_cosine",
    "stable_rank",
    "largest_token_share",
    "largest_channel_share",
    "stream_rms",
    "write_ratio",
    "attention_entropy",
)
"""The default metrics of a gauge: norms, one Gram matrix per layer, and the entropy of attention."""

GAUGE_SITES = (
    "block.out",
    "attention.probs",
    "attention.scores",
    "attention.queries",
    "block.update",
    "mlp.branch",
    "mlp.router",
)
"""Where a gauge reads the metrics of each side."""

MOST_RENEWALS = 3
"""Times that a model may take another path before it is refused: setting up costs as much as a first reading."""

Objective = tuple[Callable[..., Tensor], Tensor | None]
"""A loss as the doctor takes it, and the labels of the probe, if it needs any."""
RESIDUAL = "relative_residual"
_WORTH = (str(Status.OK), str(Status.FLOOR))


MetricsLike = Sequence[str] | Mapping[str, int] | None
"""Names of metrics; a mapping says after how many steps each is read again."""


def intervals_of(metrics: MetricsLike) -> dict[str, int]:
    """The metrics that have an interval of their own, in steps.

    Raises:
        InputError: an interval that is not a whole number of steps.
    """
    found = dict(metrics) if isinstance(metrics, Mapping) else {}
    for name, steps in found.items():
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise InputError(f"metrics={{{name!r}: {steps!r}}}: expected a whole number of steps, at least 1.")
    return found


def chosen_metrics(names: MetricsLike) -> tuple[MetricSpec, ...]:
    """The specs of these names, each once; the default metrics for None."""
    return tuple(METRICS[name] for name in dict.fromkeys(DEFAULT_METRICS if names is None else names))


class ProbeBattery:
    """Reads the streams after every block, and attention, of one forward pass.

    Args:
        specs: the metrics to compute.
        policy: which tokens count.
        every: the steps between two readings of a metric; a metric that is not named is part of every reading.

    Attributes:
        notes: what could not be read at the last call of :meth:`values`, and why.
        due: the metrics of the last step that was announced.
    """

    def __init__(
        self, specs: Sequence[MetricSpec], policy: TokensPolicy, every: Mapping[str, int] | None = None
    ) -> None:
        self.specs = tuple(specs)
        self.notes: tuple[str, ...] = ()
        self.due, self._turn = self.specs, -1
        self._clocks = {name: Linear(steps) for name, steps in (every or {}).items()}
        self._policy = policy
        self.shapes: set[tuple[int, int]] = set()
        self._start_over()

    def turn(self, step: int) -> None:
        """Choose the metrics that are due at this step; what was read and not asked for is discarded."""
        if self._turn != step:  # several forwards of one step have the same metrics
            clocks = self._clocks
            self.due = tuple(one for one in self.specs if one.name not in clocks or clocks[one.name].wants(step, 0.0))
            for spec in self.due:
                if spec.name in clocks:
                    clocks[spec.name].was_read(step, 0.0)
            self._turn = step
        self._start_over(self.due)

    def _start_over(self, due: Sequence[MetricSpec] | None = None) -> None:
        """Forget what was read. Without a step, as in an experiment on the model, all metrics are due."""
        specs = self.specs if due is None else due
        self.selection = SiteSelection.parse(sites_of_sides({spec.side for spec in specs}, GAUGE_SITES))
        self._compares = any(spec.name == RESIDUAL for spec in specs)
        self._writer = RowWriter()
        self._reader = SiteReader(specs, self._policy, self._writer)
        self._batches: list[Batch] = []
        self._pooled: dict[tuple[str | None, int], list[Tensor]] = {}

    def reading(self, view: ModelView, batch: Batch) -> AbstractContextManager[None]:
        """Read the forward pass of ``batch`` that happens inside the ``with`` block."""
        self.begin(batch)
        return trace(view, self.selection, self.observe)

    def begin(self, batch: Batch) -> None:
        """Announce the batch of the next forward pass."""
        self._reader.start(batch)
        self._batches.append(batch)

    def observe(self, ref: SiteRef, seen: Observed) -> None:
        """Reduce what is observed at a site, immediately."""
        if isinstance(seen, Unreadable):
            self._reader(ref, seen)
            return
        with full_precision(_a_tensor_of(seen)):
            self._reader(ref, seen)
            if self._compares and ref.site == SITE and isinstance(seen, Tensor):
                pooled = Pooling("mean").pooled(seen, self._reader.valid(seen))
                self._reader.later([pooled], self._pooled.setdefault((ref.stack, ref.layer), []).append)

    def values(self) -> tuple[LayerValue, ...]:
        """The values read since the last call, per metric and layer."""
        pieces = self._writer.pieces
        self.shapes |= self._reader.shapes
        self.notes = tuple(self._reader.notes())
        compared = tuple(self._between_inputs(pieces))
        self._start_over()
        return (*layer_values(pieces), *not_finite_values(pieces), *compared)

    def _between_inputs(self, pieces: Sequence[Piece]) -> Iterator[LayerValue]:
        """How far the inputs differ, and what averaging over tokens alone would leave; of eight inputs or more."""
        known = all(batch.sequences for batch in self._batches)
        if known and distinct_in(self._batches) < LEAST_INPUTS:
            return
        pooled = {place: torch.cat(parts) for place, parts in self._pooled.items()}
        pooled = {
            place: one for place, one in pooled.items() if len(one) >= LEAST_INPUTS and bool(torch.isfinite(one).all())
        }
        residuals = _residuals(pooled)
        rows: dict[tuple[str | None, int], list[tuple[int, float]]] = {}
        for piece in pieces:
            if (piece.metric, piece.site) == (RESIDUAL, SITE):
                numbered = enumerate(piece.values.tolist(), piece.first_sequence)
                rows.setdefault((piece.stack, piece.layer), []).extend(numbered)
        for (stack, layer), residual in residuals.items():
            lengths, own = self._reader.lengths.get(stack, {}), rows.get((stack, layer), [])
            counts = np.array([lengths.get(number, math.nan) for number, _ in own])
            averaging = averaging_residual(np.array([value for _, value in own]), counts)
            for name, value in (("inputs_relative_residual", residual), ("inputs_averaging_residual", averaging)):
                status = str(Status.UNDEFINED if math.isnan(value) else Status.OK)
                yield LayerValue(name, Pooling("mean").site, stack, layer, value, value, value, status)


def _residuals(pooled: Mapping[tuple[str | None, int], Tensor]) -> dict[tuple[str | None, int], float]:
    """The relative residual of each, of those of one shape in one call."""
    by_shape: dict[tuple[Any, ...], list[tuple[str | None, int]]] = {}
    for place, one in pooled.items():
        by_shape.setdefault((one.shape, one.dtype), []).append(place)
    found: dict[tuple[str | None, int], float] = {}
    for places in by_shape.values():
        values = METRICS[RESIDUAL].function(torch.stack([pooled[place] for place in places]))
        found |= dict(zip(places, values.tolist(), strict=True))
    return {place: found[place] for place in pooled}


def _a_tensor_of(seen: Tensor | tuple[Tensor, ...] | AttentionCall) -> Tensor:
    if isinstance(seen, AttentionCall):
        tensor = seen.weights if seen.weights is not None else seen.query
        assert tensor is not None
        return tensor
    return seen[0] if isinstance(seen, tuple) else seen


def layer_values(pieces: Sequence[Piece]) -> tuple[LayerValue, ...]:
    """Mean, smallest and largest value over sequences and heads, for each metric, site and layer."""
    groups: dict[tuple[str, str, str | None, int], list[Piece]] = {}
    for piece in pieces:
        if piece.values.size:
            groups.setdefault((piece.metric, piece.site, piece.stack, piece.layer), []).append(piece)
    return tuple(_summary(key, own) for key, own in groups.items())


def not_finite_values(pieces: Sequence[Piece]) -> Iterator[LayerValue]:
    """The share of sequences whose stream is not finite after a block, for blocks where it is not zero."""
    groups: dict[tuple[str | None, int], dict[int, bool]] = {}
    for piece in pieces:
        if piece.site == SITE and piece.values.size:
            seen = groups.setdefault((piece.stack, piece.layer), {})
            bad = (piece.statuses == STATUS_CODE[Status.NOT_FINITE]).reshape(len(piece.statuses), -1).any(-1)
            for sequence, is_bad in enumerate(bad.tolist(), piece.first_sequence):
                seen[sequence] = seen.get(sequence, False) or is_bad
    for (stack, layer), seen in groups.items():
        if any(seen.values()):
            share = sum(seen.values()) / len(seen)
            yield LayerValue("not_finite", SITE, stack, layer, share, share, share)


def _summary(key: tuple[str, str, str | None, int], pieces: Sequence[Piece]) -> LayerValue:
    codes = np.concatenate([piece.statuses.ravel() for piece in pieces])
    values = np.concatenate([piece.values.ravel() for piece in pieces])
    counts = np.bincount(codes, minlength=len(STATUSES))
    # Of statuses that are equally common, the one that comes first.
    status = STATUSES[codes[(counts == counts.max())[codes].argmax()]]
    worth = values[(codes == STATUS_CODE[Status.OK]) | (codes == STATUS_CODE[Status.FLOOR])]
    if worth.size == 0:
        return LayerValue(*key, np.nan, np.nan, np.nan, status)
    if status not in _WORTH:
        status = str(Status.OK)
    return LayerValue(*key, float(worth.mean()), float(worth.min()), float(worth.max()), status)


def _rows(norms: ParameterNorms, of: str) -> tuple[LayerValue, ...]:
    return (*norms.rows, fact(f"{of}_not_finite", of, float(len(norms.bad))))


class Prober:
    """Measures one model on one fixed probe.

    Args:
        watched: the model, and where its blocks and its residual stream are.
        probe: the probe and its size.
        battery: the metrics.
        strict: raise if no blocks are found.

    Attributes:
        caveats: how the probe differs from what was given: hashed, random or truncated; known once it is prepared.
        not_finite: which weights and gradients were not finite when they were last looked at, in words.
        all_weights_bad: whether no parameter was free of NaN and infinity then.
        before_update: if gradients are not finite: what else was not when they were read, before the optimizer used
            them, as a component and words; empty words if neither weights nor the activations of the probe are to
            blame. None if that is not known.
        is_renewed: whether the last look found the model on another path than before.
        unread: why a model that was read before cannot be any more; empty while it can.
        code: compares the operations of the probe's pass.
        has_probe: whether there are inputs to examine the model on; it may be examined where no blocks can be read.
    """

    def __init__(self, watched: Model, probe: Inputs, battery: ProbeBattery, *, strict: bool = False) -> None:
        self.model, self._strict = watched.model, strict
        self.battery = battery
        self.caveats: tuple[str, ...] = ()
        self.not_finite: dict[str, str] = {}
        self.all_weights_bad, self.is_renewed, self.has_probe = False, False, True
        self._renewals, self.unread = 0, ""
        self._watched, self._probe = watched, probe
        self._motion, self.code = WeightMotion(), SameCode()
        self._gradient = math.nan
        self.before_update: tuple[str, str] | None = None
        self._ready: tuple[ModelView, Sequence[Batch], Mapping[tuple[str | None, int], BlockProjections]] | None = None

    @property
    def needs_all_ranks(self) -> bool:
        """Whether a reading needs all ranks."""
        return needs_all_ranks(self.model)

    def set_up(self) -> tuple[ModelView, Sequence[Batch], Mapping[tuple[str | None, int], BlockProjections]]:
        """Prepare the probe and find the blocks, the first time.

        Where the probe cannot be run, or no blocks are found, these are left out: what holds in every training is read
        without them. Not if blocks were declared, or in strict mode.
        """
        if self._ready is None:
            prepared: Sequence[Batch] = ()
            blocks, stream = self._watched.blocks, self._watched.declared_stream
            try:
                with beside_training(self.model):
                    prepared = self._prepared()
                    view = view_of(self.model, prepared[0], blocks=blocks, stream=stream)
                self._ready = view, prepared, find_projections(view, load(self.model).config)
            except Exception as error:
                if self._strict or (blocks, stream) != (None, None):
                    raise
                is_probe = isinstance(error, DiscoveryError | LayoutError)
                self.leave_out(f"{error}".partition(". ")[0], prepared if is_probe else ())
        assert self._ready is not None
        return self._ready

    def _prepared(self) -> Prepared:
        plan = self._probe.plan(sequences=8, tokens=128)
        prepared = prepare_planned(
            load(self.model), self._probe.data, replace(plan, sequences=plan.wanted, batch=plan.wanted)
        )
        for caveat in prepared.caveats:
            LOGGER.warning("The probe: %s", caveat)
        self.caveats = prepared.caveats
        return prepared

    def leave_out(self, why: str, prepared: Sequence[Batch] = ()) -> None:
        """Read no blocks; and make no pass of the probe, unless it is given."""
        self.battery.notes = (why,)
        self._ready = ModelView(self.model, ()), prepared, {}

    @property
    def view(self) -> ModelView:
        """The structure of the model."""
        return self.set_up()[0]

    def diagnosed(self) -> tuple[Finding, ...]:
        """What ``doctor`` finds in the model on the probe.

        Nothing if other processes would have to take part, or under surgery, where it looks for no causes either.
        """
        view, prepared, _ = self.set_up()
        if self.needs_all_ranks or is_operating() or not prepared:
            return ()
        with beside_training(self.model):
            return find(examine(self.model, prepared[0], view=view if view.stacks else None, edits=False)).findings

    def examined(self, objective: Objective | None, optimizers: Sequence[Optimizer]) -> tuple[Finding, ...]:
        """The same before the first step, with the loss and the optimizer.

        Args:
            objective: the loss on the probe, if it is known.
            optimizers: of the run.
        """
        if self.needs_all_ranks or not self.has_probe:
            return ()
        if is_operating():
            LOGGER.warning("The model was not examined: causes are only looked for outside operate().")
            return ()
        view, (loss, labels) = self.view, objective or (None, None)
        try:
            with examining(self.model):
                data, given = self._probe.data, self._probe
                if isinstance(data, Mapping) and len(data) == 1:  # as the loop calls it; a name would hide experiments
                    given = replace(given, data=next(iter(data.values())))
                batch, labels, _ = batch_for(self._watched, given, labels)
                optimizer = optimizers[0] if len(optimizers) == 1 else None
                # Nothing of the user's source is edited or compiled in a training process.
                examination = examine(
                    self.model, batch, view=view if view.stacks else None, loss=loss, labels=labels,
                    optimizer=optimizer, edits=False,
                )  # fmt: skip
                return find(examination).findings
        except Exception as error:  # noqa: BLE001  (a model that cannot be examined is no reason to stop watching)
            LOGGER.warning("The model was not examined: %s: %s", type(error).__name__, error)
            return ()

    def look(self) -> tuple[LayerValue, ...]:
        """Run the probe and compute the metrics.

        A model that takes another path than at the last look, as if its code was changed while it runs, is set up anew;
        :attr:`is_renewed` is then true until the next look. If it cannot be, nothing is read, and :attr:`unread` says
        why.
        """
        before, self.is_renewed = self._ready, False
        try:
            return self._look()
        except SiteError:
            if before is None or self._renewals >= MOST_RENEWALS:
                raise
            self.battery.values()  # discard what was read before
        if self.unread:
            return ()
        self._ready, self.is_renewed, self._renewals = None, True, self._renewals + 1
        try:
            return self._look()
        except RankscopeError as error:
            self.battery.values()
            self._ready, self.is_renewed, self.unread = before, False, str(error).partition(". ")[0]
            return ()

    def _look(self) -> tuple[LayerValue, ...]:
        view, prepared, _ = self.set_up()
        if not self.battery.due or not view.stacks:
            return ()
        with beside_training(self.model):
            for part in prepared:
                with self.battery.reading(view, part):
                    part.run(self.model)
        return self.battery.values()

    def look_at_weights(self, step: int, optimizers: Sequence[Optimizer] = ()) -> tuple[LayerValue, ...]:
        """Current norms of the weights, and how far they moved since the last look."""
        view, _, _ = self.set_up()
        norms, gradient = parameter_norms(view, "weight"), self._gradient
        self._gradient = math.nan
        self.all_weights_bad = len(norms.bad) == norms.number > 0
        self.not_finite["weights"] = self._bad_weights(norms)
        moved = self._motion.take(view, step, gradient=gradient, optimizers=optimizers, used=self.code.used)
        return (*_rows(norms, "weights"), *moved)

    def look_at_gradients(self) -> tuple[LayerValue, ...]:
        """Current norms of the gradients; if they are not finite, also whether the weights and the probe still are."""
        view, _, projections = self.set_up()
        norms = parameter_norms(view, "gradient")
        self._gradient, self.before_update = norms.total if norms.number else math.nan, None
        self.not_finite["gradients"] = bad_entries(self.model, "gradient", norms.bad) if norms.bad else ""
        if norms.bad:
            weights = parameter_norms(view, "weight")
            if not weights.bad:
                place = self._first_not_finite()
                self.before_update = ("", "") if place is None else ("activations", place)
            elif len(weights.bad) < weights.number:  # all of them: an earlier update wrote them
                self.before_update = ("weights", self._bad_weights(weights))
        known = norms.number > 0 and math.isfinite(norms.total)
        facts = {"parameters_with_gradient": float(norms.number)}
        facts |= {"total_gradient_norm": norms.total} if known else {}
        learned = [name for name, one in self.model.named_parameters() if one.requires_grad]
        homes = dict.fromkeys(homes_of(view, learned).values())
        if known and homes:  # a model without blocks has none that could have a gradient
            facts["blocks_with_gradient"] = float(sum(row.mean > 0.0 for row in norms.rows))
        total = (fact(name, "gradients", value) for name, value in facts.items())
        # Of blocks that learn and have no gradient at all, it is zero.
        read = {(row.stack, row.layer) for row in norms.rows}
        without = (block_row("gradient_norm", *home, 0.0) for home in homes if known and home not in read)
        lost = lost_to_underflow(self.model)
        return (*gradient_values(self.model, projections), *_rows(norms, "gradients"), *without, *total, *lost)

    def _bad_weights(self, norms: ParameterNorms) -> str:
        """The first parameter that is not finite in the order in which the probe uses them; empty if all are."""
        _, prepared, _ = self.set_up()
        if not prepared or not 1 < len(norms.bad) < norms.number:
            return bad_entries(self.model, "weight", norms.bad) if norms.bad else ""
        with beside_training(self.model), calling_order(self.model) as called:
            prepared[0].run(self.model)
        return bad_entries(self.model, "weight", norms.bad, called)

    def first_not_finite(self) -> str:
        """The first module whose output is not finite when the probe runs."""
        return self._first_not_finite() or "none of the modules, so it is made between them"

    def _first_not_finite(self) -> str | None:
        _, prepared, _ = self.set_up()
        with beside_training(self.model), watching_modules(self.model) as found:
            for part in prepared:
                part.run(self.model)
        return found[0] if found else None

    def compared(self, step: int) -> str:
        """How the operations of the probe's pass differ from those of the look before; empty if they do not."""
        _, prepared, _ = self.set_up()
        return self.code.take(self.model, prepared[0], step) if prepared else ""

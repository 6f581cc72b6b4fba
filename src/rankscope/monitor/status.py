"""What a gauge was asked to read and what it read: which blocks, on which rank, and what cannot be read at all."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from rankscope._types import Status
from rankscope.errors import InputError, ReadingError
from rankscope.metrics import METRICS, SIDES, MetricSpec
from rankscope.models.view import ModelView
from rankscope.models.wrapping import is_distributed
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.probing import RESIDUAL, MetricsLike, chosen_metrics, intervals_of
from rankscope.monitor.ranks import Ranks
from rankscope.monitor.readings import LAYERS, LAYERS_READ, RANKS_READ, LayerValue
from rankscope.monitor.watching import chosen_alarms
from rankscope.stream.viewing import notes_on_hidden_attention
from rankscope.verdicts.states import LEAST_INPUTS

ROW = "layers_read"
PATIENT = 3
"""Readings after which a rank that never reported is named."""

_BETWEEN_INPUTS = "inputs_relative_residual"
_OF_SIDE = {
    "tokens": "no block was seen",
    "attention": "no softmax over keys and no fused attention kernel was seen",
    "scores": "no softmax over keys and no fused attention kernel was seen",
    "queries": "no fused attention kernel was seen",
    "router": "no mixture of experts was seen",
    "branch": "no MLP branch was seen",
    "update": "no block was seen that takes the residual stream and returns it",
}
_NO_CRITERION = (
    "no cross-entropy and no squared or robust error was seen before backward: call gauge.before_backward(loss), as "
    "watch does; a loss inside a compiled graph or a checkpoint is not seen, nor are those of several processes"
)
_OF_ALARMS = {
    "gradient_underflow": "no matrix has a gradient",
    "answers_alike": _NO_CRITERION,
    "gradient_carried": "several processes add to the gradients",
    "qk_to_v_gradient": "no block has query, key and value weights that are known by name and have gradients",
    "still_steps": "the weights are sharded over processes",
    _BETWEEN_INPUTS: f"the probe needs at least {LEAST_INPUTS} different inputs, with finite values",
    "batch_copies": "the batch has no tensor of tokens or features",
    "batch_padding": "the batch has no tensor of tokens and no labels",
}
_UNDEFINED = "it is undefined in every block; a probe with a single token per sequence has this effect"
_NO_GRADIENTS = "no gradients were read: call gauge.after_backward(step) between backward() and zero_grad()"
_NO_LOSS = "no loss was given: call gauge.step(step, loss=loss), or watch.loss(loss)"
_NO_BATCH = "no batch was given: call gauge.step(step, batch=batch); a Hugging Face Trainer has none to give"


class ReadingRequest:
    """The metrics and alarms of a gauge, and whether they were asked for by name.

    What was asked for by name and cannot be read is an error, here or at the first reading, also if the gauge is not
    strict. What a default includes and cannot be read is logged once and recorded.

    Args:
        metrics: as for ``Gauge``.
        alarms: as for ``Gauge``.

    Raises:
        UnknownNameError: there is no such metric or alarm.
        InputError: an alarm was asked for by name, but none of the metrics that it uses.
    """

    def __init__(self, metrics: MetricsLike, alarms: Sequence[str] | None) -> None:
        self.every = intervals_of(metrics)
        self.metrics = chosen_metrics(metrics)
        self.alarms = chosen_alarms(alarms)
        self._names_metrics, self._names_alarms = metrics is not None, alarms is not None
        for alarm in self.alarms if self._names_alarms else ():
            unread = [self._unread(metric) for metric in alarm.metrics]
            if all(unread):
                raise InputError(f"The alarm {alarm.name} cannot be raised: {unread[0]}.")

    def unmet(self, read: Collection[str], why: Mapping[str, str], *, has_batch: bool) -> dict[str, dict[str, str]]:
        """What is ``not_read`` (metrics) and ``not_watched`` (alarms), each with the reason.

        Args:
            read: the metrics that the first reading has.
            why: the reason for each requested metric that it does not have.
            has_batch: whether the gauge was given a batch.

        Raises:
            ReadingError: one of them was asked for by name.
        """
        alarms = {}
        for alarm in self.alarms:
            if not any(metric in read for metric in alarm.metrics):
                metric = alarm.metrics[0]
                reason = why.get(RESIDUAL if metric == _BETWEEN_INPUTS else metric) or self._unread(metric)
                if reason is None and "gradient" in metric and "gradients_not_finite" not in read:
                    reason = _NO_GRADIENTS
                elif reason is None and metric.startswith("batch_") and not has_batch:
                    reason = _NO_BATCH
                elif reason is None and metric.startswith("loss_"):
                    reason = _NO_LOSS
                alarms[alarm.name] = reason or _OF_ALARMS.get(metric, f"{metric} was not read")
        refused = {**(why if self._names_metrics else {}), **(alarms if self._names_alarms else {})}
        if refused:
            reasons = " ".join(f"{names}: {reason}." for names, reason in _by_reason(refused))
            raise ReadingError(
                f"The gauge was asked by name for what it cannot read here; leave it out, or use silence() "
                f"to leave out single alarms instead of naming the others. {reasons}"
            )
        return {"not_read": dict(why), "not_watched": alarms}

    def _unread(self, metric: str) -> str | None:
        """Why the arguments of the gauge leave a metric out; None if they do not."""
        needed = RESIDUAL if metric == _BETWEEN_INPUTS else metric
        if needed in METRICS and needed not in (spec.name for spec in self.metrics):
            return f"it needs {needed}, which is not among the metrics of this gauge"
        return None


def reasons_why_not(
    metrics: Sequence[MetricSpec], values: Sequence[LayerValue], view: ModelView, notes: Sequence[str]
) -> dict[str, str]:
    """For each metric without a value in any layer, the reason.

    Args:
        metrics: those that were to be read.
        values: what was read.
        view: the structure of the model.
        notes: what the reader says about sites that it could not read.
    """
    known = {row.metric for row in values if row.status != Status.UNDEFINED}
    undefined = {row.metric for row in values} - known
    if {RESIDUAL, "largest_token_share"} <= undefined:
        known |= undefined  # the stream is exactly zero, which is an alarm
    found = {}
    for spec in metrics:
        if spec.name in undefined - known:
            found[spec.name] = _UNDEFINED
        elif spec.name not in known:
            hidden = _hidden_attention(view) if SIDES[spec.side].has_heads else []
            found[spec.name] = "; ".join((*notes, *hidden)) or _OF_SIDE.get(spec.side, f"no site showed {spec.side}")
    return found


def _hidden_attention(view: ModelView) -> list[str]:
    operators = [name for stack in view.stacks for name in stack.operators]
    if operators:  # of a block whose branches have no telling names, too
        return notes_on_hidden_attention(view) or [f"{_OF_SIDE['attention']}, only operators ({', '.join(operators)})"]
    return notes_on_hidden_attention(view)


@dataclass(frozen=True)
class RankStatus:
    """What one rank read at its last reading.

    Attributes:
        step: training step of the reading.
        layers: blocks of its model.
        some: blocks at which at least one metric was read.
        every: blocks at which all metrics of the gauge were read.
        missing: the blocks at which nothing was read, in words; empty if there is none.
        metrics: the blocks at which each metric was read, in words.
        disabled: why its gauge was disabled; empty if it was not.
    """

    step: int
    layers: int
    some: int
    every: int
    missing: str = ""
    metrics: Mapping[str, str] = field(default_factory=dict)
    disabled: str = ""

    @classmethod
    def of(cls, step: int, metrics: Sequence[MetricSpec], values: Sequence[LayerValue], view: ModelView) -> RankStatus:
        """The status of this rank after a reading."""
        places: dict[str, set[tuple[str | None, int]]] = {spec.name: set() for spec in metrics}
        for row in values:
            if row.metric in places and row.layer is not None:
                places[row.metric].add((row.stack, row.layer))
        blocks = [(stack.name, layer) for stack in view.stacks for layer in range(stack.depth)]
        some = set().union(*places.values()) if metrics else set(blocks)
        every = set(blocks).intersection(*places.values())
        missing = _ranges(place for place in blocks if place not in some)
        read = {name: _ranges(place for place in blocks if place in own) for name, own in places.items()}
        return cls(step, len(blocks), len(some), len(every), missing, read)

    def row(self, rank: int, problem: str) -> LayerValue:
        """The row of a reading that says so."""
        counts = float(self.some), float(self.every), float(self.layers)
        return LayerValue(ROW, f"rank {rank}", None, None, *counts, status=problem or str(Status.OK))

    def problem(self, since: int) -> str:
        """What is wrong with it in words; empty if nothing is. ``since``: the step of the reading before."""
        if self.disabled:
            return f"disabled: {self.disabled}"
        if self.step < since:
            return f"last read at step {self.step}"
        return f"layers not read: {self.missing} (of {self.layers})" if self.missing else ""


def _ranges(places: Iterable[tuple[str | None, int]]) -> str:
    """``0-3, 7``, or ``encoder 0-3, decoder 0-3``."""
    words = []
    for stack, own in groupby(places, key=lambda place: place[0]):
        # Numbers in a row differ from their position by the same amount.
        for _, run in groupby(enumerate(layer for _, layer in own), key=lambda entry: entry[1] - entry[0]):
            layers = [layer for _, layer in run]
            ends = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
            words.append(ends if stack is None else f"{stack} {ends}")
    return ", ".join(words)


class StatusWatch:
    """Tells which blocks were read on which rank.

    The first rank knows the last report of every rank, the others only their own. No rank waits for another, so what
    the others read at a step is usually known at the next reading.

    Args:
        request: what was asked for.
        ranks: the processes.
    """

    def __init__(self, request: ReadingRequest, ranks: Ranks) -> None:
        self._request, self._ranks = request, ranks
        self._heard: dict[int, RankStatus] = {}
        self._before = -1
        self._taken = 0
        self._unmet: dict[str, dict[str, str]] | None = None
        self._warned: set[str] = set()
        self._recorded: dict[str, Any] = {}

    def check(self, values: Sequence[LayerValue], view: ModelView, notes: Sequence[str], *, has_batch: bool) -> None:
        """Compare the first reading with what was asked for; later ones are not compared.

        Raises:
            ReadingError: a metric or an alarm that was asked for by name cannot be read.
        """
        if self._unmet is not None:
            return
        why = reasons_why_not(self._request.metrics, values, view, notes)
        read = {row.metric for row in values if row.metric not in why} | {"shown_faults"}
        if not any(map(is_distributed, view.model.parameters())):
            read.add("still_steps")  # from the second reading on
        if "loss_not_finite" in read:
            read.add("loss_risen")  # after enough steps
        if "gradients_not_finite" in read and self._ranks.world == 1:
            read.add("gradient_carried")  # after the next step
        if not self._ranks.is_first:
            read |= {metric for alarm in self._request.alarms for metric in alarm.metrics if "batch_" in metric}
        self._unmet = self._request.unmet(read, why, has_batch=has_batch)
        if self._ranks.is_first:
            for names, reason in _by_reason(self._unmet["not_read"]):
                LOGGER.warning("The gauge does not read %s: %s.", names, reason)
            for names, reason in _by_reason(self._unmet["not_watched"]):
                LOGGER.info("The gauge does not watch for %s: %s.", names, reason)

    def take(
        self, step: int, values: Sequence[LayerValue], view: ModelView, due: Sequence[MetricSpec]
    ) -> tuple[tuple[LayerValue, ...], dict[str, float]]:
        """One row per rank that reported, and the same in a few scalars; ``due`` are the metrics of this reading."""
        own = RankStatus.of(step, due, values, view)
        self._say(own)
        self.listen()
        problems = {rank: status.problem(self._before) for rank, status in self._heard.items()}
        self._taken += 1
        if self._ranks.is_first and self._taken > PATIENT:
            silent = [rank for rank in range(self._ranks.world) if rank not in self._heard]
            if silent and "silent" not in self._warned:
                self._warned.add("silent")
                ranks = ", ".join(map(str, silent))
                LOGGER.warning(
                    "The gauge was never called on rank %s: call it on every rank, at the same steps.", ranks
                )
        self._before = step
        for rank, problem in problems.items() if self._ranks.is_first else ():
            if problem and f"{rank} {problem}" not in self._warned:
                self._warned.add(f"{rank} {problem}")
                LOGGER.warning("The gauge on rank %d: %s.", rank, problem)
        rows = [one.row(rank, problems[rank]) for rank, one in self._heard.items()]
        scalars = {
            LAYERS: float(own.layers),
            LAYERS_READ: float(min(one.some for one in self._heard.values())),
            RANKS_READ: float(sum(not problem for problem in problems.values())),
        }
        return tuple(rows), scalars

    def leave(self, why: str) -> None:
        """Tell the first rank that the gauge of this one was disabled."""
        own = self._heard.get(self._ranks.rank, RankStatus(-1, 0, 0, 0))
        self._say(replace(own, some=0, every=0, disabled=why))

    def listen(self) -> None:
        """On the first rank, read the last report of every rank that made one."""
        if self._ranks.is_first:
            others = {rank: RankStatus(**json.loads(words)) for rank, words in self._ranks.reports().items()}
            self._heard = dict(sorted({**self._heard, **others}.items()))

    def news(self) -> dict[str, Any]:
        """What the record should say: what is not read, and the last report of each rank; empty if it says so."""
        ranks = {str(rank): asdict(status) for rank, status in self._heard.items()}
        told = {**(self._unmet or {}), "ranks": ranks}
        if _without_steps(told) == _without_steps(self._recorded):
            return {}
        self._recorded = told
        return {"status": told}

    def _say(self, status: RankStatus) -> None:
        self._heard[self._ranks.rank] = status
        self._ranks.report(json.dumps(asdict(status)))


def _by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for reason in dict.fromkeys(reasons.values()):
        yield ", ".join(name for name, own in reasons.items() if own == reason), reason


def _without_steps(told: Mapping[str, Any]) -> dict[str, Any]:
    ranks = {rank: {**status, "step": None} for rank, status in told.get("ranks", {}).items()}
    return {**told, "ranks": ranks}

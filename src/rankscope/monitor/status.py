"""What a gauge was asked to read and what it read: what cannot be read and why, and the blocks of every rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rankscope._types import Status
from rankscope.errors import InputError, ReadingError
from rankscope.metrics import METRICS, SIDES, MetricSpec
from rankscope.models.view import ModelView
from rankscope.models.wrapping import is_distributed
from rankscope.monitor.acting import LOGGER
from rankscope.monitor.probing import RESIDUAL, MetricsLike, chosen_metrics, intervals_of
from rankscope.monitor.ranks import Ranks
from rankscope.monitor.readings import LAYERS_READ, LayerValue
from rankscope.monitor.watching import chosen_alarms
from rankscope.stream.viewing import notes_on_hidden_attention
from rankscope.verdicts.states import LEAST_INPUTS

PATIENT = 3
"""Readings after which a rank that never reported is named."""

_BETWEEN_INPUTS = "inputs_relative_residual"
_NO_ATTENTION = "no softmax over keys and no fused attention kernel was seen"
_OF_SIDE = {
    "tokens": "no block was seen",
    "attention": _NO_ATTENTION,
    "scores": _NO_ATTENTION,
    "queries": "no fused attention kernel was seen",
    "router": "no mixture of experts was seen",
    "branch": "no MLP branch was seen",
    "update": "no block was seen that takes the residual stream and returns it",
}
_OF_ALARMS = {
    "gradient_underflow": "no matrix has a gradient",
    "answers_alike": (
        "no cross-entropy and no squared or robust error was seen before backward: call gauge.before_backward(loss), "
        "as watch does; a loss inside a compiled graph or a checkpoint is not seen, nor are those of several processes"
    ),
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

    def unmet(
        self, values: Sequence[LayerValue], view: ModelView, notes: Sequence[str], *, has_batch: bool, ranks: Ranks
    ) -> dict[str, dict[str, str]]:
        """What is ``not_read`` (metrics) and ``not_watched`` (alarms) at the first reading, each with the reason.

        Args:
            values: the first reading.
            view: the structure of the model.
            notes: what the reader says about sites that it could not read.
            has_batch: whether the gauge was given a batch.
            ranks: the processes; the first one alone is given a batch.

        Raises:
            ReadingError: one of them was asked for by name.
        """
        why = reasons_why_not(self.metrics, values, view, notes)
        read = {row.metric for row in values if row.metric not in why} | {"shown_faults"}
        # What later readings have, or other ranks.
        if not any(map(is_distributed, view.model.parameters())):
            read.add("still_steps")
        if "loss_not_finite" in read:
            read.add("loss_risen")
        if "gradients_not_finite" in read and ranks.world == 1:
            read.add("gradient_carried")
        alarms = {}
        for alarm in self.alarms:
            is_elsewhere = not ranks.is_first and alarm.metrics[0].startswith("batch_")
            if is_elsewhere or any(metric in read for metric in alarm.metrics):
                continue
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
        return {"not_read": why, "not_watched": alarms}

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
    operators = ", ".join(name for stack in view.stacks for name in stack.operators)
    only = [f"{_NO_ATTENTION}, only operators ({operators})"] if operators else []
    return notes_on_hidden_attention(view) or only  # a block whose branches have no telling names


@dataclass(frozen=True)
class RankStatus:
    """What one rank read at its last reading.

    Attributes:
        step: training step of the reading.
        layers: blocks of its model.
        read: blocks at which at least one metric was read.
        disabled: why its gauge was disabled; empty if it was not.
    """

    step: int
    layers: int
    read: int
    disabled: str = ""

    @classmethod
    def of(cls, step: int, metrics: Sequence[MetricSpec], values: Sequence[LayerValue], view: ModelView) -> RankStatus:
        """The status of this rank after a reading."""
        blocks = {(stack.name, layer) for stack in view.stacks for layer in range(stack.depth)}
        names = {spec.name for spec in metrics}
        read = {(row.stack, row.layer) for row in values if row.metric in names} if names else blocks
        return cls(step, len(blocks), len(blocks & read))

    def problem(self, since: int) -> str:
        """What is wrong with it in words; empty if nothing is. ``since``: the step of the reading before."""
        if self.disabled:
            return f"disabled: {self.disabled}"
        if self.step < since:
            return f"last read at step {self.step}"
        return f"{self.layers - self.read} of {self.layers} layers not read" if self.read < self.layers else ""


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
        self._before, self._taken = -1, 0
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
        self._unmet = self._request.unmet(values, view, notes, has_batch=has_batch, ranks=self._ranks)
        if self._ranks.is_first:
            for names, reason in _by_reason(self._unmet["not_read"]):
                LOGGER.warning("The gauge does not read %s: %s.", names, reason)
            for names, reason in _by_reason(self._unmet["not_watched"]):
                LOGGER.info("The gauge does not watch for %s: %s.", names, reason)

    def take(
        self, step: int, values: Sequence[LayerValue], view: ModelView, due: Sequence[MetricSpec]
    ) -> tuple[LayerValue, ...]:
        """One row per rank that reported; ``due`` are the metrics of this reading."""
        self._say(RankStatus.of(step, due, values, view))
        self.listen()
        problems = {rank: status.problem(self._before) for rank, status in self._heard.items()}
        self._before, self._taken = step, self._taken + 1
        if self._ranks.is_first:
            for rank, problem in problems.items():
                self._warn(f"on rank {rank}: {problem}" if problem else "")
            silent = ", ".join(str(rank) for rank in range(self._ranks.world) if rank not in self._heard)
            if silent and self._taken > PATIENT:
                self._warn(f"was never called on rank {silent}: call it on every rank, at the same steps")
        return tuple(
            LayerValue(LAYERS_READ, f"rank {rank}", None, None, one.read, one.read, one.layers, problems[rank] or "ok")
            for rank, one in self._heard.items()
        )

    def _warn(self, words: str) -> None:
        """Once."""
        if words and words not in self._warned:
            self._warned.add(words)
            LOGGER.warning("The gauge %s.", words)

    def leave(self, why: str) -> None:
        """Tell the first rank that the gauge of this one was disabled."""
        own = self._heard.get(self._ranks.rank, RankStatus(-1, 0, 0))
        self._say(replace(own, read=0, disabled=why))

    def listen(self) -> None:
        """On the first rank, read the last report of every rank that made one."""
        if self._ranks.is_first:
            others = {rank: RankStatus(**json.loads(words)) for rank, words in self._ranks.reports().items()}
            self._heard = dict(sorted({**self._heard, **others}.items()))

    def news(self) -> dict[str, Any]:
        """What the record should say: what is not read, and the last report of each rank; empty if it says so."""
        ranks = {str(rank): asdict(status) for rank, status in self._heard.items()}
        # That a rank has read another step is no news.
        known = {**(self._unmet or {}), "ranks": {rank: {**one, "step": None} for rank, one in ranks.items()}}
        if known == self._recorded:
            return {}
        self._recorded = known
        return {"status": {**known, "ranks": ranks}}

    def _say(self, status: RankStatus) -> None:
        self._heard[self._ranks.rank] = status
        self._ranks.report(json.dumps(asdict(status)))


def _by_reason(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for reason in dict.fromkeys(reasons.values()):
        yield ", ".join(name for name, own in reasons.items() if own == reason), reason

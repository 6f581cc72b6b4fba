"""Output types of a gauge, as frozen data. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rankscope._printing import brief
from rankscope.errors import ResultError
from rankscope.runs._frozen import freeze, thaw

LARGEST_WHOLE = 2**31
LONGEST_SECONDS = 2.5e11
AlarmState = Literal["raised", "cleared", "noted"]
ENOUGH = 8
"""Readings below which nothing is said about a run without an alarm."""
SOON = 32
"""Steps for which answers may be no better than one answer for all inputs before that is said."""
NO_FAULT = "no fault seen"
NOT_LEARNING = "predicts no better than a constant so far"
LOSS = "rankscope/loss"
"""Name of the scalar with the loss of the step, if it was passed to the gauge."""
DASHBOARD = frozenset(
    {
        ("relative_residual", "least"),
        ("inputs_relative_residual", "least"),
        ("attention_entropy", "least"),
        ("stream_rms", "most"),
        ("qk_to_v_gradient", "least"),
        ("weight_motion", "most"),
    }
)
"""What a dashboard gets of the layers, beside the loss and the number of alarms."""
LAYERS_READ = "layers_read"
"""Name of the row of a rank: ``mean`` blocks at which something was read, ``most`` blocks of its model."""


@dataclass(frozen=True)
class LayerValue:
    """One metric at one layer, over the sequences (and heads) of the probe.

    Attributes:
        metric: registered name, or ``"qk_to_v_gradient"``, ``"q_gradient"``, ``"k_gradient"``, ``"v_gradient"``, or
            ``"inputs_relative_residual"`` and ``"inputs_averaging_residual"``, which compare the inputs of the probe,
            or ``"weight_norm"``, ``"gradient_norm"``, ``"not_finite"`` (share of sequences), or a fact about the batch;
            or :data:`LAYERS_READ`, one row per rank, whose status is ``"ok"`` or says what is missing.
        site: where it was taken; ``"attention.weights"`` for gradients, ``"inputs.mean"`` between inputs, the name of a
            parameter, or the rank.
        stack: ``"encoder"`` or ``"decoder"`` in a model that has both, else None.
        layer: number of the block, from 0; None for facts about the whole model, the loss and the batch.
        mean: mean over sequences and heads with a usable value; NaN if there is none.
        least: smallest of them.
        most: largest of them.
        status: the most common status of the values; ``"ok"`` or ``"at the float floor"`` if there is a mean.
    """

    metric: str
    site: str
    stack: str | None
    layer: int | None
    mean: float
    least: float
    most: float
    status: str = "ok"


def fact(metric: str, site: str, value: float) -> LayerValue:
    """A fact that belongs to no layer."""
    return LayerValue(metric, site, None, None, value, value, value)


@dataclass(frozen=True)
class Alarm:
    """An event that needs attention, with its reason.

    Attributes:
        name: registered name, e.g. ``"token_collapse"``.
        state: ``"raised"`` when it starts, ``"cleared"`` when it ends; ``"noted"`` for what is written down and is no
            alarm: it is read from a curve, or is a change that the loss did not follow.
        step: training step of the reading.
        stack: of the layer, None in a model with one stack.
        layer: the first affected layer; None if it is not about a layer.
        sentence: description with the numbers.
        evidence: the same numbers by name.
        component: the cause: ``"attention"``, ``"mlp"``, ``"skip"``, ``"embedding"``, ``"shapes"``,
            ``"structure"``; ``"rate"``, ``"objective"``, ``"optimizer"``, ``"data"``;
            ``"weights"`` that were replaced or are not finite; ``"activations"``, ``"loss"`` or ``"gradients"`` that
            are not finite, or gradients that do not arrive; or ``"unknown"``, if it was not found.
    """

    name: str
    state: AlarmState
    step: int
    stack: str | None
    layer: int | None
    sentence: str
    evidence: Mapping[str, float]
    component: str

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "evidence", freeze(self.evidence))

    def __str__(self) -> str:
        return self.sentence

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return {name: thaw(getattr(self, name)) for name in _names(Alarm)}


def noted(name: str, step: int, words: str, component: str, **evidence: float) -> Alarm:
    """An event: what changed at a step, which may be planned. ``declared=1`` if it is."""
    return Alarm(name, "noted", step, None, None, f"Step {step}: {words}.", evidence, component)


@dataclass(frozen=True, repr=False)
class Reading:
    """The metrics and alarms at one training step.

    Attributes:
        step: training step.
        scalars: a few numbers for a dashboard, by name (``"rankscope/relative_residual/least"``).
        table: every metric at every layer.
        alarms: alarms raised or cleared by this reading.
        active: names of the alarms that are active after this reading.
        seconds: duration of the reading.
        time: seconds since the epoch when it was taken.
        notes: what is written down and is no alarm.
    """

    step: int
    scalars: Mapping[str, float]
    table: tuple[LayerValue, ...]
    alarms: tuple[Alarm, ...] = ()
    active: tuple[str, ...] = ()
    seconds: float = 0.0
    time: float = 0.0
    notes: tuple[Alarm, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "scalars", freeze(self.scalars))

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def is_stuck(self) -> bool:
        """Whether the answers were no better than one answer for all inputs for a while, and the loss did not fall."""
        return any(row.metric == "answers_alike" and row.mean >= SOON for row in self.table)

    def values(self, metric: str, stack: str | None = None) -> dict[int, float]:
        """Mean of one metric by layer."""
        rows = [row for row in self.table if row.metric == metric and row.stack == stack]
        return {row.layer: row.mean for row in rows if row.layer is not None}

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types; numbers that are not finite become None."""
        rows = [[thaw(getattr(row, name)) for name in _names(LayerValue)] for row in self.table]
        return {
            "step": self.step,
            "time": self.time,
            "seconds": self.seconds,
            "scalars": thaw(self.scalars),
            "columns": list(_names(LayerValue)),
            "rows": rows,
            "alarms": [alarm.to_json() for alarm in self.alarms],
            "active": list(self.active),
            "notes": [note.to_json() for note in self.notes],
        }

    @classmethod
    def from_json(cls, facts: object) -> Reading:
        """Read what :meth:`to_json` wrote; anything else is a :class:`ResultError`."""
        if not isinstance(facts, Mapping) or facts.get("columns") != list(_names(LayerValue)):
            raise ResultError("A line of the record is not a reading: its columns are missing or others.")
        try:
            return cls(
                step=_whole(facts["step"]),
                scalars={str(name): _number(value) for name, value in facts["scalars"].items()},
                table=tuple(_row(row) for row in facts["rows"]),
                alarms=tuple(_alarm(entry) for entry in facts["alarms"]),
                active=tuple(str(name) for name in facts["active"]),
                notes=tuple(_alarm(entry) for entry in facts.get("notes", ())),  # records before 0.2 have none
                seconds=_duration(facts["seconds"]),
                time=_duration(facts["time"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ResultError(f"A line of the record is not a reading ({error!r:.300}).") from error


@dataclass(frozen=True)
class Heatmap:
    """One metric over layers and steps; a few hundred columns at most cover the whole run.

    Attributes:
        metric: its name.
        stack: of the layers, None in a model with one stack.
        layers: rows, first layer first.
        steps: columns, in order.
        values: one tuple per layer, one value per step; NaN if not measured.
        alarms: ``(step, layer, name)`` of the alarms raised in this stack, to mark in the plot.
    """

    metric: str
    stack: str | None
    layers: tuple[int, ...]
    steps: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]
    alarms: tuple[tuple[int, int, str], ...] = field(default=())


def scalar_name(metric: str, stack: str | None, what: str) -> str:
    """``rankscope/METRIC/WHAT``, with the stack before the metric if the model has several.

    Example:
        >>> scalar_name("mean_cosine", "encoder", "least")
        'rankscope/encoder/mean_cosine/least'
    """
    return "/".join(part for part in ("rankscope", stack, metric, what) if part is not None)


def layer_scalars(values: Sequence[LayerValue], named: Collection[str] | None = None) -> dict[str, float]:
    """Smallest, mean and largest value over the layers, by name.

    Args:
        values: of one reading.
        named: metrics of which all three are wanted, beside those of :data:`DASHBOARD`; None for every metric.
    """
    groups: dict[tuple[str, str | None], list[float]] = {}
    for row in values:
        if row.mean - row.mean == 0.0 and row.layer is not None:  # finite
            groups.setdefault((row.metric, row.stack), []).append(row.mean)
    return {
        scalar_name(metric, stack, what): value
        for (metric, stack), means in groups.items()
        for what, value in (("least", min(means)), ("mean", sum(means) / len(means)), ("most", max(means)))
        if named is None or metric in named or (metric, what) in DASHBOARD
    }


def too_few(count: int) -> str:
    """What is said instead of "no alarm" after a few readings."""
    return f"too few readings to judge ({count} of {ENOUGH})"


def one_line(
    reading: Reading, count: int | None = None, raised: Sequence[Alarm] = (), notes: Sequence[Alarm] = ()
) -> str:
    """A reading in one line: ``step 120: no fault seen (23 readings), residual 0.41 to 0.62 over 12 blocks, no alarm``.

    Args:
        reading: the reading.
        count: how many readings there were, if too few of them should be said.
        raised: alarms of the run, also of earlier readings.
        notes: of the run; the last one of each kind is named.
    """
    over = {alarm.name: alarm for alarm in raised if alarm.state == "raised" and alarm.name not in reading.active}
    faults = [over.pop(FAULTS)] if FAULTS in over else []  # of the model, and not over while training goes on
    residuals = [row.mean for row in reading.table if row.metric == "relative_residual" and row.layer is not None]
    residuals = [value for value in residuals if value == value]
    parts = []
    if residuals:
        low, high = (f"{end:.2g}" for end in (min(residuals), max(residuals)))
        parts.append(f"residual {low if low == high else f'{low} to {high}'} over {len(residuals)} blocks")
    if LOSS in reading.scalars:
        parts.append(f"loss {reading.scalars[LOSS]:.3g}")
    if reading.active:
        parts.append(f"{'alarm' if len(reading.active) == 1 else 'alarms'}: {', '.join(reading.active)}")
    elif over:
        before = ", ".join(f"{name} (step {alarm.step})" for name, alarm in over.items())
        parts.append(f"no alarm now, before: {before}")
    elif count is not None and count < ENOUGH:
        parts.append(too_few(count))
    elif not faults:
        seen = NO_FAULT if count is None else f"{NO_FAULT} ({count} readings)"
        parts = [NOT_LEARNING if reading.is_stuck else seen, *parts, "no alarm"]
    told = [note for note in notes if note.component != "none" and not note.evidence.get("declared")]
    noted = {note.name: note for note in told if note.name != FAULTS}
    if noted:
        parts.append(f"noted: {', '.join(f'{name} (step {note.step})' for name, note in noted.items())}")
    # Of a fault only its first line; what to change is in the alarm.
    shown = [*faults, *(note for note in notes if note.name == FAULTS)]
    words = [one.sentence.split("\n")[0].rstrip(".") for one in shown]
    return ". ".join([f"step {reading.step}: {', '.join(parts)}", *words])


FAULTS = "shown_faults"
"""Name of the alarm and the notes about how the model is put together, whose sentences are in every line."""


def _names(kind: type[LayerValue] | type[Alarm]) -> tuple[str, ...]:
    return tuple(kind.__dataclass_fields__)


def _number(value: object) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"expected a number, got {value!r:.80}")
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -LARGEST_WHOLE < value < LARGEST_WHOLE:
        raise ValueError(f"expected a whole number, got {value!r:.80}")
    return value


def _duration(value: object) -> float:
    """Check a number of seconds, since the epoch or elapsed; the upper limit is ten thousand years."""
    seconds = _number(value)
    if not 0 <= seconds < LONGEST_SECONDS:
        raise ValueError(f"expected seconds, got {value!r:.80}")
    return seconds


def _row(row: Sequence[Any]) -> LayerValue:
    metric, site, stack, layer, mean, least, most, status = row
    least, most = _number(least), _number(most)
    return LayerValue(str(metric), str(site), _stack(stack), _layer(layer), _number(mean), least, most, str(status))


def _alarm(facts: Mapping[str, Any]) -> Alarm:
    state: AlarmState = facts["state"] if facts["state"] in ("cleared", "noted") else "raised"
    return Alarm(
        name=str(facts["name"]),
        state=state,
        step=_whole(facts["step"]),
        stack=_stack(facts["stack"]),
        layer=_layer(facts["layer"]),
        sentence=str(facts["sentence"]),
        evidence={str(name): _number(value) for name, value in facts["evidence"].items()},
        component=str(facts["component"]),
    )


def _layer(value: object) -> int | None:
    return None if value is None else _whole(value)


def _stack(value: object) -> str | None:
    return None if value is None else str(value)

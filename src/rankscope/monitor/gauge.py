"""The gauge: measures a training run at intervals, without changing it."""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import TracebackType

from torch import Tensor, nn
from torch.optim import Optimizer

from rankscope.errors import InputError, ReadingError, ResultError
from rankscope.examination import Finding
from rankscope.linalg.to_host import start_to_host
from rankscope.models.inputs import InputsLike, as_inputs
from rankscope.models.loading import need_module
from rankscope.models.model import Model
from rankscope.monitor.acting import LOGGER, Action, Actions, CollapseError
from rankscope.monitor.alarms import AlarmSpec
from rankscope.monitor.answers import Answers
from rankscope.monitor.batches import BatchData, BatchWatch
from rankscope.monitor.block_statistics import GraphReader
from rankscope.monitor.causes import (
    Cause,
    Scene,
    Structure,
    cause_by_experiment,
    find_cause,
    is_shown,
    shown,
    structural_cause,
    was_so_at_start,
)
from rankscope.monitor.changes import LossLevel
from rankscope.monitor.clearing import Clearing
from rankscope.monitor.outlets import Outlets, Sink
from rankscope.monitor.probing import MetricsLike, Objective, ProbeBattery, Prober
from rankscope.monitor.ranks import Ranks
from rankscope.monitor.readings import (
    ENOUGH,
    FAULTS,
    LOSS,
    Alarm,
    LayerValue,
    Reading,
    fact,
    one_line,
    scalar_name,
    too_few,
)
from rankscope.monitor.record import Record, holds_record, read_record
from rankscope.monitor.schedules import Schedule, as_schedule
from rankscope.monitor.status import ReadingRequest, StatusWatch, Where
from rankscope.monitor.steps import contradiction, settings_of
from rankscope.monitor.watching import AlarmWatch, References, random_null, worst_of
from rankscope.monitor.writes import Writes

STRUCTURE_EVERY = 4
"""Readings between two looks at how the model is put together, each of which costs a pass of the probe."""
STREAM = "stream_rms"
LOSS_FACTS = ("loss_now", "loss_level", "loss_spread")
OVERFLOWS = 16.0
"""Growth of the stream since the start of the run that is blamed for numbers that are not finite."""


class Gauge:
    """Monitors a training run for collapse.

    Args:
        model: the model being trained, wrapped or not; with several ranks, after ``init_process_group``. A
            :class:`rankscope.Model` also says where its blocks and its residual stream are.
        probe: the inputs on which it is measured, fixed for the run: :class:`rankscope.Inputs`, texts, a tensor,
            keyword arguments, or None for the built-in sample text. Eight sequences are enough and the most that are
            used unless the inputs say otherwise; a slice of a validation batch is a good choice.
        schedule: ``"1%"`` of the wall time, every so many steps (a whole number), ``"log"``, or a ``Schedule``.
        metrics: names from ``rankscope ls metrics``; None for the cheap default, as far as this model shows it. A
            mapping gives each a clock of its own: with ``{"relative_residual": 1, "effective_rank": 200}`` a reading
            has the effective rank only if a multiple of 200 steps was passed since it was last read.
        alarms: names from ``ALARMS``; None for all that can be watched, an empty tuple for none.
        actions: what to do on an alarm: ``"log"``, ``"warn"``, ``"stop"`` (sets :attr:`should_stop`), ``"raise"``
            (``CollapseError``), or functions of an ``Alarm``.
        sinks: where scalars, heatmaps and alarms go in addition to the record.
        record: a folder for the record; None to keep none. If it holds one, the run is continued.
        strict: raise errors of the gauge itself instead of reporting them and disabling the gauge.
        where: ``"probe"``, or ``"graph"`` to read two norms (``relative_residual``, ``stream_rms``) of every training
            forward by ``rankscope.blockstats``, inside the graph that ``torch.compile`` builds: create the gauge
            before the first compiled step, and pass ``alarms=()`` to read nothing else. Every rank of a DDP training
            then reads its own batches, so :attr:`should_stop` may differ between ranks.
        patience: seconds to wait for other ranks where a forward pass needs them (FSDP).

    Raises:
        RankscopeError: here, for invalid arguments; later only with ``strict`` or the ``"raise"`` action.
        ReadingError: at the first reading, also without ``strict``, for a metric or an alarm that was asked for by name
            and cannot be read from this model or loop.

    Example:
        >>> from rankscope import Inputs, load
        >>> with Gauge(load("init:tiny-bert"), Inputs(sequences=2, tokens=8), schedule=10) as gauge:
        ...     [step for step in range(25) if gauge.step(step) is not None]
        [0, 10, 20]
    """

    def __init__(
        self,
        model: nn.Module | Model,
        probe: InputsLike,
        *,
        schedule: str | int | Schedule = "1%",
        metrics: MetricsLike = None,
        alarms: Sequence[str] | None = None,
        actions: Sequence[Action] = ("log",),
        sinks: Sequence[Sink] = (),
        record: str | Path | None = None,
        strict: bool = False,
        where: Where = "probe",
        patience: float = 60.0,
    ) -> None:
        if where not in ("probe", "graph"):
            raise InputError(f"where={where!r}: expected 'probe' or 'graph'.")
        request = ReadingRequest(metrics, alarms, where)
        self._schedule = as_schedule(schedule)
        self._ranks = Ranks(patience)
        watched = model if isinstance(model, Model) else Model(need_module(model, "Gauge"))
        given = as_inputs(probe)
        policy = given.plan().policy
        self._prober = Prober(watched, given, ProbeBattery(request.metrics, policy, request.every))
        self._actions = Actions(actions, speaks=self._ranks.is_first, strict=strict)
        facts = {
            "model": type(self._prober.model).__qualname__,
            "metrics": [spec.name for spec in request.metrics],
            "alarms": [rule.name for rule in request.alarms],
            "schedule": repr(self._schedule),
            "where": where,
            "ranks": self._ranks.world,
        }
        # Ranks that do not all see the folder would disagree about the history, so several start anew.
        self._resumes = _earlier(record) if record is not None and self._ranks.world == 1 else None
        outlets = sinks if self._ranks.is_first else ()
        self._outlets = Outlets(outlets, record if self._ranks.is_first else None, facts, strict=strict)
        padding = given.padding if isinstance(given.padding, str) else None
        self._watch, self._references = AlarmWatch(request.alarms), References()
        self._status = StatusWatch(request, self._ranks)
        self._optimizers: tuple[Optimizer, ...] = ()
        self.writes: Writes | None = None
        self.answers = Answers()
        self._loss_level = LossLevel()
        self._raw: int | None = None
        self._unseen: dict[str, tuple[int, Callable[[], list[Tensor]]]] = {}
        self._before, self._closed = 0, False
        self._offset = 0
        # The last but one as well: an alarm that needs two readings may follow a look that has seen the change already.
        self._structures: deque[Structure] = deque(maxlen=2)
        self._changes: tuple[Cause, ...] = ()
        self._causes: dict[str, Cause] = {}
        self._alarms: list[Alarm] = []
        self._notes: list[Alarm] = []
        self.objective: Objective | None = None
        self._findings: tuple[Finding, ...] | None = None
        self._departure: tuple[Cause, ...] = ()
        self._is_random = False
        self._batches, self._clearing = BatchWatch(padding), Clearing()
        self._where, self._strict = where, strict
        # Norms of the weights, and passes that compare structures, cost more than all norms in the graph.
        self._only_graph = where == "graph" and not request.alarms
        self._decision: tuple[int, bool] | None = None
        self._meeting: tuple[int, bool] | None = None
        self._last_read: int | None = None
        self._gradients: tuple[LayerValue, ...] = ()
        self._finite: int | None = None
        self._heard: set[str] = set()
        self._first_bad: dict[str, int] = {}  # the first step whose loss or gradient was not finite
        self._spent = 0.0
        self.disabled: str | None = None
        self.last: Reading | None = None
        self._graph: GraphReader | None = None
        if where == "graph":
            with self._guarded():
                self._graph = GraphReader(self._prober)  # it looks once, which gives the shapes of the random baseline

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of the run, once they are set. Their rates and writes between their steps are evidence."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        self._optimizers = optimizers
        if self._ranks.world == 1 and not self._only_graph:
            self.writes = self.writes or Writes(optimizers)
            self.writes.model = self._prober.model

    @property
    def should_stop(self) -> bool:
        """Whether an alarm requested that the run be stopped (``actions=("stop",)``)."""
        return self._actions.should_stop

    def is_due(self, step: int) -> bool:
        """Whether this step will be read; may be called repeatedly."""
        return self._is_due(self._numbered(step))

    def _is_due(self, step: int | None) -> bool:
        if self.disabled is not None or step is None:
            return False
        if self._decision is None or self._decision[0] != step:
            with self._guarded():
                self._decision = (step, self._decide(step))
        return self._decision is not None and self._decision == (step, True)

    def before_backward(self, loss: Tensor) -> None:
        """Keep some answers of the batch and their targets, as autograd saved them for this loss.

        From them an alarm tells whether the answers are better than one answer for all inputs. Call it with the loss
        before ``backward``; nothing is computed until a step is due.
        """
        if self.disabled is None and self._ranks.world == 1:
            with self._guarded():
                self.answers.keep(loss)

    def after_backward(self, step: int) -> None:
        """Read gradient norms, if this step is due; call it between ``backward`` and ``zero_grad``."""
        number = self._numbered(step)
        if number is None or self.disabled is not None:
            return
        is_due = self._is_due(number)
        if self._ranks.world == 1 and not self._only_graph:
            with self._guarded():
                self._clearing.after_backward(self._prober.model, is_due=is_due)
        if not is_due:
            return
        with self._guarded(), self._timed():
            if self._meets(number):
                self._look_at_start()
                if not self._refused():
                    self._gradients = self._prober.look_at_gradients()

    def step(self, step: int, *, loss: float | Tensor | None = None, batch: BatchData | None = None) -> Reading | None:
        """Take a reading, if one is due. Call it once per training step, outside forward and backward, on every rank.

        Args:
            step: the training step.
            loss: loss of this step, stored with the reading (``rankscope/loss``) for comparison; an alarm is raised if
                it is not finite. Read only when the step is due.
            batch: the training batch, a tensor, a mapping or a sequence of tensors: alarms are raised for copies,
                padding only, and a jump of the token distribution. Read only when the step is due.
        """
        number = self._numbered(step)
        if number is None:
            return None
        if self.writes is not None:
            self.writes.step = number
        if loss is not None:
            self.notice(number, "loss", loss)
        if not self._is_due(number):
            return None
        step = number
        reading: Reading | None = None
        with self._guarded():
            if self._refused():
                return self._refusal(step)
            with self._timed():
                values = self._values(step, loss, batch)
                if values:
                    self._status.check(
                        values, self._prober.view, self._prober.battery.notes, has_batch=batch is not None
                    )
                found = self._conclude(step, values) if values else None
            if found is not None:
                reading = self.last = replace(
                    found, seconds=self._spent, scalars={**found.scalars, **_loss_scalar(loss)}
                )
                with self._timed():
                    self._outlets.write(reading)
            self._schedule.was_read(step, self._spent)
            self._last_read, self._spent, self._decision = step, 0.0, (step, False)
            self._alarms += () if reading is None else reading.alarms
            self._notes += () if reading is None else reading.notes
            for alarm in () if reading is None else reading.alarms:
                self._actions.take(alarm, alone=alarm.component == "data" and self._ranks.world > 1)
        return reading

    def notice(self, step: int, name: str, value: float | Tensor) -> None:
        """Show the schedule a value of a step that costs nothing: the loss, or the norm of the gradient.

        After a jump of it the default schedule reads the next steps. On an accelerator, a value is looked at one step
        later: with streams (CUDA), the host waits neither for the device nor for what that step has queued there.
        """
        if self.disabled is not None:
            return
        with self._guarded():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                late, self._unseen[name] = self._unseen.get(name), (step, start_to_host([value]))
                if late is not None:
                    self._look_at_value(late[0], name, float(late[1]()[0]))
            else:
                self._look_at_value(step, name, _plain(value))

    def _look_at_value(self, step: int, name: str, value: float) -> None:
        self._heard.add(name)
        if not math.isfinite(value):
            self._first_bad.setdefault(name, step)
        self._schedule.notice(step, name, value)
        if name == "loss":
            if self.answers.is_new():
                self._loss_level.forget()
            self._loss_level.take(value)
            self.answers.hear(value)

    def silence(self, *names: str) -> None:
        """Never raise these alarms again.

        Raises:
            UnknownNameError: there is no such alarm.
        """
        self._watch.silence(names)

    @property
    def summary(self) -> str:
        """The last reading in one line."""
        if self.disabled is not None:
            return f"disabled: {self.disabled}"
        if self.last is None:
            return "nothing was read yet"
        return one_line(self.last, self._outlets.count + self._before, self._alarms, self._notes)

    def __repr__(self) -> str:
        return f"Gauge({type(self._prober.model).__name__}): {self.summary}"

    def close(self) -> None:
        """Write what is pending and close sinks and record; may be called again."""
        with self._guarded():
            if self._graph is not None:
                self._graph.close()
            self._clearing.close()
            if self.writes is not None:
                self.writes.close()
            self._status.listen()
            self._outlets.describe(self._status.news())
            count = self._outlets.count + self._before
            if 0 < count < ENOUGH and not self._closed and self._ranks.is_first:
                LOGGER.warning("%s; the last one: %s.", too_few(count).capitalize(), self.summary.rstrip("."))
            self._closed = True
            self._outlets.close(0 if self._last_read is None else self._last_read)

    def __enter__(self) -> Gauge:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _numbered(self, step: int) -> int | None:
        """The step as a number that never falls; None if it is not a whole number, which disables the gauge.

        A loop that counts from 0 in each epoch is counted on.
        """
        number: int | None = None
        with self._guarded():
            raw = operator.index(step)
            if self._raw is not None and raw < self._raw:
                if not self._offset:
                    LOGGER.warning(
                        "Step %d after step %d: the gauge counts on, from %d.", raw, self._raw, self._raw + 1
                    )
                self._offset += self._raw + 1 - raw
            self._raw, number = raw, raw + self._offset
        return number

    def _decide(self, step: int) -> bool:
        now = time.monotonic()
        if not self._schedule.by_clock or self._ranks.world == 1:
            return self._schedule.wants(step, now)
        announced = self._ranks.announced()
        pending = announced is not None and (self._last_read is None or announced > self._last_read)
        if self._ranks.is_first and not pending and self._schedule.wants(step, now):
            self._ranks.announce(step + 1)
            return False
        return pending and announced is not None and step >= announced

    def _look_at_start(self) -> None:
        """Once, before the first step of the optimizer if gradients are read: what the doctor says about the model."""
        if self._findings is None:
            examined = self._where == "probe" and FAULTS in self._watch.names
            self._findings = self._prober.examined(self.objective, self.optimizers) if examined else ()

    def _refused(self) -> bool:
        """Whether a fault is shown, and the model cannot be read at all."""
        return any(map(is_shown, self._findings or ())) and self._prober.why_not_read is not None

    def _refusal(self, step: int) -> Reading:
        """The only reading of a model that cannot be read: the fault that is shown."""
        cause = _cause_of(self._findings or ())
        self.disabled = f"the model cannot be read with the fault that it has. {cause.words}"
        words = f"The model has a fault, step {step}: {cause.words}"
        alarm = Alarm(FAULTS, "raised", step, None, None, words, {}, cause.component)
        self._alarms.append(alarm)
        reading = Reading(step, {}, (), (alarm,), (), time=time.time())
        self._outlets.write(reading)
        self._actions.take(alarm)
        return reading

    def _meets(self, step: int) -> bool:
        """Whether every rank is here, if a reading needs all of them."""
        if not self._prober.needs_all_ranks:
            return True
        if self._meeting is None or self._meeting[0] != step:
            self._meeting = (step, self._ranks.meet(step))
            if not self._meeting[1]:
                self._switch_off(
                    f"not all {self._ranks.world} ranks called the gauge at step {step} in time, and a model spread "
                    "over ranks can only be read by all of them together. Call it on every rank, also without a batch."
                )
        return self._meeting[1]

    def _values(self, step: int, loss: float | Tensor | None, batch: BatchData | None) -> tuple[LayerValue, ...]:
        gradients, self._gradients = self._gradients, ()
        read = () if self._graph is None else self._graph.take()
        if not self._meets(step):
            return ()
        if self._where == "probe":
            self._prober.battery.turn(step)
        weights = () if self._only_graph else self._prober.look_at_weights(step, self._rate(), self.optimizers)
        written = () if self.writes is None else self.writes.take(self._prober.view)
        values = (*(read or self._prober.look()), *weights, *written, *gradients)
        values = self._ranks.same_as_first(step, values) if self._prober.needs_all_ranks else values
        return (*values, *self._own(step, loss, batch))

    def _own(self, step: int, loss: float | Tensor | None, batch: BatchData | None) -> Iterator[LayerValue]:
        """What only this process knows: its batch, and its loss if there is no other process to disagree with."""
        if loss is not None and self._ranks.world == 1:
            value = _plain(loss)
            yield fact("loss_not_finite", "loss", float(not math.isfinite(value)))
            if math.isfinite(value):
                yield fact("loss", "loss", value)
            if (risen := self._loss_level.risen()) is not None:
                yield fact("loss_risen", "loss", float(risen))
            for name, number in zip(LOSS_FACTS, self._loss_level.level() or (), strict=False):
                yield fact(name, "loss", number)
            for name, number in self.answers.facts(step, self._rate()).items():
                yield fact(name, "loss", number)
        if math.isfinite(carried := self._clearing.take()):
            yield fact("gradient_carried", "gradients", carried)
        self._clearing.after_step()
        if math.isfinite(self._rate()):
            yield fact("learning_rate", "optimizer", self._rate())
        if self.optimizers:
            beyond, words = contradiction(self.optimizers)
            yield fact("settings_contradiction", words or "optimizer", beyond)
        if batch is not None and self._ranks.is_first:
            for name, value in self._batches.facts(batch).items():
                yield fact(name, "batch", value)

    def _rate(self) -> float:
        """The largest learning rate of the optimizers; NaN if none is known."""
        groups = [group for one in self.optimizers for group in one.param_groups if "lr" in group]
        return max((float(group["lr"]) for group in groups), default=math.nan)

    def _conclude(self, step: int, values: tuple[LayerValue, ...]) -> Reading:
        if not self._references.null:
            self._references.null = random_null(self._prober.battery.specs, self._prober.battery.shapes)
        if self._resumes is not None:
            self._resume(step, self._resumes)
        self._changes = ()
        is_first = self._outlets.count == 0 and self._before == 0
        if is_first:
            self._look_at_start()
            if (number := sum(map(is_shown, self._findings or ()))) > 0:
                values = (*values, fact(FAULTS, "structure", float(number)))
        if self._prober.unread:
            words = f"it can no longer be read as before: {self._prober.unread}"
            self._changes = (Cause("structure", words),)
            values = (*values, fact("structure_changes", "structure", 1.0))
        elif (self._outlets.count % STRUCTURE_EVERY == 0 or self._prober.is_renewed) and not self._only_graph:
            values = (*values, self._compared(step))
        self._references.take(values, step)
        self._references.past[-1] = replace(self._references.past[-1], settings=settings_of(self.optimizers))
        states, active = self._references.states(values), self._watch.active

        # Once for all alarms of a reading: it is a pass of the probe.
        departed = cache(partial(self._departed, step, self._prober.structure))

        def blame(spec: AlarmSpec, stack: str | None, layer: int | None) -> Cause:
            if spec.name == FAULTS:
                return _cause_of(self._findings or ())
            structure = cache(self._prober.structure)
            whole, past = states.get((None, None), states[stack, layer]), tuple(self._references.past)
            of_batch = all(metric.startswith("batch_") for metric in spec.metrics)
            if self._prober.needs_all_ranks and not of_batch:
                # Only the first rank knows its batch. A cause that it alone finds there would leave the others waiting
                # in the passes that look further.
                own = {name: value for name, value in whole.now.items() if not name.startswith("batch_")}
                whole, past = replace(whole, now=own), tuple(replace(one, data=False) for one in past)

            def experiment() -> Cause:
                return cause_by_experiment(
                    spec,
                    self._prober.depth(stack),
                    plain(),
                    lambda found: worst_of(spec, stack, self._references.states(found)),
                    partial(self._prober.without, stack),
                )

            faults = tuple(filter(is_shown, self._findings or ()))
            found = find_cause(
                Scene(
                    spec=spec,
                    stack=stack,
                    layer=layer,
                    state=states[stack, layer],
                    whole=whole,
                    past=past,
                    changes=() if of_batch else self._changes or departed(),
                    before=self._structures[0] if self._structures and not self._only_graph else None,
                    structure=structure,
                    diagnose=self._prober.diagnosed,
                    faults=faults,
                    inputs_apart=_last_of(values, "inputs_relative_residual"),
                    not_finite=lambda: None if of_batch else self._not_finite_at(values, spec),
                    structural=lambda: structural_cause(
                        self._prober.diagnosed if was_so_at_start(spec, states[stack, layer]) else tuple, faults
                    ),
                    experiment=experiment,
                )
            )
            if found.component == "unknown":
                found = next((one.following(name) for name, one in self._causes.items() if name in active), found)
            self._causes[spec.name] = found
            return found

        @cache
        def plain() -> tuple[LayerValue, ...]:
            return values if self._where == "probe" else self._prober.look()

        found = self._watch.look(step, states, blame)
        if self._where == "probe" and self._prober.caveats:
            words = " ".join(self._prober.caveats)
            found = tuple(replace(alarm, sentence=f"{alarm.sentence} {words}") for alarm in found)
        alarms = tuple(one for one in found if one.state != "noted")
        notes = tuple(one for one in found if one.state == "noted")
        if is_first:
            notes = (*notes, *_notes_of(self._findings or (), step))
        if not any(row.metric.endswith("not_finite") and row.mean > 0.0 for row in values):
            self._finite = step
        active = self._watch.active
        rows, status = self._status.take(step, values, self._prober.view, self._prober.battery.due)
        self._outlets.describe(self._status.news())
        scalars = {**_scalars(values), **status, "rankscope/alarms": float(len(active))}
        return Reading(step, scalars, (*values, *rows), alarms, active, time=time.time(), notes=notes)

    def _departed(self, step: int, structure: Callable[[], Structure]) -> tuple[Cause, ...]:
        """What was found since the last look at the structure when earlier weights ran again."""
        departure = None if self._only_graph or self._is_random else self._prober.departure(step)
        if departure is not None:
            before = self._structures[-1] if self._structures else None
            self._departure = (structure().departed(departure, before),)
        return self._departure

    def _compared(self, step: int) -> LayerValue:
        """How the model is put together, compared with what was seen last, here or in an earlier session.

        If that shows nothing, what it computes with earlier weights is compared.
        """
        now = self._prober.structure()
        departed = self._departed(step, lambda: now)  # in every case: it also keeps the current weights
        self._changes = (now.differences(self._structures[-1]) if self._structures else ()) or departed
        # The control: where the same pass again shows a change, the model is not deterministic, and none is claimed.
        self._is_random = self._is_random or bool(self._changes and self._prober.structure().differences(now))
        self._changes = () if self._is_random else self._changes
        self._departure = ()
        self._structures.append(now)
        self._outlets.describe({"structure": now.to_json()})
        return fact("structure_changes", "structure", float(len(self._changes)))

    def _resume(self, step: int, record: Record) -> None:
        """Continue a record: the readings before this step are the history of the run."""
        self._resumes = None
        structure = Structure.from_json(record.facts.get("structure"))
        self._structures.extend(() if structure is None else (structure,))
        for reading in record.readings:
            if reading.step < step:
                self._references.take(reading.table, reading.step)
                self._watch.look(reading.step, self._references.states(reading.table), _no_cause)
                self._outlets.recall(reading)
                self._before += 1

    def _not_finite_at(self, values: Sequence[LayerValue], spec: AlarmSpec) -> Cause | None:
        """Where the first number that is not finite was seen, and when all were finite last."""
        bad = {row.metric for row in values if row.metric.endswith("not_finite") and row.mean > 0.0}
        if not bad or (bad == {"gradients_not_finite"} and not bad & set(spec.metrics)):
            return None  # a loss scaler skips steps whose gradients overflow: not the cause of another alarm
        if spec.name != "not_finite" and "not_finite" in self._causes:
            return self._causes["not_finite"].following("not_finite")  # what came first does not change any more
        since = "" if self._finite is None else f" All numbers were finite at step {self._finite}."
        before = self._prober.before_update
        if before is not None and before[0]:
            component, words = before
            if component == "weights" and (earlier := self._cause_in_earlier_step(words, since)) is not None:
                return earlier
            words = words if component == "weights" else f"the output of {words}"
            return Cause(component, f"First, before the update: {words}.{since}")
        if "weights_not_finite" in bad and self._prober.all_weights_bad:
            return self._cause_of_bad_update("loss_not_finite" in bad, since)
        for of in ("weights", "gradients"):
            if f"{of}_not_finite" in bad and not (of == "gradients" and "loss_not_finite" in bad):
                return Cause(of, f"First: {self._prober.not_finite[of]}.{since}")
        if "not_finite" in bad:
            return Cause("activations", f"First: the output of {self._prober.first_not_finite()}.{since}")
        return Cause("loss", f"Weights and the activations of the probe are finite: look at the batch.{since}")

    def _cause_in_earlier_step(self, words: str, since: str) -> Cause | None:
        """A step since the last finite reading whose gradient was not finite, which its update brought to weights."""
        gradient, loss = (self._first_bad.get(name, math.inf) for name in ("gradient", "loss"))
        if not (self._finite or 0) <= gradient < self._references.past[-1].step:
            return None
        component = "loss" if loss <= gradient else "gradients"
        told = f"First: the {component} of step {min(loss, gradient):.0f}, whose update reached {words}."
        return Cause(component, f"{told}{since}")

    def _cause_of_bad_update(self, loss_is_bad: bool, since: str) -> Cause:
        """An update wrote all weights: what is known of its gradient, of the loss and of the activations before it.

        If gradients were read at this step, weights and activations of the probe were finite before the update.
        """
        states = {} if self.last is None else self._references.states(self.last.table)
        sizes = [(state.now.get(STREAM, math.nan), state.highest.get(STREAM, math.nan)) for state in states.values()]
        grown = max((now / start for now, start in sizes if now > 0.0 and start > 0.0), default=1.0)
        first_loss, first_gradient = (self._first_bad.get(name) for name in ("loss", "gradient"))
        words = "All weights at once"
        if first_gradient is not None:
            words += f", and the gradient of step {first_gradient} was not finite"
        elif "gradient" in self._heard:
            words += ", by an update whose gradient was finite"
        words += "."
        if self.last is not None and grown >= OVERFLOWS:
            words += f" At step {self.last.step} the stream was {grown:.2g} times as large as at the start of the run."
            return Cause("activations", f"{words}{since}")
        if first_gradient is None and "gradient" in self._heard:
            return Cause("optimizer", f"{words}{since}")
        if self._prober.before_update is not None and loss_is_bad:
            words += " Before it, weights and the activations of the probe were finite, and the loss was not."
            return Cause("loss", f"{words}{since}")
        if first_loss is not None and first_loss == first_gradient:
            words += f" The loss was not finite either at step {first_loss}, the first such step."
            return Cause("loss", f"{words}{since}")
        return Cause("gradients", f"{words}{since}")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent += time.perf_counter() - started

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Report any error inside once, and disable the gauge."""
        try:
            yield
        except (CollapseError, ReadingError):
            raise
        except Exception as error:
            if self._strict:
                raise
            self._switch_off(f"{type(error).__name__}: {error}", error)

    def _switch_off(self, why: str, error: Exception | None = None) -> None:
        if self.disabled is None:
            self.disabled = why
            self._ranks.leave()
            self._status.leave(why)
            self._outlets.describe(self._status.news())
            LOGGER.error("The gauge was disabled; the run continues. Cause: %s", why, exc_info=error)


def _earlier(folder: str | Path) -> Record | None:
    """The record to continue; a damaged one costs its history, not the run."""
    try:
        return read_record(folder) if holds_record(folder) else None
    except ResultError as error:
        LOGGER.warning("The record in %s is not continued: %s", folder, error)
        return None


def _cause_of(findings: Sequence[Finding]) -> Cause:
    """The faults that the doctor shows, and its changes."""
    causes = [shown(one) for one in findings if is_shown(one)]
    return Cause("structure", "\nAlso: ".join(one.words for one in causes))


def _notes_of(findings: Sequence[Finding], step: int) -> Iterator[Alarm]:
    """What the doctor finds besides: faults that are possible, and facts that may be meant."""
    for one in findings:
        if one.kind != "harmless" and not is_shown(one):
            words = one.sentence if one.kind == "note" else f"Possible: {one.sentence}"
            yield Alarm(FAULTS, "noted", step, None, None, words, {}, "structure")


def _no_cause(spec: AlarmSpec, stack: str | None, layer: int | None) -> Cause:
    return Cause("unknown", "")


def _scalars(values: Sequence[LayerValue]) -> dict[str, float]:
    """Smallest, mean and largest value over the layers, for each metric."""
    groups: dict[tuple[str, str | None], list[float]] = {}
    for row in values:
        if math.isfinite(row.mean) and row.layer is not None:
            groups.setdefault((row.metric, row.stack), []).append(row.mean)
    found = {f"rankscope/{row.metric}": row.mean for row in values if row.layer is None and math.isfinite(row.mean)}
    for (metric, stack), means in groups.items():
        found[scalar_name(metric, stack, "least")] = min(means)
        found[scalar_name(metric, stack, "mean")] = math.fsum(means) / len(means)
        found[scalar_name(metric, stack, "most")] = max(means)
    return found


def _last_of(values: Sequence[LayerValue], metric: str) -> float:
    """The metric after the last block, the smallest of several stacks; NaN if it was not read."""
    last = {row.stack: row.mean for row in values if row.metric == metric and row.layer is not None}
    return min((value for value in last.values() if math.isfinite(value)), default=math.nan)


def _loss_scalar(loss: float | Tensor | None) -> dict[str, float]:
    """The loss under its name; empty if there is none or it is not finite."""
    if loss is None:
        return {}
    value = _plain(loss)
    return {LOSS: value} if math.isfinite(value) else {}


def _plain(loss: float | Tensor) -> float:
    return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)

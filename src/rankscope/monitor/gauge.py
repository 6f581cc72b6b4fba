"""The gauge: measures a training run at intervals, without changing it."""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from torch import Tensor, nn
from torch.optim import Optimizer

from rankscope.errors import ReadingError, ResultError
from rankscope.examination import Finding
from rankscope.linalg.to_host import start_to_host
from rankscope.models.inputs import InputsLike, as_inputs
from rankscope.models.loading import need_module
from rankscope.models.model import Model
from rankscope.monitor.acting import LOGGER, Action, Actions, CollapseError
from rankscope.monitor.alarms import AlarmSpec, Breach
from rankscope.monitor.alarms.facts import CARRIED, NOTHING_LEFT
from rankscope.monitor.answers import Answers
from rankscope.monitor.batches import BatchData, BatchWatch
from rankscope.monitor.clearing import SAME_ANGLE, Clearing
from rankscope.monitor.ledger import Ledger
from rankscope.monitor.loss_level import LossLevel
from rankscope.monitor.objective import ObjectiveWatch
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
    layer_scalars,
    noted,
    one_line,
    too_few,
)
from rankscope.monitor.record import Record, holds_record, read_record
from rankscope.monitor.schedules import Schedule, as_schedule
from rankscope.monitor.status import ReadingRequest, StatusWatch
from rankscope.monitor.watching import AlarmWatch, References
from rankscope.monitor.why import SYMPTOMS, Clue, Why, explained, fastest, follows

STRUCTURE_EVERY = 4
"""Readings between two looks at how the model is put together, each of which costs a pass of the probe."""
FOLLOWS = 32
"""Steps before the onset of a rise in which what nobody declared makes it a warning, however slow it is."""
REMEMBERED = 512
"""Readings whose motion of the weights is remembered."""


class Gauge:
    """Monitors a training run for collapse.

    Args:
        model: the model being trained, wrapped or not; with several ranks, after ``init_process_group``. A
            :class:`rankscope.Model` also says where its blocks and its residual stream are.
        probe: the inputs on which it is measured, fixed for the run: :class:`rankscope.Inputs`, texts, a tensor,
            keyword arguments, or None for the built-in sample text. Eight sequences are enough and the most that are
            used unless the inputs say otherwise; a slice of a validation batch is a good choice.
        schedule: ``"1%"`` of the wall time, every so many steps (a whole number), or a ``Schedule``.
        metrics: names from ``rankscope ls metrics``; None for the cheap default, as far as this model shows it. A
            mapping gives each a clock of its own: with ``{"relative_residual": 1, "effective_rank": 200}`` a reading
            has the effective rank only if a multiple of 200 steps was passed since it was last read.
        alarms: names from ``ALARMS``; None for all that can be watched, an empty tuple for none.
        actions: what to do on an alarm: ``"log"``, ``"warn"``, ``"stop"`` (sets :attr:`should_stop`), ``"raise"``
            (``CollapseError``), or functions of an ``Alarm``.
        sinks: where scalars and alarms go in addition to the record.
        record: a folder for the record; None to keep none. If it holds one, the run is continued.
        strict: raise errors of the gauge itself instead of reporting them and disabling the gauge.
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
        patience: float = 60.0,
    ) -> None:
        request = ReadingRequest(metrics, alarms)
        self._schedule = as_schedule(schedule)
        self._ranks = Ranks(patience)
        watched = model if isinstance(model, Model) else Model(need_module(model, "Gauge"))
        given = as_inputs(probe)
        policy = given.plan().policy
        self._prober = Prober(watched, given, ProbeBattery(request.metrics, policy, request.every), strict=strict)
        self._actions = Actions(actions, speaks=self._ranks.is_first, strict=strict)
        facts = {
            "model": type(self._prober.model).__qualname__,
            "metrics": [spec.name for spec in request.metrics],
            "alarms": [rule.name for rule in request.alarms],
            "schedule": repr(self._schedule),
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
        self.ledger: Ledger | None = None
        self.answers = Answers()
        self._loss_level, self._objective_watch = LossLevel(), ObjectiveWatch()
        self._raw: int | None = None
        self._unseen: dict[str, tuple[int, Callable[[], list[Tensor]]]] = {}
        self._before, self._closed = 0, False
        self._offset = 0
        self._events: list[Alarm] = []
        self._code = ""
        self._motions: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._gradient_told: set[str] = set()
        self.alarms: list[Alarm] = []
        self.notes: list[Alarm] = []
        self.objective: Objective | None = None
        self._findings: tuple[Finding, ...] | None = None
        self._batches, self._clearing = BatchWatch(padding), Clearing()
        self._strict, self._named = strict, () if metrics is None else tuple(metrics)
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

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers of the run, once they are set. Their settings and writes between steps are events."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: tuple[Optimizer, ...]) -> None:
        self._optimizers = optimizers
        if self._ranks.world == 1:
            self.ledger = self.ledger or Ledger(optimizers)
            self.ledger.model = self._prober.model

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
                self.hear_objective(loss)

    def hear_objective(self, loss: Tensor) -> None:
        """Compare the operations of a loss, before ``backward``, with those of the losses before."""
        if not self._objective_watch.follows:
            self._objective_watch.follow(self._prober.model)
        elif words := self._objective_watch.take(loss):
            self.note("objective_changed", 1 + (self._raw or 0) + self._offset, words, "objective")
            self._loss_level.forget()

    @contextmanager
    def planned(self, words: str) -> Iterator[None]:
        """Declare what is written, set or switched inside: it is an event, and nothing that went wrong.

        Example:
            >>> from rankscope import Inputs, load
            >>> with Gauge(load("init:tiny-bert"), Inputs(sequences=2, tokens=8)) as gauge:
            ...     with gauge.planned("merge the adapters"):
            ...         pass  # writes weights
        """
        if self.ledger is None:
            yield
        else:
            with self.ledger.planned(words):
                yield
        self._prober.code.forget()
        self._loss_level.forget()

    def why(self) -> Why:
        """Why the run went bad: what is shown, recorded and seen, in order; with what ``doctor`` finds now.

        Example:
            >>> from rankscope import Inputs, load
            >>> with Gauge(load("init:tiny-bert"), Inputs(sequences=2, tokens=8)) as gauge:
            ...     reading = gauge.step(0)
            ...     str(gauge.why())
            'No fault seen (1 reading).'
        """
        raised = [one for one in self.alarms if one.state == "raised"]
        found: list[Clue] = []
        if self.last is not None and self.disabled is None:
            # What was so at the first step is not why the run went bad later.
            known = {one.code for one in self._findings or ()}
            with self._guarded():
                found = [
                    Clue("shown", self.last.step, "structure", _shown(one), FAULTS)
                    for one in self._prober.diagnosed()
                    if _is_shown(one) and one.code not in known
                ]
        return self._explained(raised, found)

    def _explained(self, raised: Sequence[Alarm], found: Sequence[Clue] = ()) -> Why:
        count = self._outlets.count + self._before
        return explained(raised, [*self.notes, *self._events], list(self._motions), count, found)

    def after_backward(self, step: int, *, is_own: bool = False) -> None:
        """Read gradient norms, if this step is due; call it between ``backward`` and ``zero_grad``.

        Args:
            step: the training step.
            is_own: these gradients do not compare with those of the step before: the step computes them itself, as
                that of LBFGS does, or the step before was read after they were computed.
        """
        if is_own:
            self._clearing.forget()
        number = self._numbered(step)
        if number is None or self.disabled is not None:
            return
        is_due = self._is_due(number)
        if self._ranks.world == 1:
            with self._guarded():
                self._clearing.after_backward(self._prober.model, is_due=is_due)
        if not is_due:
            return
        with self._guarded(), self._timed():
            if self._meets(number):
                self._look_at_start()
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
        if self.ledger is not None:
            self.ledger.step = number
        if loss is not None:
            self.notice(number, "loss", loss)
        if not self._is_due(number):
            return None
        step = number
        reading: Reading | None = None
        with self._guarded():
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
            self.alarms += () if reading is None else reading.alarms
            self.notes += () if reading is None else reading.notes
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
            self._loss_level.take(step, value)
            self.answers.hear(value)

    def note(self, name: str, step: int, words: str, component: str, **evidence: float) -> None:
        """Write down an event that was seen between two readings."""
        self._events.append(noted(name, step, words, component, **evidence))

    def leave_out_probe(self, why: str) -> None:
        """Read what needs no pass of the probe, because there is none."""
        self._prober.has_probe = False
        self._prober.leave_out(why)

    def alarm(self, alarm: Alarm) -> None:
        """Raise an alarm that was found between two readings."""
        if alarm.name in self._watch.names and self._ranks.is_first:
            self.alarms.append(alarm)
            self._outlets.write(Reading(alarm.step, {}, (), (alarm,), (), time=time.time()))
            self._actions.take(alarm)

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
        return one_line(self.last, self._outlets.count + self._before, self.alarms, self.notes)

    def __repr__(self) -> str:
        return f"Gauge({type(self._prober.model).__name__}): {self.summary}"

    def close(self) -> None:
        """Write what is pending and close sinks and record; may be called again."""
        with self._guarded():
            self._clearing.close()
            self._objective_watch.close()
            if self.ledger is not None:
                self.ledger.close()
            self._status.listen()
            self._outlets.describe(self._status.news())
            count = self._outlets.count + self._before
            if 0 < count < ENOUGH and not self._closed and self._ranks.is_first:
                last = self.summary.replace(f", {too_few(count)}", "").rstrip(".")
                LOGGER.warning("%s; the last one: %s.", too_few(count).capitalize(), last)
            self._closed = True
            self._outlets.close()

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
            examined = FAULTS in self._watch.names
            self._findings = self._prober.examined(self.objective, self.optimizers) if examined else ()

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
        if not self._meets(step):
            return ()
        self._prober.battery.turn(step)
        weights = self._prober.look_at_weights(step, self.optimizers)
        if self.ledger is not None:
            self._events += self.ledger.take(self._prober.view)
        values = (*self._prober.look(), *weights, *gradients)
        values = self._ranks.same_as_first(step, values) if self._prober.needs_all_ranks else values
        return (*values, *self._own(step, loss, batch))

    def _own(self, step: int, loss: float | Tensor | None, batch: BatchData | None) -> Iterator[LayerValue]:
        """What only this process knows: its batch, and its loss if there is no other process to disagree with."""
        if loss is not None and self._ranks.world == 1:
            value = _plain(loss)
            yield fact("loss_not_finite", "loss", float(not math.isfinite(value)))
            if math.isfinite(value):
                yield fact("loss", "loss", value)
            if (rise := self._loss_level.rise()) is not None:
                last = [*self.notes, *self._events]
                sudden = (one for one in last if one.component != "none" and not one.evidence.get("declared"))
                follows_one = any(0 <= rise.step - one.step <= FOLLOWS for one in sudden)
                size = max(1.0, rise.size) if follows_one else rise.size
                rows = {"risen": size, "before": rise.before, "after": rise.after, "since": float(rise.step)}
                yield from (fact(f"loss_{name}", "loss", number) for name, number in rows.items())
                if size >= 1.0:
                    self._loss_level.forget()  # told once: what follows is compared with this level
            for name, number in self.answers.facts(step, self._rate()).items():
                yield fact(name, "loss", number)
        if math.isfinite(carried := self._clearing.take()):
            yield fact("gradient_carried", "gradients", carried)
        if not carried >= CARRIED:  # a gradient that was kept is another alarm
            self._events += self._changed_gradient(step)
        self._clearing.after_step()
        if math.isfinite(self._rate()):
            yield fact("learning_rate", "optimizer", self._rate())
        if batch is not None and self._ranks.is_first:
            facts = self._batches.facts(batch, self.answers.take_labels(step))
            self._events += self._batches.events(step)
            for name, value in facts.items():
                yield fact(name, "batch", value)

    def _changed_gradient(self, step: int) -> Iterator[Alarm]:
        """What is done to gradients between backward and the step, each kind once: clipping, a scale, another angle."""
        ratio, cosine = self._clearing.ratio, self._clearing.cosine
        kinds = {
            "turned": cosine < -SAME_ANGLE,
            "at another angle": abs(cosine) < SAME_ANGLE,
            "scaled": abs(ratio) < 0.5,
        }
        for kind in (kind for kind, is_so in kinds.items() if is_so and kind not in self._gradient_told):
            self._gradient_told.add(kind)
            words = f"gradients are {kind} between backward and the step, to {ratio:.3g} (cosine {cosine:.3g})"
            declared = float(kind != "turned")
            yield noted("gradient_changed", step, words, "gradients", ratio=ratio, cosine=cosine, declared=declared)

    def _rate(self) -> float:
        """The largest learning rate of the optimizers; NaN if none is known."""
        groups = [group for one in self.optimizers for group in one.param_groups if "lr" in group]
        return max((float(group["lr"]) for group in groups), default=math.nan)

    def _conclude(self, step: int, values: tuple[LayerValue, ...]) -> Reading:
        if self._resumes is not None:
            self._resume(step, self._resumes)
        is_first = self._outlets.count == 0 and self._before == 0
        if is_first:
            self._look_at_start()
            if (number := sum(map(_is_shown, self._findings or ()))) > 0:
                values = (*values, fact(FAULTS, "structure", float(number)))
        self._compare_code(step)
        self._references.take(values)
        states = self._references.states(values)
        motion = fastest(Reading(step, {}, values, (), ()))
        self._motions.append((step, motion))

        def explain(spec: AlarmSpec, breach: Breach) -> tuple[str, str]:
            return self._told(spec, breach, step, values)

        found = self._watch.look(step, states, explain)
        if self._prober.caveats:
            words = " ".join(self._prober.caveats)
            found = tuple(replace(alarm, sentence=f"{alarm.sentence} {words}") for alarm in found)
        alarms = tuple(one for one in found if one.state != "noted")
        events, self._events = self._events, []
        notes = (*events, *(one for one in found if one.state == "noted"))
        if is_first:
            notes = (*notes, *_notes_of(self._findings or (), step))
        if not any(row.metric.endswith("not_finite") and row.mean > 0.0 for row in values):
            self._finite = step
        active = self._watch.active
        rows = self._status.take(step, values, self._prober.view, self._prober.battery.due)
        self._outlets.describe(self._status.news())
        scalars = {**layer_scalars(values, self._named), "rankscope/alarms": float(len(active))}
        return Reading(step, scalars, (*values, *rows), alarms, active, time=time.time(), notes=notes)

    def _told(self, spec: AlarmSpec, breach: Breach, step: int, values: Sequence[LayerValue]) -> tuple[str, str]:
        """The component of an alarm, and where it was first or what it follows; no experiment is made for it."""
        if spec.name == FAULTS:
            return "structure", _faults(self._findings or ())
        component, words = breach.component, ""
        if spec.name == "not_finite":
            component, words = self._not_finite_at(step, values)
        if spec.name == "not_finite_gradients":
            words = f"First: {self._prober.not_finite['gradients']}."
        as_if = Alarm(spec.name, "raised", step, None, None, "", {"since": _since(values, step)}, component)
        cause = self._explained([*(one for one in self.alarms if one.state == "raised"), as_if]).cause
        if cause is None or cause.name == spec.name or component == "data":
            return component, words
        if component != "unknown" and spec.name not in SYMPTOMS:  # what the fact itself says
            return component, follows(cause) if cause.how == "shown" else words
        return cause.component, " ".join(part for part in (words, follows(cause)) if part)

    def _compare_code(self, step: int) -> None:
        """At every fourth reading, or if the model could not be read as before: the operations of the probe's pass."""
        unread, is_due = self._prober.unread, self._outlets.count % STRUCTURE_EVERY == 0 or self._prober.is_renewed
        if unread and self._code:
            self._code = ""
            words = f"the model can no longer be read as before: {unread}"
            self.note("model_changed", step, words, "structure")
        elif is_due and not unread and not self._prober.needs_all_ranks:
            if words := self._prober.compared(step):
                self.note("model_changed", step, words, "structure")
            if self._prober.code.digest != self._code:
                self._code = self._prober.code.digest
                self._outlets.describe({"code": self._code})

    def _resume(self, step: int, record: Record) -> None:
        """Continue a record: the readings before this step are the history of the run."""
        self._resumes = None
        for reading in record.readings:
            if reading.step < step:
                self._references.take(reading.table)
                self._watch.look(reading.step, self._references.states(reading.table), lambda *_: ("unknown", ""))
                self._motions.append((reading.step, fastest(reading)))
                self.notes += reading.notes
                self._before += 1
        before = record.facts.get("code")
        if self._before and not self._prober.needs_all_ranks and isinstance(before, str):
            self._prober.compared(step)
            if before not in ("", self._prober.code.digest):
                words = "the operations of the model are not those of the earlier session"
                self.note("model_changed", step, words, "structure")

    def _not_finite_at(self, step: int, values: Sequence[LayerValue]) -> tuple[str, str]:
        """The component and the place where the first number that is not finite was seen, and when all were last."""
        bad = {row.metric for row in values if row.metric.endswith("not_finite") and row.mean > 0.0}
        # The mean over what is left of an empty batch is no number.
        empty = any(row.metric in ("batch_padding", "batch_ignored") and row.mean >= NOTHING_LEFT for row in values)
        if "batch_not_finite" in bad or empty:
            return "data", "First: the batch."
        since = "" if self._finite is None else f" All numbers were finite at step {self._finite}."
        before = self._prober.before_update
        if before is not None and before[0]:
            component, words = before
            if component == "weights" and (earlier := self._cause_in_earlier_step(words, since, step)) is not None:
                return earlier
            words = words if component == "weights" else f"the output of {words}"
            return (component, f"First, before the update: {words}.{since}")
        if "weights_not_finite" in bad and self._prober.all_weights_bad:
            return self._cause_of_bad_update("loss_not_finite" in bad, since)
        for of in ("weights", "gradients"):
            if f"{of}_not_finite" in bad and not (of == "gradients" and "loss_not_finite" in bad):
                return (of, f"First: {self._prober.not_finite[of]}.{since}")
        if "not_finite" in bad:
            return ("activations", f"First: the output of {self._prober.first_not_finite()}.{since}")
        return ("loss", f"Weights and the activations of the probe are finite: look at the batch.{since}")

    def _cause_in_earlier_step(self, words: str, since: str, step: int) -> tuple[str, str] | None:
        """A step since the last finite reading whose gradient was not finite, which its update brought to weights."""
        gradient, loss = (self._first_bad.get(name, math.inf) for name in ("gradient", "loss"))
        if not (self._finite or 0) <= gradient < step:
            return None
        component = "loss" if loss <= gradient else "gradients"
        told = f"First: the {component} of step {min(loss, gradient):.0f}, whose update reached {words}."
        return (component, f"{told}{since}")

    def _cause_of_bad_update(self, loss_is_bad: bool, since: str) -> tuple[str, str]:
        """An update wrote all weights: what is known of its gradient and of the loss before it.

        If gradients were read at this step, weights and activations of the probe were finite before the update.
        """
        first_loss, first_gradient = (self._first_bad.get(name) for name in ("loss", "gradient"))
        words = "All weights at once"
        if first_gradient is not None:
            words += f", and the gradient of step {first_gradient} was not finite"
        elif "gradient" in self._heard:
            words += ", by an update whose gradient was finite"
        words += "."
        if first_gradient is None and "gradient" in self._heard:
            return ("optimizer", f"{words}{since}")
        is_earlier = first_loss is not None and first_loss == first_gradient
        if is_earlier or (self._prober.before_update is not None and loss_is_bad):
            return ("loss", f"{words} The loss was not finite before it.{since}")
        return ("gradients", f"{words}{since}")

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


def _is_shown(finding: Finding) -> bool:
    """Whether an experiment of ``doctor`` shows a fault."""
    return finding.kind == "fault" and finding.certainty == "shown"


def _shown(finding: Finding) -> str:
    """Such a fault: what it is, what to change, its two numbers. No change is tried while a model is trained."""
    lines = [finding.sentence]
    if finding.change:
        lines.append(f"{'Change' if finding.tried else 'Hint'}: {finding.change.rstrip('.')}.")
    if finding.evidence:
        lines.append(f"Shown by: {finding.evidence}")
    return "\n".join(lines)


def _faults(findings: Sequence[Finding]) -> str:
    """The faults that the doctor shows, and its changes."""
    return "\nAlso: ".join(_shown(one) for one in findings if _is_shown(one))


def _since(values: Sequence[LayerValue], step: int) -> float:
    """The onset of a rise of the loss; else this step."""
    return next((row.mean for row in values if row.metric == "loss_since"), float(step))


def _notes_of(findings: Sequence[Finding], step: int) -> Iterator[Alarm]:
    """What the doctor finds besides: faults that are possible, and facts that may be meant."""
    for one in findings:
        if one.kind != "harmless" and not _is_shown(one):
            words = one.sentence if one.kind == "note" else f"Possible: {one.sentence}"
            yield Alarm(FAULTS, "noted", step, None, None, words, {}, "structure")


def _loss_scalar(loss: float | Tensor | None) -> dict[str, float]:
    """The loss under its name; empty if there is none or it is not finite."""
    if loss is None:
        return {}
    value = _plain(loss)
    return {LOSS: value} if math.isfinite(value) else {}


def _plain(loss: float | Tensor) -> float:
    return float(loss.detach()) if isinstance(loss, Tensor) else float(loss)

"""Is my training run collapsing? A gauge that monitors a run without disturbing it.

The contract, for plain loops and for everything built on top (host callbacks, sinks)::

    gauge = Gauge(model, probe, record="runs/gauge", actions=("log",), sinks=(...))
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        gauge.after_backward(step)      # optional: Q/K against V gradient norms, read before zero_grad
        optimizer.step(); optimizer.zero_grad()
        reading = gauge.step(step, loss=loss, batch=batch)  # a Reading when one was due, else None
        if gauge.should_stop:           # the "stop" action flags; it never raises
            break
    gauge.close()                       # or `with Gauge(...) as gauge:`

``Gauge(model, probe, *, schedule="1%", metrics=None, alarms=None, actions=("log",), sinks=(), record=None,
strict=False, ...)``

- ``model`` may be wrapped (DDP, FSDP2, ``torch.compile``); hooks and modes are added and removed inside ``step``.
- ``probe``: inputs as for ``measure``: texts, a tensor, a mapping of keyword arguments. Fixed for the whole run.
- ``schedule``: ``"1%"`` (share of wall time), a whole number (every so many steps), ``"log"``, or a
  :class:`~rankscope.monitor.schedules.Schedule`.
- ``loss`` and ``batch`` are optional: a loss that is not finite and faults of the data (copies, padding only, other
  tokens than before) are alarms. With several ranks, those of the first rank are read, and do not stop the run.
- ``record`` may hold the readings of an earlier session: they are the history of the run, and a model that is put
  together differently is an alarm. With several ranks, a session starts anew.
- ``step`` and ``after_backward`` are called on **every rank** with the same step numbers, also on a rank without a
  batch; sinks, record, log and warnings are used on rank 0 only; ``should_stop`` is set on every rank.
- ``gauge.is_due(step)`` says, without side effects on the model, whether this step will be read.
- A metric or an alarm that was asked for by name and cannot be read raises ``ReadingError`` at the first reading.
  Nothing else in the gauge raises into the run, unless ``strict=True`` (then every error does) or the ``"raise"``
  action (then ``CollapseError`` does). After an error, ``gauge.disabled`` describes the cause and ``step`` returns
  None.

:class:`Reading` is frozen: ``step``, ``scalars`` (finite floats by name), ``table`` (:class:`LayerValue` per metric and
layer), ``alarms`` (:class:`Alarm` raised or cleared now), ``active``, ``seconds``, ``time``. A :class:`Sink` has
``scalars(step, values)``, ``alarm(step, alarm)`` and ``close()``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of

if TYPE_CHECKING:
    from rankscope.monitor.acting import CollapseError, CollapseWarning
    from rankscope.monitor.alarms import ALARMS
    from rankscope.monitor.gauge import Gauge
    from rankscope.monitor.outlets import Sink
    from rankscope.monitor.readings import Alarm, Heatmap, LayerValue, Reading
    from rankscope.monitor.record import Record, read_record

__all__ = [
    "ALARMS",
    "Alarm",
    "CollapseError",
    "CollapseWarning",
    "Gauge",
    "Heatmap",
    "LayerValue",
    "Reading",
    "Record",
    "Sink",
    "read_record",
]

__getattr__ = names_of(__name__)

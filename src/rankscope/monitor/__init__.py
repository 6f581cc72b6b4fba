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

- ``model`` may be wrapped (DDP, FSDP2, ``torch.compile``); hooks and modes are added and removed inside ``step``.
- ``loss`` and ``batch`` are optional: without them, what needs them is not watched, and the record says so.
- ``step`` and ``after_backward`` are called on **every rank** with the same step numbers, also on a rank without a
  batch; sinks, record, log and warnings are used on rank 0 only; ``should_stop`` is set on every rank.
- A metric or an alarm that was asked for by name and cannot be read raises ``ReadingError`` at the first reading.
  Nothing else in the gauge raises into the run, unless ``strict=True`` (then every error does) or the ``"raise"``
  action (then ``CollapseError`` does). After an error, ``gauge.disabled`` describes the cause and ``step`` returns
  None.
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

"""Readings that are still on their device: small ones evaluated for several blocks at once, copied once per pass.

On an accelerator a small operation takes as long to launch as a large one, and on a CPU the calls themselves are most
of the work on a very small view. So small views wait, with copies of their tensors, until the pass is over or they are
too many. All others are evaluated at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rankscope.linalg.joining import Joinable, Made, joined
from rankscope.linalg.to_host import to_host
from rankscope.metrics import MetricSpec, MetricValues, View, evaluate

WAITING_ENTRIES = 1 << 23
"""Entries of the activations that wait together: as many as a walk reduces in one piece (:mod:`.linalg.tiles`)."""
WAITING_CPU_ENTRIES = 1 << 20
"""The same on a CPU: 4 MiB in float32."""
# A view waits if at least this many like it fit.
_FEWEST_WAITING = 4

Deliver = Callable[..., None]


@dataclass
class _Owed:
    """Tensors that ``deliver`` will receive on the CPU: all of them, or some columns of each."""

    deliver: Deliver
    tensors: Sequence[Tensor] = ()
    columns: slice | None = None


@dataclass
class _Group:
    """Views that are alike."""

    specs: Sequence[MetricSpec]
    floor: float
    views: list[Made] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    owed: list[_Owed] = field(default_factory=list)
    entries: int = 0

    def evaluate(self) -> None:
        """All metrics of all views."""
        # The same tensors for all, so they are copied once.
        tensors = _tensors_of(evaluate(self.specs, joined(self.views), self.floor))
        start = 0
        for count, owed in zip(self.sequences, self.owed, strict=True):
            owed.tensors, owed.columns = tensors, slice(start, start + count)
            start += count


class PendingReadings:
    """Collects the readings of a pass, in the order in which they were observed."""

    def __init__(self) -> None:
        self._owed: list[_Owed] = []
        self._groups: dict[Any, _Group] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def add(self, tensors: Sequence[Tensor], deliver: Deliver) -> None:
        """Have ``deliver`` called with these small tensors on the CPU."""
        self._owed.append(_Owed(deliver, tensors))

    def evaluate(self, specs: Sequence[MetricSpec], view: View, floor: float, deliver: Deliver) -> None:
        """Have ``deliver`` called with the values and statuses of the metrics on the CPU."""
        joinable = view if isinstance(view, Joinable) and view.batch_shape else None
        on_cpu = joinable is None or joinable.home.type == "cpu"
        most = WAITING_CPU_ENTRIES if on_cpu else WAITING_ENTRIES
        small = joinable is not None and joinable.made.entries <= most // _FEWEST_WAITING
        if joinable is None or not small or (on_cpu and not joinable.keeps_bits):
            self.add(_tensors_of(evaluate(specs, view, floor)), deliver)
            return
        made = joinable.made.copied()
        key = (tuple(spec.name for spec in specs), floor, made.likeness)
        if key in self._groups and self._groups[key].entries + made.entries > most:
            self._groups.pop(key).evaluate()
        group, owed = self._groups.setdefault(key, _Group(specs, floor)), _Owed(deliver)
        group.views.append(made)
        group.sequences.append(joinable.batch_shape[0])
        group.owed.append(owed)
        group.entries += made.entries
        self._owed.append(owed)

    def settle(self) -> None:
        """Copy everything to the CPU, once, and deliver it."""
        for group in self._groups.values():
            group.evaluate()
        owed, self._owed, self._groups = self._owed, [], {}
        tensors = {id(tensor): tensor for one in owed for tensor in one.tensors}
        copied = dict(zip(tensors, to_host(list(tensors.values())), strict=True))
        for one in owed:
            on_host = [copied[id(tensor)] for tensor in one.tensors]
            one.deliver(*(on_host if one.columns is None else (tensor[:, one.columns] for tensor in on_host)))


def _tensors_of(reading: MetricValues) -> tuple[Tensor, ...]:
    """Values and statuses; metrics first, then the batch."""
    return reading.values, reading.statuses

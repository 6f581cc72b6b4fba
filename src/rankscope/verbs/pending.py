"""Readings that are still on their device: evaluated for several blocks at once, and copied once per pass.

A metric is a few operations on reductions. On a CPU they are evaluated at once. On an accelerator a small operation
takes as long to launch as a large one, so views are stripped of their activations and wait until the pass is over, or
until what they hold exceeds :data:`HELD_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rankscope.linalg.joining import ActivationsGoneError, Joinable
from rankscope.linalg.to_host import to_host
from rankscope.metrics import MetricSpec, MetricValues, View, evaluate

HELD_BYTES = 1 << 25
"""Memory for the reductions of the views that wait together."""

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
    views: list[Joinable] = field(default_factory=list)
    owed: list[_Owed] = field(default_factory=list)
    bytes_held: int = 0

    def evaluate(self) -> None:
        """All metrics of all views."""
        joined: Any = type(self.views[0]).joined(self.views)
        tensors = _tensors_of(evaluate(self.specs, joined, self.floor))  # the same objects for all, so copied once
        start = 0
        for view, owed in zip(self.views, self.owed, strict=True):
            stop = start + view.batch_shape[0]
            owed.tensors, owed.columns = tensors, slice(start, stop)
            start = stop


class PendingReadings:
    """Collects the readings of a pass, in the order in which they were observed."""

    def __init__(self) -> None:
        self._owed: list[_Owed] = []
        self._groups: dict[Any, _Group] = {}
        self._reductions: dict[Any, frozenset[str] | None] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def add(self, tensors: Sequence[Tensor], deliver: Deliver) -> None:
        """Have ``deliver`` called with these small tensors on the CPU."""
        self._owed.append(_Owed(deliver, tensors))

    def evaluate(self, specs: Sequence[MetricSpec], view: View, floor: float, deliver: Deliver) -> None:
        """Have ``deliver`` called with the values, statuses and intervals of the metrics on the CPU."""
        joinable = view if isinstance(view, Joinable) and view.batch_shape and view.home.type != "cpu" else None
        # By shape too, because a metric may read other reductions of an empty or a large sequence.
        shape = None if joinable is None else joinable.stripped(frozenset()).likeness
        kind = (tuple(spec.name for spec in specs), type(view), shape)
        reductions = self._reductions.get(kind)
        if joinable is None or reductions is None:
            reading = evaluate(specs, view, floor)
            self.add(_tensors_of(reading), deliver)
            if joinable is not None and kind not in self._reductions:
                self._reductions[kind] = _reductions_read(specs, joinable, floor)
            return
        stripped = joinable.stripped(reductions)
        key = (kind, floor, stripped.likeness)
        group, owed = self._groups.setdefault(key, _Group(specs, floor)), _Owed(deliver)
        self._owed.append(owed)
        group.views.append(stripped)
        group.owed.append(owed)
        group.bytes_held += stripped.bytes_held
        if group.bytes_held > HELD_BYTES:
            self._groups.pop(key).evaluate()

    def settle(self) -> None:
        """Copy everything to the CPU, once, and deliver it."""
        for group in self._groups.values():
            group.evaluate()
        owed, self._owed, self._groups = self._owed, [], {}
        tensors = {id(tensor): tensor for one in owed for tensor in one.tensors}
        copied = dict(zip(tensors, to_host(list(tensors.values())), strict=True))
        for one in owed:
            found = [copied[id(tensor)] for tensor in one.tensors]
            one.deliver(*(found if one.columns is None else (tensor[:, one.columns] for tensor in found)))


def _tensors_of(reading: MetricValues) -> tuple[Tensor, ...]:
    """Values, statuses and, if there are estimates, intervals; metrics first, then the batch."""
    ends = () if reading.interval is None else (reading.interval.movedim(0, -1),)
    return (reading.values, reading.statuses, *ends)


def _reductions_read(specs: Sequence[MetricSpec], view: Joinable, floor: float) -> frozenset[str] | None:
    """The reductions that these metrics read, of a view on which they were evaluated; None if one reads activations."""
    stripped: Any = view.stripped(view.taken())
    try:
        evaluate(specs, stripped, floor)
    except ActivationsGoneError:
        return None
    return view.taken()

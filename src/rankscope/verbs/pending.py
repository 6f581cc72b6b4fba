"""Readings that are still on their device: evaluated for several blocks at once, and copied once per pass.

On an accelerator a small operation takes as long to launch as a large one, so views wait until the pass is over, or
until they are too many: small ones with a copy of their activations, up to :data:`HELD_ENTRIES`, large ones stripped of
them, up to :data:`HELD_BYTES`. On a CPU very small views wait too, because there the calls themselves are most of the
work, and with several threads so do views whose spectra are asked for, with their Gram matrices. All others are
evaluated at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rankscope.linalg.joining import ActivationsGoneError, Joinable
from rankscope.linalg.threads import available_threads
from rankscope.linalg.to_host import to_host
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import MetricSpec, MetricValues, View, evaluate

HELD_ENTRIES = 1 << 23
"""Entries of the activations that wait together: as many as a walk reduces in one piece (:mod:`.linalg.tiles`)."""
HELD_BYTES = 1 << 25
"""Memory for the reductions of the views that wait together without their activations."""
HELD_CPU_ENTRIES = 1 << 20
"""The same on a CPU: 4 MiB in float32."""
HELD_CPU_BYTES = 1 << 24
"""The same for reductions, most of them Gram matrices whose eigenvalues the threads of the CPU share."""
# A view waits with its activations if at least this many like it fit.
_FEWEST_HELD = 4

# What was learnt about views of each kind, for later passes too: a gauge makes many, of a few kinds.
_MOST_KINDS = 1000
_reductions: dict[Any, frozenset[str] | None] = {}

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
    size: int = 0

    def add(self, view: Joinable, owed: _Owed, size: int) -> None:
        """Have a view wait here; its size is in the units of the limit of the group."""
        self.views.append(view)
        self.owed.append(owed)
        self.size += size

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

    def __bool__(self) -> bool:
        return bool(self._owed)

    def add(self, tensors: Sequence[Tensor], deliver: Deliver) -> None:
        """Have ``deliver`` called with these small tensors on the CPU."""
        self._owed.append(_Owed(deliver, tensors))

    def evaluate(self, specs: Sequence[MetricSpec], view: View, floor: float, deliver: Deliver) -> None:
        """Have ``deliver`` called with the values and statuses of the metrics on the CPU."""
        joinable = view if isinstance(view, Joinable) and view.batch_shape else None
        on_cpu = joinable is None or joinable.home.type == "cpu"
        most = HELD_CPU_ENTRIES if on_cpu else HELD_ENTRIES
        small = joinable is not None and joinable.entries_held <= most // _FEWEST_HELD
        if joinable is not None and small and (not on_cpu or joinable.keeps_bits):
            held = joinable.held()
            self._wait(specs, held, floor, deliver, held.entries_held, most)
        elif joinable is None or (on_cpu and not _shares_spectra(specs, view)):
            self.add(_tensors_of(evaluate(specs, view, floor)), deliver)
        else:
            self._evaluate_large(specs, joinable, floor, deliver)

    def _evaluate_large(self, specs: Sequence[MetricSpec], view: Joinable, floor: float, deliver: Deliver) -> None:
        """Reduce a view whose activations cannot wait: the first of its kind is evaluated at once, to learn how."""
        # By shape too, because a metric may read other reductions of an empty or a large sequence.
        kind = (tuple(specs), type(view), view.stripped(frozenset()).likeness)
        reductions = _reductions.get(kind)
        if reductions is None:
            whole: Any = view
            self.add(_tensors_of(evaluate(specs, whole, floor)), deliver)
            if kind not in _reductions:
                if len(_reductions) >= _MOST_KINDS:
                    _reductions.clear()
                _reductions[kind] = _reductions_read(specs, view, floor)
            return
        stripped = _stripped(view, reductions, floor)
        most = HELD_CPU_BYTES if stripped.home.type == "cpu" else HELD_BYTES
        self._wait(specs, stripped, floor, deliver, stripped.bytes_held, most)

    def _wait(
        self, specs: Sequence[MetricSpec], view: Joinable, floor: float, deliver: Deliver, size: int, most: int
    ) -> None:
        """Add a view to those like it; what would exceed ``most`` is evaluated first."""
        key = (tuple(spec.name for spec in specs), type(view), floor, view.likeness)
        if key in self._groups and self._groups[key].size + size > most:
            self._groups.pop(key).evaluate()
        owed = _Owed(deliver)
        self._owed.append(owed)
        self._groups.setdefault(key, _Group(specs, floor)).add(view, owed, size)

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


def _shares_spectra(specs: Sequence[MetricSpec], view: View) -> bool:
    """Whether a view on a CPU should wait with its Gram matrices, so that the threads share more eigenvalues.

    Metrics of extensions are evaluated at once: they may read activations for some values only.
    """
    spectral = any(spec.needs == "spectrum" for spec in specs)
    ours = all((spec.function.__module__ or "").split(".")[0] == "rankscope" for spec in specs)
    return available_threads() > 1 and spectral and ours and isinstance(view, Tokens)


def _stripped(view: Joinable, reductions: frozenset[str], floor: float) -> Joinable:
    if isinstance(view, Tokens) and view.device.type == "cpu":
        if "kept_grams" in reductions:
            view.expect_grams()
        view.settle_resolved(floor)
    return view.stripped(reductions)


def _tensors_of(reading: MetricValues) -> tuple[Tensor, ...]:
    """Values and statuses; metrics first, then the batch."""
    return reading.values, reading.statuses


def _reductions_read(specs: Sequence[MetricSpec], view: Joinable, floor: float) -> frozenset[str] | None:
    """The reductions that these metrics read, of a view on which they were evaluated; None if one reads activations."""
    stripped: Any = _stripped(view, view.computed(), floor)
    try:
        evaluate(specs, stripped, floor)
    except ActivationsGoneError:
        return None
    return view.taken()

"""Why an alarm was raised: how the model differs from before, and which component, switched off, brings it back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import RankscopeError
from rankscope.linalg.precision import widest
from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.monitor.alarms import AlarmSpec, LayerState
from rankscope.runs.readings import LayerValue
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, Unreadable, trace

_BRANCHES = ("attention", "cross_attention", "mixer", "mlp", "both")
_SITES = ("block.in", "attention.probs", *(f"{label}.{end}" for label in _BRANCHES for end in ("out", "sum")))
SAME_GAIN = 0.1
"""Change of a gain that is not reported: learned gains move a little between two readings."""
ROUNDINGS = 16.0
"""Roundings of the sum that a gain may leave unexplained; more, and it is not that of this stream and branch."""
LARGEST_ERROR = 0.01
"""Share of the stream that those roundings may be; more, and the branch hides the stream."""
CARRIED = 0.5
"""Gain below which a skip no longer carries most of the stream."""
OTHER_BRANCH = 2.0
"""Factor by which the size of a branch, relative to the stream, has to change to be named."""
COLLAPSED_ENTRY = 0.1
"""Relative residual of the first block's input below which the embedding is the cause."""
FAST = 0.015
"""Change of the weights per step, relative to their norm, above which, in two readings, the learning rate is the cause.
In training that works it is about 0.001, and at most 0.008 in the healthy runs of our benchmark."""
MOST_HALVINGS = 3
_NOT_SHOWN = "Cause not found: a pass of the probe does not show this."


@dataclass(frozen=True)
class Cause:
    """What an alarm names as its cause.

    Attributes:
        component: one word, ``"unknown"`` if it was not found.
        words: a sentence with the evidence.
    """

    component: str
    words: str


@dataclass(frozen=True)
class Structure:
    """How a model is put together, besides its weights, as seen in one pass.

    Attributes:
        shapes: digest of the names and shapes of its parameters.
        gains: factor on the stream where the first branch of a block is added, by stack and layer (``"encoder/3"``).
            **Exact** up to rounding. Later adds are left out: after a norm, their stream is not the sum before.
        sees_later: whether attention sees later tokens, by stack and layer.
        entry: relative residual of the first block's input, by stack.
        branches: size of what each branch adds, relative to the block's input, by stack, layer and branch
            (``"encoder/3/mlp"``).
    """

    shapes: str
    gains: Mapping[str, float]
    sees_later: Mapping[str, bool]
    entry: Mapping[str, float]
    branches: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What two sessions of a run compare."""
        return {"shapes": self.shapes, "gains": dict(self.gains), "sees_later": dict(self.sees_later)}

    @classmethod
    def from_json(cls, facts: object) -> Structure | None:
        """Read what :meth:`to_json` wrote; None for anything else."""
        if not isinstance(facts, Mapping) or not isinstance(facts.get("shapes"), str):
            return None
        gains, later = facts.get("gains"), facts.get("sees_later")
        if not isinstance(gains, Mapping) or not isinstance(later, Mapping):
            return None
        numbers = {str(name): float(gain) for name, gain in gains.items() if isinstance(gain, (int, float))}
        return cls(facts["shapes"], numbers, {str(name): bool(sees) for name, sees in later.items()}, {})

    def differences(self, before: Structure) -> tuple[Cause, ...]:
        """How this model differs from the one before."""
        found = []
        if self.shapes != before.shapes:
            found.append(Cause("shapes", "names or shapes of parameters are others"))
        moved: dict[tuple[str, str], list[str]] = {}
        for name, gain in self.gains.items():
            old = before.gains.get(name, math.nan)
            if abs(gain - old) > SAME_GAIN * max(abs(gain), abs(old)):
                moved.setdefault((f"{gain:.2g}", f"{old:.2g}"), []).append(name)
        for (gain_now, gain_before), names in moved.items():
            words = f"the skips carry {gain_now} of the stream instead of {gain_before} in {_blocks(names)}"
            found.append(Cause("skip", words))
        masks = [name for name, sees in self.sees_later.items() if before.sees_later.get(name, sees) != sees]
        if masks:
            seen = "sees later tokens, which it did not" if self.sees_later[masks[0]] else "no longer sees later tokens"
            found.append(Cause("attention", f"attention {seen} in {_blocks(masks)}"))
        return tuple(found)

    def other_branches(self, before: Structure) -> Cause | None:
        """The branches that add far more, or far less, than before."""
        ratios = {
            name: size / before.branches[name]
            for name, size in self.branches.items()
            if size > 0.0 and before.branches.get(name, 0.0) > 0.0
        }
        moved = [name for name, ratio in ratios.items() if max(ratio, 1.0 / ratio) >= OTHER_BRANCH]
        if not moved:
            return None
        labels = sorted({name.split("/")[2] for name in moved})
        first = min(moved, key=_layer_of)
        words = (
            f"the branches ({', '.join(labels)}) add {self.branches[first]:.2g} of the stream instead of "
            f"{before.branches[first]:.2g} in block {_layer_of(first)}, and others than before in {_blocks(moved)}"
        )
        return Cause(labels[0] if len(labels) == 1 else "branches", words)

    def missing_skips(self, stack: str | None, layer: int) -> Cause | None:
        """The skips up to a layer, if most of them carry less than half of the stream."""
        known = {n: g for n, g in self.gains.items() if _stack_of(n) == (stack or "") and _layer_of(n) <= layer}
        lost = [name for name, gain in known.items() if abs(gain) < CARRIED]
        if 2 * len(lost) <= len(known):
            return None
        carried = max(abs(known[name]) for name in lost)
        return Cause("skip", f"the skips carry at most {carried:.2g} of the stream in {_blocks(lost)}")


def _stack_of(name: str) -> str:
    return name.split("/")[0]


def _layer_of(name: str) -> int:
    return int(name.split("/")[1])


def _blocks(names: Sequence[str]) -> str:
    """``"blocks 0 to 5"``, with the branch if it is one of several."""
    layers = sorted({_layer_of(name) for name in names})
    stack = f" of the {_stack_of(names[0])}" if _stack_of(names[0]) else ""
    if len(layers) == 1:
        return f"block {layers[0]}{stack}"
    if layers == list(range(layers[0], layers[-1] + 1)):
        return f"blocks {layers[0]} to {layers[-1]}{stack}"
    return f"blocks {', '.join(map(str, layers))}{stack}"


class _StructureReader:
    """Collects gains and masks of one pass; tensors are kept until the sum they belong to was seen."""

    def __init__(self) -> None:
        self.gains: dict[str, float] = {}
        self.sees_later: dict[str, bool] = {}
        self.entry: dict[str, float] = {}
        self.branches: dict[str, float] = {}
        self._size = math.nan
        self._stream: Tensor | None = None
        self._branch: Tensor | None = None

    def __call__(self, ref: SiteRef, seen: Observed) -> None:
        if isinstance(seen, Unreadable):
            return
        place = f"{ref.stack or ''}/{ref.layer}"
        if isinstance(seen, AttentionCall):
            support = seen.support()
            visible = torch.ones(seen.lengths, dtype=torch.bool) if support is None else support
            self.sees_later[place] = bool(visible.triu(1).any())
        elif isinstance(seen, Tensor):
            self._take(ref, place, seen.detach().clone())

    def _take(self, ref: SiteRef, place: str, tensor: Tensor) -> None:
        if ref.site == "block.in":
            self._stream, self._branch, self._size = tensor, None, _norm(tensor)
            if ref.layer == 0:
                residual = METRICS["relative_residual"].function
                self.entry[ref.stack or ""] = float(residual(tensor).mean()) if tensor.ndim == 3 else math.nan
        elif ref.site.endswith(".out"):
            self._branch = tensor if self._branch is None else self._branch
            self.branches[f"{place}/{ref.site.removesuffix('.out')}"] = _norm(tensor) / self._size
        elif self._stream is not None and self._branch is not None:
            gain = _gain(tensor, self._branch, self._stream)
            if math.isfinite(gain):
                self.gains[place] = gain
            self._stream = None


def _gain(total: Tensor, branch: Tensor, stream: Tensor) -> float:
    """The factor g of total = g stream + branch, by least squares; NaN if they do not fit."""
    if not total.shape == branch.shape == stream.shape:
        return math.nan
    rounding = ROUNDINGS * torch.finfo(total.dtype).eps
    total, branch, stream = (tensor.cpu().double() for tensor in (total, branch, stream))
    carried, size = total - branch, float(stream.norm())
    error = rounding * float(total.norm() + branch.norm() + stream.norm())
    if not (math.isfinite(error) and error <= LARGEST_ERROR * size):
        return math.nan
    gain = float((carried * stream).sum()) / size**2
    return round(gain, 6) if float((carried - gain * stream).norm()) <= error else math.nan


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=widest(tensor.device)))


def read_structure(view: ModelView, batch: Batch) -> Structure:
    """Run the model once and see how it is put together."""
    reader = _StructureReader()
    with trace(view, SiteSelection.parse(_SITES), reader):
        batch.run(view.model)
    shapes = hashlib.sha256()
    for name, parameter in view.model.named_parameters():
        shapes.update(f"{name} {tuple(parameter.shape)};".encode())
    return Structure(shapes.hexdigest()[:16], reader.gains, reader.sees_later, reader.entry, reader.branches)


Severity = Callable[[Sequence[LayerValue]], "tuple[float, float] | None"]
Without = Callable[[str, int, int], Sequence[LayerValue]]


def cause_of_structure(now: Structure, before: Structure | None, stack: str | None, layer: int) -> Cause | None:
    """A cause that can be seen without switching anything off."""
    for found in now.differences(before) if before is not None else ():
        return Cause(found.component, f"Cause: {found.words}.")
    missing = now.missing_skips(stack, layer)
    if missing is not None:
        return Cause(missing.component, f"Cause: {missing.words}.")
    entry = now.entry.get(stack or "", math.nan)
    if entry < COLLAPSED_ENTRY:
        words = f"Cause: tokens are alike before the first block, relative residual {entry:.2g}."
        return Cause("embedding", words)
    return None


def cause_in_history(state: LayerState, fastest: float) -> Cause | None:
    """A cause that the run's own history shows: weights that move too fast, or an objective that is satisfied.

    Args:
        state: of the layer.
        fastest: second largest ``weight_motion`` of the readings so far, each the largest of its layers.
    """
    if fastest >= FAST:
        return Cause("rate", f"Cause: the learning rate: weights changed by {fastest:.2g} of their norm per step.")
    if state.settled:
        words = "Cause: the objective: the gradient of the whole model has nearly vanished in this state."
        return Cause("objective", words)
    return None


def cause_of_vanished_gradients(state: LayerState, spec: AlarmSpec) -> Cause | None:
    """Why queries and keys get no gradient, if attention itself is the reason."""
    entropy, gradient = state.now.get("attention_entropy", math.nan), state.now.get(spec.metrics[0], math.nan)
    if gradient == 0.0 and entropy > 0.0:
        words = f"Cause: attention does not depend on queries and keys at all; its entropy is {entropy:.2g}."
        return Cause("attention", words)
    return None


def cause_by_experiment(
    spec: AlarmSpec, depth: int, plain: Sequence[LayerValue], severity: Severity, without: Without
) -> Cause:
    """Switch attention off in all blocks, then MLPs: the one that ends the alarm is the cause. Its blocks are narrowed.

    Args:
        spec: the alarm.
        depth: number of blocks.
        plain: the values on the probe.
        severity: the largest severity of the alarm in some values, and the value there; None if they do not show it.
        without: the values with a component switched off in some blocks, given its name, the first and the last block.
    """
    before = severity(plain)
    what = spec.metrics[0].replace("_", " ")
    if before is None:
        return Cause("unknown", _NOT_SHOWN)
    tried: dict[str, tuple[float, float]] = {}
    for component in ("attention", "mlp"):
        try:
            after = severity(without(component, 0, depth - 1))
        except RankscopeError:
            continue
        if after is None:
            return Cause("unknown", _NOT_SHOWN)
        tried[component] = after
    helped = [component for component, (left, _) in tried.items() if left < spec.release]
    if len(helped) != 1:
        ends = " and ".join(f"{value:.2g} with {name} off" for name, (_, value) in tried.items())
        return Cause("unknown", f"Cause not found: the {what} is {before[1]:.2g}, {ends}." if ends else
                     "Cause not found: the branches of this model cannot be switched off.")  # fmt: skip
    component = helped[0]
    first, last, after_value = _narrowed(spec, component, depth, tried[component][1], severity, without)
    place = f"block {first}" if first == last else f"blocks {first} to {last}"
    words = f"Cause: {component} in {place}: with it off the {what} is {after_value:.2g} instead of {before[1]:.2g}."
    return Cause(component, words)


def _narrowed(
    spec: AlarmSpec, component: str, depth: int, value: float, severity: Severity, without: Without
) -> tuple[int, int, float]:
    """The smallest range of blocks, found by halving, that is enough to switch off."""
    first, last = 0, depth - 1
    for _ in range(MOST_HALVINGS):
        if first == last:
            break
        middle = (first + last) // 2
        for low, high in ((first, middle), (middle + 1, last)):
            after = severity(without(component, low, high))
            if after is not None and after[0] < spec.release:
                first, last, value = low, high, after[1]
                break
        else:
            break
    return first, last, value

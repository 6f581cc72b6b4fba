"""Why an alarm was raised: one search for every alarm, from what is already known to experiments on the branches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import RankscopeError
from rankscope.examination import CAUSES, Finding
from rankscope.linalg.precision import widest
from rankscope.linalg.update import skip_gain
from rankscope.metrics import METRICS
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.models.wrapping import is_distributed
from rankscope.monitor.alarms import AlarmSpec, LayerState
from rankscope.monitor.alarms.data_shift import CUT
from rankscope.monitor.alarms.gradient_underflow import LOST
from rankscope.monitor.alarms.kept_gradients import CARRIED as KEPT
from rankscope.monitor.alarms.repeated_sequences import SORTED, STUCK
from rankscope.monitor.alarms.still_weights import MOVED, STOPPED
from rankscope.monitor.alarms.still_weights import STEPS as STILL
from rankscope.monitor.alarms.vanishing_qk_gradients import NOTHING
from rankscope.monitor.readings import LayerValue
from rankscope.monitor.replay import Departure
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, Unreadable, trace

_BRANCHES = ("attention", "cross_attention", "mixer", "mlp", "both")
_SITES = ("block.in", "attention.probs", *(f"{label}.{end}" for label in _BRANCHES for end in ("out", "sum")))
SAME_GAIN = 0.1
"""Change of a gain that is not reported: learned gains move a little between two readings."""
CARRIED = 0.5
"""Gain below which a skip no longer carries most of the stream."""
LOST_BRANCH = 0.05
"""Share of what a branch added at the look before, below which the model was changed: no training does that."""
AS_BEFORE = 2.0
"""Factor by which a value may differ from what it was when the run began, and be about the same."""
COLLAPSED_ENTRY = 0.1
"""Relative residual of the first block's input below which the embedding is the cause."""
SETTLES = 16
"""Steps after which the motion of weights counts: with Adam and small initial weights, the first steps are large."""
RAISED = 4.0
"""Factor by which a learning rate was raised from one reading to the next, and above its first value."""
LOST_SPREAD = 0.25
"""Share of the spread of an embedding's rows that is left, below which it is the cause; 0.86 in healthy runs."""
OTHER_ENTRY = 4.0
"""Factor by which the stream before the first block changes between two looks, that its branches do not explain."""
EQUAL_INPUTS = 1e-3
"""Relative residual between the inputs before the first block, below which they are the same there."""
TARGET = 0.003
"""Motion of the weights per step, relative to their norm, that a lower learning rate should lead to."""
FAST_EARLY = 0.05
"""The same for the first steps, in three readings."""
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
        change: what to change; empty if that follows from the component.
    """

    component: str
    words: str
    change: str = ""

    def following(self, alarm: str) -> Cause:
        """The same cause, for an alarm that has none of its own; one that follows already names the first alarm."""
        if self.words.startswith("Follows "):
            return self
        return replace(self, words=f"Follows {alarm.replace('_', ' ')}. {self.words}")


@dataclass(frozen=True)
class Structure:
    """How a model is put together, besides its weights, as seen in one pass.

    Attributes:
        shapes: digest of the names and shapes of its parameters.
        gains: factor on the stream where the first branch of a block is added, by stack and layer (``"encoder/3"``).
            **Exact** up to rounding. Later adds are left out: after a norm, their stream is not the sum before.
        sees_later: whether attention sees later tokens, by stack and layer.
        entry: relative residual of the first block's input, by stack.
        inputs_entry: relative residual between the inputs, each the mean of its tokens, before the first block.
        entry_size: norm of the first block's input, by stack.
        settings: type of each module without children and what it was built with, as it prints it, by name.
        dtypes: the dtype of each parameter, by name.
        sizes: norm of what each branch adds, by stack, layer and branch (``"encoder/3/mlp"``): relative to a
            stream that explodes, every branch shrinks.
        shared: parameters whose memory is that of another one, and the first name of that.
    """

    shapes: str
    gains: Mapping[str, float]
    sees_later: Mapping[str, bool]
    entry: Mapping[str, float]
    inputs_entry: Mapping[str, float] = field(default_factory=dict)
    entry_size: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

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
        found = list(self._other_sharing(before))
        if self.shapes != before.shapes and not found:
            found.append(Cause("shapes", "names or shapes of parameters are others"))
        cast = [name for name, dtype in self.dtypes.items() if before.dtypes.get(name, dtype) != dtype]
        if cast:
            words = f"{len(cast)} parameters are {self.dtypes[cast[0]]} instead of {before.dtypes[cast[0]]}"
            found.append(Cause("numbers", words))
        moved: dict[tuple[str, str], list[str]] = {}
        for name, gain in self.gains.items():
            old = before.gains.get(name, math.nan)
            if abs(gain - old) > SAME_GAIN * max(abs(gain), abs(old)):
                moved.setdefault((f"{gain:.2g}", f"{old:.2g}"), []).append(name)
        lost = [name for name in before.gains if name not in self.gains]
        # A stream that is not finite has no gains either, and is not a change of the model.
        if lost and self.shapes == before.shapes and all(map(math.isfinite, self.entry.values())):
            found.append(Cause("skip", f"no addition of a skip is seen any more in {_blocks(lost)}"))
        for (gain_now, gain_before), names in moved.items():
            words = f"the skips carry {gain_now} of the stream instead of {gain_before} in {_blocks(names)}"
            found.append(Cause("skip", words))
        masks = [name for name, sees in self.sees_later.items() if before.sees_later.get(name, sees) != sees]
        if masks:
            seen = "sees later tokens, which it did not" if self.sees_later[masks[0]] else "no longer sees later tokens"
            found.append(Cause("attention", f"attention {seen} in {_blocks(masks)}"))
        for label in sorted({name.split("/")[2] for name in self.sizes}):
            own = {name: size for name, size in self.sizes.items() if name.split("/")[2] == label}
            silent = [name for name, size in own.items() if size < LOST_BRANCH * before.sizes.get(name, 0.0)]
            if silent:
                most = max(own[name] / before.sizes[name] for name in silent)
                words = f"the {label.replace('_', ' ')} branch adds at most {most:.2g} of what it did"
                found.append(Cause(label, f"{words} in {_blocks(silent)}"))
        return tuple(found)

    def _other_sharing(self, before: Structure) -> Iterator[Cause]:
        """Parameters that were separate and are one now, or the other way round."""
        for one, other, words in (
            (self, before, "were two parameters and are one"),
            (before, self, "were one parameter and are two"),
        ):
            pairs = [(name, of) for name, of in one.shared.items() if name in other.dtypes and name not in other.shared]
            if pairs:
                more = f", and so did {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
                change = (
                    f"Look at what assigned {pairs[0][0]}: tie weights before the optimizer is built, or not at all."
                )
                yield Cause("weights", f"{pairs[0][0]} and {pairs[0][1]} {words} now{more}", change)

    def departed(self, departure: Departure, before: Structure | None) -> Cause:
        """Why the same weights give other values: a setting that matters in evaluation mode, or the first place."""
        words = f"the weights of step {departure.since} give other values than at that step: {departure.words}"
        settings = () if before is None else self.other_settings(before)
        other = [name for name in settings if not self.settings[name].lower().startswith("drop")]
        change = f"Compare the code and the configuration with those of step {departure.since}."
        if before is None or not other:
            return Cause(departure.component, words, change)
        return Cause("structure", f"{_set_anew(other, self.settings, before.settings)}; {words}", change)

    def other_settings(self, before: Structure) -> tuple[str, ...]:
        """Names of the modules that are of another type, or built with other numbers."""
        return tuple(name for name, one in self.settings.items() if before.settings.get(name, one) != one)


def _depth(layer: int | None) -> int:
    return -1 if layer is None else layer


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
        self.sizes: dict[str, float] = {}
        self.inputs_entry: dict[str, float] = {}
        self.entry_size: dict[str, float] = {}
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
                self.entry_size[ref.stack or ""] = self._size
                residual = METRICS["relative_residual"].function
                self.entry[ref.stack or ""] = float(residual(tensor).mean()) if tensor.ndim == 3 else math.nan
                if tensor.ndim == 3 and min(tensor.shape[:2]) > 1:
                    self.inputs_entry[ref.stack or ""] = float(residual(tensor.to(widest(tensor.device)).mean(1)))
        elif ref.site.endswith(".out"):
            self._branch = tensor if self._branch is None else self._branch
            self.sizes[f"{place}/{ref.site.removesuffix('.out')}"] = _norm(tensor)
        elif self._stream is not None and self._branch is not None:
            gain = skip_gain(tensor, self._branch, self._stream)
            if math.isfinite(gain):
                self.gains[place] = gain
            self._stream = None


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
    leaves = {name: one for name, one in view.model.named_modules() if next(one.children(), None) is None}
    return Structure(
        shapes.hexdigest()[:16],
        reader.gains,
        reader.sees_later,
        reader.entry,
        reader.inputs_entry,
        reader.entry_size,
        {name: f"{type(one).__name__}({one.extra_repr()})" for name, one in leaves.items()},
        reader.sizes,
        {name: str(one.dtype).removeprefix("torch.") for name, one in view.model.named_parameters()},
        _shared(view.model),
    )


def _shared(model: nn.Module) -> dict[str, str]:
    """Parameters in the memory of another one, as one object or as two, and the first name of that."""
    first: dict[object, str] = {}
    found = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        place = 0 if is_distributed(one) or one.is_meta else one.data_ptr()
        of = first.setdefault((place, one.shape) if place else id(one), name)
        if of != name:
            found[name] = of
    return found


Severity = Callable[[Sequence[LayerValue]], "tuple[float, float] | None"]
Without = Callable[[str, int, int], Sequence[LayerValue]]


@dataclass(frozen=True)
class Moment:
    """What is remembered of one reading, for causes.

    Attributes:
        step: training step.
        motion: change of the weights per step, relative to their norm, by stack and layer.
        rate: learning rate, NaN if it is not known.
        loss: NaN if it is not known.
        data: whether the batch was unlike those before.
        written: those that something else wrote between two of its steps, one of each block; see :class:`Writes`.
        spread: how far the rows of an embedding are from their mean, relative to the start of the run.
        settings: of the optimizers besides the learning rate, by name.
        contradiction: how far they contradict each other, and in which words.
    """

    step: int
    motion: Mapping[tuple[str | None, int | None], float]
    rate: float = math.nan
    loss: float = math.nan
    data: bool = False
    written: tuple[LayerValue, ...] = ()
    spread: LayerValue | None = None
    settings: Mapping[str, float] = field(default_factory=dict)
    contradiction: LayerValue | None = None

    @property
    def slowest(self) -> float:
        """Motion of the block that moved least; NaN if none is known."""
        return min((value for value in self.motion.values() if math.isfinite(value)), default=math.nan)

    @property
    def fastest(self) -> float:
        """Motion of the block that moved most; NaN if none is known."""
        return max((value for value in self.motion.values() if math.isfinite(value)), default=math.nan)


@dataclass(frozen=True)
class Scene:
    """Everything the search for a cause may look at, when an alarm was raised. Functions are called only if needed.

    Attributes:
        spec: the alarm.
        stack: of the layer.
        layer: the first affected layer; None for an alarm about the whole model, the loss or the batch.
        state: of that layer.
        whole: facts about the whole model, the loss and the batch.
        past: the last readings, this one last.
        changes: how the model differs from what was seen last, if this reading compared it.
        before: how the model was put together before.
        structure: how it is put together now.
        diagnose: what ``doctor`` finds in it on the probe.
        faults: what it showed before the first step.
        inputs_apart: how far the inputs are from their mean after the last block; NaN if they were not compared.
        not_finite: the first number that is not finite; None if all are finite.
        structural: the seam to causes in the structure of the model alone; see :func:`structural_cause`.
        experiment: switches branches off, one kind after the other.
    """

    spec: AlarmSpec
    stack: str | None
    layer: int | None
    state: LayerState
    whole: LayerState
    past: Sequence[Moment]
    changes: Sequence[Cause]
    before: Structure | None
    structure: Callable[[], Structure]
    diagnose: Callable[[], Sequence[Finding]]
    faults: Sequence[Finding]
    inputs_apart: float
    not_finite: Callable[[], Cause | None]
    structural: Callable[[], Cause | None]
    experiment: Callable[[], Cause]


def find_cause(scene: Scene) -> Cause:
    """The first cause that the evidence supports; the same order for every alarm.

    Numbers that are not finite, the batch, a model that was rebuilt, weights that were replaced or do not move, the
    learning rate, the embedding, the objective, the structure, and last the experiments, which run the probe.
    """
    for look in _LOOKS:
        found = look(scene)
        if found is not None:
            return found
    return Cause("unknown", _NOT_SHOWN)


def _of_numbers(scene: Scene) -> Cause | None:
    if "settings_contradiction" in scene.spec.metrics:  # what the optimizer holds may have made them so
        return None
    found = scene.not_finite()
    empty = _of_broken_batch(scene) or _of_empty_batch(scene)
    # The mean over no label is not a number: the batch comes before what follows from it.
    if found is None or empty is None or found.component not in ("loss", "gradients", "activations"):
        return found
    return empty


def _of_broken_batch(scene: Scene) -> Cause | None:
    share = scene.whole.now.get("batch_not_finite", 0.0)
    if share == 0.0:
        return None
    return Cause("data", f"Cause: the data: {share:.2g} of the entries of the batch are NaN or infinite.")


def _of_empty_batch(scene: Scene) -> Cause | None:
    empty = max(scene.whole.now.get(name, 0.0) for name in ("batch_padding", "batch_ignored"))
    if empty < EMPTY:
        return None
    return Cause("data", f"Cause: the data: {empty:.0%} of the batch is padding or has ignored labels.")


EMPTY = 0.99
"""Share of a batch that is padding or has ignored labels, at which nothing is left to learn from."""
ONE_TOKEN = 0.8
"""Share of a batch that one token may have, before it counts as the cause."""
RECENT = 8
"""Readings before an alarm in which a change of the data, the rate or the loss may be its cause."""


def _of_batch(scene: Scene) -> Cause | None:
    now, start = scene.whole.now, scene.whole.start
    copies, common = now.get("batch_copies", 0.0), now.get("batch_common", 0.0)
    if (
        copies == 1.0
        or copies - start.get("batch_copies", copies) >= 0.5 * (1.0 - start.get("batch_copies", copies)) > 0
    ):
        return Cause("data", f"Cause: the data: {copies:.0%} of the sequences of the batch are copies.")
    if (stuck := now.get("batch_stuck", 0.0)) >= STUCK:
        return Cause("data", f"Cause: the data: the batch is the same as in each of the {stuck:.0f} readings before.")
    if (sorted_ := now.get("batch_one_class", 0.0)) >= SORTED:
        return Cause("data", f"Cause: the data: each of the last {sorted_:.0f} batches has a single class.")
    if (feature := now.get("batch_feature", -1.0)) >= 0.0:
        words = f"feature {feature:.0f} of the inputs drowns the others, and is nearly constant"
        return Cause("data", f"Cause: the data: {words}.")
    if (cut := now.get("batch_cut", 0.0)) >= CUT:
        length = now.get("batch_length", math.nan)
        words = f"sequences are {length:.0f} tokens long, and were {cut * length:.0f} in the batches before"
        return Cause("data", f"Cause: the data: {words}.")
    if (empty := _of_empty_batch(scene)) is not None:
        return empty
    if common >= ONE_TOKEN:
        return Cause("data", f"Cause: the data: one token makes up {common:.0%} of the batch.")
    if any(moment.data for moment in scene.past[-RECENT:]):
        step = next(moment.step for moment in scene.past[-RECENT:] if moment.data)
        return Cause("data", f"Cause: the data: the batches changed at step {step}.")
    return None


def _of_changes(scene: Scene) -> Cause | None:
    changes = scene.changes or (scene.structure().differences(scene.before) if scene.before is not None else ())
    if not changes:
        return None
    words = f"Cause: {'; '.join(change.words for change in changes)}."
    return Cause(changes[0].component, words, changes[0].change)


def _of_settings(scene: Scene) -> Cause | None:
    """Numbers that modules are built with: the probability of dropout, the epsilon of a norm."""
    if scene.before is None or not scene.before.settings:
        return None
    now, before = scene.structure(), scene.before
    other = now.other_settings(before)
    if not other:
        return None
    return Cause(
        "structure", f"Cause: a setting of the model changed: {_set_anew(other, now.settings, before.settings)}."
    )


def _set_anew(names: Sequence[str], now: Mapping[str, str], before: Mapping[str, str]) -> str:
    more = f", and {len(names) - 1} others" if len(names) > 1 else ""
    return f"{names[0]} is {now[names[0]]} instead of {before[names[0]]}{more}"


def _of_underflow(scene: Scene) -> Cause | None:
    """Gradients that are rounded to zero, entry by entry."""
    share, spacing = (scene.whole.now.get(f"gradient_{name}", 0.0) for name in ("underflow", "spacing"))
    if share < LOST or scene.whole.converged:
        return None
    words = f"{share:.0%} of their entries are exactly zero, and the others small multiples of {spacing:.2g}"
    return Cause("gradients", f"Cause: the gradients underflow: {words}, the least that their dtype holds.")


def _of_contradiction(scene: Scene) -> Cause | None:
    """Settings of the optimizer that contradict each other, from the start on or since they were changed."""
    found = scene.past[-1].contradiction if scene.past else None
    if found is None or found.mean < 1.0:
        return None
    return Cause("optimizer", f"Cause: the optimizer {found.site}.")


STEADY = 3
"""Readings for which a setting of the optimizer was the same, before another value is a change: some follow a cycle."""


def _of_optimizer_settings(scene: Scene) -> Cause | None:
    """A decay, a momentum or an epsilon that was the same until it became another one."""
    past = list(scene.past)
    for place in range(max(STEADY, len(past) - 2 * RECENT), len(past)):
        for name, now in past[place].settings.items():
            before = [one.settings.get(name, math.nan) for one in past[place - STEADY : place]]
            if len(set(before)) > 1 or not abs(now - before[-1]) > SAME_GAIN * max(abs(now), abs(before[-1])):
                continue
            words = f"{name} is {now:.3g} instead of {before[-1]:.3g} since step {past[place].step}"
            if name == "maximize":
                return Cause("objective", f"Cause: the optimizer maximises what it did minimise: {words}.")
            change = f"Look at {name} in optimizer.param_groups: it was {before[-1]:.3g}."
            return Cause("optimizer", f"Cause: a setting of the optimizer changed: {words}.", change)
    return None


WRITTEN = ("weights_undone", "weights_written")
"""What is read between two steps, in the order in which it is named."""


def _of_writes(scene: Scene) -> Cause | None:
    """Weights that changed between two steps of the optimizer."""
    found = [(moment, row) for moment in scene.past[-RECENT:] for row in moment.written]
    if not found:
        return None
    moment, first = min(found, key=lambda one: (WRITTEN.index(one[1].metric), one[0].step, _depth(one[1].layer)))
    places = [f"{row.stack or ''}/{row.layer}" for row in moment.written if row is not first and row.layer is not None]
    others = f", and more in {_blocks(places)}" if places else ""
    words = (
        f"something other than the optimizer wrote {first.site} between steps {first.most:.0f} and "
        f"{first.most + 1:.0f}, by {first.least:.2g} of its norm{others}"
    )
    if first.metric == "weights_undone":
        words = f"{words}: back to about where they were, not for the first time"
    return Cause("weights", f"Cause: the weights: {words}.", LOOK_FOR_WRITES)


LOOK_FOR_WRITES = (
    "Look for what writes weights between two steps: averaged weights that are copied in and stay, an adapter that is "
    "merged again, a checkpoint or a part of one that is loaded, a hook."
)


def _of_still_weights(scene: Scene) -> Cause | None:
    still, of_block = (one.now.get("still_steps", 0.0) for one in (scene.whole, scene.state))
    if still < STILL and scene.layer is not None and of_block >= STILL:
        words = f"no weight of block {scene.layer} moved in {of_block:.0f} steps; others move"
        size = scene.state.now.get("gradient_norm", 0.0)
        if size > 0.0:
            words = f"{words}, and its gradient is not zero ({size:.2g})"
            return Cause("optimizer", f"Cause: the optimizer: {words}.", _OWN_RATE)
        return Cause("gradients", f"Cause: no gradient reaches it: {words}.", _NO_GRADIENT)
    if still < STILL:
        return None
    rate = scene.past[-1].rate if scene.past else math.nan
    if (stopped := scene.whole.now.get("weights_stopped", 0.0)) >= STOPPED:
        words = f"{stopped:.0%} of the weights that moved stopped requiring gradients {still:.0f} steps ago, at once"
        return Cause("gradients", f"Cause: {words}; the optimizer still holds them, at a rate above 0.", _STOPPED)
    if rate == 0.0:
        return Cause("rate", f"Cause: the learning rate is 0; no weight moved in {still:.0f} steps.")
    moved = scene.whole.now.get("weights_moved", 0.0)
    if scene.whole.now.get("total_gradient_norm", math.nan) == 0.0:
        return Cause("gradients", "Cause: the gradient of every parameter is exactly zero.")
    if moved >= MOVED:
        return _of_slow_weights(scene.whole.now, rate)
    if 0.0 < rate <= LOW_RATE:
        return _of_slow_weights(scene.whole.now, rate)
    if moved > 0.0:
        words = f"only {moved:.1%} of the entries of the weights moved in a reading"
        return Cause("numbers", f"Cause: rounding: {words}.")
    if scene.whole.now.get("blocks_with_gradient") == 0.0 and scene.whole.now.get("total_gradient_norm", 0.0) > 0.0:
        if any(one.code in NO_GRADIENT for one in scene.faults):
            return SEE_FAULT
        words = f"no weight of a block moved in {still:.0f} steps; other parameters have gradients"
        return Cause("gradients", f"Cause: no gradient reaches the blocks: {words}.", _NO_GRADIENT)
    return Cause("optimizer", f"Cause: the optimizer: no weight moved in {still:.0f} steps.")


def _of_slow_weights(now: Mapping[str, float], rate: float) -> Cause:
    """Weights that hardly move: epsilon decides the steps, the rate is too low, or something shrinks the steps."""
    speed, epsilon = now.get("weights_speed", 0.0), now.get("epsilon_ratio", math.nan)
    if epsilon > 1.0 and not rate <= LOW_RATE:
        words = f"its epsilon is {epsilon:.2g} times the root of the second moment that it is added to"
        return Cause("optimizer", f"Cause: the optimizer: {words}, so that its steps are far below its rate.")
    if rate <= LOW_RATE:
        words = f"at {rate:.2g}, weights move by at most {speed:.1g} of their norm per step"
        return Cause("rate", f"Cause: the learning rate: {words}.")
    share = now.get("weights_slowed", math.nan)
    words = f"weights move by {speed:.2g} of their norm per step, {share:.2g} of what they did at this learning rate"
    return Cause("optimizer", f"Cause: the optimizer: {words}; the gradient is about as large as before.", _SHRUNK)


LOW_RATE = 1e-7
_SHRUNK = "Look at what shrinks gradients between backward and the step (clipping, scaling), and at the optimizer."
_OWN_RATE = "Look at the learning rate of its parameters in the groups of the optimizer."
_STOPPED = (
    "If this was not on purpose, look for requires_grad_(False) on a module that is shared: a teacher or a target has "
    "to be a copy (copy.deepcopy)."
)
_NO_GRADIENT = (
    "Look for detach(), torch.no_grad() and requires_grad in the forward after it, and at the learning rate of its "
    "parameters."
)


def _of_kept_gradients(scene: Scene) -> Cause | None:
    share = scene.whole.now.get("gradient_carried", 0.0)
    if share < KEPT:
        return None
    words = f"{share:.0%} of the gradient of a step is that of the step before, which was not cleared"
    return Cause("gradients", f"Cause: the gradients: {words}.")


def _of_rate(scene: Scene) -> Cause | None:
    """Weights that move too fast, now or in two readings since the first steps; or a rate that was raised."""
    if not scene.past:
        return None
    first, last = scene.past[0].step, scene.past[-1]
    rates = [(one.step, one.rate) for one in scene.past if math.isfinite(one.rate) and one.rate > 0.0]
    motions = sorted(one.fastest for one in scene.past if one.step - first >= SETTLES and math.isfinite(one.fastest))
    fastest = motions[-2] if len(motions) > 1 else max(motions, default=0.0)
    early = sorted(one.fastest for one in scene.past if math.isfinite(one.fastest))
    if len(early) > 2 and early[-3] >= FAST_EARLY:
        fastest = max(fastest, early[-3])
    known = f" (learning rate {last.rate:.2g})" if math.isfinite(last.rate) else ""
    for number in range(len(rates) - 1, 0, -1):
        step, after = rates[number]
        before = max(rate for _, rate in rates[:number])
        moved = max((one.fastest for one in scene.past if one.step >= step and math.isfinite(one.fastest)), default=0.0)
        if step - first >= SETTLES and after >= RAISED * before and moved >= FAST / 3:
            return Cause("rate", f"Cause: the learning rate went from {before:.2g} to {after:.2g} at step {step}.")
    # Each motion is that since the reading before: the last step at which weights did not move fast yet.
    fast = next((one for one in scene.past if one.fastest >= min(FAST, fastest)), last)
    if fastest >= FAST and _follows_rate(scene.past, fast):
        begin = max((one.step for one in scene.past if one.step < fast.step), default=first)
        words = f"weights changed by up to {fastest:.2g} of their norm per step, from step {begin} on"
        return Cause("rate", f"Seen before: {words}{known}.")
    return None


def _follows_rate(past: Sequence[Moment], fast: Moment) -> bool:
    """Whether weights move fast since the first steps, or as the learning rate rose; else something else moves them."""
    if fast.step - past[0].step <= 2 * SETTLES:
        return True
    known = [one.fastest / one.rate for one in past if one.step < fast.step and one.rate > 0.0]
    usual = [share for share in known if math.isfinite(share)]
    return not usual or not fast.fastest / fast.rate > RAISED * max(usual)


def _of_entry(scene: Scene) -> Cause | None:
    now = scene.structure()
    if scene.layer is None:  # an alarm about the whole model: the stack whose inputs are most alike
        entry, inputs = (min(found.values(), default=math.nan) for found in (now.entry, now.inputs_entry))
    else:
        entry, inputs = (found.get(scene.stack or "", math.nan) for found in (now.entry, now.inputs_entry))
    spread = scene.past[-1].spread if scene.past else None
    if spread is not None and spread.mean <= LOST_SPREAD:
        words = f"the rows of {spread.site} differ by {spread.mean:.2g} of what they did at the start of the run"
        change = "Look at what pulls its rows together: decay, or a term of the loss."
        return Cause("embedding", f"Cause: the embedding: {words}.", change)
    if entry < COLLAPSED_ENTRY:
        return Cause("embedding", f"Cause: tokens are alike before the first block, relative residual {entry:.2g}.")
    if inputs < EQUAL_INPUTS:
        words = f"inputs are alike before the first block, relative residual between inputs {inputs:.2g}"
        return Cause("embedding", f"Cause: {words}: look at the token ids and the embedding.")
    if scene.before is not None:
        for stack, value in now.inputs_entry.items():
            old = scene.before.inputs_entry.get(stack, math.nan)
            if value <= LOST_SPREAD * old:
                words = f"inputs differ by {value:.2g} before the first block, and differed by {old:.2g} there before"
                return Cause("embedding", f"Cause: the embedding: {words}: look at the token ids and the embedding.")
        for stack, size in now.entry_size.items():
            old = scene.before.entry_size.get(stack, math.nan)
            if size > 0.0 < old and max(size / old, old / size) >= OTHER_ENTRY:
                words = f"what enters the first block is {size / old:.2g} times as large as before"
                return Cause("embedding", f"Cause: the embedding: {words}, and its weights were not replaced.")
    return None


def _of_objective(scene: Scene) -> Cause | None:
    """A loss that changed while data, model and rate did not; or a gradient that has vanished in this state."""
    losses = [(one.step, one.loss) for one in scene.past if math.isfinite(one.loss)]
    for (_, before), (step, after) in list(pairwise(losses))[-2 * RECENT :]:
        if before > 0.0 > after:
            words = f"its sign: {before:.2g} before and {after:.2g} at step {step}"
            return Cause("objective", f"Cause: the objective: the loss changed {words}.")
    vanishes_anyway = "answers_alike" in scene.spec.metrics  # as it does at the best constant answer
    alike = "inputs_relative_residual" in scene.spec.metrics
    if scene.state.settled and not vanishes_anyway and (not scene.state.converged or alike):
        words = "the gradient of the whole model has nearly vanished in this state"
        return Cause("objective", f"Seen with it: {words}.")
    return None


SEE_FAULT = Cause("structure", "See the fault that was shown at the first step.")
"""Instead of a vaguer cause: there is one opinion about the structure of a model, that of ``doctor``."""
NO_GRADIENT = frozenset({"detached", "unused_parameters"})
"""Faults that explain weights which get no gradient."""
OF_WEIGHTS = 31
"""Order of the first cause that may depend on weights, which training changes; those before it are of the wiring."""
OF_OUTPUTS = range(40, 45)
"""Orders of the causes that show where the difference between inputs is lost."""
EQUAL_ANSWERS = 1e-5
"""Distance of the answers from their mean, relative to the loss, at which they are the same."""
_HEAD = (
    "Look at the head and at what is done to its output: a scale or a temperature, a pooling, an activation after it."
)
MOVED_LITTLE = 0.01
"""Motion of the weights in all steps together, relative to their norm, with which little can have been learned."""


def _of_answers(scene: Scene) -> Cause | None:
    """Answers that do not depend on the inputs, or do not help: what is shown, the rate, the head, or the labels."""
    if "answers_alike" not in scene.spec.metrics:
        return None
    if scene.whole.now.get("answers_crossed", 0.0) > 0.0:
        words = "each answer is compared with the targets of all inputs: their shapes are broadcast against each other"
        return Cause("objective", f"Cause: the objective: {words}.")
    for one in filter(is_shown, scene.diagnose()):
        if scene.inputs_apart < COLLAPSED_ENTRY or CAUSES[one.code].order in (*range(OF_WEIGHTS), *OF_OUTPUTS):
            return shown(one, scene.faults)
    if scene.whole.now.get("total_gradient_norm", math.nan) == 0.0:
        return Cause("gradients", "Cause: the gradient of every parameter is exactly zero.")
    steps = [(after.step - before.step) * after.fastest for before, after in pairwise(scene.past)]
    moved = math.fsum(one for one in steps if math.isfinite(one))
    if moved < MOVED_LITTLE:
        known = f" (learning rate {scene.past[-1].rate:.2g})" if math.isfinite(scene.past[-1].rate) else ""
        words = f"in the steps that are remembered, weights moved by {moved:.1g} of their norm in all{known}"
        return Cause("rate", f"Seen before: {words}.")
    apart, loss = (scene.whole.now.get(name, math.nan) for name in ("answers_apart", "mean_answer_loss"))
    if apart < EQUAL_ANSWERS * loss and scene.inputs_apart >= COLLAPSED_ENTRY:
        words = f"inputs differ by {scene.inputs_apart:.2g} of their size after the last block, and answers hardly"
        return Cause("head", f"Cause: what follows the last block: {words}, by {apart / loss:.1g} of the loss.", _HEAD)
    return None


def is_shown(finding: Finding) -> bool:
    """Whether an experiment of ``doctor`` shows a fault."""
    return finding.kind == "fault" and finding.certainty == "shown"


def shown(finding: Finding, said: Sequence[Finding] = ()) -> Cause:
    """Such a fault in the lines that ``doctor`` prints: what it is, what to change, its two numbers; once."""
    if any(one.code == finding.code for one in said):
        return SEE_FAULT
    lines = [finding.sentence]
    if finding.change:
        lines.append(f"{'Change' if finding.tried else 'Hint'}: {finding.change.rstrip('.')}.")
    if finding.evidence:
        lines.append(f"Shown by: {finding.evidence}")
    return Cause("structure", "\n".join(lines))


def _of_structure(scene: Scene) -> Cause | None:
    return None if scene.layer is None else scene.structural()


def _of_unread_keys(scene: Scene) -> Cause | None:
    """Attention that does not depend on queries and keys."""
    now, entropy = scene.state.now, scene.state.now.get("attention_entropy", math.nan)
    if now.get("qk_to_v_gradient", math.nan) < NOTHING:
        if math.isnan(entropy) or entropy == 0.0:
            words = "each token sees a single key, so queries and keys have no effect: the mask"
            return Cause("attention", f"Cause: {words}.", "Look at what builds the attention mask, and at its dtype.")
        words = f"attention does not depend on queries and keys at all; its entropy is {entropy:.2g}"
        return Cause("attention", f"Cause: {words}.", "Look at the queries, the keys and the scale of their scores.")
    return None


def _by_experiment(scene: Scene) -> Cause | None:
    by_layer = scene.layer is not None and not scene.spec.is_event
    found = scene.experiment() if by_layer else Cause("unknown", "Cause not found.")
    return SEE_FAULT if found.component == "unknown" and scene.faults else found


_LOOKS: tuple[Callable[[Scene], Cause | None], ...] = (
    _of_numbers,
    _of_batch,
    _of_writes,
    _of_changes,
    _of_settings,
    _of_optimizer_settings,
    _of_contradiction,
    _of_underflow,
    _of_still_weights,
    _of_kept_gradients,
    _of_rate,
    _of_entry,
    _of_answers,
    _of_objective,
    _of_structure,
    _of_unread_keys,
    _by_experiment,
)


def was_so_at_start(spec: AlarmSpec, state: LayerState) -> bool:
    """Whether what an alarm reads was about the same when the run began: the model is to blame, not its training."""
    found = [values[spec.metrics[0]] for values in (state.now, state.start, state.highest) if spec.metrics[0] in values]
    return len(found) > 1 and min(found) > 0 and max(found) <= AS_BEFORE * min(found)


def structural_cause(diagnose: Callable[[], Sequence[Finding]], said: Sequence[Finding] = ()) -> Cause | None:
    """A cause in the structure of the model alone: what ``doctor`` shows, so that there is one opinion about it."""
    fault = next(filter(is_shown, diagnose()), None)
    return None if fault is None else shown(fault, said)


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
    words = f"With {component} off in {place}, the {what} is {after_value:.2g} instead of {before[1]:.2g}."
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

"""Whether the model still computes what it did: the weights of an earlier reading, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.models.wrapping import is_distributed, with_parameters
from rankscope.monitor.isolation import beside_training, full_precision
from rankscope.stream.frames import tensors_in
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, trace

MOST_HELD = 2**29
"""Bytes of weights that are held; a larger model is not replayed."""
SEQUENCES = 2
CALM = 2
"""Comparisons in a row without a difference, before one is reported: a model whose function depends on the step, on
chance or on what a call left behind never has them."""
SAME = 0.01
"""Relative difference that is taken for rounding; half of the digits of the dtype if that is more."""
_BRANCHES = ("attention", "cross_attention", "mixer", "mlp", "both")
_ADDED = tuple(f"{label}.out" for label in _BRANCHES)
_SITES = ("block.in", "block.out", *(f"{label}.{end}" for label in _BRANCHES for end in ("out", "sum")))
_DEEPEST = 8
OUTPUT = "the output"
Place = tuple[str, int, str]
"""Stack, layer and site."""
Values = Mapping[Place, tuple[Tensor, float]]


@dataclass(frozen=True)
class Departure:
    """The first place at which the same weights and inputs give other values.

    Attributes:
        component: one word, as that of a cause; empty for a branch that added nothing and was switched on, which is a
            plan and no fault.
        words: where, and how far the values are from the earlier ones.
        since: when the values were recorded.
    """

    component: str
    words: str
    since: int


class Replay:
    """Holds the weights of an earlier reading and what they gave, and runs them again.

    The same weights, buffers and inputs give the same values, up to rounding, as long as code and settings are the
    same. So a difference is a change of the model that no step of an optimizer makes. **Exact** up to rounding, for
    two sequences of the probe, in evaluation mode. Buffers that change in the first looks, as statistics do, run as
    they were; others (rotary frequencies, masks) run as they are, so that a change of theirs is seen.
    """

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._varying: set[str] = set()
        self._seen: dict[Place, tuple[Tensor, float]] = {}
        self._step, self._looks, self._calm = 0, 0, 0

    def forget(self) -> None:
        """Start over: the model is not the one whose weights are held."""
        self._weights, self._buffers, self._seen = {}, {}, {}
        self._varying, self._looks, self._calm = set(), 0, 0

    def take(self, view: ModelView, batch: Batch, step: int) -> Departure | None:
        """Compare with the earlier values. The weights are replaced by the current ones at looks 1, 2, 3, 5, 9, ..."""
        learned = {name: one for name, one in view.model.named_parameters() if one.is_floating_point()}
        held = sum(one.numel() * one.element_size() for one in learned.values())
        if held > MOST_HELD or any(one.is_meta or is_distributed(one) for one in learned.values()):
            return None
        batch = batch.taken(0, min(SEQUENCES, batch.sequences)) if batch.sequences else batch
        found = None
        buffers = dict(view.model.named_buffers())
        changed = {
            name for name, held in self._buffers.items() if name in buffers and not _is_same(buffers[name], held)
        }
        self._varying |= changed if self._looks <= CALM else set()
        if self._seen:
            fits = {name: (one.shape, one.dtype) for name, one in learned.items()}
            if fits == {name: (one.shape, one.dtype) for name, one in self._weights.items()}:
                now = self._run(view, batch, replayed=True)
                found = self._departure(self._seen, now)
                # The control: a model that gives other values in the same pass again is not deterministic.
                if found is not None and self._departure(now, self._run(view, batch, replayed=True)) is not None:
                    self.forget()
                    found = None
            else:
                self.forget()
        is_new = found is not None and bool(found.component) and self._calm >= CALM
        self._calm = self._calm + 1 if found is None else 0
        self._varying |= changed
        if found is not None or self._looks & (self._looks - 1) == 0:
            self._weights = {name: one.detach().to("cpu", copy=True) for name, one in learned.items()}
            self._buffers = {name: one.detach().clone() for name, one in view.model.named_buffers()}
            self._seen, self._step = self._run(view, batch, replayed=False), step
        self._looks += 1
        return found if is_new else None

    def _run(self, view: ModelView, batch: Batch, *, replayed: bool) -> dict[Place, tuple[Tensor, float]]:
        """One number per token at each site, in the order in which they are reached, and how exact its dtype is."""
        found: dict[Place, tuple[Tensor, float]] = {}

        def note(place: Place, tensor: Tensor) -> None:
            with full_precision(tensor):
                wide = tensor.detach().float()
                found[place] = (wide @ _direction(wide.shape[-1], wide.device)).cpu(), torch.finfo(tensor.dtype).eps

        def observe(ref: SiteRef, seen: Observed) -> None:
            if isinstance(seen, Tensor):
                note((ref.stack or "", ref.layer, ref.site), seen)

        model = view.model
        now = dict(model.named_parameters())
        held = {name: one.to(now[name].device) for name, one in self._weights.items()} if replayed else {}
        with beside_training(model), with_parameters(model, held):
            if replayed:
                _write(model, {name: one for name, one in self._buffers.items() if name in self._varying})
            with trace(view, SiteSelection.parse(_SITES), observe):
                output = batch.run(model)
            for number, tensor in enumerate(tensors_in(output, _DEEPEST)):
                if tensor.is_floating_point() and tensor.ndim > 0:
                    note(("", number, OUTPUT), tensor)
        return found

    def _departure(self, seen: Values, now: Values) -> Departure | None:
        """The first place whose values differ; or one before it that is no longer seen, as if attention is not one."""
        before, missing = "", None
        for place, (old, eps) in seen.items():
            values = now.get(place)
            if values is None:
                missing = missing or place
                continue
            if values[0].shape != old.shape:
                # Attention that acts over another axis changes which one counts as tokens, already at the entry.
                words = f"{_where(place)} is {tuple(values[0].shape)} instead of {tuple(old.shape)}, tokens last"
                return Departure("structure", f"{words}{before}", self._step)
            size = float(old.norm())
            distance = float((values[0] - old).norm()) / size if size > 0.0 else math.inf * bool(values[0].any())
            if math.isinf(distance) and place[2] in _ADDED:
                return Departure("", f"{_where(place)} was nothing", self._step)
            if distance > max(SAME, math.sqrt(eps)):
                gone = f", and {_where(missing)} is no longer seen" if missing else ""
                words = f"{_where(place)} differs by {distance:.2g}{before}{gone}"
                return Departure(_component(missing or place), words, self._step)
            before = f", while {_where(place)} is the same"
        return None


def _is_same(now: Tensor, before: Tensor) -> bool:
    return now.shape == before.shape and now.device == before.device and torch.equal(now, before)


def _direction(width: int, device: torch.device) -> Tensor:
    """A fixed random vector."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, generator=generator).to(device) / math.sqrt(width)


def _write(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Put buffers in; those that training has now are restored by :func:`beside_training`."""
    for name, buffer in model.named_buffers():
        kept = buffers.get(name)
        if kept is not None and kept.shape == buffer.shape and not torch.equal(kept, buffer):
            buffer.copy_(kept)


def _where(place: Place) -> str:
    stack, layer, site = place
    of = f" of the {stack}" if stack else ""
    if site == OUTPUT:
        return "the output of the model"
    branch, _, end = site.partition(".")
    name = branch.replace("_", " ")
    if branch == "block":
        what = "the stream that enters" if end == "in" else "the stream that leaves"
    else:
        what = f"what {name} adds in" if end == "out" else f"the stream after {name} in"
    return f"{what} block {layer}{of}"


def _component(place: Place) -> str:
    """A branch if what it adds differs first; the embedding at the entry; else what joins them: the structure."""
    _, layer, site = place
    if site == OUTPUT:
        return "head"
    branch, _, end = site.partition(".")
    if branch == "block":
        return "embedding" if end == "in" and layer == 0 else "structure"
    return branch if end == "out" else "skip"

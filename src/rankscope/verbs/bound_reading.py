"""The two ways to a network's numbers: one forward pass of the model, or its weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rankscope._errors import UnsupportedConfigError
from rankscope.linalg.precision import float_floor
from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.heads.family import family_of
from rankscope.models.inputs import Batch
from rankscope.models.lazy_blocks import LazyModel
from rankscope.models.view import ModelView
from rankscope.paths.capture import run_frozen
from rankscope.paths.network import FrozenBlock, Step
from rankscope.theory.theorems import LayerQuantities, Network
from rankscope.verbs.bound_quantities import (
    head_sizes,
    mlp_size,
    passage_of,
    read_by_attention,
    skip_gain_of,
    stream_state,
)

_UNIT = 1e-6


@dataclass(frozen=True)
class Measured:
    """One sequence in one stack."""

    stack: str | None
    sequence: int
    network: Network
    layers: tuple[LayerQuantities, ...]


@dataclass
class StepFacts:
    """What the steps of a network have in common, learnt block by block.

    Attributes:
        bare: attention reads the stream itself, and what it gives is added as it is.
        has_skip: a skip passes attention.
        has_source: something besides attention is added.
        nothing_else: a step without attention passes the stream on as it is.
        any_skip: a skip passes anything.
        kinds: of each step whether it attends, and whether it adds an MLP.
        width: of the stream.
        qk_norm: queries or keys are normed somewhere.
    """

    bare: bool = True
    has_skip: bool = False
    has_source: bool = False
    nothing_else: bool = True
    any_skip: bool = False
    kinds: list[tuple[bool, bool]] = field(default_factory=list)
    width: int = 0
    qk_norm: bool = False

    @property
    def only_mlp(self) -> bool:
        """Whether attention and an MLP take turns, without skips."""
        turns = [(True, False), (False, True)] * (len(self.kinds) // 2)
        return not self.any_skip and self.kinds == turns

    def see(self, steps: Sequence[Step], weights: HeadWeights) -> None:
        """One block more."""
        attends = [step for step in steps if step.heads is not None]
        self.bare &= all(step.before.is_identity and step.after.is_identity for step in attends)
        self.has_skip |= any(step.skip is not None for step in attends)
        self.has_source |= any(step.source is not None for step in steps)
        self.nothing_else &= all(step.heads is not None or _is_nothing(step) for step in steps)
        self.any_skip |= any(step.skip is not None for step in steps)
        self.kinds += [(step.heads is not None, step.source is not None and step.origin == "mlp") for step in steps]
        self.width, self.qk_norm = self.width or weights.W_Q.shape[1], self.qk_norm or weights.qk_norm


@dataclass
class Found:
    """What was read of one batch: per sequence one entry for each layer, and the facts about the steps."""

    layers: list[list[LayerQuantities]]
    facts: StepFacts = field(default_factory=StepFacts)


@dataclass(eq=False)
class BoundReader:
    """Reads batches block by block and keeps numbers only.

    Args:
        view: the model and its structure.
        config: its configuration.
        steps: of Lanczos per layer and sequence; None leaves out the gains.
        has_norm: whether a norm acts anywhere in a block.
    """

    view: ModelView
    config: Any
    steps: int | None
    has_norm: bool = True
    dtypes: set[torch.dtype] = field(default_factory=set)
    lengths: dict[str | None, dict[int, int]] = field(default_factory=dict)
    _weights: dict[str, tuple[HeadWeights, LayerQuantities]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = self.view.modules()
        self._names = {
            (stack.name, call.first_layer + offset): call.module_name
            for stack in self.view.stacks
            for call in stack.calls
            for offset in range(len(call.blocks))
        }
        self.position = position_of(self.config)

    def read(self, batch: Batch) -> list[Measured]:
        """Run the model once."""
        return [
            measured
            for stack, found in self.read_part(batch).items()
            for measured in self.finished(stack, batch.first_sequence, found)
        ]

    def read_part(self, batch: Batch, before: Tensor | None = None) -> dict[str | None, Found]:
        """Run the model, or a part of it behind what the block ``before`` it gave back."""
        entries: dict[str | None, Tensor] = {}
        found: dict[str | None, Found] = {}

        def begin(stack: str | None, entry: Tensor) -> None:
            entries[stack], found[stack] = entry, Found([[] for _ in range(entry.shape[0])])

        def through(block: FrozenBlock) -> None:
            if block.is_final:
                return
            for number, layer in enumerate(self._layers(block, entries[block.stack], batch)):
                found[block.stack].layers[number] += layer
            found[block.stack].facts.see(block.steps, self._of(block)[0])
            self.dtypes.add(block.out.dtype)
            entries[block.stack] = block.out.to(torch.float64)

        run_frozen(self.view, self.config, batch, begin, through, dtype=torch.float64, before=before)
        return found

    def finished(self, stack: str | None, first_sequence: int, found: Found) -> list[Measured]:
        """The sequences of a batch that has gone through all blocks."""
        return [
            Measured(stack, first_sequence + number, self._network(found.facts, layers), tuple(layers))
            for number, layers in enumerate(found.layers)
            if layers
        ]

    def _layers(self, block: FrozenBlock, entry: Tensor, batch: Batch) -> list[list[LayerQuantities]]:
        weights, known = self._of(block)
        state, out = entry, block.out.to(torch.float64)
        found: list[list[LayerQuantities]] = [[] for _ in range(entry.shape[0])]
        for step in block.steps:
            if step.heads is not None:
                read = read_by_attention(step, state)
                for number in range(entry.shape[0]):
                    keep = _kept(batch, number, entry)
                    self.lengths.setdefault(block.stack, {})[batch.first_sequence + number] = int(keep.sum())
                    if int(keep.sum()) < 2:
                        continue
                    passage = passage_of(
                        weights,
                        read[number, keep],
                        step.heads.probs[number][:, keep][:, :, keep],
                        stream_state(entry[number, keep]),
                        stream_state(out[number, keep]),
                        skip_gain=skip_gain_of(step),
                        position=self.position,
                        floor=float_floor(block.out.dtype),
                        steps=self.steps,
                    )
                    found[number].append(replace(known, layer=block.layer, passage=passage))
            state = step.total(state)
        return found

    def _of(self, block: FrozenBlock) -> tuple[HeadWeights, LayerQuantities]:
        name = self._names[(block.stack, block.layer)]
        if name not in self._weights:
            module = self._modules[name]
            weights = head_weights(module, self.config)
            self._weights[name] = weights, layer_weights(block.layer, weights, module, self.config)
        return self._weights[name]

    def _network(self, facts: StepFacts, layers: Sequence[LayerQuantities]) -> Network:
        bare, cut = facts.bare, not facts.has_skip and not facts.has_source
        passages = [layer.passage for layer in layers if layer.passage is not None]
        return Network(
            depth=len(layers),
            heads=max(len(layer.heads) for layer in layers),
            width=facts.width,
            pure=bare and cut and facts.nothing_else,
            only_mlp=bare and not self.has_norm and facts.only_mlp,
            has_skip=facts.has_skip,
            row_scaling=bare and cut and all(_on_sphere(p.stream_out.mu, p.stream_out.unit_mu) for p in passages),
            bilinear=self.position == "none" and not facts.qk_norm,
        )


def _is_nothing(step: Step) -> bool:
    """Whether the stream passes as it is: what is left of a branch that surgery took out."""
    return step.skip is not None and step.skip.is_identity and not step.constants()


def _on_sphere(mu: float, unit_mu: float) -> bool:
    return abs(mu - unit_mu) <= _UNIT * max(mu, unit_mu)


def _kept(batch: Batch, number: int, entry: Tensor) -> Tensor:
    """Which tokens of a sequence are no padding."""
    keep = torch.ones(entry.shape[1], dtype=torch.bool, device=entry.device)
    if batch.keep is not None and batch.keep.shape[0] == entry.shape[0] and batch.keep.shape[1] <= entry.shape[1]:
        keep[:] = False
        keep[: batch.keep.shape[1]] = batch.keep[number].to(entry.device)
    return keep


def position_of(config: Any) -> str:
    """How positions enter the scores, as the family description has it; ``"unknown"`` for a model of several."""
    try:
        return str(family_of(config).position)
    except UnsupportedConfigError:
        return "unknown"


def layer_weights(layer: int, weights: HeadWeights, block: torch.nn.Module, config: Any) -> LayerQuantities:
    """The norms of one layer's weights."""
    mlp, note = mlp_size(block, config)
    return LayerQuantities(layer, head_sizes(weights), weights.scale, mlp, note)


def read_weights(model: LazyModel) -> Measured:
    """The norms of every layer, one block in memory at a time."""
    layers: list[LayerQuantities] = []
    qk_norm, width = False, 0
    for block in model.blocks():
        weights = head_weights(block.module, model.config)
        known = layer_weights(block.layers[0], weights, block.module, model.config)
        layers += [replace(known, layer=layer) for layer in block.layers]
        qk_norm, width = qk_norm or weights.qk_norm, weights.W_Q.shape[1]
    network = Network(
        depth=len(layers),
        heads=max(len(layer.heads) for layer in layers),
        width=width,
        bilinear=model.family.position == "none" and not qk_norm,
    )
    return Measured(None, 0, network, tuple(layers))

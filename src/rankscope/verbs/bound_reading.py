"""A network's numbers from one forward pass of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rankscope._errors import InputError, UnsupportedConfigError
from rankscope.linalg.precision import float_floor
from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.heads.family import family_of
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView
from rankscope.paths.capture import run_frozen
from rankscope.paths.network import FrozenBlock, FrozenStep, SeenAttention
from rankscope.theory.theorems import LayerQuantities, Network
from rankscope.verbs.bound_found import Found, Measured, StepFacts
from rankscope.verbs.bound_passage import SeenLayer, passage_of
from rankscope.verbs.bound_quantities import skip_gain_of
from rankscope.verbs.bound_weights import layer_weights


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

        run_frozen(self.view, self.config, batch, begin, through, dtype=torch.float64, before=before, keep_seen=True)
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
        out = block.out.to(torch.float64)
        if not bool(torch.isfinite(out).all()):
            raise InputError(
                f"Block {block.layer} gives numbers that are not finite, and no theorem speaks of them. Find out where "
                "they arise with rankscope.measure."
            )
        found: list[list[LayerQuantities]] = [[] for _ in range(entry.shape[0])]
        for step in block.steps:
            if step.heads is None or step.seen is None:
                continue
            for number in range(entry.shape[0]):
                keep = _kept(batch, number, entry)
                self.lengths.setdefault(block.stack, {})[batch.first_sequence + number] = int(keep.sum())
                if int(keep.sum()) < 2:
                    continue
                P = step.heads.probs[number][:, keep]
                passage = passage_of(
                    weights,
                    _seen(step, step.seen, entry, out, number, keep),
                    P[:, :, keep],
                    skip_gain=skip_gain_of(step),
                    position=self.position,
                    floor=float_floor(block.out.dtype),
                    steps=self.steps,
                    outside=float(P[:, :, ~keep].sum(-1).max()),
                )
                found[number].append(replace(known, layer=block.layer, passage=passage))
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
        return Network(
            depth=len(layers),
            heads=max(len(layer.heads) for layer in layers),
            width=facts.width,
            pure=bare and cut and facts.nothing_else,
            only_mlp=bare and not self.has_norm and facts.only_mlp,
            has_skip=facts.has_skip,
            row_scaling=bare and cut,
            bilinear=self.position == "none" and not facts.qk_norm,
        )


def _seen(step: FrozenStep, seen: SeenAttention, entry: Tensor, out: Tensor, number: int, keep: Tensor) -> SeenLayer:
    """One sequence of a step, without padding."""

    def of(x: Tensor) -> Tensor:
        return x[number, keep].to(torch.float64)

    return SeenLayer(
        entry=of(entry),
        read=of(seen.read),
        given=None if seen.given is None else of(seen.given),
        summed=of(seen.summed),
        out=of(out),
        beside=0.0 if step.source is None else float(torch.linalg.vector_norm(of(step.source))),
    )


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

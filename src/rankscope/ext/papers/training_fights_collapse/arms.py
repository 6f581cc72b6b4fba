"""The networks that are trained and measured, as frozen descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from rankscope.ext.papers._spec import ExperimentSize
from rankscope.masks import parse_mask
from rankscope.surgery.operation import Operation

OWN = "own"
"""The model's own mask: complete in the encoder, causal in the causal model."""
LONG = 128
"""Step from which exact arithmetic is run at powers of two only."""

VARIANTS: Mapping[str, Operation] = MappingProxyType(
    {
        "whole": Operation(),
        "no MLP": Operation(mlp="drop"),
        "no norm": Operation(norm="identity"),
        "no skip": Operation(attention_skip=0.0, mlp_skip=0.0),
        "no skip, no norm": Operation(attention_skip=0.0, mlp_skip=0.0, norm="identity"),
        "no skip, no MLP": Operation(attention_skip=0.0, mlp_skip=0.0, mlp="drop"),
        "attention alone": Operation(attention_skip=0.0, mlp_skip=0.0, mlp="drop", norm="identity"),
    }
)


@dataclass(frozen=True)
class TrainedArm:
    """One network, trained as described: whatever is removed is removed during training too.

    Attributes:
        family: ``"encoder"`` (BERT, norms after each sum) or ``"causal"`` (GPT-2, norms before each branch).
        variant: what is left of it, a name in :data:`VARIANTS`.
        depth: number of blocks.
        mask: which keys a query sees; ``"own"`` for the model's own.
        longer: how many times as many steps as the others it is trained for.
    """

    family: Literal["encoder", "causal"]
    variant: str
    depth: int
    mask: str = OWN
    longer: int = 1

    @property
    def name(self) -> str:
        """For messages and file names."""
        words = f"{self.family}-{self.variant}-{self.mask}-depth{self.depth}-x{self.longer}"
        return "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in words)

    @property
    def operation(self) -> Operation:
        """The surgery it is trained under."""
        known = VARIANTS[self.variant]
        return known if self.mask == OWN else replace(known, mask=parse_mask(self.mask))

    @property
    def cuts(self) -> tuple[str, ...]:
        """Variants it is cut down to after training, as the paper does; only whole networks are."""
        if self.variant != "whole" or self.mask != OWN:
            return ()
        return tuple(name for name, operation in VARIANTS.items() if operation.attention_skip == 0.0)

    def at(self) -> dict[str, str | int]:
        """Its columns in a table."""
        names = {"family": self.family, "variant": self.variant, "mask": self.mask}
        return {**names, "depth": self.depth, "longer": self.longer}


@dataclass(frozen=True, kw_only=True)
class TrainingSize(ExperimentSize):
    """How large the experiment is.

    Attributes:
        width: of the residual stream; MLPs are four times as wide.
        heads: per block.
        depth: of the main arms.
        shallow: other depths at which networks without skips are trained.
        masks: tried in the encoder besides its own.
        variants: trained with the encoder's own mask.
        masked: trained under the other masks.
        causal: trained in the causal model.
        deepened: trained at the other depths.
        patient: also trained for longer.
        longer: how many times as many steps.
        seeds: of weights, data and order of the data.
        steps: optimiser steps.
        looks: steps at which exact arithmetic is run, besides the last.
        probed: sequences on which collapse is measured in exact arithmetic.
        seen: sequences on which it is measured in the model's own arithmetic.
        learnt: training sequences.
        held: held-out sequences.
    """

    width: int = 64
    heads: int = 4
    depth: int = 4
    shallow: tuple[int, ...] = (2,)
    masks: tuple[str, ...] = ("window(2)",)
    variants: tuple[str, ...] = tuple(VARIANTS)
    masked: tuple[str, ...] = ("whole", "no skip", "attention alone")
    causal: tuple[str, ...] = ("whole", "no MLP", "no norm", "no skip", "attention alone")
    deepened: tuple[str, ...] = ("no skip", "attention alone")
    patient: tuple[str, ...] = ("no skip", "attention alone")
    longer: int = 16
    seeds: int = 3
    steps: int = 128
    looks: tuple[int, ...] = (0, 10, 50)
    probed: int = 2
    seen: int = 8
    learnt: int = 1000
    held: int = 200

    @property
    def std(self) -> float:
        """Standard deviation of a weight: the one that keeps the size of a token through a square matrix."""
        return float(self.width**-0.5)

    def arms(self) -> Iterator[TrainedArm]:
        """Every network, without its seeds."""
        yield from (TrainedArm("encoder", variant, self.depth) for variant in self.variants)
        yield from (TrainedArm("causal", variant, self.depth) for variant in self.causal)
        yield from (TrainedArm("encoder", name, self.depth, mask) for mask in self.masks for name in self.masked)
        yield from (TrainedArm("encoder", name, depth) for depth in self.shallow for name in self.deepened)
        yield from (TrainedArm("encoder", variant, self.depth, longer=self.longer) for variant in self.patient)

    def steps_read(self) -> frozenset[int]:
        """Steps at which losses, gradients and residuals are read: powers of two, the looks and the last."""
        doubling = {2**power for power in range(self.steps.bit_length()) if 2**power < self.steps}
        return frozenset({0, self.steps - 1, *doubling, *self.looks})

    def steps_looked(self) -> frozenset[int]:
        """Steps at which exact arithmetic is run: the looks, the last, and in a long training powers of two."""
        doubling = {step for step in self.steps_read() if step >= LONG and step.bit_count() == 1}
        return frozenset({*self.looks, self.steps - 1, *doubling})


FULL = TrainingSize()
SMALL = TrainingSize(
    width=16,
    heads=2,
    depth=3,
    shallow=(),
    variants=("whole", "no skip", "attention alone"),
    masked=("no skip",),
    causal=("whole", "no skip", "attention alone"),
    deepened=(),
    patient=(),
    seeds=1,
    steps=12,
    looks=(0,),
    probed=1,
    seen=2,
    learnt=100,
    held=50,
)

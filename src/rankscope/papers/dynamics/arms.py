"""The networks whose training is watched, as frozen descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from rankscope.masks import parse_mask
from rankscope.surgery.operation import Operation

Family = Literal["encoder", "causal"]
COORDINATES = ("family", "variant", "mask", "depth", "seed", "step", "arithmetic", "cut", "longer")
OWN = "own"
"""The model's own mask: complete in the encoder, causal in the causal model."""

LONG = 128
"""Step from which on looks are as far apart as they are from the start."""

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
class Arm:
    """One network, trained as it is described: whatever is cut is cut in training too.

    Attributes:
        family: ``"encoder"`` (BERT, norms after each sum) or ``"causal"`` (GPT-2, norms before each branch).
        variant: what is left of it, a name in :data:`VARIANTS`.
        depth: blocks.
        mask: which keys a query sees; ``"own"`` for the model's own.
        longer: how many times as many steps as the others it is trained for.
    """

    family: Family
    variant: str
    depth: int
    mask: str = OWN
    longer: int = 1

    @property
    def name(self) -> str:
        """As it is written in messages and file names."""
        words = f"{self.family}-{self.variant}-{self.mask}-depth{self.depth}-x{self.longer}"
        return "".join(letter if letter.isalnum() or letter == "-" else "_" for letter in words)

    @property
    def operation(self) -> Operation:
        """The surgery it is trained under."""
        known = VARIANTS[self.variant]
        if self.mask == OWN:
            return known
        return Operation(
            attention_skip=known.attention_skip,
            mlp_skip=known.mlp_skip,
            mlp=known.mlp,
            norm=known.norm,
            mask=parse_mask(self.mask),
        )

    @property
    def cuts(self) -> tuple[str, ...]:
        """Variants it is cut down to after training, as the paper does; only whole networks are."""
        if self.variant != "whole" or self.mask != OWN:
            return ()
        return tuple(name for name, operation in VARIANTS.items() if operation.attention_skip == 0.0)

    def at(self) -> dict[str, str | int | None]:
        """Its columns in a table."""
        names = {"family": self.family, "variant": self.variant, "mask": self.mask}
        return {**names, "depth": self.depth, "longer": self.longer}


@dataclass(frozen=True)
class Size:
    """How large the experiment is.

    Attributes:
        width: of the stream; MLPs are four times as wide.
        heads: of a block.
        depth: of the main arms.
        shallow: other depths at which networks without skips are trained.
        masks: tried in the encoder besides its own.
        variants: trained with the encoder's own mask.
        masked: trained under the other masks.
        causal: trained in the causal model.
        deepened: trained at the other depths.
        patient: trained for longer besides.
        longer: how many times as many steps.
        seeds: of weights, data and order of the data.
        steps: of the optimiser.
        looks: steps at which exact arithmetic is run; the last step besides.
        probed: sequences on which collapse is measured in exact arithmetic.
        seen: sequences on which it is measured in the model's own.
        learnt: sequences to learn from.
        held: other sequences, by which a network is judged.
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
        """Standard deviation of a weight: what keeps the size of a token through a square matrix."""
        return float(self.width**-0.5)

    def arms(self) -> Iterator[Arm]:
        """Every network, without its seeds."""
        yield from (Arm("encoder", variant, self.depth) for variant in self.variants)
        yield from (Arm("causal", variant, self.depth) for variant in self.causal)
        yield from (Arm("encoder", variant, self.depth, mask) for mask in self.masks for variant in self.masked)
        yield from (Arm("encoder", variant, depth) for depth in self.shallow for variant in self.deepened)
        yield from (Arm("encoder", variant, self.depth, longer=self.longer) for variant in self.patient)

    def steps_read(self) -> frozenset[int]:
        """Steps at which losses, gradients and residuals are read: powers of two, the looks and the last."""
        doubling = {2**power for power in range(self.steps.bit_length()) if 2**power < self.steps}
        return frozenset({0, self.steps - 1, *doubling, *self.looks})

    def steps_looked(self) -> frozenset[int]:
        """Steps at which exact arithmetic is run: the looks, the last, and in a long training powers of two."""
        doubling = {step for step in self.steps_read() if step >= LONG and step.bit_count() == 1}
        return frozenset({*self.looks, self.steps - 1, *doubling})

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


FULL = Size()
SMALL = Size(
    width=16,
    heads=2,
    depth=3,
    shallow=(),
    masks=("window(2)",),
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

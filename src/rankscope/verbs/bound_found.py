"""What ``bound`` reads of a network: numbers per layer, and what its steps have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rankscope.models.heads import HeadWeights
from rankscope.paths.network import FrozenStep
from rankscope.theory.theorems import LayerQuantities, Network


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

    def see(self, steps: Sequence[FrozenStep], weights: HeadWeights) -> None:
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


def _is_nothing(step: FrozenStep) -> bool:
    """Whether the stream passes as it is: what is left of a branch that surgery took out."""
    return step.skip is not None and step.skip.is_identity and not step.constants()

"""The declaration of a remedy, and the decorator that registers one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rankscope._citations import Cite
from rankscope._printing import brief
from rankscope._registry import Registry
from rankscope.models.view import ModelView
from rankscope.surgery.graft import Graft
from rankscope.surgery.operation import Operation

Need = Literal["skips", "post-norm", "pre-norm", "attention", "mlp", "training"]
Step = Operation | Graft


@dataclass(frozen=True)
class RemedyCase:
    """The model and settings for which a remedy is prepared.

    Attributes:
        view: the model and its structure.
        strength: how much of it; its meaning depends on the remedy.
        learnable: its numbers are parameters, which belong to the treatment.
    """

    view: ModelView
    strength: float
    learnable: bool = False

    @property
    def depth(self) -> int:
        """Number of blocks in the deepest stack."""
        return max(stack.depth for stack in self.view.stacks)


@dataclass(frozen=True)
class Remedy:
    """A remedy: one pure function, and the facts that the verb, tests, documentation and the command line use.

    Attributes:
        name: the function's name.
        summary: first line of its docstring: what it changes.
        claim: what its paper says it does, in our words.
        claims_tokens: whether that is a claim about token similarity, and not only about training.
        cites: its sources.
        needs: what a model must have; ``training``: it starts without effect, or helps only during training.
        strength: the default.
        strength_means: what the number is.
        neutral: the strength that leaves a model unchanged; None if there is none.
        learnable: whether its numbers can be parameters.
        parameters: how many it adds when they are, in words.
        flops: what it adds to a forward pass, in words; n tokens, d width, L blocks, h heads.
        prepare: returns the operations and grafts for a model.
    """

    name: str
    summary: str
    claim: str
    claims_tokens: bool
    cites: tuple[Cite, ...]
    needs: frozenset[Need]
    strength: float
    strength_means: str
    neutral: float | None
    learnable: bool
    parameters: str
    flops: str
    prepare: Callable[[RemedyCase], Sequence[Step]]

    __repr__ = brief


REMEDIES: Registry[Remedy] = Registry("remedy", __package__)


def remedy(
    *,
    claim: str,
    claims_tokens: bool,
    cites: tuple[Cite, ...],
    needs: frozenset[Need] | set[Need],
    strength: float,
    strength_means: str,
    neutral: float | None,
    learnable: bool,
    parameters: str,
    flops: str,
) -> Callable[[Callable[[RemedyCase], Sequence[Step]]], Callable[[RemedyCase], Sequence[Step]]]:
    """Register a function of :class:`RemedyCase` that returns operations and grafts."""

    def register(prepare: Callable[[RemedyCase], Sequence[Step]]) -> Callable[[RemedyCase], Sequence[Step]]:
        summary = (prepare.__doc__ or "").strip().split("\n", 1)[0]
        facts = (claim, claims_tokens, cites, frozenset(needs), strength, strength_means, neutral, learnable)
        REMEDIES.add(prepare.__name__, Remedy(prepare.__name__, summary, *facts, parameters, flops, prepare))
        return prepare

    return register

"""What a remedy declares about itself, and the decorator that declares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rankscope._citations import Cite
from rankscope._registry import Registry
from rankscope.models.view import ModelView
from rankscope.surgery.graft import Graft
from rankscope.surgery.operation import Operation
from rankscope.theory.designs.design import Design

Need = Literal["skips", "post-norm", "pre-norm", "attention", "mlp", "training"]
Step = Operation | Graft
DesignChange = Callable[[Design, float], Mapping[str, Any]]


@dataclass(frozen=True)
class RemedyCase:
    """What a remedy is prepared for.

    Attributes:
        view: the model and its structure.
        strength: how much of it; what the number means is the remedy's to say.
        learnable: its numbers are parameters, and those that are trained stay with the treatment.
    """

    view: ModelView
    strength: float
    learnable: bool = False

    @property
    def depth(self) -> int:
        """Blocks of the deepest stack."""
        return max(stack.depth for stack in self.view.stacks)


@dataclass(frozen=True)
class Remedy:
    """A remedy: facts that the verb, the tests, the documentation and the command line read, and one pure function.

    Attributes:
        name: the function's name.
        summary: first line of its docstring: what it changes.
        claim: what its paper says it does, in our words.
        claims_tokens: whether that is a claim about how alike tokens become, and not about training alone.
        cites: where it comes from.
        needs: what a model must have to undergo it; ``training``: it begins as nothing, or helps only what is trained.
        strength: the default.
        strength_means: what the number is.
        neutral: the strength that leaves a model as it is; None when there is none.
        learnable: whether its numbers can be parameters.
        parameters: how many it adds when they are, in words.
        flops: what it adds to a forward pass, in words; n tokens, d width, L blocks, h heads.
        prepare: gives what is to be done to a model.
        design: what changes in a design without weights, by the remedy's strength; None where a design cannot say it.
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
    design: DesignChange | None = None


REMEDIES: Registry[Remedy] = Registry("remedy", "rankscope.remedies")


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
    design: DesignChange | None = None,
) -> Callable[[Callable[[RemedyCase], Sequence[Step]]], Callable[[RemedyCase], Sequence[Step]]]:
    """Register a function of :class:`RemedyCase` that gives operations and grafts."""

    def register(prepare: Callable[[RemedyCase], Sequence[Step]]) -> Callable[[RemedyCase], Sequence[Step]]:
        summary = (prepare.__doc__ or "").strip().split("\n", 1)[0]
        facts = (claim, claims_tokens, cites, frozenset(needs), strength, strength_means, neutral, learnable)
        REMEDIES.add(prepare.__name__, Remedy(prepare.__name__, summary, *facts, parameters, flops, prepare, design))
        return prepare

    return register

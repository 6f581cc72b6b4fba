"""``applied``: run a model with a remedy inside a ``with`` block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.models.view import BlockPlan, ModelView
from rankscope.remedies._spec import REMEDIES, Need, Remedy, RemedyCase, Step
from rankscope.surgery.graft import Graft
from rankscope.surgery.operating import grafting, operating
from rankscope.surgery.operation import Operation
from rankscope.surgery.session import structure_of

# Says what was not found, not what the model lacks: a skip may be written in a way that is not recognised.
_LACKS: dict[Need, str] = {
    "skips": "no addition of a skip was found; it has none, or it mixes the stream in a form that is not recognised",
    "post-norm": "no norm was found that reads the sum its skips add to (it is not post-norm, as far as can be seen)",
    "pre-norm": "no norm was found that only its branches read (it is not pre-norm, as far as can be seen)",
    "attention": "no attention was found whose probabilities can be seen",
    "mlp": "no addition of an MLP was found; it has none, or it mixes the stream in a form that is not recognised",
}


def check_needs(remedy: Remedy, view: ModelView) -> None:
    """Raise unless every block of a model has what a remedy needs.

    Raises:
        UnsupportedOperationError: the message names the block and what is missing.
    """
    for stack in view.stacks:
        for layer, plan in enumerate(stack.plans):
            for need in sorted(remedy.needs & _LACKS.keys()):
                if not has(plan, need):
                    where = f"{f'{stack.name} ' if stack.name else ''}block {layer}"
                    raise UnsupportedOperationError(
                        f"{remedy.name} needs {need}: in {where} of this {type(view.model).__name__} {_LACKS[need]}."
                    )


def has(plan: BlockPlan, need: Need) -> bool:
    """Whether a block has what a remedy may need."""
    if need == "skips":
        return bool(plan.skips)
    if need == "post-norm":
        return plan.has_norm and plan.post_norm
    if need == "pre-norm":
        return plan.has_norm and not plan.post_norm
    if need == "attention":
        return "attention" in plan.attention
    return bool({"mlp", "both"} & set(plan.skips))


class Treatment(nn.Module):
    """A remedy prepared for one model: its operations and grafts, and its own parameters.

    Attributes:
        remedy: the facts.
        strength: how much of it.
        steps: operations and grafts, in order.
    """

    def __init__(self, remedy: Remedy, strength: float, steps: Sequence[Step]) -> None:
        super().__init__()
        self.remedy, self.strength, self.steps = remedy, strength, tuple(steps)
        self.grafts = nn.ModuleList(step for step in steps if isinstance(step, Graft))

    def describe(self) -> dict[str, Any]:
        """The treatment in plain JSON types."""
        return {
            "remedy": self.remedy.name,
            "strength": self.strength,
            "steps": [step.describe() for step in self.steps],
        }


def treatment(view: ModelView, name: str, *, strength: float | None = None, learnable: bool = False) -> Treatment:
    """Prepare a remedy for a model.

    Args:
        view: the model and its structure.
        name: from ``rankscope ls remedies``.
        strength: None for the remedy's own default.
        learnable: make its numbers parameters.

    Raises:
        UnknownNameError: no such remedy; the message suggests the closest names.
        UnsupportedOperationError: it cannot be applied to the model; the message gives the reason.
        InputError: the strength is not a finite number, or the remedy has nothing to learn.
    """
    entry = REMEDIES[name]
    if strength is not None and not math.isfinite(strength):
        raise InputError(f"strength={strength!r}: expected a finite number ({entry.strength_means}).")
    if learnable and not entry.learnable:
        raise InputError(f"{name} has no numbers that could be learned: leave learnable= out.")
    check_needs(entry, view)
    amount = entry.strength if strength is None else float(strength)
    return Treatment(entry, amount, entry.prepare(RemedyCase(view, amount, learnable)))


@contextmanager
def applied(
    model: nn.Module,
    remedy: str | Treatment,
    *,
    strength: float | None = None,
    learnable: bool = False,
    inputs: Any = None,
    blocks: str | Sequence[str] | None = None,
    view: ModelView | None = None,
) -> Iterator[Treatment]:
    """Run a model with a remedy inside the ``with`` block; it is restored afterwards, even after an error.

    No weight of the model is changed and none is added. The remedy's own parameters belong to the treatment that
    the ``with`` statement yields: give them to the optimiser; pass it instead of a name to reuse them. May be
    nested with other remedies and with ``operate`` on the same model.

    Args:
        model: any model rankscope can measure.
        remedy: a name from ``rankscope ls remedies``, or a prepared treatment.
        strength: how much of it; None for its default.
        learnable: make its numbers parameters of the treatment.
        inputs: something the model runs on; needed once for a module that is not from transformers.
        blocks: names or patterns of the block modules, if discovery needs help.
        view: the structure, if known.

    Raises:
        UnsupportedOperationError: it cannot be applied to this model; the message gives the reason.

    Example:
        >>> from rankscope.models.loading import load
        >>> model = load("init:tiny-bert").model
        >>> with applied(model, "skipinit", learnable=True) as given:
        ...     sum(parameter.numel() for parameter in given.parameters())
        6
    """
    if isinstance(remedy, Treatment):
        if strength is not None or learnable:
            raise InputError("This treatment is already prepared: strength= and learnable= go with a name.")
        view = view if view is not None else structure_of(model, inputs, blocks)
        check_needs(remedy.remedy, view)
        given = remedy
    else:
        REMEDIES[remedy]
        view = view if view is not None else structure_of(model, inputs, blocks)
        given = treatment(view, remedy, strength=strength, learnable=learnable)
    with ExitStack() as stack:
        for step in given.steps:
            if isinstance(step, Operation):
                stack.enter_context(operating(model, step, view=view))
            else:
                stack.enter_context(grafting(model, step, view=view))
        yield given

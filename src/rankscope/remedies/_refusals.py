"""What a model must have to undergo a remedy, said before anything runs."""

from __future__ import annotations

from rankscope._errors import UnsupportedOperationError
from rankscope.models.view import BlockPlan, ModelView
from rankscope.remedies._spec import Need, Remedy

_LACKS: dict[Need, str] = {
    "skips": "adds nothing to its stream by a skip",
    "post-norm": "does not normalise the sum that its skips add to (it is not post-norm)",
    "pre-norm": "has no norms that only its branches read (it is not pre-norm)",
    "attention": "has no attention whose probabilities can be seen",
    "mlp": "adds no MLP to its stream",
}


def check_needs(remedy: Remedy, view: ModelView) -> None:
    """Raise unless every block of a model has what a remedy needs.

    Raises:
        UnsupportedOperationError: with the block and what it lacks.
    """
    for stack in view.stacks:
        for layer, plan in enumerate(stack.plans):
            for need in sorted(remedy.needs & _LACKS.keys()):
                if not _has(plan, need):
                    where = f"{f'{stack.name} ' if stack.name else ''}block {layer}"
                    raise UnsupportedOperationError(
                        f"{remedy.name} needs {need}, and {where} of this {type(view.model).__name__} {_LACKS[need]}."
                    )


def _has(plan: BlockPlan, need: Need) -> bool:
    if need == "skips":
        return bool(plan.skips)
    if need == "post-norm":
        return plan.has_norm and plan.post_norm
    if need == "pre-norm":
        return plan.has_norm and not plan.post_norm
    if need == "attention":
        return "attention" in plan.attention
    return bool({"mlp", "both"} & set(plan.skips))

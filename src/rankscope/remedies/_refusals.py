"""What a model must have to undergo a remedy, said before anything runs."""

from __future__ import annotations

from rankscope._errors import UnsupportedOperationError
from rankscope.models.view import BlockPlan, ModelView
from rankscope.remedies._spec import Need, Remedy

# What was not found, and not what a model is: a skip may be written in a way that is not recognised.
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
        UnsupportedOperationError: with the block and what it lacks.
    """
    for stack in view.stacks:
        for layer, plan in enumerate(stack.plans):
            for need in sorted(remedy.needs & _LACKS.keys()):
                if not _has(plan, need):
                    where = f"{f'{stack.name} ' if stack.name else ''}block {layer}"
                    raise UnsupportedOperationError(
                        f"{remedy.name} needs {need}: in {where} of this {type(view.model).__name__} {_LACKS[need]}."
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

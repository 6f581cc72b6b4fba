"""Whether the weights of single heads can be read from a model's blocks."""

from __future__ import annotations

from rankscope._errors import RankscopeError
from rankscope.models.loading import LoadedModel
from rankscope.models.view import ModelView
from rankscope.runs.checks import Check


def check_heads(loaded: LoadedModel, view: ModelView) -> list[Check]:
    """One check per stack: readable, or refused with the family's reason."""
    from rankscope.models.heads import head_weights

    if loaded.config is None:
        reason = "per-head weights need a family description, and this is no transformers model"
        return [Check("heads", "refused", f"{reason}. Everything that needs no weights works.")]
    modules = view.modules()
    checks = []
    for stack in view.stacks:
        try:
            weights = head_weights(modules[stack.calls[0].module_name], loaded.config)
        except RankscopeError as error:
            checks.append(Check("heads", "refused", str(error)))
        else:
            heads, dim, width = weights.W_Q.shape
            checks.append(Check("heads", "pass", f"weights of {heads} heads read, {dim} x {width} each"))
    return checks

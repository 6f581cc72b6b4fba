"""What a model cannot undergo, said before anything runs."""

from __future__ import annotations

from rankscope._errors import InputError, UnsupportedOperationError
from rankscope.models.view import BlockPlan, ModelView
from rankscope.surgery.operation import Operation


def check_operable(operation: Operation, view: ModelView) -> None:
    """Raise unless every block the operation is meant for can undergo it.

    Raises:
        InputError: a layer or stack that does not exist.
        UnsupportedOperationError: a block that cannot be changed as asked, with the reason.
    """
    _check_place(operation, view)
    meant = {
        f"{f'{stack.name} ' if stack.name else ''}block {layer}": plan
        for stack in view.stacks
        for layer, plan in enumerate(stack.plans)
        if operation.applies_to(stack.name, layer)
    }
    for where, plan in meant.items():
        _check_block(operation, where, plan)
    if operation.norm != "keep" and not any(plan.has_norm for plan in meant.values()):
        raise UnsupportedOperationError(f"norm={operation.norm!r}: no block meant has a norm of its own.")
    if operation.mlp == "drop" and not any({"mlp", "both"} & set(plan.skips) for plan in meant.values()):
        raise UnsupportedOperationError("mlp='drop': no block meant adds an MLP to the stream that could be dropped.")
    _check_inline(operation, view)


def _check_inline(operation: Operation, view: ModelView) -> None:
    """Blocks inside one module call: the stream shows where their adds are, and not to which a norm belongs."""
    for stack in view.stacks:
        for call in stack.calls:
            layers = range(call.first_layer, call.first_layer + len(call.blocks))
            meant = [operation.applies_to(stack.name, layer) for layer in layers]
            if not any(meant) or len(call.blocks) == 1:
                continue
            if operation.norm != "keep" and not all(meant):
                raise UnsupportedOperationError(
                    f"norm={operation.norm!r}: {call.module_name or 'the model'} holds {len(call.blocks)} blocks in one"
                    " call, and which of them a norm belongs to cannot be told. Leave layers= out."
                )
            if operation.mlp == "drop" and any("both" in plan.skips for plan in call.blocks):
                raise UnsupportedOperationError(
                    f"mlp='drop': {call.module_name or 'the model'} holds {len(call.blocks)} parallel blocks in one "
                    "call, and their MLPs cannot be told apart."
                )


def _check_place(operation: Operation, view: ModelView) -> None:
    names = [stack.name for stack in view.stacks]
    if operation.stack is not None and operation.stack not in names:
        raise InputError(f"stack={operation.stack!r}: this model has {', '.join(map(str, names))}.")
    deepest = max(stack.depth for stack in view.stacks if operation.stack in (None, stack.name))
    beyond = sorted(layer for layer in operation.layers or () if not 0 <= layer < deepest)
    if beyond:
        raise InputError(f"layers={beyond}: this model has blocks 0 to {deepest - 1}.")


def _check_block(operation: Operation, where: str, plan: BlockPlan) -> None:
    if operation.touches_attention and "attention" not in plan.attention:
        raise UnsupportedOperationError(
            f"{where}: its attention probabilities cannot be seen (no softmax over keys, or a kernel of its own), "
            "so they cannot be changed. Skips, MLP and norms can."
        )
    if "both" in plan.skips or any(plan.joins):
        if operation.attention_skip != operation.mlp_skip:
            raise UnsupportedOperationError(
                f"{where} adds attention and MLP at once: it has one skip, so attention_skip and mlp_skip must agree."
            )
        if operation.mlp == "drop" and "both" in plan.skips and plan.parallel_mlp is None:
            raise UnsupportedOperationError(f"{where}: the MLP joins the attention branch in a way that was not seen.")
    if operation.mlp == "drop" and not {"mlp", "both"} & set(plan.skips) and "mixer" not in plan.skips:
        raise UnsupportedOperationError(f"{where} adds no MLP to the stream that could be dropped.")
    if not plan.skips and {operation.attention_skip, operation.mlp_skip} - {0.0, 1.0}:
        raise UnsupportedOperationError(f"{where} has no skip to scale.")

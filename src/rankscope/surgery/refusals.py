"""Checks whether an operation is possible on a model, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.models.view import BlockPlan, Carry, ModelView, Stack
from rankscope.surgery.operation import Operation


def check_operable(operation: Operation, view: ModelView) -> None:
    """Raise unless the operation is possible on every block it applies to.

    Raises:
        InputError: a layer or stack that does not exist.
        UnsupportedOperationError: a block cannot be changed as requested; the message gives the reason.
    """
    _check_place(operation, view)
    if operation != Operation():
        need_edits_in_blocks(view, norms=operation.norm in ("scale", "rms"))
    meant = {
        f"{f'{stack.name} ' if stack.name else ''}block {layer}": plan
        for stack in view.stacks
        for layer, plan in enumerate(stack.plans)
        if operation.applies_to(stack.name, layer)
    }
    if {operation.attention_skip, operation.mlp_skip} != {1.0}:
        check_carries(view, "a gain on the skips", operation)
    if operation.norm != "keep":
        check_own_norms(view, f"norm={operation.norm!r}", operation)
    if operation.mlp == "drop":
        _check_inside(operation, view)
    for where, plan in meant.items():
        _check_block(operation, where, plan)
    if operation.norm != "keep" and not any(plan.has_norm for plan in meant.values()):
        raise UnsupportedOperationError(f"norm={operation.norm!r}: no block meant has a norm of its own.")
    if operation.mlp == "drop" and not any({"mlp", "both"} & set(plan.skips) for plan in meant.values()):
        adds = "; ".join(
            f"{where} adds {' and '.join(sorted(set(plan.skips))) or 'nothing'}" for where, plan in meant.items()
        )
        raise UnsupportedOperationError(
            f"mlp='drop': no block meant adds an MLP to the stream that could be dropped. Found: {adds or 'no block'}."
        )
    _check_inline(operation, view)
    _check_changes_something(operation, meant)


def _check_changes_something(operation: Operation, meant: Mapping[str, BlockPlan]) -> None:
    """Each part of an operation must change something in at least one of the blocks it applies to."""
    if not meant or {operation.attention_skip, operation.mlp_skip} == {1.0}:
        return
    gained = [any(operation.gain(label) != 1.0 for label in plan.skips) for plan in meant.values()]
    if not any(gained):
        places = list(meant)
        blocks = places[0] if len(places) == 1 else f"{places[0]} to {places[-1]}"
        raise UnsupportedOperationError(
            f"This gain on skips would change nothing: {blocks} have no skip it applies to, neither a sum "
            "nor any other way around a block. Leave it out: the model already runs without such skips."
        )


def _check_inside(operation: Operation, view: ModelView) -> None:
    """Refuse a block with other skips inside or around it alone: it is not clear which of its parts is the MLP."""
    for stack in view.stacks:
        for call in stack.calls:
            last = call.first_layer + len(call.blocks) - 1
            inside = [
                c
                for c in stack.carries
                if c.calls_begun is None
                and (
                    (call.module_name and f"{c.module}.".startswith(f"{call.module_name}."))
                    or call.first_layer <= c.first <= c.last <= last
                )
            ]
            if inside and operation.applies_to(stack.name, call.first_layer):
                raise UnsupportedOperationError(
                    f"mlp='drop': {call.module_name} has paths around its parts that are not plain skips "
                    f"({inside[0].where}), so what its MLP adds cannot be told apart. Write the sums of the block as "
                    "x + f(x)."
                )


def need_edits_in_blocks(view: ModelView, *, norms: bool = False) -> None:
    """Check that the blocks contain the whole stream, so that editing inside them is enough.

    ``norms`` says whether norms along the last axis replace the blocks' own.

    Raises:
        UnsupportedOperationError: the stream was declared to be in other slots, its skips outside of the blocks, or its
            channels along another axis.
    """
    for stack in view.stacks:
        if not stack.stream.has_plain_blocks:
            raise UnsupportedOperationError(
                f"The residual stream of {stack.calls[0].module_name} was declared as '{stack.stream}': not all of its "
                "skips are inside the blocks, and those outside cannot be changed. measure and the gauge can read it."
            )
        if norms and not stack.layout.endswith("dim"):
            raise UnsupportedOperationError(
                f"This puts a norm along the last axis, and the channels of {stack.calls[0].module_name} are along "
                f"another: '{stack.stream}'. Of the norms, only norm='identity' can be asked for."
            )


def check_carries(view: ModelView, what: str, operation: Operation | None = None) -> None:
    """Raise if the stream bypasses a block in another way than through the known skips.

    Args:
        view: the model.
        what: is to be done, in words.
        operation: which blocks are meant; None for all.

    Raises:
        UnsupportedOperationError: the change would be incomplete; the message says where.
    """
    if operation is not None:
        _check_long_skips(view, operation)
    left = [
        (stack, tuple(c for c in stack.carries if operation is None or c.calls_begun is None)) for stack in view.stacks
    ]
    carries = _in_meant(operation, left)
    if carries:
        raise UnsupportedOperationError(
            f"The stream gets around blocks in a way that {what} would leave in place, so the result would not be what "
            f"it is called. {_listed(carries)}. What can be edited is a sum of a stream and a branch (x + f(x), with "
            "any gain), a projection of the two side by side, and a sum of two states of the stream (a long skip); a "
            "skip through a matrix or an activation of its own, turned or cut channels and scripted sums cannot."
        )


def _check_long_skips(view: ModelView, operation: Operation) -> None:
    """A long skip goes around attention and MLP of several blocks alike, and is scaled only with all of them."""
    for stack in view.stacks:
        for skip in stack.long_skips:
            meant = [operation.applies_to(stack.name, layer) for layer in range(skip.first, skip.last + 1)]
            if not any(meant):
                continue
            name = f"{stack.name} " if stack.name else ""
            if not all(meant):
                raise UnsupportedOperationError(
                    f"A long skip goes around {name}{skip.where}, and layers= names only some of these blocks, so that "
                    "the stream would still get around them. Name all of them, or none."
                )
            if operation.attention_skip != operation.mlp_skip:
                raise UnsupportedOperationError(
                    f"A long skip goes around {name}{skip.where}: around attention and MLPs alike, so attention_skip "
                    "and mlp_skip must agree."
                )


def check_own_norms(view: ModelView, what: str, operation: Operation | None = None) -> None:
    """Raise if a norm of the stream is written out instead of being a norm module or function.

    Args:
        view: the model.
        what: is to be done, in words.
        operation: which blocks are meant; None for all.

    Raises:
        UnsupportedOperationError: some norms would stay unchanged; the message says where.
    """
    norms = _in_meant(operation, [(stack, stack.own_norms) for stack in view.stacks])
    if norms:
        raise UnsupportedOperationError(
            f"{what} would leave norms in place that are written out instead of being a norm module "
            f"or a norm function of torch. {_listed(norms)}. Make each a module of its own, or call such a function."
        )


def _in_meant(operation: Operation | None, listed: list[tuple[Stack, tuple[Carry, ...]]]) -> list[str]:
    return [
        f"{f'{stack.name} ' if stack.name else ''}{carry.where}"
        for stack, carries in listed
        for carry in carries
        if operation is None
        or any(operation.applies_to(stack.name, layer) for layer in range(carry.first, carry.last + 1))
    ]


def _listed(found: list[str]) -> str:
    more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
    return f"Found at {'; '.join(found[:4])}{more}"


def _check_inline(operation: Operation, view: ModelView) -> None:
    """Check blocks inside one module call, whose adds are known, but not to which of them a norm belongs."""
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
    if operation.mlp == "drop" and plan.beside is not None:
        raise UnsupportedOperationError(
            f"mlp='drop': {where} joins what {plan.beside} computes from each token alone with what mixes tokens, in a "
            "form that is not known, and adds both at once. Add the two to each other (attention(x) + mlp(x)), or each "
            "to the stream."
        )
    if operation.mlp == "drop" and not plan.is_proven:
        raise UnsupportedOperationError(
            f"mlp='drop': {where} adds a branch that did not change when tokens of its input were replaced, because "
            "its weights are zero or missing, its input is NaN or infinite, or there is one token. Whether it is an "
            "MLP or mixes tokens cannot be told. Give inputs of two tokens or more, and weights that are not zero."
        )
    if operation.mlp == "drop" and not {"mlp", "both"} & set(plan.skips) and "mixer" not in plan.skips:
        raise UnsupportedOperationError(f"{where} adds no MLP to the stream that could be dropped.")
    if not plan.skips and {operation.attention_skip, operation.mlp_skip} - {0.0, 1.0}:
        raise UnsupportedOperationError(f"{where} has no skip to scale.")

"""Models that give one answer, whatever their inputs are, and the operation in which the inputs are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankscope.examination import _source
from rankscope.examination._examination import Examination
from rankscope.examination._following import FollowedStep, Following, at_unit_size, depends_on_inputs, named, without
from rankscope.examination._spec import Finding, Look, cause, told
from rankscope.examination._tensors import main_output, redrawn
from rankscope.examination.outputs import OUTPUTS, begins_at_zero
from rankscope.models.inputs import Batch
from rankscope.models.inputs.axes import other_entries
from rankscope.models.inputs.record import is_mask_like

SMALL = 1e-2
"""Size of what an operation takes, below which it may be lost beside what is added to it."""
_TRIED = 3
"""Operations that are tried as the place of the loss."""


def _others(batch: Batch) -> tuple[Batch, list[Tensor]]:
    """The batch with other ids, vectors and images everywhere, and these tensors."""
    made: list[Tensor] = []

    def other(name: str, value: Tensor, axis: int) -> Tensor:
        if is_mask_like(name) or value.dtype is torch.bool or value.ndim < 2:
            return value
        made.append(other_entries(value, torch.ones(value.shape[:2], dtype=torch.bool, device=value.device)))
        return made[-1]

    return batch.mapped(other), made


def _inputs_differ(x: Examination) -> bool:
    """Whether the sequences, or images, of the batch are not all the same."""
    differ: list[bool] = []

    def compare(name: str, value: Tensor, axis: int) -> Tensor:
        rows = value.movedim(axis, 0)
        differ.append(not is_mask_like(name) and not torch.equal(rows, rows[:1].expand_as(rows)))
        return value

    x.batch.mapped(compare)
    return any(differ)


def _floating(value: Any) -> list[Tensor]:
    """Everything that a model returns, as numbers."""
    leaves = pytree.tree_leaves(value)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        leaves = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _are_alike(x: Examination, returned: Any) -> bool:
    """Whether everything that a model returned for each sequence is the same for all of them."""
    floating = _floating(returned)
    axes = [x.sequence_axis(one) for one in floating]
    rows = [one.movedim(axis, 0) for one, axis in zip(floating, axes, strict=True) if axis is not None]
    return bool(rows) and not any(depends_on_inputs(one[:1].expand_as(one), one) for one in rows)


def _apart_if_alike(x: Examination) -> float | None:
    """How far the outputs are from each other if all are alike and the inputs are not; None otherwise."""
    if x.result is None or not _inputs_differ(x) or not _are_alike(x, x.returned):
        return None
    return x.inputs_apart(x.result)


def _is_made_so_by_weights(x: Examination) -> bool:
    """Whether outputs differ with other weights, also in the place of gains and gates that begin at zero."""
    drawn = torch.Generator().manual_seed(0)
    zero = {name: one.detach() for name, one in x.model.named_parameters() if not bool(one.detach().any())}
    moved = {name: (0.1 * torch.randn(one.shape, generator=drawn)).to(one) for name, one in zero.items()}
    # Tried first, because it needs no copy of the model: a head or a gate of zero is usual.
    if any(one.ndim > 1 or one.numel() == 1 for one in zero.values()) and not _are_alike(x, x.run(replaced=moved)):
        return True
    return not _are_alike(x, x.run(replaced=redrawn([("", x.model)]) | moved))


def _two(x: Examination) -> Batch:
    return x.batch.taken(0, 2) if x.sequences > 2 else x.batch


def _losing(x: Examination) -> tuple[Following, list[FollowedStep]] | None:
    """The operations that lose the inputs, the last one first; None if anything that is returned depends on them.

    Two passes on two sequences: as they are, and with all others.
    """
    batch = _two(x)
    other, made = _others(batch)
    before = Following(x.model)
    with before.watching():
        own = x.run(batch)
    after = Following(x.model, before, [id(one) for one in made])
    with after.watching():
        others = x.run(other)
    pairs = list(zip(_floating(own), _floating(others), strict=False))
    result = main_output(others)
    if result is None or not made or any(depends_on_inputs(one, two) for one, two in pairs):
        return None
    return after, after.losing(result)


def _spread_with(x: Examination, step: FollowedStep, run: Callable[[Callable[..., Any], Any, Any], Any]) -> float:
    """How much the outputs of different inputs differ, with something else in the place of an operation."""
    changed = Following(x.model, change=(step.number, run))
    try:
        with changed.watching():
            output = x.output()
    except (RuntimeError, ValueError, TypeError, IndexError):
        return 0.0  # what the operation takes does not fit in the place of what it returns
    return 0.0 if output is None else x.inputs_apart(output) or 0.0


def _is_without_gradient(x: Examination) -> bool:
    try:
        return bool(x.gradients) and not any(one is not None and bool(one.any()) for one in x.gradients.values())
    except RuntimeError:
        return False  # no backward pass on this machine: then nothing is said about gradients


def _removal(x: Examination, step: FollowedStep, look: Look) -> str:
    return x.edited(look, step.place, _source.without_operation(step.place, step.name, step.lost or 0))


def _located(
    x: Examination, look: Look, before: float, follow: Following, losing: list[FollowedStep], *, alone: bool
) -> Finding | None:
    """The finding for the operation in which the inputs are lost: without it, or with larger inputs, they are not."""
    lead, code = "All outputs are the same, whatever the inputs are", look.__name__
    for step in losing[:_TRIED]:
        if step.lost is None or (alone and not step.is_alone):
            continue
        if 0 < step.taken < SMALL and not step.is_alone:
            shrinks = follow.shrinking(step.number)
            after = 0.0 if shrinks is None else _spread_with(x, shrinks, without(0))
            proven = after > 100 * max(before, 1e-6)
            if not proven:
                shrinks, after = None, _spread_with(x, step, at_unit_size(step.lost))
            if after > 100 * max(before, 1e-6):
                change = "" if shrinks is None else _removal(x, shrinks, look)
                return Finding(
                    code,
                    f"{lead}: they have a size of {told(step.taken)} where {named(x, step)} takes them, and are lost "
                    "beside what is added there."
                    + ("" if shrinks is None else f" {named(x, shrinks)} makes them so small."),
                    change or "Standardise what is taken there",
                    tried=bool(change),
                    measured=OUTPUTS,
                    before=before,
                    after=after,
                    intervention="without that operation" if proven else "with what is taken there at a size of 1",
                    where=step.module or "",
                )
        after = _spread_with(x, step, without(step.lost))
        if after > 100 * max(before, 1e-6):
            change = _removal(x, step, look)
            return Finding(
                code,
                f"{lead}: {named(x, step)} returns the same for all of them, although what it takes differs."
                + (" No parameter gets a gradient." if _is_without_gradient(x) else ""),
                change or "Give this operation values that it does not make equal",
                tried=bool(change),
                measured=OUTPUTS,
                before=before,
                after=after,
                intervention="without this operation",
                where=step.module or "",
            )
    if alone or not losing:
        return None
    return Finding(
        code,
        f"{lead}: {named(x, losing[0])} returns the same for all of them, although what it takes differs.",
        "Give this operation values that it does not make equal",
        measured="change of the outputs when all inputs are replaced, relative to their size",
        before=0.0,
        where=losing[0].module or "",
    )


def shrinking_operation(x: Examination, look: Look) -> tuple[str, str]:
    """The operation without which the outputs are 30 times as large, and the change that removes it; empty for none."""
    batch, follow = _two(x), Following(x.model)
    with follow.watching():
        result = main_output(x.run(batch))
    step = None if result is None else follow.shrinking(result)
    if step is None or x.result is None:
        return "", ""
    changed = Following(x.model, change=(step.number, without(0)))
    with changed.watching():
        output = x.output()
    if output is None or float(output.double().norm()) < 30 * float(x.result.double().norm()):
        return "", ""
    return named(x, step), _removal(x, step, look)


@cause(
    proof="all inputs are replaced by others, and the weights by others, and no output changes; without the operation "
    "that is named, or with larger numbers in it, outputs differ",
    change="the operation that drops, clips or scales down the inputs",
    order=10,
)
def inputs_ignored(x: Examination) -> Iterator[Finding]:
    """A model that answers the same, whatever its inputs are."""
    before = _apart_if_alike(x)
    if before is None:
        return
    lost = None if _is_made_so_by_weights(x) else _losing(x)
    if lost is None:
        return
    found = _located(x, inputs_ignored, before, *lost, alone=False)
    if found is not None:
        yield found
        return
    yield Finding(
        "inputs_ignored",
        "All outputs are the same, whatever the inputs are. The operation in which the inputs are lost was not found.",
        "Look at where forward uses its inputs: what it returns is made of something else",
        measured="change of the outputs when all inputs are replaced, relative to their size",
        before=0.0,
    )


@cause(
    proof="all inputs are replaced by others, and no output changes; without one operation of one tensor, they do",
    change="remove the operation, or give it what it does not make equal",
    order=40,
)
def lost_in_operation(x: Examination) -> Iterator[Finding]:
    """An operation behind which all inputs are alike."""
    before = _apart_if_alike(x)
    if before is None:
        return
    lost = None if begins_at_zero(x) else _losing(x)
    found = None if lost is None else _located(x, lost_in_operation, before, *lost, alone=True)
    if found is not None:
        yield found

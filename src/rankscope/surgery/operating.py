"""``operate``: change how a model runs inside a ``with`` block, and restore it afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.errors import UnsupportedOperationError
from rankscope.masks import Mask, parse_mask
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.surgery.graft import ATTENTION_PLACES, Graft
from rankscope.surgery.operation import (
    AttentionChoice,
    MaskChoice,
    MlpChoice,
    NormChoice,
    Operation,
    number_set,
)
from rankscope.surgery.refusals import check_carries, check_operable, check_own_norms, need_edits_in_blocks
from rankscope.surgery.session import remove_last, session_on


@contextmanager
def operate(
    model: nn.Module,
    *,
    skip: float | None = None,
    attention_skip: float | None = None,
    mlp_skip: float | None = None,
    mlp: MlpChoice = "keep",
    norm: NormChoice = "keep",
    mask: Mask | str | None = None,
    mask_mode: MaskChoice = "replace",
    temperature: float = 1.0,
    attention: AttentionChoice = "keep",
    attention_scale: float = 1.0,
    heads: int | Collection[int] = (),
    layers: int | Collection[int] | None = None,
    stack: str | None = None,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
) -> Iterator[Operation]:
    """Operate on a model: it runs modified inside the ``with`` block and is restored afterwards, even after an error.

    No weight is changed. ``with`` blocks may be nested on the same model: gains, temperatures and factors multiply,
    masks apply in order, and of several norms the innermost counts. Gradients flow, also with gradient checkpointing of
    whole blocks, as long as the backward pass runs inside the ``with`` block. Compiled code runs as written inside.

    Args:
        model: any model rankscope can measure.
        skip: gain on every skip: 0 removes it, any number scales it.
        attention_skip: gain where attention is added; overrides ``skip``.
        mlp_skip: gain where the MLP is added; overrides ``skip``.
        mlp: ``"drop"`` removes the MLP.
        norm: ``"identity"``, ``"scale"`` (unit length) or ``"rms"`` in place of the blocks' norms.
        mask: a mask or an expression such as ``"causal & window(4)"``.
        mask_mode: ``"replace"``, ``"intersect"`` or ``"unite"`` with the model's own.
        temperature: divides attention scores.
        attention: ``"uniform"`` or ``"centred"``.
        attention_scale: factor on the deviation from uniform attention (AttnScale).
        heads: heads to remove.
        layers: blocks to change, from 0; None for all.
        stack: the stack to change (``"encoder"``, ``"decoder"``); None for all.
        inputs: something the model runs on; needed once for a module that is not from transformers.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: layout of the residual stream, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.

    Raises:
        UnsupportedOperationError: the operation is not possible on this model; the message gives the reason.

    Example:
        >>> from rankscope.models.loading import load
        >>> model = load("init:tiny-bert").model
        >>> with operate(model, skip=0.0, mlp="drop") as operation:
        ...     operation.describe()
        {'attention_skip': 0.0, 'mlp_skip': 0.0, 'mlp': 'drop'}
    """
    operation = operation_of(
        skip=skip,
        attention_skip=attention_skip,
        mlp_skip=mlp_skip,
        mlp=mlp,
        norm=norm,
        mask=mask,
        mask_mode=mask_mode,
        temperature=temperature,
        attention=attention,
        attention_scale=attention_scale,
        heads=heads,
        layers=layers,
        stack=stack,
    )
    with operating(model, operation, inputs=inputs, blocks=blocks, stream=stream):
        yield operation


def operation_of(
    *,
    skip: float | None = None,
    attention_skip: float | None = None,
    mlp_skip: float | None = None,
    mlp: MlpChoice = "keep",
    norm: NormChoice = "keep",
    mask: Mask | str | None = None,
    mask_mode: MaskChoice = "replace",
    temperature: float = 1.0,
    attention: AttentionChoice = "keep",
    attention_scale: float = 1.0,
    heads: int | Collection[int] = (),
    layers: int | Collection[int] | None = None,
    stack: str | None = None,
) -> Operation:
    """An operation from the arguments of :func:`operate`."""
    both = 1.0 if skip is None else float(skip)
    return Operation(
        attention_skip=both if attention_skip is None else float(attention_skip),
        mlp_skip=both if mlp_skip is None else float(mlp_skip),
        mlp=mlp,
        norm=norm,
        mask=parse_mask(mask) if isinstance(mask, str) else mask,
        mask_mode=mask_mode,
        temperature=float(temperature),
        attention=attention,
        attention_scale=float(attention_scale),
        heads=number_set(heads),
        layers=None if layers is None else number_set(layers),
        stack=stack,
    )


@contextmanager
def operating(
    model: nn.Module,
    operation: Operation,
    *,
    inputs: Any = None,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
    view: ModelView | None = None,
) -> Iterator[None]:
    """Like :func:`operate`, for an existing operation, on a model whose structure may be known."""
    with session_on(model, inputs=inputs, blocks=blocks, stream=stream, view=view) as session:
        check_operable(operation, session.view)
        session.operations.append(operation)
        try:
            yield
        finally:
            remove_last(session.operations, operation)


@contextmanager
def grafting(
    model: nn.Module,
    graft: Graft,
    *,
    inputs: Any = None,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
    view: ModelView | None = None,
) -> Iterator[None]:
    """Run a model with a graft inside the ``with`` block; it is restored afterwards, even after an error.

    Grafts are applied after operations, in order. What a graft has learned stays with the graft.

    Args:
        model: any model rankscope can measure.
        graft: the graft.
        inputs: something the model runs on; needed once for a module that is not from transformers.
        blocks: names or patterns of the block modules, if discovery needs help.
        stream: layout of the residual stream, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        view: the structure, if known.

    Raises:
        UnsupportedOperationError: a block has no place where the graft could be applied.
    """
    with session_on(model, inputs=inputs, blocks=blocks, stream=stream, view=view) as session, ExitStack() as stack:
        need_edits_in_blocks(session.view, norms=graft.norms_last_axis)
        _check_places(graft, session.view)
        for handle in graft.hooks(session.view):
            stack.callback(handle.remove)
        session.grafts.append(graft)
        stack.callback(graft.reset)
        stack.callback(remove_last, session.grafts, graft)
        yield


def _check_places(graft: Graft, view: ModelView) -> None:
    if graft.touches & {"adds", "sums"}:
        check_carries(view, "what is put at the skips")
    if "norms" in graft.touches:
        check_own_norms(view, "What is put at the norms")
    for stack in view.stacks:
        for layer, plan in enumerate(stack.plans):
            where = f"{f'{stack.name} ' if stack.name else ''}block {layer}"
            if graft.touches & ATTENTION_PLACES and "attention" not in plan.attention:
                raise UnsupportedOperationError(
                    f"{where}: its attention probabilities cannot be seen (no softmax over keys, or a kernel of its "
                    "own), so they cannot be changed."
                )
            if graft.touches & {"adds", "sums"} and not plan.skips:
                raise UnsupportedOperationError(f"{where} has no skip onto which a branch is added.")
            if "norms" in graft.touches and not plan.has_norm:
                raise UnsupportedOperationError(f"{where} has no norm that could be changed.")
        if graft.touches & {"norms", "reads"} and any(len(call.blocks) > 1 for call in stack.calls):
            raise UnsupportedOperationError(
                "This model holds several blocks in one module call, and which of them a norm belongs to cannot be "
                "told, so norms cannot be changed by block."
            )

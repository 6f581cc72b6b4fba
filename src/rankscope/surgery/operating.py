"""``operate``: change how a model runs, for the length of a ``with`` block, and leave it as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from rankscope._errors import InputError
from rankscope.masks import Mask, parse_mask
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.models.view import ModelView
from rankscope.stream.viewing import known_view, view_of
from rankscope.surgery.operation import (
    AttentionChoice,
    MaskChoice,
    MlpChoice,
    NormChoice,
    Operation,
    number_set,
)
from rankscope.surgery.operator import Operator
from rankscope.surgery.refusals import check_operable


@dataclass
class _Session:
    """The operations under way on one model, carried out by one operator."""

    view: ModelView
    operations: list[Operation] = field(default_factory=list)
    cleanup: ExitStack = field(default_factory=ExitStack)


_SESSIONS: WeakKeyDictionary[nn.Module, _Session] = WeakKeyDictionary()


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
) -> Iterator[Operation]:
    """Operate on a model: inside the block it runs changed, after it, also after an error, as before.

    No weight is touched. Blocks may be nested on the same model: gains, temperatures and factors multiply, masks apply
    in order, of several norms the innermost counts. Gradients flow, also under gradient checkpointing of whole blocks,
    as long as the backward pass runs inside the block.

    Args:
        model: any model rankscope can measure.
        skip: gain on every skip: 0 removes it, any number scales it.
        attention_skip: gain where attention is added; overrides ``skip``.
        mlp_skip: gain where the MLP is added; overrides ``skip``.
        mlp: ``"drop"`` takes the MLP out.
        norm: ``"identity"``, ``"scale"`` (unit length) or ``"rms"`` in place of the blocks' norms.
        mask: a mask or an expression such as ``"causal & window(4)"``.
        mask_mode: ``"replace"``, ``"intersect"`` or ``"unite"`` with the model's own.
        temperature: attention scores are divided by it.
        attention: ``"uniform"`` or ``"centred"``.
        attention_scale: factor on what departs from uniform attention (AttnScale).
        heads: heads to remove.
        layers: blocks meant, from 0; None for all.
        stack: the stack meant (``"encoder"``, ``"decoder"``); None for all.
        inputs: something the model runs on; needed once for a module that is not from transformers.
        blocks: names or patterns of the block modules, where discovery needs help.

    Raises:
        UnsupportedOperationError: when this model cannot undergo it, with the reason.

    Example:
        >>> from rankscope.models.loading import load
        >>> model = load("init:tiny-bert").model
        >>> with operate(model, skip=0.0, mlp="drop") as operation:
        ...     operation.describe()
        {'attention_skip': 0.0, 'mlp_skip': 0.0, 'mlp': 'drop'}
    """
    both = 1.0 if skip is None else float(skip)
    operation = Operation(
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
    with operating(model, operation, inputs=inputs, blocks=blocks):
        yield operation


@contextmanager
def operating(
    model: nn.Module,
    operation: Operation,
    *,
    inputs: Any = None,
    blocks: str | Sequence[str] | None = None,
    view: ModelView | None = None,
) -> Iterator[None]:
    """The same for an operation that is already described, on a model whose structure may be known."""
    session = _SESSIONS.get(model)
    outermost = session is None
    if session is None:
        _refuse_overlap(model)
        session = _Session(view if view is not None else _view(model, inputs, blocks))
    check_operable(operation, session.view)
    session.operations.append(operation)
    try:
        if outermost:
            session.cleanup.enter_context(Operator(session.view, session.operations).riding())
            _SESSIONS[model] = session
        yield
    finally:
        _remove_last(session.operations, operation)
        if outermost:
            _SESSIONS.pop(model, None)
            session.cleanup.close()


def _remove_last(operations: list[Operation], operation: Operation) -> None:
    """Take out this very one, and not an equal one that was there before it."""
    position = max(i for i, present in enumerate(operations) if present is operation)
    del operations[position]


def _refuse_overlap(model: nn.Module) -> None:
    """Two hands on one stream would not see each other's cuts."""
    for other in list(_SESSIONS):
        if any(part is model for part in other.modules()) or any(part is other for part in model.modules()):
            raise InputError(
                f"{type(model).__name__} and {type(other).__name__}, which is operated on now, are parts of one model. "
                f"Nest operate() on the same module, here the {type(other).__name__}."
            )


def operations_on(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Plain descriptions of what is being done to a model right now, in order."""
    session = _SESSIONS.get(model)
    return () if session is None else tuple(operation.describe() for operation in session.operations)


def _view(model: nn.Module, inputs: Any, blocks: str | Sequence[str] | None) -> ModelView:
    loaded = load(model)
    if inputs is None and loaded.config is None:
        known = known_view(model)
        if known is not None:
            return known
        raise InputError(
            f"operate() has to see {type(model).__name__} run once, to find its blocks. Pass inputs= with something it "
            "runs on, or measure it first."
        )
    return view_of(model, prepare_inputs(loaded, inputs, sequences=2, tokens=16, batch=2)[0], blocks=blocks)

"""``operate``: change how a model runs inside a ``with`` block, and restore it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn

from rankscope.errors import UnsupportedOperationError
from rankscope.models.inputs import InputsLike, as_inputs
from rankscope.models.loading import need_module
from rankscope.models.model import Model
from rankscope.models.view import ModelView
from rankscope.surgery.graft import ATTENTION_PLACES, Graft
from rankscope.surgery.operation import Operation
from rankscope.surgery.refusals import check_carries, check_operable, check_own_norms, need_edits_in_blocks
from rankscope.surgery.session import remove_last, surgeon_of
from rankscope.surgery.surgery import Surgery, SurgeryLike, as_surgery


def operate(
    model: nn.Module | Model, surgery: SurgeryLike = None, *, inputs: InputsLike = None
) -> AbstractContextManager[Operation]:
    """Operate on a model: it runs modified inside the ``with`` block and is restored afterwards, even after an error.

    No weight is changed. ``with`` blocks may be nested on the same model: gains, temperatures and factors multiply,
    masks apply in order, and of several norms the innermost counts. Gradients flow, also with gradient checkpointing of
    whole blocks, or of parts of a block with ``use_reentrant=False``; their backward pass has to run inside the
    ``with`` block, and raises after it. Compiled code runs as written inside.

    Args:
        model: any model rankscope can measure, in memory: a module, or a :class:`rankscope.Model`, which also says
            where its blocks and its residual stream are.
        surgery: what to change: a :class:`rankscope.Surgery`, or a dictionary of its fields.
        inputs: something the model runs on; needed once for a module that is not from transformers.

    Raises:
        UnsupportedOperationError: the operation is not possible on this model; the message gives the reason.

    Example:
        >>> from rankscope import Surgery, load
        >>> with operate(load("init:tiny-bert"), Surgery(skip=0.0, mlp="drop")) as operation:
        ...     operation.describe()
        {'attention_skip': 0.0, 'mlp_skip': 0.0, 'mlp': 'drop'}
    """
    held = Model(need_module(model, "operate()")) if not isinstance(model, Model) else model
    return _Operate(held, as_surgery(surgery), as_inputs(inputs))


class _Operate(AbstractContextManager[Operation]):
    """What :func:`operate` returns."""

    def __init__(self, model: Model, surgery: Surgery, inputs: Any) -> None:
        self._model, self._surgery, self._inputs = model, surgery, inputs
        self._open = ExitStack()

    def __enter__(self) -> Operation:
        self._open.enter_context(operating(self._model, self._surgery.operation, inputs=self._inputs))
        return self._surgery.operation

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.__exit__(*error)

    def __repr__(self) -> str:
        return f"operate({self._model!r}, {self._surgery!r}), for use in a `with` statement"


@contextmanager
def operating(
    model: nn.Module | Model, operation: Operation, *, inputs: Any = None, view: ModelView | None = None
) -> Iterator[None]:
    """Like :func:`operate`, for an existing operation, on a model whose structure may be known."""
    with surgeon_of(model, inputs, view) as surgeon:
        check_operable(operation, surgeon.view)
        surgeon.operations.append(operation)
        try:
            yield
        finally:
            remove_last(surgeon.operations, operation)


@contextmanager
def grafting(
    model: nn.Module | Model, graft: Graft, *, inputs: Any = None, view: ModelView | None = None
) -> Iterator[None]:
    """Run a model with a graft inside the ``with`` block; it is restored afterwards, even after an error.

    Grafts are applied after operations, in order. What a graft has learned stays with the graft.

    Args:
        model: a module, or a :class:`rankscope.Model`, which also says where its blocks and its residual stream are.
        graft: the graft.
        inputs: something the model runs on; needed once for a module that is not from transformers.
        view: the structure, if known.

    Raises:
        UnsupportedOperationError: a block has no place where the graft could be applied.
    """
    with surgeon_of(model, inputs, view) as surgeon, ExitStack() as stack:
        need_edits_in_blocks(surgeon.view, norms=graft.norms_last_axis)
        _check_places(graft, surgeon.view)
        for handle in graft.hooks(surgeon.view):
            stack.callback(handle.remove)
        surgeon.grafts.append(graft)
        stack.callback(graft.reset)
        stack.callback(remove_last, surgeon.grafts, graft)
        yield


def _check_places(graft: Graft, view: ModelView) -> None:
    if "adds" in graft.touches:
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
            if "adds" in graft.touches and not plan.skips:
                raise UnsupportedOperationError(f"{where} has no skip onto which a branch is added.")
            if "norms" in graft.touches and not plan.has_norm:
                raise UnsupportedOperationError(f"{where} has no norm that could be changed.")
        if graft.touches & {"norms", "reads"} and any(len(call.blocks) > 1 for call in stack.calls):
            raise UnsupportedOperationError(
                "This model holds several blocks in one module call, and which of them a norm belongs to cannot be "
                "told, so norms cannot be changed by block."
            )

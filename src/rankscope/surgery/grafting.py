"""``grafting``: put something into a running model, for the length of a ``with`` block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from rankscope._errors import UnsupportedOperationError
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.surgery.graft import ATTENTION_PLACES, Graft
from rankscope.surgery.refusals import check_carries, check_own_norms
from rankscope.surgery.session import need_edits_in_blocks, remove_last, session_on


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
    """Run a model with a graft in place; after the block, also after an error, the model is as it was.

    Grafts act after operations, in their order. What a graft has learned stays with the graft.

    Args:
        model: any model rankscope can measure.
        graft: what is put in.
        inputs: something the model runs on; needed once for a module that is not from transformers.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        view: the structure, where it is known.

    Raises:
        UnsupportedOperationError: a block has no place where the graft could take hold.
    """
    with session_on(model, inputs=inputs, blocks=blocks, stream=stream, view=view) as session, ExitStack() as stack:
        need_edits_in_blocks(session.view)
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

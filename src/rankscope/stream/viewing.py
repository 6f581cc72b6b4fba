"""Finds the structure of a model on a small part of the inputs on which it will be measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedConfigError
from rankscope.models.inputs import Batch
from rankscope.models.spread import resharded
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView, Stack
from rankscope.stream.discovery import discover
from rankscope.stream.evidence import agreed

_PROBE_TOKENS = 256
"""Long enough to reveal most paths that only longer inputs take, short compared with what is measured."""
_STACKS: WeakKeyDictionary[nn.Module, tuple[Stack, ...]] = WeakKeyDictionary()


def view_of(
    model: nn.Module,
    batch: Batch,
    *,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | None = None,
) -> ModelView:
    """Discover the stacks of ``model`` with a few forward passes on two short sequences of ``batch``.

    Raises:
        DiscoveryError: no blocks were found.
        LayoutError: the axes of their residual stream are not in the assumed order.
    """
    small, sequences = probe_batch(batch, whole=_depends_on_length(model))
    with undisturbed(model):
        view = discover(model, lambda: small.run(model), batch=sequences, blocks=blocks, stream=stream)
        view = agreed(view, small, sequences, some_count=batch.keep is not None)
    _STACKS[model] = view.stacks
    return view


def need_plain_stream(view: ModelView, verb: str) -> None:
    """Check that a verb which also uses weights or exact arithmetic supports this stream.

    Raises:
        UnsupportedConfigError: the stream was declared with another layout.
    """
    for stack in view.stacks:
        if not stack.stream.is_plain:
            raise UnsupportedConfigError(
                f"{verb} reads a residual stream that is the first tensor of each block, as 'batch tokens dim' or "
                f"'tokens batch dim'. That of {stack.calls[0].module_name or type(view.model).__name__} lies as "
                f"'{stack.stream}', which measure and the gauge can read."
            )


def known_view(model: nn.Module) -> ModelView | None:
    """The structure that was found last, if any."""
    stacks = _STACKS.get(model)
    return None if stacks is None else ModelView(model, stacks)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, without gradients; mode, random state and FSDP2's shards are restored."""
    was_training = [module for module in model.modules() if module.training]
    for module in was_training:
        module.training = False
    try:
        with resharded(model), torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        for module in was_training:
            module.training = True


def _depends_on_length(model: nn.Module) -> bool:
    """Whether a short input would change the model: block-sparse models switch to full attention permanently."""
    return any(getattr(module, "attention_type", None) == "block_sparse" for module in model.modules())


def probe_batch(batch: Batch, *, whole: bool = False) -> tuple[Batch, int]:
    """Two sequences of the batch (the same one twice if there is only one), and at most 256 tokens of token ids.

    With ``whole``, all tokens. If there are two tokens, three sequences are used, because with as many tokens as
    sequences the two axes could not be distinguished.
    """
    tensors = [value for value in (*batch.arguments, *batch.inputs.values()) if isinstance(value, Tensor)]
    axis = batch.axis
    rows = 3 if any(value.dim() > 1 and value.shape[1 - axis] == 2 for value in tensors) else 2
    crop = not whole and _are_token_ids(tensors)

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() <= axis or value.shape[axis] != batch.sequences:
            return value
        taken = value.index_select(axis, torch.arange(rows, device=value.device) % batch.sequences)
        return taken[:, :_PROBE_TOKENS] if crop else taken

    inputs = {name: cut(value) for name, value in batch.inputs.items()}
    return Batch(inputs, None, 0, rows, tuple(cut(value) for value in batch.arguments), axis), rows


def _are_token_ids(tensors: Sequence[Tensor]) -> bool:
    """Whether every tensor is ``batch x tokens`` integers of one length, which may be truncated."""
    if any(value.is_floating_point() or value.dim() != 2 for value in tensors):
        return False
    return len({value.shape[1] for value in tensors}) == 1

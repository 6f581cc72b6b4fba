"""Tokens that a model adds to those of its input: class tokens and registers, which count, or padding, which does not.

Both make the stream longer than the input, and nothing in the shapes tells them apart. The output does: it depends on
a class token, and not on padding that the model adds to reach a multiple of its window and cuts off again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.errors import InputError, PaddedInputError
from rankscope.models.inputs import Batch
from rankscope.models.loading.devices import seed_generators
from rankscope.models.view import ModelView, Stack
from rankscope.stream.frames import stream_in, tensors_in
from rankscope.stream.observation import token_ids

PROBE_TOKENS = 256
"""Length to which the inputs are cut for the passes that find the structure: long enough to reveal most paths that only
longer inputs take, short compared with what is measured. What was cut says nothing about padding to a multiple."""


def check_own_tokens(
    view: ModelView, batch: Batch, stack: Stack, length: int, tokens: int, first: int, *, some_count: bool
) -> None:
    """Raise if some tokens of the stream are not of the input, and would be measured, or left out, wrongly.

    Args:
        view: the structure found.
        batch: the probe, of token ids.
        stack: the stack, whose stream is ``batch tokens dim`` or ``tokens batch dim``.
        length: number of tokens per sequence of the input.
        tokens: number of tokens per sequence of the stream.
        first: position of the input's first token in the stream.
        some_count: whether only some tokens of the input count.

    Raises:
        PaddedInputError: the output does not depend on the model's own tokens, and all tokens would be measured.
        InputError: it does, and only tokens of the input would be measured.
    """
    if tokens <= length or length >= PROBE_TOKENS:
        return
    own = torch.ones(tokens, dtype=torch.bool)
    own[first : first + length] = False
    is_padding = not _reach_output(view, batch, stack, own)
    extra = "a token" if tokens == length + 1 else f"{tokens - length} tokens"
    added = f"{type(view.model).__name__} adds {extra} to the {length} of the input"
    if is_padding and not some_count:
        raise PaddedInputError(
            f"{added}, and its output does not depend on them: they are padding, which would be measured as tokens. "
            f"Pass sequences of {tokens} tokens."
        )
    if not is_padding and some_count:
        raise InputError(
            f"{added}, and its output depends on them: they count, and would be left out with the padding of the "
            "input. Pass sequences of one length, without padding and with tokens_policy='content'."
        )


def counted(batch: Batch) -> Batch:
    """The same batch of token ids with a mask that says that all of them count, and nothing else does."""
    ids = token_ids(batch)[0]
    return replace(batch, keep=torch.ones_like(ids if batch.axis == 0 else ids.T, dtype=torch.bool))


def _reach_output(view: ModelView, batch: Batch, stack: Stack, own: Tensor) -> bool:
    """Whether the output changes with these tokens of what the first block takes; True if they cannot be changed."""
    done: list[bool] = []

    def change(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taken = stream_in(stack.stream, args, kwargs)
        if done or taken is None:
            return None
        axis = stack.stream.axis_of("tokens", taken.dim())
        places = own.to(taken.device).reshape([-1 if at == axis else 1 for at in range(taken.dim())])
        # Not a multiple of the token: a norm would undo it.
        other = torch.where(places, taken.flip(-1) * 2 + 1, taken)
        done.append(any(value is taken for value in (*args, *kwargs.values())))
        return (
            tuple(other if value is taken else value for value in args),
            {name: other if value is taken else value for name, value in kwargs.items()},
        )

    with torch.random.fork_rng(devices=[]):
        seed_generators(0)
        plain = tensors_in(batch.run(view.model))
        handle = view.modules()[stack.calls[0].module_name].register_forward_pre_hook(
            change, prepend=True, with_kwargs=True
        )
        try:
            seed_generators(0)
            changed = tensors_in(batch.run(view.model))
        finally:
            handle.remove()
    if not any(done) or not plain or len(plain) != len(changed):
        return True
    return any(not torch.equal(before, after) for before, after in zip(plain, changed, strict=True))

"""Finds which tokens of the caller's own tensors are padding, from an argument of the model, as the model reads it.

Libraries disagree about masks. In transformers a 1 in ``attention_mask`` is a token that counts; in torch a True in
``src_key_padding_mask`` is one that does not; other code calls either of them ``mask``. A name is not evidence, but the
model's behaviour is: a padding token can be replaced by any other without changing a token that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.errors import InputError
from rankscope.linalg.precision import as_float64
from rankscope.models.inputs.axes import as_written, other_entries
from rankscope.models.inputs.record import Batch, Padding, is_mask_like

TRANSFORMERS_MASK = "attention_mask"
NO_PADDING = "none"
_HIDDEN = -1e3
"""A score at or below this, added before a softmax, hides a key."""
_ROUNDINGS = 16.0
"""Number of roundings by which a token may change although nothing that it reads has changed."""


@dataclass(frozen=True)
class PaddingReading:
    """One way to read an argument.

    Attributes:
        name: name of the argument.
        marks: the value that marks padding, None if there is only one reading (lengths, additive scores).
        content: (batch, tokens), True where a token counts.
    """

    name: str
    marks: int | None
    content: Tensor

    def __str__(self) -> str:
        return self.name if self.marks is None else f"{self.name}={self.marks}"


@dataclass(frozen=True)
class Content:
    """Which tokens count.

    Attributes:
        masks: per batch (batch, tokens), True where a token counts; None if unknown.
        how: the reading that excluded tokens, in the format of ``padding``; None if there was none.
        notes: arguments that were not understood and do not affect the numbers.
    """

    masks: tuple[Tensor | None, ...]
    how: str | None = None
    notes: tuple[str, ...] = ()


def content_of(model: nn.Module, parts: Sequence[Batch], padding: Padding, *, is_transformers: bool) -> Content:
    """Which tokens of each batch count.

    Raises:
        InputError: an argument looks like a mask, excludes tokens under one reading, and cannot be read with certainty.
    """
    if isinstance(padding, Tensor):
        return Content(_from_tensor(parts, padding))
    if padding == NO_PADDING:
        return Content((None,) * len(parts))
    name, _, value = (padding or "").partition("=")
    if name and not all(isinstance(part.inputs.get(name), Tensor) for part in parts):
        given = ", ".join(str(key) for key in parts[0].inputs) or "no keyword argument"
        raise InputError(
            f"padding={padding!r}: the inputs hold no tensor called {name!r}; they hold {given}. Write padding='NAME' "
            "or 'NAME=VALUE' with the value that marks padding, or pass a tensor that is True where a token is padding."
        )
    if not name and is_transformers and _plain_transformers_mask(parts):
        return Content(tuple(torch.ne(part.inputs[TRANSFORMERS_MASK], 0) for part in parts))
    asked = [name] if name else [TRANSFORMERS_MASK] if is_transformers else None
    masks: list[Tensor | None] = []
    rule: PaddingReading | None = None
    notes: dict[str, None] = {}
    for part in parts:
        names = _mask_like(part) if asked is None else asked
        told = []
        for argument in names:
            try:
                reading = _read(model, part, argument, value, rule, explicit=bool(name))
            except InputError:
                if name or is_mask_like(argument):
                    raise
                reading = None  # booleans per token with another name: not recognisable as a mask
            if reading is not None:
                told.append(reading)
            elif argument in part.inputs:
                notes[f"{argument} was not recognised as a mask of tokens: no token was left out by it"] = None
        rule = next((reading for reading in told if not bool(reading.content.all())), rule)
        masks.append(torch.stack([reading.content for reading in told]).all(dim=0) if told else None)
    return Content(tuple(masks), None if rule is None else str(rule), tuple(notes))


def _plain_transformers_mask(parts: Sequence[Batch]) -> bool:
    masks = [part.inputs.get(TRANSFORMERS_MASK) for part in parts]
    return all(isinstance(mask, Tensor) and mask.ndim == 2 for mask in masks)


def _from_tensor(parts: Sequence[Batch], padding: Tensor) -> tuple[Tensor | None, ...]:
    total = sum(part.sequences for part in parts)
    lengths = {tokens_in(part) for part in parts} - {None}
    if padding.ndim != 2 or padding.shape[0] < total or (lengths and lengths != {padding.shape[1]}):
        raise InputError(
            f"padding has shape {tuple(padding.shape)}; expected ({total}, {', '.join(map(str, lengths)) or 'tokens'}):"
            " one row per sequence, True where a token is padding."
        )
    hidden = padding != 0
    return tuple(~hidden[part.first_sequence : part.first_sequence + part.sequences] for part in parts)


def _read(
    model: nn.Module, part: Batch, name: str, value: str, rule: PaddingReading | None, *, explicit: bool
) -> PaddingReading | None:
    """How one argument of a batch is read; None if it is not a token mask."""
    readings = _readings(part, name)
    if value:
        readings = [reading for reading in readings if reading.marks is not None and _same(value, reading.marks)]
    if not readings:
        if explicit:
            raise _not_read(
                part, name, f"it has neither the shape nor the values of a mask{f' with {value}' * bool(value)}"
            )
        return None
    if value:
        return readings[0]
    if rule is not None and rule.name == name:  # found on an earlier batch
        return next((reading for reading in readings if reading.marks == rule.marks), readings[0])
    whole = [reading for reading in readings if bool(reading.content.all())]
    if whole:
        return whole[0]
    if _may_be_a_pattern(name, part.inputs[name], part.sequences):
        raise _not_read(part, name, "with as many sequences as tokens it may say which tokens see which as well")
    possible = [reading for reading in readings if bool(reading.content.any(dim=1).all())]
    if not possible:
        raise _not_read(part, name, "under any reading a whole sequence would be padding")
    return _by_evidence(model, part, name, possible)


def _may_be_a_pattern(name: str, value: Tensor, sequences: int) -> bool:
    return "pad" not in name.casefold() and value.ndim == 2 and value.shape[0] == value.shape[1] == sequences


def is_pattern(name: str, value: Tensor, sequences: int) -> bool:
    """Whether an argument is a mask between tokens, (tokens, tokens), which is passed whole to every batch."""
    return is_mask_like(name) and value.ndim == 2 and value.shape[0] == value.shape[1] != sequences


def _same(value: str, marks: int) -> bool:
    return value.strip().casefold() in (("1", "true") if marks else ("0", "false"))


def tokens_in(part: Batch) -> int | None:
    """Number of tokens per sequence of a batch, from its ids or vectors; None if unknown."""
    for name, value in (*part.inputs.items(), *(("", value) for value in part.arguments)):
        if isinstance(value, Tensor) and not is_mask_like(name) and value.ndim in (2, 3):
            return int(value.shape[1 - part.axis])
    return None


def _mask_like(part: Batch) -> list[str]:
    """Arguments that may mark padding: by their name, or booleans with the shape of the tokens."""
    shape = (part.sequences, tokens_in(part))
    return [
        name
        for name, value in part.inputs.items()
        if isinstance(value, Tensor)
        and (is_mask_like(name) or (value.dtype is torch.bool and tuple(value.shape) == shape))
    ]


def _readings(part: Batch, name: str) -> list[PaddingReading]:
    """Every way to read an argument as a mask of the batch's tokens; empty if its shape or values match none."""
    value, tokens = part.inputs.get(name), tokens_in(part)
    if isinstance(value, Tensor) and is_pattern(name, value, part.sequences):
        return [
            PaddingReading(
                name, None, torch.ones(part.sequences, value.shape[0], dtype=torch.bool, device=value.device)
            )
        ]
    if isinstance(value, Tensor) and value.ndim > 1 and part.axis_of(name) == 1:
        value = value.transpose(0, 1)
    if not isinstance(value, Tensor) or value.ndim == 0 or value.shape[0] != part.sequences or tokens is None:
        return []
    if value.ndim == 1:
        whole = not value.is_floating_point() and value.dtype is not torch.bool
        if not whole or not bool(((value >= 1) & (value <= tokens)).all()):
            return []
        return [PaddingReading(name, None, torch.arange(tokens, device=value.device) < value[:, None])]
    if value.shape[-1] != tokens:
        return []
    if value.is_floating_point() and bool((value <= 0).all()) and bool((value <= _HIDDEN).any()):
        return [PaddingReading(name, None, _seen_keys(value > _HIDDEN))]
    if value.dtype is not torch.bool and not bool(((value == 0) | (value == 1)).all()):
        return []
    return [PaddingReading(name, 0, _seen_keys(value != 0)), PaddingReading(name, 1, _seen_keys(value == 0))]


def _seen_keys(allowed: Tensor) -> Tensor:
    """Keys that at least one query of any head may see; (batch, tokens)."""
    return allowed if allowed.ndim == 2 else allowed.flatten(1, -2).any(dim=1)


def _by_evidence(model: nn.Module, part: Batch, name: str, possible: Sequence[PaddingReading]) -> PaddingReading:
    """The only reading under which replacing padding has no effect, and replacing content does.

    Raises:
        InputError: there is no such reading, or more than one.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise _not_read(part, name, "the model is not in memory, so how it reads the argument cannot be tried")
    if any(not _at_one_end(reading.content) for reading in possible):
        raise _not_read(part, name, "the tokens it marks are not at one end of each sequence, as padding is")
    with as_written(model):
        plain = _last_states(model, part, None)
        fitting = []
        for reading in possible:
            hidden, seen = ~reading.content, reading.content
            if not _moves(plain, _last_states(model, part, hidden), seen) and _moves(
                plain, _last_states(model, part, seen), seen
            ):
                fitting.append(reading)
    if len(fitting) == 1:
        return fitting[0]
    why = (
        "replacing the tokens it marks changes the others, so the model does not hide them"
        if not fitting
        else "tokens do not act on each other in this model, so it has no effect"
    )
    raise _not_read(part, name, why)


def _at_one_end(content: Tensor) -> bool:
    """Whether in each row the tokens that count are one contiguous run at the start or the end."""
    changes = (content[:, 1:] != content[:, :-1]).sum(dim=1)
    return bool((changes <= 1).all())


def _last_states(model: nn.Module, part: Batch, replaced: Tensor | None) -> Tensor | None:
    """The last output of any module with one vector per token, (batch, tokens, ...); tokens may be replaced."""
    seen: list[Tensor] = []
    shape = (part.sequences, tokens_in(part))

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.ndim > 2:
                tensor = tensor.transpose(0, part.axis)
                if tuple(tensor.shape[:2]) == shape:
                    seen[:] = [tensor.detach()]

    handles = [module.register_forward_hook(keep) for module in model.modules()]
    try:
        (part if replaced is None else _with_others(part, replaced)).run(model)
    finally:
        for handle in handles:
            handle.remove()
    return seen[0] if seen else None


def _moves(plain: Tensor | None, other: Tensor | None, at: Tensor) -> bool:
    if plain is None or other is None:
        return False
    size = as_float64(plain[at])
    change = (size - as_float64(other[at])).abs()
    known = torch.isfinite(change)
    if not bool(known.any()):
        return False
    return bool(change[known].max() > _ROUNDINGS * torch.finfo(plain.dtype).eps * size[known].abs().max())


def _with_others(part: Batch, replaced: Tensor) -> Batch:
    """The batch with other ids or vectors where ``replaced`` is True; arguments that look like masks are kept."""
    inputs = {
        name: value if is_mask_like(name) or not isinstance(value, Tensor) else _other(value, replaced, part.axis)
        for name, value in part.inputs.items()
    }
    return replace(part, inputs=inputs, keep=None)


def _other(value: Tensor, replaced: Tensor, axis: int) -> Tensor:
    where = replaced.transpose(0, axis)
    if value.ndim < 2 or value.shape[:2] != where.shape or value.dtype is torch.bool:
        return value
    return other_entries(value, where)


def _not_read(part: Batch, name: str, why: str) -> InputError:
    shape = tuple(part.inputs[name].shape)
    return InputError(
        f"The argument {name!r} (shape {shape}) may say which tokens are padding, and it is not clear how: {why}. "
        f"Padding would be counted as tokens. Pass Inputs(..., padding='{name}=1') or padding='{name}=0' (the value "
        "that marks padding), a tensor that is True where a token is padding, or "
        f"padding='{NO_PADDING}' if every token counts."
    )

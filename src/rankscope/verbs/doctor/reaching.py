"""The batch that the doctor looks at, also of models whose inputs are not sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rankscope._types import is_named, kind_of
from rankscope.errors import IgnoredInputError, InputError
from rankscope.examination.passes import Loss
from rankscope.models.inputs import Batch, InputPlan, Inputs, prepare_planned
from rankscope.models.inputs.given import on_device
from rankscope.models.inputs.opening import opened
from rankscope.models.inputs.padding import NO_PADDING
from rankscope.models.loading.named import named_object
from rankscope.models.model import Model

MOST = 16
"""Sequences that are looked at."""


class Reached(NamedTuple):
    """What the doctor looks at.

    Attributes:
        batch: at most 16 sequences.
        labels: those that belong to it, if there are any; a tuple or a dictionary as it is, with its tensors cut.
        unclear: why ``measure`` would refuse these inputs, although the model runs on them; empty if it would not.
    """

    batch: Batch
    labels: Any
    unclear: str


def batch_for(subject: Model, given: Inputs, labels: Any = None) -> Reached:
    """One batch of at most 16 sequences, and the labels that belong to it.

    Args:
        subject: the model.
        given: the inputs; two sequences of the sample text if there are none.
        labels: of the sequences of the inputs, or of their tokens; None for none.

    Raises:
        InputError: the model cannot run on the inputs in any reading, or there are too few labels.
    """
    count = 2 if given.data is None else MOST
    plan = given.plan(sequences=count, tokens=24, batch=count, seed=subject.seed)
    plan = replace(plan, sequences=min(plan.wanted, count) if given.sequences else count)
    data = opened(given.data)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        shapes = " and ".join(str(tuple(part.shape)) for part in data)
        raise InputError(
            f"inputs is a tuple of tensors of shape {shapes}. If it is inputs and targets, pass them apart: "
            "doctor(model, batch[0], labels=batch[1], loss=...), or --inputs 'train.py:batch[0]' --labels "
            "'train.py:batch[1]' --loss train.py:loss. If the model takes both, pass a dictionary of its arguments."
        )
    given = replace(given, data=data)
    # A tuple or a dictionary is for the loss alone: what its parts mean is not known.
    parts = isinstance(labels, Mapping) or any(isinstance(one, Tensor) for one in pytree.tree_leaves(labels)[:1])
    apart = labels if parts and not isinstance(labels, Tensor) else None
    told = None if labels is None or apart is not None else torch.as_tensor(labels)
    if told is not None and plan.axes is None and _counts(given.data, 0) == len(told) != _counts(given.data, 1):
        plan = replace(plan, axes="batch tokens")  # the labels say which axis counts sequences
    try:
        try:
            batch, unclear = _prepared(subject, given, plan)
        except IgnoredInputError as ignored:  # a cause says why; which axis counts sequences makes no difference then
            batch, unclear = _prepared(subject, given, replace(plan, axes="batch tokens"))[0], str(ignored)
    except (InputError, RuntimeError, IndexError, ValueError, TypeError) as error:
        return Reached(_whole(subject, data, error), labels if told is None else told, "")  # one input, all its labels
    if told is None:
        given_count = _counts(given.data, batch.axis) or batch.sequences

        def cut(one: Any) -> Any:
            belongs = isinstance(one, Tensor) and one.ndim > 0 and len(one) == given_count
            return one[: batch.sequences].to(subject.loaded.inputs_device) if belongs else one

        return Reached(batch, None if apart is None else pytree.tree_map(cut, apart), unclear)
    if len(told) < batch.sequences:
        raise InputError(f"labels has {len(told)} entries for {batch.sequences} sequences.")
    return Reached(batch, told[: batch.sequences], unclear)


def named_value(value: Any) -> Any:
    """What a name such as ``train.py:labels`` or a file of tensors holds; anything else as it is."""
    return opened(Path(value)) if isinstance(value, str) else value


def builder_of(model: Any) -> Callable[[], torch.nn.Module] | None:
    """The function that builds the model, if it was given or is named; None otherwise."""
    spec = model.spec if isinstance(model, Model) else model
    if isinstance(spec, str):
        named = named_object(spec, call=False) if is_named(spec) else None
        return named if callable(named) and not isinstance(named, torch.nn.Module) else None
    return model if isinstance(model, (FunctionType, MethodType, partial)) else None


def loss_for(loss: Any) -> Loss | None:
    """The loss as a function.

    Raises:
        InputError: it is not a function, ``"own"`` or the name of one.
    """
    if loss is None:
        return None
    if loss == "own":
        return lambda output, *_: output["loss"] if isinstance(output, Mapping) else output.loss
    if isinstance(loss, str):
        loss = named_object(loss, call=False)
    if not callable(loss):
        raise InputError(f"loss is {kind_of(loss)}; expected a function of the output and the labels, or 'own'.")
    return cast("Loss", loss)


def optimizer_for(optimizer: Any, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer, or what a function makes from the model.

    Raises:
        InputError: it is neither.
    """
    if isinstance(optimizer, str):
        optimizer = named_object(optimizer, call=False)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model) if signature(optimizer).parameters else optimizer()
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"optimizer is {kind_of(optimizer)}; expected a torch.optim.Optimizer.")
    return optimizer


def _prepared(subject: Model, given: Inputs, plan: InputPlan) -> tuple[Batch, str]:
    """The first batch of the inputs; a padding mask that hides nothing is for a cause to find, not a reason to stop."""
    loaded = subject.loaded
    try:
        return prepare_planned(loaded, given.data, plan)[0], ""
    except InputError as error:
        if plan.padding is not None or not isinstance(given.data, Mapping):
            raise
        return prepare_planned(loaded, given.data, replace(plan, padding=NO_PADDING))[0], str(error)


def _counts(data: Any, axis: int) -> int | None:
    values = data.values() if isinstance(data, Mapping) else [data]
    sizes = {value.shape[axis] for value in values if isinstance(value, Tensor) and value.ndim > max(axis, 1)}
    return sizes.pop() if len(sizes) == 1 else None


def _whole(subject: Model, data: Any, error: Exception) -> Batch:
    """The inputs as they are, as one input: graphs, and whatever cannot be cut along its first axis."""
    if isinstance(data, Mapping):
        batch = Batch(dict(data), None, 0, 1)
    elif isinstance(data, Tensor):
        batch = Batch({}, None, 0, 1, (data,))
    else:
        raise error
    (batch,) = on_device([batch], subject.loaded.inputs_device)
    try:
        with torch.no_grad():
            batch.call(subject.loaded.model)
    except (RuntimeError, IndexError, ValueError, TypeError):
        raise error from None
    return batch

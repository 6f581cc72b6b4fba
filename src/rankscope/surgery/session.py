"""The surgery that is active on each model: one mode per model, regardless of nesting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rankscope.errors import InputError
from rankscope.models.inputs import as_inputs, prepare_inputs
from rankscope.models.loading import load, need_module
from rankscope.models.model import Model
from rankscope.models.stream import Stream, stream_of
from rankscope.models.view import ModelView
from rankscope.models.wrapping import uncompiled, unwrapped
from rankscope.stream.mode import StreamMode
from rankscope.stream.viewing import known_view, view_of, with_proven_cuts
from rankscope.surgery.surgeon import Surgeon

_SURGEONS: WeakKeyDictionary[nn.Module, Surgeon] = WeakKeyDictionary()


@contextmanager
def surgeon_of(model: nn.Module | Model, inputs: Any = None, view: ModelView | None = None) -> Iterator[Surgeon]:
    """The surgeon at work on a model, or a new one that ends with the ``with`` block."""
    module = need_module(model.model if isinstance(model, Model) else model, "operate()")
    at_work = _SURGEONS.get(module)
    if at_work is not None:
        yield at_work
        return
    _refuse_overlap(module)
    if view is None:
        declared = (model.blocks, model.declared_stream) if isinstance(model, Model) else ()
        view = structure_of(module, inputs, *declared)
    # Before the mode is active: the proof replaces the stream, which the mode would follow in vain.
    surgeon = Surgeon(with_proven_cuts(view))
    with ExitStack() as stack:
        # Compiled code would run without the surgery, or be compiled again with it.
        stack.enter_context(uncompiled(module))
        stack.enter_context(StreamMode(surgeon.view, surgeon).active())
        _SURGEONS[module] = surgeon
        stack.callback(_SURGEONS.pop, module, None)
        yield surgeon


def structure_of(
    model: nn.Module,
    inputs: Any = None,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
) -> ModelView:
    """The structure of a model, from the surgeon at work on it or by running the model once.

    Raises:
        InputError: the module is not from transformers, and no inputs were given on which it could run.
    """
    model = unwrapped(model)
    at_work = _SURGEONS.get(model)
    if at_work is not None:
        return at_work.view
    loaded, given = load(model), as_inputs(inputs)
    if given.data is None and loaded.config is None:
        known = known_view(model)
        if known is not None:
            return known
        raise InputError(
            f"operate() has to see {type(model).__name__} run once, to find its blocks. Pass inputs= with something it "
            "runs on, or measure it first."
        )
    # The position of the blocks does not depend on which tokens count.
    prepared = prepare_inputs(loaded, given.data, sequences=2, tokens=16, batch=2, padding="none", axes=given.axes)
    return view_of(model, prepared[0], blocks=blocks, stream=stream_of(stream), measures=False)


def is_operating() -> bool:
    """Whether surgery is active on any model."""
    return bool(_SURGEONS)


def operations_on(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Descriptions of the active operations and grafts on a model, operations first, in order."""
    surgeon = _SURGEONS.get(model)
    if surgeon is None:
        return ()
    done = [operation.describe() for operation in surgeon.operations]
    return (*done, *(graft.describe() for graft in surgeon.grafts))


def remove_last(steps: list[Any], step: object) -> None:
    """Remove this exact object, and not an equal one that was added before it."""
    position = max(i for i, present in enumerate(steps) if present is step)
    del steps[position]


def _refuse_overlap(model: nn.Module) -> None:
    """Refuse surgery on two parts of one model: two modes on one stream would not see each other's changes."""
    for other in list(_SURGEONS):
        if any(part is model for part in other.modules()) or any(part is other for part in model.modules()):
            raise InputError(
                f"{type(model).__name__} and {type(other).__name__}, which is operated on now, are parts of one model. "
                f"Nest operate() on the same module, here the {type(other).__name__}."
            )

"""The surgery that is active on each model: one mode per model, regardless of nesting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from rankscope.errors import InputError
from rankscope.models.inputs import as_inputs, prepare_inputs
from rankscope.models.loading import load, need_module
from rankscope.models.stream import Stream, stream_of
from rankscope.models.view import ModelView
from rankscope.models.wrapping import uncompiled, unwrapped
from rankscope.stream.mode import StreamMode
from rankscope.stream.viewing import known_view, view_of, with_proven_cuts
from rankscope.surgery.graft import Graft
from rankscope.surgery.operation import Operation
from rankscope.surgery.surgeon import Surgeon


@dataclass
class Session:
    """The active operations and grafts on one model, applied by one mode."""

    view: ModelView
    operations: list[Operation] = field(default_factory=list)
    grafts: list[Graft] = field(default_factory=list)


_SESSIONS: WeakKeyDictionary[nn.Module, Session] = WeakKeyDictionary()


@contextmanager
def session_on(
    model: nn.Module,
    *,
    inputs: Any = None,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
    view: ModelView | None = None,
) -> Iterator[Session]:
    """The active session on a model, or a new one that ends with the ``with`` block."""
    model = need_module(model, "operate()")
    under_way = _SESSIONS.get(model)
    if under_way is not None:
        yield under_way
        return
    _refuse_overlap(model)
    # Before the mode is active: the proof replaces the stream, which the mode would follow in vain.
    session = Session(with_proven_cuts(view if view is not None else structure_of(model, inputs, blocks, stream)))
    with ExitStack() as stack:
        # Compiled code would run without the surgery, or be compiled again with it.
        stack.enter_context(uncompiled(model))
        surgeon = Surgeon(session.view, session.operations, session.grafts)
        stack.enter_context(StreamMode(session.view, surgeon).active())
        _SESSIONS[model] = session
        stack.callback(_SESSIONS.pop, model, None)
        yield session


def structure_of(
    model: nn.Module,
    inputs: Any = None,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | None = None,
) -> ModelView:
    """The structure of a model, from the active session or by running the model once.

    Raises:
        InputError: the module is not from transformers, and no inputs were given on which it could run.
    """
    model = unwrapped(model)
    under_way = _SESSIONS.get(model)
    if under_way is not None:
        return under_way.view
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
    return bool(_SESSIONS)


def operations_on(model: nn.Module) -> tuple[dict[str, Any], ...]:
    """Descriptions of the active operations and grafts on a model, operations first, in order."""
    session = _SESSIONS.get(model)
    if session is None:
        return ()
    done = [operation.describe() for operation in session.operations]
    return (*done, *(graft.describe() for graft in session.grafts))


def remove_last(steps: list[Any], step: object) -> None:
    """Remove this exact object, and not an equal one that was added before it."""
    position = max(i for i, present in enumerate(steps) if present is step)
    del steps[position]


def _refuse_overlap(model: nn.Module) -> None:
    """Refuse surgery on two parts of one model: two modes on one stream would not see each other's changes."""
    for other in list(_SESSIONS):
        if any(part is model for part in other.modules()) or any(part is other for part in model.modules()):
            raise InputError(
                f"{type(model).__name__} and {type(other).__name__}, which is operated on now, are parts of one model. "
                f"Nest operate() on the same module, here the {type(other).__name__}."
            )

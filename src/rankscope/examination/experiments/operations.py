"""Follows what depends on the inputs through every operation of a pass, to the one in which they are lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.examination import source
from rankscope.examination.experiments.dependencies import replaced
from rankscope.examination.experiments.scan import ModuleFollower
from rankscope.examination.outcomes import NO, Outcome, experiment
from rankscope.examination.passes import ROOM, Examination
from rankscope.examination.source import SourcePlace
from rankscope.examination.tensors import main_output, redrawn
from rankscope.linalg.rounding import differs
from rankscope.models.inputs.record import is_mask_like
from rankscope.models.loading.devices import seed_generators

_TRACES = 256
"""Roundings that count as equal in float32 and float64; in half precision none does."""

_TRACE = 1e-5
"""Change of what an operation returns, relative to its size, below which the inputs count as lost in it."""


@dataclass(frozen=True)
class FollowedStep:
    """One operation of a pass.

    Attributes:
        number: its place among the operations.
        name: of the function.
        module: name of the innermost module that was running; None outside the model's own.
        place: where it is written.
        sources: numbers of the operations that made its tensors.
        lost: the place, among its tensors, of one that depends on the inputs while the result does not; None if none.
    """

    number: int
    name: str
    module: str | None
    place: SourcePlace | None
    sources: tuple[int, ...]
    lost: int | None = None


class Following(ModuleFollower):
    """Notes the operations of a pass; given an earlier pass on other inputs, which of them lose the inputs.

    Args:
        model: the model.
        before: the earlier pass.
        replaced: ids of the tensors of the inputs that are others now.
        change: the number of an operation, and a function that is called in its place with its tensors.

    Attributes:
        steps: by number.
        is_whole: whether every operation was kept and the passes ran the same ones.
        began: the first operation that returned something else than in the earlier pass, for tensors that are the same.
    """

    def __init__(
        self,
        model: nn.Module,
        before: Following | None = None,
        replaced: Collection[int] = (),
        change: tuple[int, Callable[[Callable[..., Any], Any, Any], Any]] | None = None,
    ) -> None:
        super().__init__(model)
        self._before, self._change = before, change
        self._moved: set[int] = set(replaced)
        self._made: dict[int, int] = {}
        self._alive: list[Any] = []
        self._kept: dict[int, tuple[str, Tensor | None]] = {}
        self._number, self._room = 0, ROOM
        self.steps: dict[int, FollowedStep] = {}
        self.is_whole = True
        self.began: FollowedStep | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs, number = kwargs or {}, self._number
        self._number += 1
        if self._change is not None:
            return self._change[1](func, args, kwargs) if number == self._change[0] else func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            moved = next((at for at, one in enumerate(given) if id(one) in self._moved), None)
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            made = args[0] if func is Tensor.__setitem__ else out
            tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and not leaf.is_nested]
            if tensors and self.is_whole:
                self._note(number, func.__name__, given, tensors, moved)
        return out

    def _note(self, number: int, name: str, given: list[Tensor], tensors: list[Tensor], moved: int | None) -> None:
        sources = tuple(dict.fromkeys(self._made[id(one)] for one in given if id(one) in self._made))
        main = max(tensors, key=Tensor.numel).detach()
        depends = False
        if self._before is None:
            self._room -= main.numel() * main.element_size()
            self.is_whole = self._room > 0
            self._kept[number] = name, main.clone()
        else:
            was, kept = self._before._kept.get(number, ("", None))
            self.is_whole = was == name and kept is not None
            depends = self.is_whole and kept is not None and _is_moved(kept, main)
            ids = {id(one) for one in tensors}
            self._moved = self._moved | ids if depends else self._moved - ids
        self._alive += tensors  # so that no other tensor gets their ids
        self._made |= {id(one): number for one in tensors}
        loses = moved is not None and not depends
        self.steps[number] = FollowedStep(
            number,
            name,
            self.inside[-1] if self.inside else None,
            source.running(),
            sources,
            moved if loses else None,
        )
        if depends and moved is None and self.began is None:
            self.began = self.steps[number]

    def losing(self, result: Tensor) -> list[FollowedStep]:
        """The operations that lose the inputs on the way to a result, the last one first."""
        before = self._leading_to(self._made[id(result)]) if id(result) in self._made else set(self.steps)
        found = [step for number, step in self.steps.items() if step.lost is not None and number in before]
        return sorted(found, key=lambda step: -step.number) if self.is_whole else []

    def _leading_to(self, number: int) -> set[int]:
        reached, waiting = {number}, [number]
        while waiting:
            step = self.steps.get(waiting.pop())
            new = set() if step is None else set(step.sources) - reached
            reached |= new
            waiting += new
        return reached


def _is_moved(before: Tensor, after: Tensor) -> bool:
    """Whether what an operation returned changed by more than a trace, which later operations would lose anyway."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return True
    if not before.is_floating_point() or torch.finfo(before.dtype).bits < 32:
        return not torch.equal(before, after)
    whole = before.double().nan_to_num(0.0, 0.0, 0.0)
    return float((whole - after.double().nan_to_num(0.0, 0.0, 0.0)).norm()) > _TRACE * float(whole.norm())


def depends_on_inputs(before: Tensor, after: Tensor) -> bool:
    """Whether a tensor changed with the inputs by more than rounding.

    Rounding is that of the largest entry in the columns that changed at all: one column with huge entries, such as a
    class that is masked, says nothing about the others.
    """
    if before.shape != after.shape or before.dtype != after.dtype:
        return True
    same = (before == after) | (before.isnan() & after.isnan())
    if bool(same.all()) or torch.finfo(before.dtype).bits < 32:
        return not bool(same.all())
    columns = before.shape[-1] if before.ndim else 1
    changed = ~same.reshape(-1, columns).all(0)
    one, other = (part.reshape(-1, columns)[:, changed] for part in (before, after))
    return bool(differs(one, other, _TRACES).any())


def without(at: int) -> Callable[[Callable[..., Any], Any, Any], Any]:
    """Give what an operation takes in the place of what it returns, if both have one shape."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)][at]
            saved = given.clone()
        out = func(*args, **kwargs)
        made = args[0] if func is Tensor.__setitem__ else out
        if not isinstance(made, Tensor) or made.shape != saved.shape or made.dtype != saved.dtype:
            return out
        if made is given:  # written in place: whoever holds it reads it there
            made.copy_(saved)
            return out
        return saved

    return run


def named(x: Examination, step: FollowedStep) -> str:
    """The operation as it is written, with the function in which it is; or the module, or its name."""
    if step.place is not None:
        with suppress(source.NotWrittenError):
            return f"`{step.place.text(source.operation(step.place, step.name))}` in `{step.place.name}`"
    module = x.model.get_submodule(step.module) if step.module else None
    if module is not None and next(module.children(), None) is None:
        return f"{step.module} ({type(module).__name__})"
    where = f"`{step.place.name}`" if step.place is not None else step.module or "the model itself"
    return f"{step.name.strip('_')} in {where}"


_TRIED = 3
"""Operations that are tried as the place where the inputs are lost: each is a pass."""


def _inputs_differ(x: Examination) -> bool:
    """Whether the sequences, or images, of the batch are not all the same."""
    differ: list[bool] = []

    def compare(name: str, value: Tensor, axis: int) -> Tensor:
        rows = value.movedim(axis, 0)
        differ.append(not is_mask_like(name) and not torch.equal(rows, rows[:1].expand_as(rows)))
        return value

    x.batch.mapped(compare)
    return any(differ)


def _floating(value: Any) -> list[Tensor]:
    """Everything that a model returns, as numbers."""
    leaves = pytree.tree_leaves(value)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        leaves = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _are_alike(x: Examination, returned: Any) -> bool:
    """Whether everything that a model returned for each sequence is the same for all of them."""
    floating = _floating(returned)
    axes = [x.sequence_axis(one) for one in floating]
    rows = [one.movedim(axis, 0) for one, axis in zip(floating, axes, strict=True) if axis is not None]
    return bool(rows) and not any(depends_on_inputs(one[:1].expand_as(one), one) for one in rows)


def _is_made_so_by_weights(x: Examination) -> bool:
    """Whether outputs differ with other weights, also in the place of gains and gates that begin at zero."""
    drawn = torch.Generator().manual_seed(0)
    zero = {name: one.detach() for name, one in x.model.named_parameters() if not bool(one.detach().any())}
    moved = {name: (0.1 * torch.randn(one.shape, generator=drawn)).to(one) for name, one in zero.items()}
    # Tried first, because it needs no copy of the model: a head or a gate of zero is usual.
    if any(one.ndim > 1 or one.numel() == 1 for one in zero.values()) and not _are_alike(x, x.run(replaced=moved)):
        return True
    return not _are_alike(x, x.run(replaced=redrawn([("", x.model)]) | moved))


@experiment
def inputs_lost(x: Examination) -> Outcome:
    """Whether all outputs are the same, whatever the inputs are, and in which operation they become so.

    The control are other weights: with them outputs differ, so that it is not the wiring. Two passes on two sequences,
    as they are and with all others, are followed to the last operation that takes what differs and returns what does
    not. Without it, outputs differ.
    """
    if x.result is None or x.noise or not _inputs_differ(x) or not _are_alike(x, x.returned):
        return NO
    before = x.inputs_apart(x.result)
    batch = x.batch.taken(0, 2) if x.sequences > 2 else x.batch
    other, made = replaced(batch)
    first = Following(x.model)
    with first.watching():
        own = x.run(batch)
    second = Following(x.model, first, [id(one) for one in made])
    with second.watching():
        others = x.run(other)
    result = main_output(others)
    pairs = list(zip(_floating(own), _floating(others), strict=False))
    if result is None or before is None or not made or any(depends_on_inputs(one, two) for one, two in pairs):
        return NO
    losing = second.losing(result)
    numbers: dict[str, Any] = {"before": before, "after": None, "step": losing[0] if losing else None}
    for step in losing[:_TRIED]:
        after = _spread_without(x, step)
        if after > 100 * max(before, _TRACE):
            numbers |= {"after": after, "step": step}
            break
    return Outcome(True, _is_made_so_by_weights(x), numbers)


def _spread_without(x: Examination, step: FollowedStep) -> float:
    """How much the outputs of different inputs differ, with what an operation takes in its place."""
    changed = Following(x.model, change=(step.number, without(step.lost or 0)))
    try:
        with changed.watching():
            output = x.output()
    except (RuntimeError, ValueError, TypeError, IndexError):
        return 0.0  # what the operation takes does not fit in the place of what it returns
    return 0.0 if output is None else x.inputs_apart(output) or 0.0


def first_that_differs(x: Examination) -> FollowedStep | None:
    """The first operation that returns something else for the same tensors, in two equal passes."""
    before = Following(x.model)
    after = Following(x.model, before)
    for seed, follow in enumerate((before, after)):
        with torch.random.fork_rng(devices=[]), follow.watching():
            seed_generators(seed)
            x.run()
    return after.began

"""Follows what depends on the inputs through every operation of a pass, to the one in which they are lost."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.examination import _source
from rankscope.examination._examination import Examination
from rankscope.examination._innermost import ModuleFollower
from rankscope.examination._source import SourcePlace
from rankscope.linalg.rounding import differs

_ROOM = 1 << 28
"""Bytes of what operations return that one pass keeps."""
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
        size: root mean square of what it returned.
        lost: the place, among its tensors, of one that depends on the inputs while the result does not; None if none.
        taken: root mean square of that tensor.
        is_alone: whether that tensor is the only one.
    """

    number: int
    name: str
    module: str | None
    place: SourcePlace | None
    sources: tuple[int, ...]
    size: float
    lost: int | None = None
    taken: float = 0.0
    is_alone: bool = False


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
        self._number, self._room = 0, _ROOM
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
            # Read here, because the operation may write into it.
            taken = 0.0 if moved is None else _size(given[moved])
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            made = args[0] if func is Tensor.__setitem__ else out
            tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and not leaf.is_nested]
            if tensors and self.is_whole:
                self._note(number, func.__name__, given, tensors, moved, taken)
        return out

    def _note(
        self, number: int, name: str, given: list[Tensor], tensors: list[Tensor], moved: int | None, taken: float
    ) -> None:
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
        floating = [one for one in given if one.is_floating_point()]
        self.steps[number] = FollowedStep(
            number,
            name,
            self.inside[-1] if self.inside else None,
            _source.running(),
            sources,
            _size(main),
            moved if loses else None,
            taken,
            len(floating) == 1,
        )
        if depends and moved is None and self.began is None:
            self.began = self.steps[number]

    def losing(self, result: Tensor) -> list[FollowedStep]:
        """The operations that lose the inputs on the way to a result, the last one first."""
        before = self._leading_to(self._made[id(result)]) if id(result) in self._made else set(self.steps)
        found = [step for number, step in self.steps.items() if step.lost is not None and number in before]
        return sorted(found, key=lambda step: -step.number) if self.is_whole else []

    def shrinking(self, made: Tensor | int) -> FollowedStep | None:
        """The operation up to a tensor or a step that made things smaller by most, by a factor of 30 or more."""
        number = made if isinstance(made, int) else self._made.get(id(made), -1)
        known = [self.steps[one] for one in self._leading_to(number) if one in self.steps]
        least = min(known, key=self._factor, default=None)
        return least if least is not None and self._factor(least) < 1 / 30 else None

    def _factor(self, step: FollowedStep) -> float:
        """By what an operation multiplied the size of the smallest tensor that it took."""
        taken = [self.steps[one].size for one in step.sources if one in self.steps]
        return step.size / min(taken) if taken and min(taken) > 0 else 1.0

    def _leading_to(self, number: int) -> set[int]:
        reached, waiting = {number}, [number]
        while waiting:
            step = self.steps.get(waiting.pop())
            new = set() if step is None else set(step.sources) - reached
            reached |= new
            waiting += new
        return reached


def _size(one: Tensor) -> float:
    """Root mean square; 1 for ids."""
    return float(one.double().square().mean().sqrt()) if one.is_floating_point() and one.numel() else 1.0


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


def at_unit_size(at: int) -> Callable[[Callable[..., Any], Any, Any], Any]:
    """Give an operation one of its tensors with a mean square of one."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            leaves, spec = pytree.tree_flatten((args, kwargs))
            place = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][at]
            size = leaves[place].double().square().mean().sqrt()
            leaves[place] = (leaves[place] / size).to(leaves[place].dtype)
            args, kwargs = pytree.tree_unflatten(leaves, spec)
        return func(*args, **kwargs)

    return run


def named(x: Examination, step: FollowedStep) -> str:
    """The operation as it is written, with the function in which it is; or the module, or its name."""
    node = _source.operation(step.place, step.name)
    if node is not None and step.place is not None:
        return f"`{step.place.text(node)}` in `{step.place.name}`"
    module = x.model.get_submodule(step.module) if step.module else None
    if module is not None and next(module.children(), None) is None:
        return f"{step.module} ({type(module).__name__})"
    where = f"`{step.place.name}`" if step.place is not None else step.module or "the model itself"
    return f"{step.name.strip('_')} in {where}"

"""Computes a part of a recorded pass once more, with some values replaced, and compares the results.

This is the one experiment: *replace a value, replay, compare with the control*. The control is the same replay without
the replacement, and not the recording, so that whatever both have in common cancels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rankscope.linalg.rounding import differs
from rankscope.models.loading.devices import seed_generators
from rankscope.pass_graph.identity import inside, mapped, memory_of
from rankscope.pass_graph.ir import Node, Value

ROUNDINGS = 64
"""Roundings of the largest entry by which equal values may differ if they are summed up in another order."""
_CHOICES = frozenset(
    {"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "median", "kthvalue", "nonzero", "multinomial"}
)
"""Operations that choose entries: indices they return are decisions, which a replay keeps."""


class CannotReplayError(Exception):
    """A part of a pass cannot be computed once more: a value was not kept, or its memory is gone."""


def replay(nodes: Iterable[Node], new: Mapping[Value, Tensor], *, chooses: bool = False) -> dict[Value, Tensor]:
    """Compute what depends on replaced values; all that is not in the result has the content that was recorded.

    Args:
        nodes: operations, in order.
        new: the replaced values.
        chooses: whether entries are chosen anew (masks, the experts of a token). If not, choices stay as recorded, so
            that shapes do.

    Raises:
        CannotReplayError: a value that is needed was not kept, or an operation does not accept the new values.

    Example:
        >>> from rankscope.pass_graph.record import GraphRecorder
        >>> recorder = GraphRecorder(keeps=True)
        >>> with torch.no_grad(), recorder:
        ...     x = torch.ones(2)
        ...     y = x + x.exp()
        >>> given, made = recorder.value_of(x), recorder.value_of(y)
        >>> replay(recorder.graph.nodes, {given: torch.zeros(2)})[made]
        tensor([1., 1.])
    """
    known = dict(new)
    for node in nodes:
        if any(value in known for value in node.inputs) and not all(value in known for value in node.outputs):
            stays = not chooses and _decides(node)
            results = [None] * len(node.outputs) if stays else result_of(node, known, chooses=chooses)
            for value, result in zip(node.outputs, results, strict=True):
                if value not in known and result is not None:
                    known[value] = result
    return known


def result_of(node: Node, known: Mapping[Value, Tensor], *, chooses: bool = False) -> list[Tensor | None]:
    """What a node computes from these contents, and the recorded ones of all other values; None for choices."""
    contents = {value: content_of(value, known) for value in inside((node.args, node.kwargs), Value)}
    for value in node.written:
        contents[value] = contents[value].clone()
    args, kwargs = mapped((node.args, node.kwargs), Value, contents.__getitem__)
    try:
        if node.is_random:  # the same numbers in every replay
            with torch.random.fork_rng(devices=[]):
                seed_generators(0)
                result = node.run(*args, **kwargs)
        else:
            result = node.run(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
        raise CannotReplayError(f"{node.name} does not run once more: {error}") from error
    targets = [contents[value] for value in node.written]
    given = list(contents.values())
    made = [*targets, *(one for one in inside(result, Tensor) if not any(one is other for other in given))]
    if len(made) != len(node.outputs):
        raise CannotReplayError(f"{node.name} returned {len(made)} tensors instead of {len(node.outputs)}")
    chosen = node.name in _CHOICES and not chooses
    return [None if chosen and not _is_content(one.dtype) else one for one in made]


def content_of(value: Value, known: Mapping[Value, Tensor]) -> Tensor:
    """The content of a value in a replay.

    Raises:
        CannotReplayError: it was not kept, or its memory is gone.
    """
    content = known.get(value, value.content)
    if content is None:
        raise CannotReplayError("a value was not kept")
    if content.numel() and memory_of(content) is not None and content.untyped_storage().nbytes() == 0:
        raise CannotReplayError("the memory of a value is gone")
    return content


def changed(value: Value, control: Mapping[Value, Tensor], other: Mapping[Value, Tensor]) -> bool:
    """Whether a value differs between two replays by more than rounding."""
    if value not in control and value not in other:
        return False
    return unlike(content_of(value, control), content_of(value, other))


def unlike(before: Tensor, after: Tensor) -> bool:
    """Whether two tensors differ by more than rounding; tensors of other classes differ if they are other objects."""
    if before is after or before.is_meta:  # a meta tensor has no content
        return False
    if before.shape != after.shape or before.dtype != after.dtype or not {type(before), type(after)} <= {Tensor}:
        return True
    if before.layout is not torch.strided:
        before, after = before.to_dense(), after.to_dense()
    after = after.to(before.device)  # the memory of a device may be that of the processor
    if before.is_complex():
        before, after = torch.view_as_real(before.resolve_conj()), torch.view_as_real(after.resolve_conj())
    if not before.is_floating_point():
        return not torch.equal(before, after)
    return bool(differs(before, after, ROUNDINGS).any())


def _decides(node: Node) -> bool:
    """Whether a node compares numbers: what it returns is a decision."""
    made = [value.dtype for value in node.outputs]
    return all(dtype is torch.bool for dtype in made) and any(_is_content(value.dtype) for value in node.inputs)


def _is_content(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class SharedMemory:
    """Reads a tensor from memory that it shares with others, after these were laid down there in order.

    Args:
        own: the tensor.
        others: the tensors that are laid down.
    """

    def __init__(self, own: Tensor, others: Iterable[Tensor]) -> None:
        self._bytes = -(-own.untyped_storage().nbytes() // 16) * 16
        self._own = _place_of(own)
        self._others = [_place_of(other) for other in others]

    def __call__(self, *contents: Tensor) -> Tensor:
        """What the tensor holds, if the others hold these contents."""
        flat = torch.zeros(self._bytes, dtype=torch.uint8, device=contents[0].device)
        for content, (dtype, *place) in zip(contents, self._others, strict=True):
            flat.view(dtype).as_strided(*place).copy_(content)
        dtype, *place = self._own
        return flat.view(dtype).as_strided(*place).clone()


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

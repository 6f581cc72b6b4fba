"""Values, nodes and calls of modules: what a recorded pass consists of. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload


@dataclass(eq=False)
class Value:
    """The content of a tensor at one moment.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        node: what made it; None for what the model was given, its parameters, and what was computed unseen.
        is_parameter: whether it is a parameter, or made of parameters alone.
        is_weight: whether it is a matrix of weights, and not a bias or a gain, or made of such matrices alone.
        content: the tensor itself, kept only while a replay may need it.
    """

    shape: torch.Size
    dtype: torch.dtype
    node: Node | None = None
    is_parameter: bool = False
    is_weight: bool = False
    content: Tensor | None = None


@dataclass(eq=False)
class Call:
    """One call of a module.

    Attributes:
        name: qualified name of the module; empty for the model itself.
        number: by which the caller of the recorder knows it; None for calls that it does not number.
        parent: the call in which it happened.
        normalises: whether the module is a norm.
        taken: the value it was given, if that is a stream.
        returned: the first tensor that it returned.
        stream: what was found to be the stream that it was given, as it goes through the call.
        sums: the stream after each known sum, by the number of the add.
        given: what the module was called with, with values in place of tensors; None if contents were not kept.
        made: the values that it returned.
        span: numbers of its first operation, and of the first one after it.
        run: computes it once more.
    """

    name: str
    number: int | None
    parent: Call | None
    normalises: bool
    taken: Value | None
    returned: Value | None = None
    stream: dict[Value, None] = field(default_factory=dict)
    sums: dict[int, Value] = field(default_factory=dict)
    given: Any = None
    made: tuple[Value, ...] = ()
    span: tuple[int, int] = (0, 0)
    run: Callable[..., Any] | None = None

    @property
    def around(self) -> Iterator[Call]:
        """This call, and those in which it happened."""
        yield self
        if self.parent is not None:
            yield from self.parent.around

    @property
    def is_in_norm(self) -> bool:
        """Whether the module is a norm, or a part of one."""
        return self.normalises or (self.parent is not None and self.parent.is_in_norm)


@dataclass(frozen=True)
class Edge:
    """Where, between nodes, a call begins or ends."""

    call: Call
    begins: bool


@dataclass(frozen=True)
class Function:
    """A torch function that the author of the model called.

    Attributes:
        func: the function.
        adds: the skips whose sum it is: number of the call of a module, number of the add in it, and the stream; in
            recordings that keep contents also the summand that contains it, and the branch.
    """

    func: Callable[..., Any]
    adds: tuple[tuple[int, int, tuple[Value, ...]], ...] = ()

    @property
    def name(self) -> str:
        """As one writes it."""
        own = str(self.func) if isinstance(self.func, HigherOrderOperator) else getattr(self.func, "__name__", "")
        own = own.split(".")[0]
        return f"torch.{own}" if hasattr(torch, own) else own or str(self.func)


@dataclass(eq=False)
class Node:
    """One operation.

    Attributes:
        name: of the operation; ``add`` for ``add_`` as well.
        run: computes it.
        args: its arguments, with values in place of tensors.
        kwargs: those that were given by name.
        inputs: the values among the arguments; not those that it only overwrites.
        outputs: what it made: the new values of what it wrote to, then what it returned.
        written: the values, before, of what it wrote to.
        function: what the author called; None for operations of torch's own accord.
        call: the innermost call of a module that was running.
        number: counts the operations of a recording.
    """

    name: str
    run: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    written: tuple[Value, ...] = ()
    function: Function | None = None
    call: Call | None = None
    number: int = 0

    @property
    def operator(self) -> OpOverload | None:
        """The operator of torch, or of a library of kernels; None for what is made of several."""
        return self.run if isinstance(self.run, OpOverload) else None

    @property
    def is_opaque(self) -> bool:
        """Whether this is an operator that takes functions: what they compute is not seen."""
        return isinstance(self.run, HigherOrderOperator)

    @property
    def is_foreign(self) -> bool:
        """Whether this is a kernel that torch does not know."""
        return self.is_opaque or (self.operator is not None and self.operator.namespace not in _TORCH)

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers."""
        return self.operator is not None and torch.Tag.nondeterministic_seeded in self.operator.tags

    @property
    def module(self) -> str:
        """Name of the innermost module that was running."""
        return self.call.name if self.call is not None else ""

    @property
    def written_as(self) -> str:
        """The operation as the author of the model wrote it."""
        own = "" if self.function is None else self.function.name
        return own if own and not own.startswith("__") else f"torch.ops.aten.{self.name}"


_TORCH = ("aten", "prim", "prims")
_OWN = (*_TORCH, "_c10d_functional", "c10d")


@dataclass
class Graph:
    """A recorded pass.

    Attributes:
        events: nodes, and edges of calls, in order.
        inputs: what the model was given.
        functions: every torch function that was called.
        appeared: values of tensors that were met while contents were kept, and that no recorded operation made.
        unrecorded: functions that ran without any operation of torch's, in order: what they wrote to is not known.
        operators: the operators that were called and are not torch's own, by name.
        count: how many operations were recorded, with those that were dropped since.
    """

    events: list[Node | Edge] = field(default_factory=list)
    inputs: dict[Value, None] = field(default_factory=dict)
    functions: set[Callable[..., Any]] = field(default_factory=set)
    appeared: list[Value] = field(default_factory=list)
    unrecorded: list[Function] = field(default_factory=list)
    operators: dict[str, None] = field(default_factory=dict)
    count: int = 0

    @property
    def nodes(self) -> list[Node]:
        """The operations, in order."""
        return [event for event in self.events if isinstance(event, Node)]

    def add(self, node: Node) -> None:
        """Record an operation."""
        node.number = self.count
        self.count += 1
        self.events.append(node)
        for value in node.outputs:
            value.node = node
        if node.is_opaque:
            self.operators[f"higher_order::{node.name}"] = None
        elif node.operator is not None and node.operator.namespace not in _OWN:
            self.operators[f"{node.operator.namespace}::{node.operator.overloadpacket.__name__}"] = None


def way_back(values: Iterable[Value], before: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """These values and those that they follow from, each once.

    Args:
        values: where to begin.
        before: the values to go on to from a value; none where the way ends.
    """
    waiting, seen = list(values), set[Value]()
    while waiting:
        value = waiting.pop()
        if value not in seen:
            seen.add(value)
            yield value
            waiting += before(value)

"""Records every operation of one pass, also those of scripted code and custom autograd functions."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from rankscope.errors import LayoutError
from rankscope.models.wrapping import hidden
from rankscope.pass_graph.identity import ByTensor, inside, mapped, memory_of
from rankscope.pass_graph.ir import Call, Edge, Function, Graph, Node, Value
from rankscope.pass_graph.kernel_mode import KernelMode
from rankscope.pass_graph.replay import SharedMemory

_OVERWRITING = frozenset({"copy_", "zero_", "fill_"})
"""Operations that do not read what they write to."""
_SHAPED_LIKE = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones",
     "new_full", "new_empty"}
)  # fmt: skip
"""Operations that read only the shape of what they are given."""


class GraphRecorder(KernelMode):  # type: ignore[no-untyped-call]
    """Records all operations that run while it is active, on the layer below autograd.

    Args:
        keeps: whether the contents of values are kept, so that nodes can be replayed. It can be switched during a pass,
            so that never more than one block is kept.

    Attributes:
        graph: the pass so far.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self.graph = Graph()
        self.keeps = keeps
        self._known = ByTensor[Value]()
        self._sharing: dict[int, list[weakref.ref[Tensor]]] = {}
        self._kept: dict[int | None, list[Value]] = {}
        self._calls: list[tuple[Call, int]] = []
        self._replayable: list[Call] = []
        self._function: Function | None = None

    # What the caller marks in the pass: module calls, and the functions of the author.

    def note_input(self, given: object) -> None:
        """Record what the model is given."""
        self.graph.inputs |= dict.fromkeys(map(self.value_of, inside(given, Tensor)))

    def enter(
        self, name: str, *, normalises: bool = False, number: int | None = None, taken: Tensor | None = None
    ) -> None:
        """Record that a module is called; with a number, also where in the pass this happens."""
        call = Call(name, number, self.call, normalises, None if taken is None else self.value_of(taken))
        if number is not None:
            self.graph.events.append(Edge(call, begins=True))
        self._calls.append((call, len(self.graph.events)))

    def note_module(self, module: nn.Module, given: object) -> None:
        """Record what the innermost call runs on what, so that it can be replayed as a whole."""
        if self.keeps and self.call is not None:
            self.call.given = mapped(given, Tensor, self.value_of)
            self.call.run = RunsModule(module)
            self._replayable.append(self.call)
            self.call.span = self.graph.count, self.graph.count

    def leave(self, returned: Tensor | None, product_of: Tensor | None = None, output: object = None) -> None:
        """Record that the innermost call has ended.

        Args:
            returned: the first tensor that it returned.
            product_of: what it was given, if all it did was to multiply that by a matrix of weights. This replaces what
                was recorded inside: a layer that quantises its inputs divides them by a scale computed from them, in a
                kernel of its own, which could not be told from a sum of the two.
            output: everything that it returned.
        """
        call, start = self._calls.pop()
        if returned is not None and product_of is not None:
            del self.graph.events[start:]
            given, made = self.value_of(product_of), self.value_of(returned)
            run = call.run or _unknown
            self.graph.add(Node("linear", run, (given,), {}, (given,), (made,), function=self._function, call=call))
        call.returned = None if returned is None else self.value_of(returned)
        if call.run is not None:
            call.made, call.span = tuple(map(self.value_of, inside(output, Tensor))), (call.span[0], self.graph.count)
        if call.number is not None:
            self.graph.events.append(Edge(call, begins=False))

    @property
    def call(self) -> Call | None:
        """The innermost call that is running."""
        return self._calls[-1][0] if self._calls else None

    @contextmanager
    def function(self, func: Callable[..., Any], adds: Sequence[tuple[int, int, Any]] = ()) -> Iterator[None]:
        """Operations in this block are executed for a torch function that the author called.

        Args:
            func: the function.
            adds: the skips whose sum it is: number of the module call, number of the add in it, and the tensors.
        """
        before = self._function
        self._function = Function(func, tuple(mapped(adds, Tensor, self.value_of)))
        self.graph.functions.add(func)
        count = len(self.graph.events)
        try:
            yield
        finally:
            if len(self.graph.events) == count:
                self.graph.unrecorded.append(self._function)
            self._function = before

    def note_stream(self, number: int, tensor: Tensor, after_add: int | None = None) -> None:
        """Record that a tensor is the stream of a running call, and which add of the call has made it."""
        if self.keeps:
            call = next(call for call, _ in self._calls if call.number == number)
            call.stream[self.value_of(tensor)] = None
            if after_add is not None:
                call.sums[after_add] = self.value_of(tensor)

    def forget(self) -> None:
        """Drop all nodes, and the contents of all values."""
        self.graph = Graph(count=self.graph.count)
        self.release()

    def release(self) -> None:
        """Drop the contents of all values, and what calls were given; a tensor that is used again is kept again."""
        for value in (value for values in self._kept.values() for value in values):
            value.content = None
        for call in self._replayable:
            call.run = call.given = None
        self._kept.clear()
        self._replayable.clear()

    # Values of tensors.

    def value_of(self, tensor: Tensor) -> Value:
        """The value that a tensor has now."""
        known = self._known.get(tensor)
        if known is None:
            # An unknown tensor that uses known memory (x.data, a round trip through NumPy) is a view of it.
            others = self._others(tensor)
            known = self._new(tensor)
            if self.keeps and not others:
                self.graph.appeared.append(known)
            elif others:
                self._share(tensor, others, tuple(self._known.get(other) for other in others), known)
        self._keep(known, tensor)
        return known

    def _new(self, tensor: Tensor) -> Value:
        value = Value(tensor.shape, tensor.dtype)
        value.is_parameter = isinstance(tensor, nn.Parameter)
        value.is_weight = value.is_parameter and tensor.dim() > 1
        self._known[tensor] = value
        if (memory := memory_of(tensor)) is not None:
            self._sharing.setdefault(memory, []).append(weakref.ref(tensor))
        return value

    def keeps_content(self, value: Value) -> bool:
        """Whether the content of this value is kept while contents are."""
        return True

    def _keep(self, value: Value, tensor: Tensor) -> None:
        # No copy: it is made when the memory is about to be written to, which few operations do. But for small
        # parameters, whose memory some wrappers free before a block has ended.
        if self.keeps and value.content is None and self.keeps_content(value):
            with hidden():
                value.content = tensor.detach()
                if tensor.dim() < 2:
                    value.content = value.content.clone()
            self._kept.setdefault(memory_of(tensor), []).append(value)

    def _others(self, target: Tensor) -> list[Tensor]:
        """Other live tensors that share the memory of ``target``."""
        memory = memory_of(target)
        alive = [tensor for ref in self._sharing.get(memory or 0, []) if (tensor := ref()) is not None]
        unique = {id(tensor): tensor for tensor in alive if tensor is not target and memory_of(tensor) == memory}
        return [tensor for tensor in unique.values() if tensor in self._known]

    def _share(self, own: Tensor, laid_down: Sequence[Tensor], values: Sequence[Any], made: Value) -> None:
        """Record that the value of a tensor follows from those of others in the same memory."""
        run = SharedMemory(own, laid_down)
        self.graph.add(Node("shared memory", run, tuple(values), {}, tuple(values), (made,), call=self.call))

    # Operations.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_opaque = isinstance(func, HigherOrderOperator)
        name = func.name() if is_opaque else func.overloadpacket.__name__
        # Values are read before the call: an operation that writes to a tensor gives it a new one.
        own_args, own_kwargs = mapped((args, kwargs), Tensor, self.value_of)
        targets, overwritten = ([], []) if is_opaque else _written_to(func, args, kwargs)
        written = tuple(map(self.value_of, targets))
        unread = {*map(self.value_of, targets if name in _OVERWRITING else overwritten)}
        inputs = [] if name in _SHAPED_LIKE else inside((own_args, own_kwargs), Value)
        for target in targets:
            for value in self._kept.pop(memory_of(target), ()):
                assert value.content is not None
                value.content = value.content.clone()
                self._kept.setdefault(None, []).append(value)
        out = func(*args, **kwargs)
        given = inside((args, kwargs), Tensor)
        made = [*targets, *(one for one in inside(out, Tensor) if not any(one is other for other in given))]
        if any(tensor.is_nested for tensor in made):
            raise LayoutError(
                "The model makes nested tensors, in which tokens have no axis. Run it on sequences of one length, as "
                "plain tensors, with a padding mask if they have to be padded."
            )
        if is_opaque:
            inputs += map(self.value_of, _captured((args, kwargs)))
        node = Node(
            name.removesuffix("_") if targets else name,
            func,
            own_args if self.keeps or not is_opaque else (),
            own_kwargs if self.keeps or not is_opaque else {},
            tuple(value for value in inputs if value not in unread),
            written=written,
            function=self._function,
            call=self.call,
        )
        # What is written to, and everything in the same memory, gets a new value.
        shared = [(other, self._known.get(other), target) for target in targets for other in self._others(target)]
        node.outputs = tuple(map(self._new, made))
        if made:
            self.graph.add(node)
        for value, tensor in zip(node.outputs, made, strict=True):
            self._keep(value, tensor)
            value.is_weight |= bool(node.inputs) and all(one.is_weight for one in node.inputs)
            value.is_parameter |= bool(node.inputs) and all(one.is_parameter for one in node.inputs)
        for other, before, target in shared:
            if not any(other is one for one in targets):
                after = self._new(other)
                self._share(other, (other, target), (before, self._known.get(target)), after)
                self._keep(after, other)
        return out


def _written_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation writes to, and those of them whose content it does not read, given as ``out=``."""
    targets: list[Tensor] = []
    overwritten: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments if func._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = inside(kwargs.get(argument.name, args[position] if position < len(args) else None), Tensor)
            targets += given
            overwritten += given if argument.is_out else []
    return targets, overwritten


def _captured(given: object) -> list[Tensor]:
    """Tensors that the functions among the arguments close over."""
    functions = [value for value in pytree.tree_leaves(given) if inspect.isfunction(value)]
    return inside([dict(inspect.getclosurevars(function).nonlocals) for function in functions], Tensor)


class RunsModule:
    """Runs a module once more, as written and without hooks; a recording does not keep it alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        module = self._module()
        if module is None:
            return _unknown()
        parts = [vars(part) for part in module.modules() if "_forward_hooks" in vars(part)]
        hooks = [{kind: part[kind] for kind in ("_forward_hooks", "_forward_pre_hooks")} for part in parts]
        # Its weights may be tensors of a class with functions of its own: those are needed, and modes are not.
        modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
        try:
            for part in parts:
                part |= {"_forward_hooks": OrderedDict(), "_forward_pre_hooks": OrderedDict()}
            with torch._C._EnableTorchFunction():
                return module.forward(*args, **kwargs)
        except Exception as error:  # whatever the author's code raises on other values
            raise RuntimeError(f"{type(module).__name__}: {error}") from error
        finally:
            for part, own in zip(parts, hooks, strict=True):
                part |= own
            for mode in reversed(modes):
                torch._C._push_on_torch_function_stack(mode)


def _unknown(*given: Tensor) -> Tensor:
    raise NotImplementedError("what a layer with weights in a format of its own computes is not seen")

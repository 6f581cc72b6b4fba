"""A record of every tensor operation of one forward pass, as far as it concerns the residual stream.

Torch functions are what the model's author wrote; a ``TorchDispatchMode`` sees what they are executed as: every
operation, including those of scripted code and custom autograd functions, with views and in-place writes. An operation
is stored as a few integers: which values went in, which came out, and what kind of map it is. No tensor is kept.

A *value* is the content of a tensor at one moment. It gets a new number when the tensor is written to in place, and so
does every other tensor that shares its memory.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from rankscope.errors import LayoutError
from rankscope.stream.dispatch import KernelMode
from rankscope.stream.frames import ByTensor, tensors_in
from rankscope.stream.operators import NORMS

Kind = Literal["carries", "scales", "bends", "matrix", "mixes"]
"""What a map does to its inputs.

``carries``: passes them on unchanged, up to a sum, a view, a norm, a selection. ``scales``: a product of tensors.
``bends``: a nonlinear elementwise function. ``matrix``: a product with a matrix that does not depend on the
input. ``mixes``: anything else, in particular everything that mixes tokens.
"""

_LINEAR = {"add", "sub", "rsub", "neg", "lerp", "where", "masked_fill", "clone", "copy", "positive"}
_ELEMENTWISE = {"hardswish", "prelu", "_prelu_kernel", "log_sigmoid_forward", "glu", "rrelu_with_noise", "floor_divide"}
"""Elementwise functions that torch does not mark as such."""
_PRODUCTS = {"mul", "div", "true_divide"}
_CARRYING = {
    "_to_copy", "_unsafe_view", "_reshape_alias", "cat", "stack", "repeat", "roll", "flip", "rot90", "constant_pad_nd",
    "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "index", "_unsafe_index", "index_select",
    "gather", "take_along_dim", "index_put", "_unsafe_index_put", "index_copy", "index_add", "index_fill", "scatter",
    "scatter_add", "scatter_reduce", "select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter",
    "masked_select", "masked_scatter", "copy", "native_layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm",
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
    "native_dropout", "avg_pool1d", "avg_pool2d", "_adaptive_avg_pool2d", "max_pool2d_with_indices",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d",
    "repeat_interleave", "tril", "triu", "resize_", "set_", "lift_fresh", "_conj", "view_as_real", "view_as_complex",
    "addcmul", "addcdiv", "split_with_sizes_copy", "unbind_copy", "bernoulli",
}  # fmt: skip
_STATISTICS = {
    "mean",
    "sum",
    "amax",
    "amin",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "linalg_vector_norm",
    "norm",
    "prod",
}
_SORTED = {"max", "min", "topk", "sort", "median", "kthvalue", "logsumexp", "argmax", "argmin", "argsort"}
_MATRIX_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "linear", "mv", "addmv", "matmul"}
_CONVOLUTIONS = {"convolution", "_convolution", "mkldnn_convolution"}
_ADDED_PRODUCTS = {"addmm", "baddbmm", "addbmm", "addmv"}
_CONDITIONED = {"where": 0, "masked_fill": 1, "masked_scatter": 1, "masked_select": 1}
"""Operations with an argument that only selects, and its position."""
_INDEXED = {
    "index", "_unsafe_index", "index_put", "_unsafe_index_put", "index_select", "gather", "index_add", "index_copy",
    "index_fill", "scatter", "scatter_add", "scatter_reduce", "take_along_dim",
}  # fmt: skip
"""Operations with integer tensors among their arguments, which only select."""
_LAYERS = {torch.nn.functional.linear, torch.addmm}
"""Functions that are a product with a matrix, whatever they are executed as."""
_SIDE_BY_SIDE = {"cat", "stack"}
_OWN_NAMESPACES = ("aten", "prim", "prims", "_c10d_functional", "c10d")
_CONSTANT = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "zero_", "fill_", "zero", "fill",
}  # fmt: skip


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        kind: what it does to its inputs.
        carried: input values that are passed on.
        read: input values that only control it: broadcast gains, conditions, and the factors of an added product.
        out: output values.
        written: values of other tensors that share the memory an in-place operation wrote to, before and after.
        merges: whether carried values end up in the same entries, by a sum or by a selection.
        reduces: whether it sums over tokens or over streams stored side by side.
        is_statistic: whether it is one number per token, such as a mean over channels.
        in_norm: whether it happened inside a recognised norm.
        adds: the skips whose sum this is: number of the module call, number of the add in it, value of the stream.
        name: the operation as the author of the model wrote it.
        module: qualified name of the module that ran it.
        tokens: the leading axes of the output.
        is_foreign: whether it is a custom kernel, unknown to torch.
        beside: length of the axis along which it puts its inputs side by side, if that is not the last; else 0.
        contracts: length of the axis over which a matrix product or a convolution sums; else 0.
    """

    kind: Kind
    carried: tuple[int, ...]
    read: tuple[int, ...]
    out: tuple[int, ...]
    written: tuple[tuple[int, int], ...]
    merges: bool
    reduces: bool
    is_statistic: bool
    in_norm: bool
    adds: tuple[tuple[int, int, int], ...]
    name: str
    module: str
    tokens: tuple[int, ...]
    is_foreign: bool = False
    beside: int = 0
    contracts: int = 0


def _view_of(sources: tuple[int, ...], value: int, tokens: tuple[int, ...]) -> Op:
    return Op("carries", sources, (), (value,), (), False, False, False, False, (), "a view", "", tokens)


@dataclass(frozen=True)
class Edge:
    """Begin or end of a module call: its number and name, and the value of its input or output."""

    call: int
    module: str
    value: int
    begins: bool
    tokens: tuple[int, ...]


class Tape(KernelMode):  # type: ignore[no-untyped-call]
    """Records all operations that run while it is active.

    Attributes:
        events: operations and the edges of module calls, in order.
        inputs: values of the model's own arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Op | Edge] = []
        self.inputs: set[int] = set()
        self.operators: dict[str, None] = {}
        self.functions: set[Callable[..., Any]] = set()
        self._values = 0
        self._known = ByTensor[int]()
        self._sharing: dict[int, list[weakref.ref[Tensor]]] = {}
        self._modules: list[tuple[str, bool, int]] = []
        self._casts: dict[int, int] = {}
        self._func: Callable[..., Any] | None = None
        self._adds: list[tuple[int, int, Tensor]] = []

    @property
    def module(self) -> str:
        """Name of the innermost module that is running."""
        return self._modules[-1][0] if self._modules else ""

    def enter(self, name: str, normalises: bool) -> None:
        """Record that a module is called."""
        self._modules.append((name, normalises, len(self.events)))

    def leave(self) -> None:
        """Record that the innermost module call has ended."""
        self._modules.pop()

    def leave_matrix(self, x: Tensor, out: Tensor) -> None:
        """Record that the innermost module call has ended and was a product with a constant matrix.

        It replaces what was recorded inside. A layer that quantises its inputs divides them by a scale computed from
        them, in a kernel of its own, which could not be told from a sum of the two.
        """
        name, _, start = self._modules.pop()
        given, made = self.value_of(x), self.value_of(out)
        del self.events[start:]
        tokens = tuple(out.shape[:-1])
        self.events.append(
            Op("matrix", (given,), (), (made,), (), True, False, False, False, (), "linear", name, tokens)
        )

    def note_input(self, values: object) -> None:
        """Record the model's own arguments."""
        self.inputs |= {self.value_of(tensor) for tensor in tensors_in(values, depth=4)}

    def note_edge(self, call: int, module: str, tensor: Tensor | None, *, begins: bool) -> None:
        """Record that a module call begins with this tensor, or returns it."""
        if tensor is None:
            self.events.append(Edge(call, module, 0, begins, ()))
        else:
            self.events.append(Edge(call, module, self.value_of(tensor), begins, tuple(tensor.shape[:-1])))

    def begin_function(self, func: Callable[..., Any], adds: Sequence[tuple[int, int, Tensor]]) -> Any:
        """Start a torch function; the operations that follow are part of it. Returns the state to restore afterwards.

        Args:
            func: the function.
            adds: the skips whose sum it is: number of the module call, number of the add in it, and the stream.
        """
        before = self._func, self._adds
        self._func, self._adds = func, list(adds)
        self.functions.add(func)
        return before

    def end_function(self, before: Any) -> None:
        """End a torch function and restore the state that :meth:`begin_function` returned."""
        self._func, self._adds = before

    def value_of(self, tensor: Tensor) -> int:
        """The number of the value that a tensor currently has."""
        # An id may be reused after a tensor is freed: the weak reference says whether it is still the same object.
        known = self._known.get(tensor)
        if known is not None:
            return known
        # An unknown tensor that uses known memory (x.data, a round trip through NumPy) is a view of it.
        sources = tuple(self.value_of(other) for other in self._others(tensor))
        value = self._new_value(tensor)
        if sources:
            self.events.append(_view_of(sources, value, tuple(tensor.shape[:-1])))
        return value

    def _new_value(self, tensor: Tensor) -> int:
        self._values += 1
        self._known[tensor] = self._values
        if (memory := _memory_of(tensor)) is not None:
            self._sharing.setdefault(memory, []).append(weakref.ref(tensor))
        return self._values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Input values are numbered before the call: an in-place operation gives its target a new number.
        given = tensors_in((args, kwargs), depth=3)
        if isinstance(func, HigherOrderOperator):
            return self._opaque(func, args, kwargs, [*given, *_captured((args, kwargs))])
        before = [self.value_of(tensor) for tensor in given]
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace not in _OWN_NAMESPACES:
            self.operators[f"{func.namespace}::{name}"] = None
        made = tensors_in(out, depth=2)
        if any(tensor.is_nested for tensor in made):
            raise LayoutError(
                "The model makes nested tensors, in which tokens have no axis. Run it on sequences of one length, as "
                "plain tensors, with a padding mask if they have to be padded."
            )
        if name not in _CONSTANT or func._schema.is_mutable:
            self._write_down(func, name, args, kwargs, given, before, made)
        return out

    def _opaque(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], given: list[Tensor]) -> Any:
        """Run an operator that takes functions, and record it as a custom kernel: what they do is not seen."""
        content = [tensor.is_floating_point() or tensor.is_complex() for tensor in given]
        carried = tuple(self.value_of(tensor) for tensor, has in zip(given, content, strict=True) if has)
        read = tuple(self.value_of(tensor) for tensor, has in zip(given, content, strict=True) if not has)
        out = func(*args, **kwargs)
        made = tensors_in(out, depth=2)
        self.operators[f"higher_order::{func.name()}"] = None
        if made:
            outs = tuple(self.value_of(tensor) for tensor in made)
            tokens = tuple(made[0].shape[:-1])
            self.events.append(
                Op(
                    "mixes",
                    carried,
                    read,
                    outs,
                    written=(),
                    merges=True,
                    reduces=False,
                    is_statistic=False,
                    in_norm=False,
                    adds=(),
                    name=func.name(),
                    module=self.module,
                    tokens=tokens,
                    is_foreign=True,
                )
            )
        return out

    def _write_down(
        self,
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: list[Tensor],
        before: list[int],
        made: list[Tensor],
    ) -> None:
        target = _written_to(func, args, kwargs)
        plain = name.removesuffix("_") if target is not None else name
        if self._func in _LAYERS and plain in _INDEXED:
            plain = "linear"  # weights that are not in memory are stood in for by a choice of channels
        kind, carried, read, statistic = self._kind(func, plain, args, given, before, made)
        reduces = plain in _STATISTICS and not statistic
        if target is not None and name == plain:  # torch.add(x, y, out=z): z is not a summand
            keep = {self.value_of(target)} - {
                v for t, v in zip(given[:-1], before[:-1], strict=True) if t is not target
            }
            carried = tuple(value for value in carried if value not in keep)
        written: list[tuple[int, int]] = []
        if target is not None:
            # The target and everything that shares its memory get new values.
            old = {id(other): self.value_of(other) for other in self._others(target)}
            self._new_value(target)
            written = [(old[id(other)], self._new_value(other)) for other in self._others(target)]
            made = [target, *(tensor for tensor in made if tensor is not target)]
            # x.copy_(y) carries y only, and x.zero_() nothing: the old content of x is gone.
            if plain == "copy" and len(before) > 1:
                carried = tuple(before[1:2])
            elif plain in ("zero", "fill"):
                carried = ()
        outs = tuple(self.value_of(tensor) for tensor in made)
        # Autocast casts operands inside an add, so the add receives a cast of the stream and not the stream itself.
        if plain == "_to_copy":
            self._casts[before[0]] = outs[0]
        if not outs:
            return
        merges = _merges(func, plain, args, given)
        call = self._func
        in_norm = (call is not None and call in NORMS) or any(normalises for _, normalises, _ in self._modules)
        adds = tuple((number, add, self._given_as(stream, given, before)) for number, add, stream in self._adds)
        tokens = tuple(made[0].shape[:-1])
        module = self.module
        written_as = _written_as(call, name)
        self.events.append(
            Op(
                kind,
                carried,
                read,
                outs,
                tuple(written),
                merges,
                reduces,
                statistic,
                in_norm,
                adds,
                written_as,
                module,
                tokens,
                func.namespace not in ("aten", "prims", "prim"),
                0 if merges or plain != "cat" else made[0].shape[_axis_of_cat(args, given)],
                _contracted(plain, given),
            )
        )

    def _given_as(self, stream: Tensor, given: list[Tensor], before: list[int]) -> int:
        """The value of the stream as an input: its own, or that of the cast that autocast substitutes for it."""
        same = (value for tensor, value in zip(given, before, strict=True) if tensor is stream)
        own = self.value_of(stream)
        return next(same, self._casts.get(own, own))

    def _others(self, target: Tensor) -> list[Tensor]:
        """Other live tensors that share the memory of ``target``."""
        memory = _memory_of(target)
        alive = [tensor for ref in self._sharing.get(memory or 0, []) if (tensor := ref()) is not None]
        unique = {id(tensor): tensor for tensor in alive if tensor is not target and _memory_of(tensor) == memory}
        return list(unique.values())

    def _kind(
        self, func: Any, name: str, args: Sequence[Any], given: list[Tensor], before: list[int], made: list[Tensor]
    ) -> tuple[Kind, tuple[int, ...], tuple[int, ...], bool]:
        """What an operation does, which values it carries, which only control it, and whether it is a statistic."""
        # A mean over channels is one number per token (a norm computes it); over tokens it mixes them.
        if name in _STATISTICS:
            light = _is_over_channels(args, given, made)
            return ("bends" if light else "mixes"), tuple(before), (), light
        if name in _SORTED:
            light = _is_over_channels(args, given, made) or (name in ("topk", "sort") and len(args) < 3)
            return ("bends" if light else "mixes"), tuple(before), (), False
        if name in _MATRIX_PRODUCTS:
            # addmm(c, a, b) = c + a b: the first argument is added, not multiplied.
            added = int(name in _ADDED_PRODUCTS)
            return "matrix", tuple(before[added:]), tuple(before[:added]), False
        if name in _CONVOLUTIONS:
            is_pointwise = all(length == 1 for length in given[1].shape[2:])
            return ("matrix" if is_pointwise else "mixes"), tuple(before), (), False
        if name in ("addcmul", "addcdiv"):
            return "carries", tuple(before), (), False
        if name in _PRODUCTS and made:
            # A factor of the full shape is carried (the stream, or a gate of its size); a broadcast one is a gain.
            full = [tensor.shape == made[0].shape for tensor in given]
            carried = tuple(value for value, is_full in zip(before, full, strict=True) if is_full)
            return "scales", carried, tuple(value for value in before if value not in carried), False
        if name in _CONDITIONED:
            position = _CONDITIONED[name]
            return "carries", tuple(v for i, v in enumerate(before) if i != position), (before[position],), False
        if name in _INDEXED:
            floats = [tensor.is_floating_point() or tensor.is_complex() for tensor in given]
            carried = tuple(value for value, is_float in zip(before, floats, strict=True) if is_float)
            return "carries", carried, tuple(value for value in before if value not in carried), False
        if func.is_view or name in _CARRYING or name in _LINEAR or name in _SIDE_BY_SIDE:
            return "carries", tuple(before), (), False
        if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE:
            return "bends", tuple(before), (), False
        return "mixes", tuple(before), (), False


def _captured(values: object) -> list[Tensor]:
    """Tensors that the functions among the arguments close over."""
    functions = [value for value in pytree.tree_leaves(values) if callable(value)]
    captured = [inspect.getclosurevars(function).nonlocals for function in functions if inspect.isfunction(function)]
    return tensors_in(captured, depth=3)


def _written_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that an operation writes to, in place or through ``out=``."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name, args[position] if position < len(args) else None)
            if isinstance(given, Tensor):
                return given
    return None


def _merges(func: Any, name: str, args: Sequence[Any], given: list[Tensor]) -> bool:
    """Whether values end up in the same entries; tensors concatenated along the tokens do not."""
    if name == "cat":
        return not given or _axis_of_cat(args, given) == given[-1].dim() - 1
    if name == "stack":
        return True
    return name not in _PRODUCTS


def _axis_of_cat(args: Sequence[Any], given: list[Tensor]) -> int:
    return int(args[1] if len(args) > 1 else 0) % max(1, given[-1].dim())


def _contracted(name: str, given: list[Tensor]) -> int:
    """Length of the axis over which a product with a matrix sums; channels come second in a convolution."""
    if name in _CONVOLUTIONS:
        return given[0].shape[1]
    if name in _MATRIX_PRODUCTS:
        return given[int(name in _ADDED_PRODUCTS)].shape[-1]
    return 0


def _is_over_channels(args: Sequence[Any], given: list[Tensor], made: list[Tensor]) -> bool:
    """Whether a sum, a mean, ... is over the last axis only."""
    dims = next((arg for arg in args[1:] if isinstance(arg, (list, tuple))), None)
    if dims is None:
        dims = [arg for arg in args[1:] if isinstance(arg, int) and not isinstance(arg, bool)][-1:]
    ndim = given[0].dim() if given else 0
    return ndim > 1 and len(dims) == 1 and dims[0] % ndim == ndim - 1


def _memory_of(tensor: Tensor) -> int | None:
    """Identifies the memory of a tensor; None for tensors without plain memory (sparse ones, other subclasses)."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    storage = tensor.untyped_storage()
    try:
        return int(storage.data_ptr() or storage._cdata)  # meta tensors have no memory: use the storage object
    except RuntimeError:
        return None  # torch.func.jvp hands out tensors whose storage has no address


def _written_as(func: Callable[..., Any] | None, name: str) -> str:
    """The name of the operation as the model's author wrote it."""
    own = getattr(func, "__name__", "")
    if not own or own.startswith("_"):
        return f"torch.ops.aten.{name}"
    return f"torch.{own}" if hasattr(torch, own) else own

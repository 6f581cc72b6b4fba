"""What is read while a pass runs: softmax calls, what becomes of their weights, and whose numbers a key is made of.

Nothing is changed and no pass is added. Two things are followed by the operations themselves. Weights are followed from
the softmax to the product with the values. And each number that a linear map returns is followed, as the place that it
came from, through views and transposes to the product of queries and keys::

    linear  (batch, tokens, heads * size)   token 0 0 0 0 | 1 1 1 1 | ...
    view    (batch, tokens, heads, size)    transposed: the keys of one head are those of tokens 0, 1, 2 ...
    view    (batch, heads, tokens, size)    the keys of one head are those of tokens 0, 0, 0, 0, 1, 1 ...: mixed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rankscope.examination import source
from rankscope.examination.source import SourcePlace
from rankscope.stream.operators import PRODUCTS, SOFTMAXES

_FOLLOWED = 24
"""Tensors that are followed at once: projections of one attention, their heads, scores and weights."""
_LARGEST = 1 << 24
"""Entries up to which the places of a tensor's numbers are followed."""
OFF_ONE = 1e-2
"""Distance of a sum of weights from one above which they do not sum to one; half precision reaches a third of it."""
_LOGS = frozenset({F.log_softmax, torch.log_softmax, Tensor.log_softmax})
_FILLS = (Tensor.masked_fill, torch.masked_fill, Tensor.masked_fill_)
_SHAPING = frozenset(
    {
        "view", "reshape", "transpose", "permute", "contiguous", "unflatten", "flatten", "chunk", "split", "unbind",
        "squeeze", "unsqueeze", "__getitem__", "swapaxes", "swapdims", "movedim", "clone", "t", "mT", "T", "__get__",
        "tensor_split", "narrow", "select", "repeat_interleave", "expand",
    }
)  # fmt: skip
"""Functions that move numbers and compute none."""


@dataclass(frozen=True)
class SoftmaxCall:
    """One softmax: its axis, the shape of what it returned, and where it is written."""

    axis: int
    shape: tuple[int, ...]
    place: SourcePlace | None


@dataclass(frozen=True)
class Weighting:
    """A product of values with weights that a softmax made.

    Attributes:
        softmax: the softmax.
        summed: the axis of the weights that the product sums over, from the end.
        axis: distance from one of the sums that the product takes, over the keys.
        other: the same along the axis of the softmax itself.
        cleared: share of the entries that were set to zero after the softmax.
    """

    softmax: SoftmaxCall
    summed: int
    axis: float
    other: float
    cleared: float


@dataclass(frozen=True)
class MixedHeads:
    """Heads that were split or merged across tokens: how, and how many tokens one head sees."""

    how: str
    tokens: int
    place: SourcePlace | None


class Scan(TorchFunctionMode):
    """Notes softmax calls and where they are written, and follows weights and places of numbers.

    Attributes:
        calls: every softmax, and every logarithm of one.
        again: those whose argument a softmax made.
        fills: the shape of each mask that is filled in, and where that is written.
        filled_after: the same for masks that are filled into what a softmax made.
        returned: the softmax that made what the model returns.
        mixed: heads that were mixed with tokens.
        overflow: the first operation in float16 that made infinity of numbers, as it is called, and where.
    """

    def __init__(self, tokens: int | None) -> None:
        super().__init__()
        self._tokens = tokens
        self.calls: list[SoftmaxCall] = []
        self.again: list[SoftmaxCall] = []
        self.fills: list[tuple[tuple[int, ...], SourcePlace | None]] = []
        self.filled_after: list[SourcePlace | None] = []
        self.weightings: list[Weighting] = []
        self.returned: SoftmaxCall | None = None
        self.mixed: list[MixedHeads] = []
        self.overflow: tuple[str, SourcePlace | None] | None = None
        self._known: list[tuple[Tensor, Tensor, SoftmaxCall]] = []
        # Tensors with the place of each of their numbers: the row of a linear map, or the query of attention.
        self._rows: list[tuple[Tensor, Tensor]] = []
        self._queries: list[tuple[Tensor, Tensor]] = []
        self._keys: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with torch._C.DisableTorchFunction():
            # Copies, because a mask may be written into the weights in place.
            known_inputs = [(place, one) for one in self._known for place, t in enumerate(given) if t is one[0]]
        out = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if self.overflow is None and isinstance(out, Tensor) and out.dtype is torch.float16 and func not in _FILLS:
                was_finite = given and all(bool(torch.isfinite(one).all()) for one in given)
                if was_finite and bool(torch.isposinf(out).any()):
                    self.overflow = func.__name__, source.running()
            if self._tokens is not None:
                self._follow(func, args, kwargs, given, out)
            if func in SOFTMAXES | _LOGS and isinstance(out, Tensor):
                axis = kwargs["dim"] if "dim" in kwargs else args[1]
                call = SoftmaxCall(axis % out.ndim, tuple(out.shape), source.running())
                self.calls.append(call)
                if func in SOFTMAXES:
                    self.again += [call] if known_inputs else []
                    self._known.append((out, out.detach().clone(), call))
            elif known_inputs and isinstance(out, Tensor):
                place, (weights, made, call) = known_inputs[0]
                if func in PRODUCTS:
                    if not any(isinstance(one, nn.Parameter) for one in given):  # heads are mixed by parameters
                        self._weigh(func, args, place, weights, made, call)
                elif out.shape == made.shape and out.is_floating_point():
                    self._known.append((out, made, call))
            if func in _FILLS and len(given) > 1:
                written = source.running()
                self.fills.append((tuple(given[1].shape), written))
                self.filled_after += [written] if known_inputs else []
            for followed in (self._known, self._rows, self._queries, self._keys):
                del followed[:-_FOLLOWED]
        return out

    def ended(self, result: Any) -> None:
        """Look whether a softmax made what the model returned."""
        self.returned = next((call for out, _, call in self._known if out is result), None)
        for followed in (self._known, self._rows, self._queries, self._keys):
            followed.clear()

    # Places of numbers.

    def _follow(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], out: Any) -> None:
        name = func.__name__
        if func is F.linear and out.ndim >= 3 and out.numel() <= _LARGEST:
            self._look_at_merged(given[0])
            rows = out.numel() // out.shape[-1]
            place = torch.arange(rows, device=out.device).view(*out.shape[:-1], 1).expand(out.shape)
            self._rows.append((out, place))
        elif func is F.scaled_dot_product_attention:
            self._look_at_keys(given[1], _of(self._rows, given[1]))
            self._queries.append((out, _queries_of(out)))
        elif func in PRODUCTS and isinstance(out, Tensor) and func is not torch.einsum and len(given) == 2:
            keys = _of(self._rows, given[1])
            if keys is not None and keys.ndim == given[1].ndim > 2:
                self._keys.append((out, keys.transpose(-1, -2)))
            if any(given[0] is one for one, *_ in self._known) and out.numel() <= _LARGEST:
                self._queries.append((out, _queries_of(out)))
        elif func in SOFTMAXES and isinstance(out, Tensor) and given:
            found = _of(self._keys, given[0])
            if found is not None:
                self._look_at_keys(None, found)
        else:
            for followed in (self._rows, self._queries, self._keys):
                self._carry(followed, name, func, args, kwargs, given, out)

    def _carry(
        self,
        followed: list[tuple[Tensor, Tensor]],
        name: str,
        func: Any,
        args: Any,
        kwargs: Any,
        given: list[Tensor],
        out: Any,
    ) -> None:
        """Move the places as the numbers are moved; keep them where each number is computed from the one before."""
        known = next(((one, found) for one in given if (found := _of(followed, one)) is not None), None)
        if known is None:
            return
        tensor, place = known
        if name in _SHAPING and args and args[0] is tensor and tensor.shape == place.shape:
            # Places are expanded along channels: a view of the tensor may be none of them.
            moved = func(place.contiguous(), *args[1:], **kwargs)
            pairs = zip(pytree.tree_leaves(out), pytree.tree_leaves(moved), strict=False)
            followed += [(one, two) for one, two in pairs if isinstance(one, Tensor) and one.shape == two.shape]
        elif isinstance(out, Tensor) and out.shape == tensor.shape and out.is_floating_point():
            followed.append((out, place))

    def _look_at_keys(self, keys: Tensor | None, place: Tensor | None) -> None:
        """Whether one token is several keys of one head, while the head does not see all tokens."""
        if place is None or place.ndim < 3 or self._tokens is None:
            return
        first = place.flatten(0, -3)[0]  # keys by channels of the first head of the first sequence
        if first.shape[0] < 2 or not bool((first == first[:, :1]).all()):
            return  # a key made of several tokens, as in attention between channels
        seen = len(torch.unique(first[:, 0]))
        if seen < first.shape[0] and seen < self._tokens:
            how = "heads for tokens" if seen == 1 else "split"
            self.mixed.append(MixedHeads(how, seen, source.running()))

    def _look_at_merged(self, given: Tensor) -> None:
        """Whether a token of what attention returned holds numbers of several queries, but not of all."""
        place = _of(self._queries, given)
        if place is None or place.ndim < 3 or self._tokens is None:
            return
        first = place.flatten(0, -3)[0]
        several = len(torch.unique(first[0]))
        if len(first) == self._tokens == int(place.max()) + 1 and 1 < several < self._tokens:
            self.mixed.append(MixedHeads("merge", several, source.running()))

    # Weights.

    def _weigh(self, func: Any, args: Any, place: int, weights: Tensor, made: Tensor, call: SoftmaxCall) -> None:
        summed = _summed_axis(func, args, place, weights)
        if summed is None or weights.shape[summed] < 2:
            return
        sums, own = weights.double().sum(summed), weights.double().sum(call.axis)
        off, other = (float((one - 1).abs().max()) for one in (sums, own))
        cleared = float(((weights == 0) & (made > 0)).double().mean())
        self.weightings.append(Weighting(call, summed - weights.ndim, off, other, cleared))

    def wrong(self) -> list[Weighting]:
        """Products whose weights sum to one along another axis than the one that is summed over, or were masked."""
        return [one for one in self.weightings if one.axis > OFF_ONE and (one.other < OFF_ONE / 10 or one.cleared > 0)]


def _of(followed: list[tuple[Tensor, Tensor]], tensor: Any) -> Tensor | None:
    return next((place for one, place in reversed(followed) if one is tensor), None)


def _queries_of(out: Tensor) -> Tensor:
    return torch.arange(out.shape[-2], device=out.device)[:, None].expand(out.shape)


def _summed_axis(func: Any, args: Any, place: int, weights: Tensor) -> int | None:
    """The axis of the weights that a product sums over; None if there is not exactly one."""
    if func is not torch.einsum:
        return weights.ndim - 1 if place == 0 else weights.ndim - 2 if weights.ndim > 1 else None
    if not isinstance(args[0], str) or "." in args[0] or "->" not in args[0]:
        return None
    given, _, out = args[0].replace(" ", "").partition("->")
    summed = [at for at, letter in enumerate(given.split(",")[place]) if letter not in out]
    return summed[0] if len(summed) == 1 else None


class ModuleFollower(TorchFunctionMode):
    """Sees the operations of a pass and knows the innermost module that runs.

    Args:
        model: whose modules are named.

    Attributes:
        inside: names of the modules that run, the innermost last; None for those that are not part of the model. A list
            and no property, because the compiler traces the mode of a model that calls ``flex_attention``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self.inside: list[str | None] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow one pass."""
        begin = register_module_forward_pre_hook(lambda module, _: self.inside.append(self._names.get(module)))
        end = register_module_forward_hook(lambda *_: self._ended(), always_call=True)
        try:
            with self:
                yield
        finally:
            begin.remove()
            end.remove()

    def _ended(self) -> None:
        self.inside.pop()


_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)
"""Functions that drop entries; modules call them too."""


class Dropouts(ModuleFollower):
    """Sees what drops in a pass, by whatever module or function.

    Args:
        model: the model.
        drops: False to drop nothing.

    Attributes:
        dropped: the innermost module and the share, for each call that drops.
        ran: names of the modules in which something was computed.
    """

    def __init__(self, model: nn.Module, *, drops: bool) -> None:
        super().__init__(model)
        self._drops = drops
        self.dropped: list[tuple[str, float]] = []
        self.ran: set[str | None] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        self.ran |= set(self.inside)
        if func in _DROPOUTS:
            named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            if named.get("training", named.get("train", True)):
                where = (self.inside[-1] if self.inside else None) or ""
                self.dropped.append((where, float(named.get("p", 0.5))))
                if not self._drops:
                    return named["input"]
        return func(*args, **kwargs)

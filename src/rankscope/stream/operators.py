"""Which torch functions do what to a residual stream.

The tracer follows tensor objects, so it has to know the calls that return the stream as a new object
(``SAME_VALUES``, ``NORMS``) and the calls that add to it (``ADDS``).
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from rankscope.linalg.rounding import differs
from rankscope.models.wrapping import hidden

T = torch.Tensor
_ROUNDINGS = 64

ADDS: frozenset[Callable[..., Any]] = frozenset({T.add, T.__add__, T.__radd__, T.add_, T.__iadd__, torch.add})
DIFFERENCES: frozenset[Callable[..., Any]] = frozenset(
    {T.sub, T.__sub__, T.sub_, T.__isub__, T.subtract, T.subtract_, torch.sub, torch.subtract}
)
ADDED_PRODUCTS: frozenset[Callable[..., Any]] = frozenset({torch.addcmul, T.addcmul, T.addcmul_})
INTERPOLATIONS: frozenset[Callable[..., Any]] = frozenset({torch.lerp, T.lerp, T.lerp_})
ADDED_MATRIX_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.addmm, T.addmm, T.addmm_, torch.baddbmm, T.baddbmm, T.baddbmm_}
)
CHOICES: frozenset[Callable[..., Any]] = frozenset({torch.where, T.where})
INDEXED_SUMS: frozenset[Callable[..., Any]] = frozenset({torch.index_add, T.index_add, T.index_add_})
SUMS: frozenset[Callable[..., Any]] = (
    ADDS | DIFFERENCES | ADDED_PRODUCTS | INTERPOLATIONS | ADDED_MATRIX_PRODUCTS | CHOICES | INDEXED_SUMS
)
"""All calls that are a sum of two terms, one of which can be the stream."""
CONCATENATIONS: frozenset[Callable[..., Any]] = frozenset({torch.cat, torch.concat, torch.concatenate})
JOINS: frozenset[Callable[..., Any]] = CONCATENATIONS | {torch.stack}
"""Calls that put the stream beside its branch; a later call (``REDUCTIONS``) makes one stream of the two."""
REDUCTIONS: frozenset[Callable[..., Any]] = frozenset({T.sum, torch.sum, T.mean, torch.mean})
IN_PLACE_SUMS: frozenset[Callable[..., Any]] = frozenset(
    {T.add_, T.__iadd__, T.sub_, T.__isub__, T.subtract_, T.addcmul_, T.lerp_, T.addmm_, T.baddbmm_, T.index_add_}
)

LIMITS: frozenset[Callable[..., Any]] = frozenset(
    {torch.clamp, T.clamp, torch.clip, T.clip, torch.nan_to_num, T.nan_to_num}
)
"""Guards against overflow, as T5 has in float16. Where they change nothing, they return what they were given."""
SAME_VALUES: frozenset[Callable[..., Any]] = frozenset(
    {
        T.view, T.reshape, T.flatten, T.unflatten, T.squeeze, T.unsqueeze, T.contiguous, T.clone, T.detach,
        T.to, T.float, T.double, T.half, T.bfloat16, T.type, T.type_as, T.view_as, T.expand, T.expand_as,
        torch.reshape, torch.flatten, torch.squeeze, torch.unsqueeze, torch.clone,
        F.dropout, torch.dropout, torch.feature_dropout,
    }
)  # fmt: skip

SLICE: Callable[..., Any] = T.__getitem__
MOVES: frozenset[Callable[..., Any]] = SAME_VALUES | frozenset(
    {
        SLICE, T.__setitem__, T.permute, T.transpose, T.swapaxes, T.swapdims, T.movedim, T.moveaxis, T.t, T.narrow,
        T.select, T.chunk, T.split, T.unbind, T.repeat, T.repeat_interleave, T.index_select, T.flip, T.roll, T.copy_,
        torch.permute, torch.transpose, torch.swapaxes, torch.movedim, torch.moveaxis, torch.narrow, torch.select,
        torch.chunk, torch.split, torch.unbind, torch.repeat_interleave, torch.index_select, torch.flip, torch.roll,
        torch.cat, torch.concat, torch.stack,
    }
)  # fmt: skip
"""Calls that copy entries from one place to another and compute nothing."""
MULTIPLICATIONS: frozenset[Callable[..., Any]] = frozenset({T.mul, T.__mul__, T.__rmul__, torch.mul})
DIVISIONS: frozenset[Callable[..., Any]] = frozenset(
    {T.div, T.__truediv__, torch.div, T.true_divide, torch.true_divide}
)
NEGATIONS: frozenset[Callable[..., Any]] = frozenset({T.neg, T.__neg__, torch.neg, T.negative, torch.negative})

NORMS: frozenset[Callable[..., Any]] = frozenset(
    {F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm, F.group_norm, F.batch_norm}
)

SOFTMAXES: frozenset[Callable[..., Any]] = frozenset({F.softmax, torch.softmax, T.softmax})

CONSTANTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, T.new_zeros, T.new_ones, T.new_full}
)

_FACTS = "shape dtype device layout ndim requires_grad is_cuda is_leaf is_sparse is_quantized is_meta is_nested grad_fn"
QUERIES: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(T, fact).__get__ for fact in _FACTS.split()),
        T.dim, T.size, T.numel, T.nelement, T.stride, T.storage_offset, T.element_size, T.is_contiguous,
        T.is_floating_point, T.is_complex, T.untyped_storage, T.__len__,
        torch.is_floating_point, torch.is_complex, torch.numel,
    }
)  # fmt: skip
"""Calls that say something about a tensor and compute nothing: four of five calls that a model makes."""

PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {torch.matmul, T.matmul, T.__matmul__, T.__rmatmul__, torch.bmm, T.bmm, torch.baddbmm, T.baddbmm, torch.einsum}
)
PROJECTIONS: frozenset[Callable[..., Any]] = frozenset(
    {F.linear, torch.addmm, T.addmm, F.conv1d, F.conv2d, F.embedding, torch.conv1d, torch.conv2d}
)

SDPA: Callable[..., Any] = F.scaled_dot_product_attention
MULTI_HEAD: Callable[..., Any] = F.multi_head_attention_forward


def is_flex(func: Callable[..., Any]) -> bool:
    """Whether a call is the operator of ``flex_attention``, which exists only once a model has imported it."""
    return isinstance(func, HigherOrderOperator) and str(func) == "flex_attention"


_TORCH_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_PLAIN: Mapping[str, Any] = {"dtype": torch.float32, "device": "cpu"}
_SIGNS = torch.tensor([[1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]], **_PLAIN)
"""Three directions over four channels: each has mean zero and variance one, and so has each rotation of them."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises its input: it is a norm of torch, or behaves like one.

    A norm without matrices returns ``bias + gain * x / size(x)``, so it is given made-up tokens: three directions with
    mean zero, their opposites and their mixtures, each times another positive number. If it divides each token by its
    size, and does nothing else, one bias and one gain per channel explain all that it returns. A copy of the module
    runs, with other numbers for its weights, so that nothing is left on it and weights that are zero hide nothing.

    Example:
        >>> class Rescale(nn.Module):
        ...     def forward(self, x):
        ...         return x * x.square().mean(-1, keepdim=True).rsqrt()
        >>> is_norm(Rescale()), is_norm(nn.Tanh()), is_norm(nn.Identity())
        (True, False, False)
    """
    if isinstance(module, _TORCH_NORMS):
        return True
    own = list(module.parameters())
    # fully_shard gives a module a class of torch's: whose it is, is said by the class that has its forward.
    author = next(kind.__module__ for kind in type(module).__mro__ if "forward" in vars(kind))
    if author.startswith("torch.") or any(weight.dim() > 1 for weight in own):
        return False
    kind = _kind_of(module)
    if kind is None:
        return _normalises(module, own)
    if kind not in _TRIED:
        _TRIED[kind] = _normalises(module, own)
    return _TRIED[kind]


_TRIED: dict[Hashable, bool] = {}
"""What is known of a kind of module: a model has one for each of its layers."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _kind_of(module: nn.Module) -> Hashable | None:
    """All that decides what a module computes, but for the numbers in its weights; None if that cannot be told."""
    said = [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]
    if module._modules or module._buffers or not all(isinstance(value, (int, float, str)) for _, value in said):
        return None
    shapes = [(name, None if weight is None else weight.shape) for name, weight in module._parameters.items()]
    return type(module), type(module).forward, *said, *shapes


def _normalises(module: nn.Module, own: Sequence[nn.Parameter]) -> bool:
    """Whether a module behaves like a norm: see :func:`is_norm`."""
    # As many channels as it has weights; without any, as one of its numbers says, or as one likes.
    numbers = [one for value in vars(module).values() for one in (value if isinstance(value, tuple) else (value,))]
    width = max([weight.numel() for weight in own] or [one for one in numbers if type(one) is int], default=1)
    if width < 4 and own and width > 1:
        return False
    width = max(width, 4)
    with hidden(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        # Rotations of the three directions over the channels; those beyond a multiple of four are zero.
        turns = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.6, 0, 0.8], [-0.48, 0.64, 0.6]], **_PLAIN)
        tokens = F.pad((turns @ _SIGNS).repeat(1, width // 4), (0, width % 4))
        sizes = torch.tensor([128, 64, 96, 80, 112], **_PLAIN)[:, None]
        given = torch.stack([tokens * sizes, -tokens * sizes.flip(0)])
        try:
            out = _with_other_weights(module)(given)
        except Exception:  # noqa: BLE001 (whatever it raises: it does not take one tensor of tokens, as norms do)
            return False
    if not isinstance(out, Tensor) or out.shape != given.shape or not out.is_floating_point() or out.is_meta:
        return False
    bias = (out[0, 0] + out[1, 0]) / 2
    gain = (out[0, 0] - bias) * tokens[0]
    wanted = bias + gain * torch.stack([tokens, -tokens])
    used = width // 4 * 4
    return bool(gain[:used].abs().min() > 0) and not bool(differs(wanted, out, _ROUNDINGS).any())


def _with_other_weights(module: nn.Module) -> Callable[..., Any]:
    """What a module computes, with weights that are all positive and different; without its hooks, and as evaluated."""
    other = object.__new__(type(module))
    vars(other).update({name: copy.copy(value) for name, value in vars(module).items()}, training=False)
    other._buffers = copy.deepcopy(module._buffers)
    other._parameters = {
        name: None if one is None else nn.Parameter(torch.linspace(0.5, 1.5, one.numel(), **_PLAIN).view(one.shape))
        for name, one in module._parameters.items()
    }
    # Modules inside are called as functions. What loads weights puts its own method before the author's.
    for name, child in module._modules.items():
        if child is not None:
            del other._modules[name]
            vars(other)[name] = _with_other_weights(child)
    own = vars(module).get("_old_forward", vars(module).get("forward"))
    return partial(type(module).forward if own is None else own.__func__, other)


_ATTENTION_NAME = re.compile(r"attention|attn", re.IGNORECASE)


def is_attention(name: str, kind: type[nn.Module]) -> bool:
    """Whether a module is attention, judged by its own name or that of its class."""
    return _ATTENTION_NAME.search(f"{name.rpartition('.')[2]} {kind.__name__}") is not None


class _Modes(threading.local):
    """What is active in this thread: modes act only in the thread that put them in place."""

    def __init__(self) -> None:
        self.awake: list[object] = []
        self.asleep = 0


_MODES = _Modes()


@contextmanager
def awake(mode: object) -> Iterator[None]:
    """Inside this block, a mode acts on its model."""
    _MODES.awake.append(mode)
    try:
        yield
    finally:
        _MODES.awake.remove(mode)


def some_mode_is_awake() -> bool:
    """Whether a mode acts on some model now."""
    return bool(_MODES.awake) and not _MODES.asleep


@contextmanager
def modes_asleep() -> Iterator[None]:
    """Inside this block, models run as if no mode acted on them."""
    _MODES.asleep += 1
    try:
        yield
    finally:
        _MODES.asleep -= 1


def is_asleep() -> bool:
    """Whether modes are asleep."""
    return bool(_MODES.asleep)

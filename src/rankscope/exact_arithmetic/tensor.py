"""A tensor that stores what its tokens have in common and their differences separately, each with a log-scale.

A model runs on it unmodified: each ATen operation that receives one is dispatched to its rule in
``rankscope.exact_arithmetic.rules``.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.exact_arithmetic.registry import RULES, refuse
from rankscope.exact_arithmetic.rounding import are_moved, moved
from rankscope.exact_arithmetic.terms import (
    LOST,
    Term,
    added,
    broadcast,
    by_scale,
    exp,
    gathered,
    one_row,
    scaled,
    summed,
)

# Rows whose relative difference in plain float64 is below this have fewer than eight correct digits in it.
_ROUNDING = 2.0**-26


class Deviation(Tensor):
    r"""A tensor :math:`B + \sum_t e^{s_t} D_t` in float64, where the log-scales :math:`s_t` are plain numbers.

    Exact: every rule keeps the relative accuracy of each term, whatever its scale, so tokens may have relative
    differences of 10^-100000. ``base`` and every term are stored with size 1 along axes on which they are constant: a
    base with equal rows is one row. The residual stream has one term; attention scores have several, whose different
    scales the softmax needs. All sequences in one Deviation would share its scales, so each sequence gets its own.

    Attributes:
        base: the common part.
        terms: the deviations.
        null_axis: an axis along which every term sums to exactly zero, as for a softmax; None if unknown.
        base_sum: the exact sum of ``base`` along that axis; None if unknown.

    Example:
        >>> x = Deviation.from_tokens(torch.tensor([[[1.0, 2.0], [3.0, 2.0]]]))
        >>> x.base.tolist(), round(math.exp(x.log_residual()) ** 2, 12)
        ([[[2.0, 2.0]]], 2.0)
    """

    base: Tensor
    terms: tuple[Term, ...]
    null_axis: int | None
    base_sum: float | None
    source: weakref.ref[Deviation] | None
    write_back: Callable[[Tensor, Tensor], Tensor] | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        base: Tensor,
        terms: Sequence[Term] = (),
        shape: Sequence[int] | None = None,
        *,
        null_axis: int | None = None,
        base_sum: float | None = None,
    ) -> Deviation:
        """Create a deviation of this shape, or of the shape its parts broadcast to."""
        if shape is None:
            shape = broadcast(base.shape, *(term.values.shape for term in terms))
        out: Deviation = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=base.dtype, device=base.device)
        out.base, out.terms = _padded(base, len(shape)), tuple(Term(s, _padded(v, len(shape))) for s, v in terms)
        out.null_axis, out.base_sum, out.source, out.write_back = null_axis, base_sum, None, None
        return out

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and scales; the numbers are in ``base`` and ``terms``."""
        scales = ", ".join(f"e^{term.log_scale:.6g} {tuple(term.values.shape)}" for term in self.terms)
        return f"Deviation({tuple(self.shape)}: base {tuple(self.base.shape)}, terms [{scales}])"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Dispatch an operation to its rule."""
        import rankscope.exact_arithmetic.rules  # noqa: F401  (fills the registry)

        arguments = dict(kwargs or {})
        buffer = arguments.pop("out", None)
        packet = func.overloadpacket
        name = packet.__name__
        # Operators of other libraries are registered by name, so that no rule has to import them.
        rule = RULES.get(packet) or RULES.get(str(packet))
        if rule is None and name.endswith("_"):  # add_ uses the rule of add and writes into its first argument
            rule, buffer = RULES.get(getattr(torch.ops.aten, name[:-1], None)), args[0]
        if rule is None:
            refuse(packet)
        names = _names_of(rule)
        if names is not None and arguments.keys() - names:
            refuse(packet, f"its rule does not know the argument {min(arguments.keys() - names)}")
        if buffer is None:
            return _moved(rule, rule(*args, **arguments))
        if not isinstance(buffer, cls):
            refuse(packet, "it writes a deviation into a plain tensor")
        return buffer.overwritten(_moved(rule, rule(*args, **arguments)), packet)

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse, like everything that leaves torch: NumPy would see neither base nor terms."""
        refuse("Tensor.numpy", "it leaves torch")

    def tolist(self) -> NoReturn:
        """Refuse: a list would lose the terms."""
        refuse("Tensor.tolist", "it leaves torch")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse, like ``numpy``."""
        refuse("Tensor.__array__", "it leaves torch")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a wrapper has no memory, and the array on the other side would be read from address zero."""
        refuse("Tensor.__dlpack__", "it leaves torch")

    def overwritten(self, new: Deviation | Tensor, operation: Any) -> Deviation:
        """Replace the value by ``new``, as an in-place operation does, also in the tensors of which this is a view."""
        if new.shape != self.shape:
            refuse(operation, f"it turns a tensor of shape {tuple(self.shape)} into one of {tuple(new.shape)} in place")
        parts = new if isinstance(new, Deviation) else Deviation(new, (), self.shape)
        source = None if self.source is None else self.source()
        if source is not None:
            if self.write_back is None:
                refuse(operation, "it writes into a view of a tensor that is still in use")
            source.overwritten(written(source, parts, self.write_back), operation)
        self.base, self.terms, self.null_axis, self.base_sum = parts.base, parts.terms, parts.null_axis, parts.base_sum
        return self

    @classmethod
    def from_tokens(cls, x: Tensor, keep: Tensor | None = None) -> Deviation:
        """Split the rows of ``x`` into their mean and the deviations from it.

        Args:
            x: one sequence, any shape ``(..., dim)``; every row along the last axis is a token.
            keep: which rows count in the mean, in any shape with as many entries as there are rows; None for all.
        """
        if not x.is_floating_point() or x.dim() < 2:
            raise InputError(f"Tokens were given as a {x.dtype} tensor of shape {tuple(x.shape)}; expected (..., dim).")
        return cls(torch.zeros(1, dtype=torch.float64, device=x.device), (Term(0.0, x.detach().double()),)).recentred(
            keep
        )

    def recentred(self, keep: Tensor | None = None) -> Deviation:
        """The same value with the mean of the rows that count as base, and no terms if those rows are equal.

        Deviations below one get unit norm over the rows that count and a log-scale; larger ones have scale 1.
        If the base differs between rows, its differences become part of the term, and plain float64 is the limit.
        """
        base, terms = self._centred(keep)
        out = []
        for (scale, values), log_norm in terms:
            # e^scale values = e^log_scale (e^change values); with log_scale < 0 the new values have unit norm.
            log_scale = min(scale + log_norm, 0.0) if math.isfinite(log_norm) else scale
            change = scale - log_scale
            if log_scale < 0.0 and abs(change + log_norm) > 1.0:
                # Beyond about e^(10^16) a log-scale cannot resolve a factor of e: adding log_norm above was rounded
                # away. Divide the values by their norm anyway, or they would grow without bound.
                change = -log_norm
            out.append(Term(log_scale, values * exp(change)))
        return Deviation(base, gathered(out), self.shape)

    def log_residual(self, keep: Tensor | None = None) -> float:
        r"""Natural logarithm of :math:`\|C X\|_F` over the rows that count. Exact; minus infinity if rows are equal."""
        terms = self.recentred(keep).terms
        if not terms:
            return -math.inf
        scale, values = summed(terms)
        return _log_norm(_kept(values.expand(self.shape), keep)) + scale

    def _centred(self, keep: Tensor | None) -> tuple[Tensor, list[tuple[Term, float]]]:
        """Mean of the rows that count, and the deviations from it: terms and the logarithms of their norms."""
        base, terms = one_row(self.base), by_scale(self.terms)
        # Rows of the base differ: there is nothing common to split off, so everything becomes one term of scale 1.
        if any(size != 1 for size in base.shape[:-1]):
            center, values = _split(base.expand(self.shape), keep)
            for term in terms:
                values = added(values, term.values, term.log_scale)
            base, terms = center, [Term(0.0, values)]
            _check_above_rounding(base, values, keep)
        kept: list[tuple[Term, float]] = []
        # Terms may have a mean of their own, which moves to the base.
        for scale, values in terms:
            mean, values = _split(values.expand(self.shape), keep)
            base = base + scaled(scale, mean)
            log_norm = _log_norm(_kept(values, keep))
            if log_norm != -math.inf:
                kept.append((Term(scale, values), log_norm))
        return base, kept

    def check_exact(self, keep: Tensor | None = None) -> None:
        """Refuse a value whose rows have no common base and differ by little more than rounding.

        Raises:
            UnsupportedArithmeticError: with the module that is running.
        """
        if any(size != 1 for size in self.base.shape[:-1]):
            self._centred(keep)

    def shrunk(self, log_factor: float) -> Deviation:
        """The same base, with every deviation multiplied by ``e^log_factor``."""
        return Deviation(self.base, [Term(s + log_factor, v) for s, v in self.terms], self.shape)

    def log_norm(self, keep: Tensor | None = None) -> float:
        r"""Natural logarithm of :math:`\|X\|_F` over the rows that count; minus infinity at zero."""
        return _log_norm(_kept(self.to_plain(), keep))

    def to_plain(self) -> Tensor:
        """The value in ordinary float64, where small terms are lost."""
        out = self.base
        for term in self.terms:
            out = added(out, term.values, term.log_scale)
        return out.expand(self.shape)


@cache
def _names_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keyword arguments that a rule accepts; None for any."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else frozenset(parameters)


def _moved(function: Callable[..., Any], out: Any) -> Any:
    """The result of a rule, with last digits perturbed if that is enabled; rules that only rearrange do not round."""
    if not are_moved() or function.__module__.endswith((".shapes", ".indexing")):
        return out
    if isinstance(out, tuple):
        return tuple(_moved(function, part) for part in out)
    if not isinstance(out, Deviation):
        return out
    terms = [Term(s, moved(v)) for s, v in out.terms]
    return Deviation(moved(out.base), terms, out.shape, null_axis=out.null_axis, base_sum=out.base_sum)


def _log_norm(rows: Tensor) -> float:
    """Logarithm of the Euclidean norm, scaled first because squares leave the range of float64 earlier."""
    size = float(rows.abs().max()) if rows.numel() else 0.0
    if size == 0.0:
        return -math.inf
    return math.log(size) + math.log(float(torch.linalg.vector_norm(rows / size))) if math.isfinite(size) else size


def _check_above_rounding(center: Tensor, departures: Tensor, keep: Tensor | None) -> None:
    """Refuse rows without a common base if they differ by so little that it may be rounding."""
    rows = _kept(departures, keep)
    size = float(torch.linalg.vector_norm(center)) * math.sqrt(rows.shape[0])
    if float(torch.linalg.vector_norm(rows)) < _ROUNDING * size:
        refuse("a part of the block", "it gives tokens that were equal a common part that differs by rounding alone")


def _padded(part: Tensor, axes: int) -> Tensor:
    return part if part.dim() == axes else part.reshape((1,) * (axes - part.dim()) + part.shape)


def _kept(values: Tensor, keep: Tensor | None) -> Tensor:
    rows = values.reshape(-1, values.shape[-1])
    return rows if keep is None else rows[keep.reshape(-1)]


def _split(values: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean of the rows that count, and all rows minus it.

    The first of them is subtracted before averaging: the floating-point mean of seven equal numbers need not be that
    number, but the mean of seven zeros is zero.
    """
    one_row = (1,) * (values.dim() - 1) + (values.shape[-1],)
    rows = _kept(values, keep)
    if rows.shape[0] == 0:
        return torch.full(one_row, math.nan, dtype=values.dtype, device=values.device), values
    first = rows[0].reshape(one_row)
    off = (rows - rows[0]).mean(dim=0).reshape(one_row)
    return first + off, added(-off.expand(values.shape), values - first, 0.0)


def merged(x: Deviation) -> Deviation:
    """The same value with at most one term; small terms are rounded to the precision of the largest."""
    if len(x.terms) < 2:
        return x
    return Deviation(x.base, (summed(x.terms),), x.shape, null_axis=x.null_axis, base_sum=x.base_sum)


def joined(x: Deviation) -> Deviation:
    """``x`` with one term, as required by nonlinear functions.

    Raises:
        UnsupportedArithmeticError: the scales are so far apart that small terms would be lost, while the rows of the
            base are equal: for example attention scores without positions, which only a softmax can handle.
    """
    if len(x.terms) < 2:
        return x
    scales = [term.log_scale for term in x.terms]
    shapes = {term.values.shape for term in x.terms}
    if max(scales) - min(scales) > LOST and len(shapes) > 1 and x.base.shape != x.shape:
        refuse("a function that is not linear", "it acts on attention scores without positions, before their softmax")
    return merged(x)


def written(x: Deviation, new: Deviation, write_back: Callable[[Tensor, Tensor], Tensor]) -> Deviation:
    """``x`` after ``new`` was written to a part of it."""
    # One scale for both, so that the written part and the rest can be one tensor.
    held, other = merged(x), merged(new)
    base = write_back(held.base.expand(x.shape), other.base.expand(new.shape))
    top = max((term.log_scale for term in (*held.terms, *other.terms)), default=0.0)
    values = write_back(_at_scale(held, top), _at_scale(other, top))
    return Deviation(one_row(base), (Term(top, values),) if held.terms or other.terms else (), x.shape)


def _at_scale(x: Deviation, scale: float) -> Tensor:
    if not x.terms:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return (x.terms[0].values * exp(x.terms[0].log_scale - scale)).expand(x.shape)

"""A tensor that knows by how little its tokens differ: a common part, and deviations with log-scales of their own.

A model runs on it unmodified: each ATen operation that meets one goes to its rule (``rankscope.deviation.rules``).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankscope._errors import InputError
from rankscope.deviation.registry import RULES, refuse


class Term(NamedTuple):
    """``e^{log_scale} values``; axes along which it is constant have size 1."""

    log_scale: float
    values: Tensor


class Deviation(Tensor):
    r"""A tensor :math:`B + \sum_t e^{s_t} D_t` in float64, the log-scales :math:`s_t` being plain numbers.

    Exact: every rule keeps the relative accuracy of each term, whatever its scale, so that tokens may differ by
    10^-100000 of themselves. ``base`` and every term are stored with size 1 along axes on which they are constant: a
    base with equal rows is one row. The residual stream has one term; attention scores have several, whose differences
    in scale the softmax needs. All sequences in one Deviation share its scales, so each sequence gets its own.

    Attributes:
        base: the common part.
        terms: the deviations.
        null_axis: an axis along which every term sums to exactly zero, as that of a softmax does; None where unknown.
        base_sum: what ``base`` sums to exactly along that axis; None where unknown.

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
        """A deviation of this shape, or of the shape its parts broadcast to."""
        if shape is None:
            shape = torch.broadcast_shapes(base.shape, *(term.values.shape for term in terms))
        out: Deviation = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, tuple(shape), dtype=torch.float64, device=base.device
        )
        out.base, out.terms = _padded(base, len(shape)), tuple(Term(s, _padded(v, len(shape))) for s, v in terms)
        out.null_axis, out.base_sum, out.source = null_axis, base_sum, None
        return out

    def __repr__(self) -> str:  # type: ignore[override]
        """Shape and scales; the numbers are in ``base`` and ``terms``."""
        scales = ", ".join(f"e^{term.log_scale:.6g} {tuple(term.values.shape)}" for term in self.terms)
        return f"Deviation({tuple(self.shape)}: base {tuple(self.base.shape)}, terms [{scales}])"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Send an operation to its rule."""
        import rankscope.deviation.rules  # noqa: F401  (fills the registry)

        kwargs = kwargs or {}
        packet = func.overloadpacket
        found = RULES.get(packet)
        if found is not None:
            return found(*args, **kwargs)
        name = packet.__name__
        plain = RULES.get(getattr(torch.ops.aten, name[:-1], None)) if name.endswith("_") else None
        if plain is None:
            refuse(packet)
        return args[0].overwritten(plain(*args, **kwargs), packet) if isinstance(args[0], cls) else refuse(
            packet, "it writes a deviation into a plain tensor"
        )

    def overwritten(self, new: Deviation | Tensor, operation: Any) -> Deviation:
        """Take over the parts of ``new``, as an operation in place does."""
        if self.source is not None and self.source() is not None:
            refuse(operation, "it writes into a view of a tensor that is still in use")
        if isinstance(new, Deviation):
            self.base, self.terms, self.null_axis, self.base_sum = new.base, new.terms, new.null_axis, new.base_sum
        else:
            self.base, self.terms, self.null_axis, self.base_sum = new, (), None, None
        return self

    @classmethod
    def from_tokens(cls, x: Tensor, keep: Tensor | None = None) -> Deviation:
        """The rows of ``x`` as their mean and what departs from it.

        Args:
            x: one sequence, any shape ``(..., dim)``; every row along the last axis is a token.
            keep: which rows enter the mean, in any shape with as many entries as there are rows; None for all.
        """
        if not x.is_floating_point() or x.dim() < 2:
            raise InputError(f"Tokens were given as a {x.dtype} tensor of shape {tuple(x.shape)}; expected (..., dim).")
        return cls(torch.zeros(1, dtype=torch.float64, device=x.device), (Term(0.0, x.detach().double()),)).recentred(
            keep
        )

    def recentred(self, keep: Tensor | None = None) -> Deviation:
        """The same value with the mean of the kept rows as base and one term of unit Frobenius norm over these rows.

        Where the base differs between rows its differences become part of the term, and plain float64 is the limit.
        """
        whole = merged(self)
        scale, values = whole.terms[0] if whole.terms else Term(0.0, torch.zeros_like(whole.base))
        base = whole.base
        if any(size != 1 for size in base.shape[:-1]):
            center = _mean(base.expand(self.shape), keep)
            values = torch.add((base - center).expand(self.shape), values, alpha=exp(scale))
            base, scale = center, 0.0
        values = values.expand(self.shape)
        mean = _mean(values, keep)
        values = values - mean
        base = base + scaled(scale, mean)
        norm = float(torch.linalg.vector_norm(_kept(values, keep)))
        if norm == 0.0:
            return Deviation(base, (), self.shape)
        return Deviation(base, (Term(scale + math.log(norm), values / norm),), self.shape)

    def log_residual(self, keep: Tensor | None = None) -> float:
        r"""Natural logarithm of :math:`\|C X\|_F` over the kept rows. Exact; minus infinity where rows are equal."""
        centred = self.recentred(keep)
        return centred.terms[0].log_scale if centred.terms else -math.inf

    def log_norm(self, keep: Tensor | None = None) -> float:
        r"""Natural logarithm of :math:`\|X\|_F` over the kept rows; minus infinity at zero."""
        norm = float(torch.linalg.vector_norm(_kept(self.to_plain(), keep)))
        return math.log(norm) if norm > 0 else -math.inf

    def to_plain(self) -> Tensor:
        """The value in ordinary float64, where small terms are lost."""
        return total(self).expand(self.shape)


def total(x: Deviation) -> Tensor:
    """The value in ordinary arithmetic, constant axes still of size 1."""
    out = x.base
    for term in x.terms:
        out = torch.add(out, term.values, alpha=exp(term.log_scale))
    return out


def exp(log_scale: float) -> float:
    """``e^log_scale``, zero where that underflows, infinite where it overflows."""
    if log_scale > 709.0:
        return math.inf
    return math.exp(log_scale) if log_scale > -745.0 else 0.0


def scaled(log_scale: float, values: Tensor) -> Tensor:
    """``e^log_scale values``, without a pass over them where it is one."""
    return values if log_scale == 0.0 else values * exp(log_scale)


def merged(x: Deviation) -> Deviation:
    """The same value with one term at most; small terms are rounded in the units of the largest."""
    if len(x.terms) < 2:
        return x
    top = max(term.log_scale for term in x.terms)
    values = x.terms[0].values * exp(x.terms[0].log_scale - top)
    for term in x.terms[1:]:
        values = torch.add(values, term.values, alpha=exp(term.log_scale - top))
    return Deviation(x.base, (Term(top, values),), x.shape, null_axis=x.null_axis, base_sum=x.base_sum)


def gathered(terms: Sequence[Term]) -> tuple[Term, ...]:
    """Terms of the same stored shape added up; others stay apart."""
    groups: dict[torch.Size, Term] = {}
    for term in terms:
        held = groups.get(term.values.shape)
        groups[term.values.shape] = term if held is None else _sum(held, term)
    return tuple(groups.values())


def _sum(one: Term, other: Term) -> Term:
    large, small = (one, other) if one.log_scale >= other.log_scale else (other, one)
    factor = exp(small.log_scale - large.log_scale)
    return large if factor == 0.0 else Term(large.log_scale, torch.add(large.values, small.values, alpha=factor))


def _padded(part: Tensor, axes: int) -> Tensor:
    return part if part.dim() == axes else part.reshape((1,) * (axes - part.dim()) + part.shape)


def _kept(values: Tensor, keep: Tensor | None) -> Tensor:
    rows = values.reshape(-1, values.shape[-1])
    return rows if keep is None else rows[keep.reshape(-1)]


def _mean(values: Tensor, keep: Tensor | None) -> Tensor:
    return _kept(values, keep).mean(dim=0).reshape((1,) * (values.dim() - 1) + (values.shape[-1],))

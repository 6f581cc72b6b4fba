"""Sums, products, quotients and roots of deviations, with each difference in closed form.

The pattern of every rule: for a function f and a value b + d, the new base is f(b) and the new term is a formula for
f(b + d) - f(b) that contains no subtraction of nearly equal numbers, so it is accurate for any size of d.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse, rule
from rankscope.exact_arithmetic.rules.activations import smooth
from rankscope.exact_arithmetic.tensor import Deviation, joined
from rankscope.exact_arithmetic.terms import Term, broadcast, exp, gathered

aten = torch.ops.aten

# Numbers of this size or larger hide keys; added to a deviation they would round it away.
_MASKING = 1e3


def plain_part(value: Any, beside: Deviation) -> Tensor:
    """A number or plain tensor in float64, reduced to size 1 along axes on which it and ``beside.base`` are constant.

    This detects a mask that is the same for every row, so that rows stay equal.
    """
    if not isinstance(value, Tensor):
        return torch.tensor(value, dtype=torch.float64, device=beside.device)
    plain: Tensor = value if value.is_complex() else value.double()
    for back in range(1, min(plain.dim(), beside.base.dim()) + 1):
        if plain.shape[-back] > 1 and beside.base.shape[-back] == 1:
            first = plain.narrow(-back, 0, 1)
            if plain.stride(-back) == 0 or bool((plain == first).all()):
                plain = first
    return plain


def shape_of(*operands: Any) -> torch.Size:
    """The shape these broadcast to."""
    return broadcast(*(x.shape if isinstance(x, Tensor) else () for x in operands))


@rule(aten.add)
def add(a: Any, b: Any, *, alpha: float = 1) -> Deviation:
    """``a + alpha b``, with the terms of both."""
    if not isinstance(a, Deviation):
        return add(mul(b, alpha) if alpha != 1 else b, a)
    if isinstance(b, Deviation):
        base = torch.add(a.base, b.base, alpha=alpha)
        more = b.terms if alpha == 1 else [Term(s, v * alpha) for s, v in b.terms]
        return _with_sums(Deviation(base, gathered((*a.terms, *more)), shape_of(a, b)), a, b, alpha)
    plain = plain_part(b, a)
    plain = plain if alpha == 1 else plain * alpha
    # Adding b to the base would make it larger than both (one varies over rows, the other along them). Keep b as a
    # term instead, unless it is a mask.
    grows = broadcast(a.base.shape, plain.shape).numel() > max(a.base.numel(), plain.numel())
    if grows and not plain.is_complex() and bool((plain.abs() < _MASKING).all()):
        return Deviation(a.base, gathered((*a.terms, Term(0.0, _aligned(plain, a)))), shape_of(a, b))
    kept = a.null_axis if isinstance(b, Tensor) is False or b.dim() <= a.dim() else None
    return Deviation(a.base + plain, a.terms, shape_of(a, b), null_axis=kept)


def _aligned(plain: Tensor, beside: Deviation) -> Tensor:
    return plain.reshape((1,) * (beside.dim() - plain.dim()) + plain.shape) if plain.dim() < beside.dim() else plain


def _with_sums(out: Deviation, a: Deviation, b: Deviation, alpha: float) -> Deviation:
    """Keep the null axis: if the terms of both sum to zero along it, so do those of the sum."""
    if a.null_axis is not None and a.null_axis == b.null_axis and a.shape == b.shape:
        out.null_axis = a.null_axis
        known = a.base_sum is not None and b.base_sum is not None
        out.base_sum = a.base_sum + alpha * b.base_sum if known else None  # type: ignore[operator]
    return out


@rule(aten.sub, aten.subtract)
def sub(a: Any, b: Any, *, alpha: float = 1) -> Deviation:
    """``a - alpha b``."""
    return add(a, b, alpha=-alpha)


@rule(aten.rsub)
def rsub(a: Any, b: Any, alpha: float = 1) -> Deviation:
    """``b - alpha a``."""
    return add(b, a, alpha=-alpha)


@rule(aten.neg)
def neg(x: Deviation) -> Deviation:
    """``-x``."""
    return mul(x, -1.0)


@rule(aten.mul, aten.multiply)
def mul(a: Any, b: Any) -> Deviation:
    """Product rule, including the product of the deviations."""
    if not isinstance(a, Deviation):
        return mul(b, a)
    if not isinstance(b, Deviation):
        return _times_plain(a, b)
    # (a0 + da)(b0 + db) = a0 b0 + a0 db + da b0 + da db.
    crossed = [Term(s, a.base * v) for s, v in b.terms] + [Term(s, v * b.base) for s, v in a.terms]
    both = [] if _dwarfs(a) and _dwarfs(b) else [Term(s + t, u * v) for s, u in a.terms for t, v in b.terms]
    return Deviation(a.base * b.base, gathered((*crossed, *both)), shape_of(a, b))


def _dwarfs(x: Deviation) -> bool:
    """Whether the base is so much larger than the terms that their products are negligible."""
    return all(term.log_scale < -250.0 for term in x.terms) and bool((x.base != 0).all())


def _times_plain(a: Deviation, b: Any) -> Deviation:
    factor = plain_part(b, a)
    terms = tuple(Term(s, v * factor) for s, v in a.terms)
    # A factor that is constant along the null axis keeps sums of zero; a single number also keeps the base sum.
    null, total = None, None
    if a.null_axis is not None and (factor.dim() == 0 or factor.shape[a.null_axis - a.dim() :][:1] == (1,)):
        null = a.null_axis
        total = a.base_sum * float(factor) if factor.numel() == 1 and a.base_sum is not None else None
    return Deviation(a.base * factor, terms, shape_of(a, b), null_axis=null, base_sum=total)


@rule(aten.div, aten.divide, aten.true_divide)
def div(a: Any, b: Any) -> Deviation:
    """``a / b``, as ``a`` times the reciprocal of ``b``."""
    if not isinstance(b, Deviation):
        return mul(a, 1.0 / plain_part(b, a))
    return mul(a, reciprocal(b))


@rule(aten.reciprocal)
def reciprocal(x: Deviation) -> Deviation:
    """Difference ``1/(b+d) - 1/b = -d / (b (b+d))``."""
    x = joined(x)
    return with_difference(x, 1.0 / x.base, lambda b, d, e: -d / (b * (b + e * d)))


@rule(aten.sqrt)
def sqrt(x: Deviation) -> Deviation:
    """The difference of two roots is d over their sum."""
    x = joined(x)
    return with_difference(x, x.base.sqrt(), lambda b, d, e: d / ((b + e * d).sqrt() + b.sqrt()))


@rule(aten.rsqrt)
def rsqrt(x: Deviation) -> Deviation:
    """Difference ``1/B - 1/A = -d / (A B (A + B))`` with ``A = sqrt(b)`` and ``B = sqrt(b+d)``."""
    x = joined(x)

    def difference(b: Tensor, d: Tensor, e: float) -> Tensor:
        A, B = b.sqrt(), (b + e * d).sqrt()
        return -d / (A * B * (A + B))

    return with_difference(x, x.base.rsqrt(), difference)


@rule(aten.exp)
def exponential(x: Deviation) -> Deviation:
    """Difference ``e^b (e^d - 1)``."""
    return with_difference(joined(x), x.base.exp(), lambda b, d, e: b.exp() * relative_expm1(d, e))


@rule(aten.expm1)
def expm1(x: Deviation) -> Deviation:
    """The same difference as for ``exp``."""
    return with_difference(joined(x), x.base.expm1(), lambda b, d, e: b.exp() * relative_expm1(d, e))


@rule(aten.log)
def log(x: Deviation) -> Deviation:
    """Difference ``log(1 + d/b)``."""
    return with_difference(joined(x), x.base.log(), lambda b, d, e: torch.log1p(e * d / b) / e if e > 1e-290 else d / b)


@rule(aten.log1p)
def log1p(x: Deviation) -> Deviation:
    """``log(1 + x)``."""
    return log(add(x, 1.0))


def relative_expm1(d: Tensor, e: float) -> Tensor:
    """``(exp(e d) - 1) / e``, which is ``d`` if e underflows."""
    return torch.expm1(e * d) / e if e > 1e-290 else d


@rule(aten.pow)
def power(x: Any, exponent: Any) -> Deviation:
    """Integer powers as products, half-integer ones as roots, others by quadrature or ``exp(exponent log x)``."""
    if isinstance(x, Deviation) and isinstance(exponent, (int, float)):
        closed = {-1: reciprocal, 0.5: sqrt, -0.5: rsqrt}.get(exponent)
        if closed is not None:
            return closed(x)
        if exponent == int(exponent) and 1 <= exponent <= 4:
            return _whole_power(x, int(exponent))
        return smooth(x, lambda b: b.pow(exponent), lambda b: exponent * b.pow(exponent - 1))
    base = x.base if isinstance(x, Deviation) else plain_part(x, exponent)
    if not bool((base > 0).all()):
        refuse("aten.pow", "the base is not positive, and the exponent is not a single number")
    return exponential(mul(log(x) if isinstance(x, Deviation) else base.log(), exponent))


def _whole_power(x: Deviation, exponent: int) -> Deviation:
    out = x
    for _ in range(exponent - 1):
        out = mul(out, x)
    return out


@rule(aten.square)
def square(x: Deviation) -> Deviation:
    """``x x``."""
    return mul(x, x)


@rule(aten.addcmul)
def addcmul(x: Any, a: Any, b: Any, *, value: float = 1) -> Deviation:
    """``x + value a b``."""
    product = mul(a, b) if isinstance(a, Deviation) or isinstance(b, Deviation) else a * b
    return add(x, product, alpha=value)


def with_difference(x: Deviation, value: Tensor, difference: Any) -> Deviation:
    """``value`` as the base, and ``difference(base, values, e^log_scale)``, in units of the scale, as the term."""
    terms: Sequence[Term] = [Term(s, difference(x.base, v, exp(s))) for s, v in x.terms]
    return Deviation(value, terms, x.shape)

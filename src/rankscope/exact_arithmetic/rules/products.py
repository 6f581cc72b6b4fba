"""Matrix products: linear maps with plain weights, and products of two deviations, whose parts are kept separate.

In ``Q K^T`` the parts have different scales: one number, a part that is the same for every row, one that is constant
along a row, and one that is neither. In ``P V`` it is known that the rows of the softmax P sum to exactly one and its
deviations to zero, so the common part of V passes through unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse, rule
from rankscope.exact_arithmetic.rounding import are_moved, fingerprint, moved, product_fingerprint
from rankscope.exact_arithmetic.rules.arithmetic import add, mul
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term, broadcast, common_parts, gathered, normalised

aten = torch.ops.aten

# A sum this much smaller than its summands has at most four correct digits.
_CANCELLED = 2.0**-40
# At most this many numbers are summed exactly: more would take seconds.
_AFFORDABLE = 2**22


@rule(aten.mm, aten.bmm, aten.matmul)
def product(a: Any, b: Any) -> Deviation:
    """``a @ b``, at least one of which is a deviation."""
    if isinstance(a, Deviation) and not isinstance(b, Deviation):
        if b.dim() == 2 and a.dim() == 2 and a.null_axis is None:
            return _rows_through(a, b)
        b = Deviation(b.double())
    elif not isinstance(a, Deviation):
        a = Deviation(a.double())
    shape = (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    base, terms = _common_rows(*_parts(a, b))
    # Products with deviations of a softmax can be far smaller than their log-scales: normalise before comparing scales.
    if a.null_axis is not None:
        terms = [normalised(term) for term in terms]
    return Deviation(base, gathered(terms), shape)


def _rows_through(x: Deviation, weight: Tensor) -> Deviation:
    """A linear map of rows; a one-row base is appended to the rows of the term, so that one product does both."""
    weight = weight.double()
    shape = (x.shape[0], weight.shape[1])
    if len(x.terms) != 1 or x.base.shape != (1, x.shape[1]) or x.terms[0].values.shape != x.shape:
        terms = [Term(s, _contract(v, weight)) for s, v in x.terms]
        return Deviation(_equal_rows_alike(x.base, weight), terms, shape)
    scale, values = x.terms[0]
    rows = _matmul(torch.cat((values, x.base)), weight)
    return Deviation(rows[-1:], (Term(scale, rows[:-1]),), shape)


def _equal_rows_alike(base: Tensor, weight: Tensor) -> Tensor:
    """``base @ weight``, with equal rows staying equal to the last bit, which a kernel does not guarantee."""
    if base.shape[0] == 1 or base.shape[1] == 1:
        return _contract(base, weight)
    # BLAS may use different kernels for different rows of one product, so multiply each distinct row only once.
    distinct, place = torch.unique(base, dim=0, return_inverse=True)
    products = _matmul(distinct, weight)
    return products[place]


def _parts(a: Deviation, b: Deviation) -> tuple[Tensor, list[Term]]:
    """Every part of ``a`` times every part of ``b``."""
    inner = a.shape[-1]
    a_null, b_null = a.null_axis == a.dim() - 1, b.null_axis == b.dim() - 2
    terms = []
    base = _through_base(a, b.base, inner, b.base_sum if b_null else None)
    for s, u in a.terms:
        if a_null and b.base.shape[-2] > 1 and s == 0.0:
            # Rows of attention that differ at order one, times values that differ: the rows have nothing in common.
            base = base + _contract(u, b.base, inner)
        # A term of a softmax sums to zero along the keys, so its product with values that are constant there is zero.
        elif not (a_null and b.base.shape[-2] == 1 < inner):
            terms.append(Term(s, _contract(u, b.base, inner)))
        # The same for the product of two terms, with either factor constant along the keys.
        for t, v in b.terms:
            if not (a_null and v.shape[-2] == 1 < inner) and not (b_null and u.shape[-1] == 1 < inner):
                terms.append(Term(s + t, _contract(u, v, inner)))
    for t, v in b.terms:
        if not (b_null and a.base.shape[-1] == 1 < inner):
            terms.append(Term(t, _through_base(a, v, inner)))
    return base, terms


def _through_base(a: Deviation, v: Tensor, inner: int, right_sum: float | None = None) -> Tensor:
    """The base of ``a`` times a part, using exactly known sums instead of computing them."""
    # Attention rows sum to exactly one: values that are the same for all keys pass through without a sum.
    if a.null_axis == a.dim() - 1 and a.base_sum is not None and v.shape[-2] == 1 < inner:
        return v * a.base_sum
    if right_sum is not None and a.base.shape[-1] == 1 < inner:
        return a.base * right_sum
    return _contract(a.base, v, inner)


def _contract(u: Tensor, v: Tensor, inner: int | None = None) -> Tensor:
    """``u @ v``, where either may be constant along the inner axis, of length ``inner``."""
    inner = max(u.shape[-1], v.shape[-2]) if inner is None else inner
    if u.shape[-1] == v.shape[-2] == 1:
        return u * v * float(inner)
    if u.shape[-1] == 1:
        return u * v.sum(dim=-2, keepdim=True)
    if v.shape[-2] == 1:
        return u.sum(dim=-1, keepdim=True) * v
    return _matmul(u, v)


def _matmul(u: Tensor, v: Tensor) -> Tensor:
    """``u @ v``; entries in which all but the last digits cancel are computed exactly and rounded once.

    Heads that cancel each other, and masks whose products average exactly, produce such sums: rounding at every step
    would leave a residue of 1e-16 instead of zero.
    """
    out: Tensor = u @ v
    if out.is_complex():
        return out
    # Cauchy-Schwarz bounds an entry by the product of the norms; an entry far below it is the result of cancellation.
    sizes = torch.linalg.vector_norm(u, dim=-1, keepdim=True) * torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    cancelled = (out.abs() < sizes * _CANCELLED) & (out != 0)
    if bool(cancelled.any()):
        out[cancelled] = _rounded_once(u, v, out.shape, cancelled)
    if not are_moved():
        return out
    # Perturb rows of a linear map by their input, and entries of attention by the pairs that were multiplied.
    return moved(out, fingerprint(u, -1) if v.dim() == 2 else product_fingerprint(u, v))


def _rounded_once(u: Tensor, v: Tensor, shape: torch.Size, chosen: Tensor) -> Tensor:
    """These entries of ``u @ v`` from exact products and an exact sum; unchanged if there are too many."""
    *batch, rows, columns = shape
    place = chosen.nonzero(as_tuple=True)
    inner = u.shape[-1]
    if place[0].numel() * inner > _AFFORDABLE:
        return (u @ v)[chosen]
    a = u.expand(*batch, rows, inner)[(*place[:-2], place[-2])]
    b = v.expand(*batch, inner, columns).transpose(-1, -2)[(*place[:-2], place[-1])]
    # Each product is high + low exactly, and fsum adds all of them with a single rounding.
    high = a * b
    low = _product_error(a, b, high)
    sums = [math.fsum(pair) for pair in torch.cat((high, low), dim=-1).tolist()]
    return torch.tensor(sums, dtype=u.dtype, device=u.device)


def _product_error(a: Tensor, b: Tensor, product: Tensor) -> Tensor:
    """The exact value of ``a b - product`` (Dekker 1971)."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(a: Tensor) -> tuple[Tensor, Tensor]:
    scaled = a * 134217729.0  # 2^27 + 1: splits 53 bits into two halves whose products are exact
    high = scaled - (scaled - a)
    return high, a - high


def _common_rows(base: Tensor, terms: Sequence[Term]) -> tuple[Tensor, list[Term]]:
    """Move parts that are the same for every row to the base, if the base is.

    Scores that differ between keys stay separate from a base that is one number: added to it, they would be rounded.
    """
    if base.shape[-2] > 1:
        return base, list(terms)
    if base.shape[-1] > 1:
        return common_parts(base, terms)
    apart = [term for term in terms if term.values.shape[-1] > 1]
    base, rest = common_parts(base, [term for term in terms if term.values.shape[-1] == 1])
    return base, [*apart, *rest]


@rule(aten.addmm, aten.baddbmm)
def added_product(bias: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Deviation:
    """``beta bias + alpha a @ b``."""
    if isinstance(a, Deviation) or isinstance(b, Deviation):
        out = product(a, b)
        out = out if alpha == 1 else mul(out, alpha)
        if beta == 0:
            return out
        return add(out, bias, alpha=beta)
    return add(torch.mul(a @ b, alpha), bias, alpha=beta)


@rule(aten.addbmm, aten.dot, aten.mv, aten.addmv)
def _no_product(*args: Any, **kwargs: Any) -> Deviation:
    refuse("aten.dot/mv/addmv", "products with a single vector have no rule yet")


@rule(aten.convolution)
def convolution(
    x: Any,
    weight: Any,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Deviation:
    """A convolution with plain weights. A base with equal rows needs one window only, unless padding adds others."""
    if not isinstance(x, Deviation) or isinstance(weight, Deviation):
        refuse("aten.convolution", "its weights depend on the tokens")
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    terms = [Term(s, aten.convolution(v.expand(x.shape), weight, None, *rest)) for s, v in x.terms]
    window = [step * (size - 1) + 1 for step, size in zip(dilation, weight.shape[2:], strict=True)]
    equal = not transposed and not any(padding) and all(size == 1 for size in x.base.shape[2:])
    shape = (*x.shape[:2], *window) if equal else x.shape
    base = aten.convolution(x.base.expand(shape), weight, bias, *rest)
    whole = terms[0].values.shape if terms else aten.convolution(x.base.expand(x.shape), weight, bias, *rest).shape
    return Deviation(base, terms, whole)


@rule("_grouped_mm", "transformers.grouped_mm_fallback")
def grouped_product(
    x: Any, weight: Any, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Deviation:
    """Rows in groups, each group times its own matrix; a one-row base is multiplied once per group."""
    if isinstance(weight, Deviation) or x.dim() != 2 or weight.dim() != 3 or offs is None or bias is not None:
        refuse("aten._grouped_mm", "the rule knows rows of two axes in groups, and plain weights without a bias")
    ends = [0, *offs.tolist()]
    sizes = [after - before for before, after in pairwise(ends)]
    if ends[-1] < x.shape[0]:
        sizes.append(x.shape[0] - ends[-1])
        weight = torch.cat((weight, torch.zeros_like(weight[:1])))
    if x.base.shape[0] == 1 < x.shape[0]:
        rows = (x.base @ weight.double()).squeeze(1)
        base = rows.repeat_interleave(torch.tensor(sizes, device=rows.device), dim=0)
    else:
        base = _by_group(x.base, weight, sizes)
    terms = [Term(s, _by_group(v.expand(x.shape), weight, sizes)) for s, v in x.terms]
    return Deviation(base, terms, (x.shape[0], weight.shape[2]))


def _by_group(rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    parts = torch.split_with_sizes(rows, sizes)
    return torch.cat([part @ matrix.double() for part, matrix in zip(parts, weight, strict=True)])

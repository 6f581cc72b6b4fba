"""The products of rows with the weights of the expert each was sent to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse, rule
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term


@rule("_grouped_mm", "transformers.grouped_mm_fallback")
def grouped_product(
    x: Any, weight: Any, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Deviation:
    """Rows in groups, each group times a matrix of its own; a base of one row is multiplied once for each group."""
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

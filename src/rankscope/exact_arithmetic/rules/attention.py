"""The fused attention kernel, decomposed into its products and softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rankscope.exact_arithmetic.registry import refuse, rule
from rankscope.exact_arithmetic.rules.arithmetic import add, mul
from rankscope.exact_arithmetic.rules.products import product
from rankscope.exact_arithmetic.rules.softmax import softmax
from rankscope.exact_arithmetic.tensor import Deviation

aten = torch.ops.aten


@rule("_scaled_dot_product_flash_attention_for_cpu")
def flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, Tensor]:
    """The kernel that torch uses on a CPU."""
    if dropout_p:
        refuse("scaled_dot_product_attention", "dropout is on; call model.eval()")
    return attend(query, key, value, attn_mask, is_causal, scale), torch.empty(0, dtype=torch.float64)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Deviation:
    """``softmax(scale Q K^T + mask) V``.

    Without positions, and without a mask or with the same mask for every row, the deviation is of third order;
    otherwise it is of first order. If the common part of the queries differs between rows, by position, the scores are
    computed in ordinary arithmetic.
    """
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=-3) for t in (key, value))
    # The kernel's causal flag becomes an ordinary additive mask, whose rows differ: collapse is then of first order.
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = torch.zeros_like(causal, dtype=torch.float64).masked_fill(~causal, -torch.inf)
    # Scores of tokens that differ at order one have nothing small to keep separate.
    if _rows_differ(query):
        query, key = (t.to_plain() if isinstance(t, Deviation) else t for t in (query, key))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if isinstance(query, Deviation) or isinstance(key, Deviation):
        scores = mul(product(query, key.transpose(-1, -2)), factor)
    else:
        scores = Deviation(query @ key.transpose(-1, -2) * factor)
    if mask is not None:
        scores = add(scores, mask)
    return product(softmax(scores, -1), value)


def _rows_differ(query: Tensor) -> bool:
    """Whether queries differ between rows even for equal tokens, by position."""
    rows = query.base if isinstance(query, Deviation) else query
    return rows.shape[-2] > 1 and not bool((rows == rows[..., :1, :]).all())

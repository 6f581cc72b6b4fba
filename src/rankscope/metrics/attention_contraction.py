"""Upper bound on how much one attention layer amplifies differences between tokens, attained by some."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.attention_view import AttentionView
from rankscope.metrics._spec import CHANNEL_ORDER, TOKEN_ORDER, attention_metric


@attention_metric(
    symbol=r"s_1(CP)",
    range=(0.0, math.inf),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER,
    needs="spectrum",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    cites=(Cite("wu2024role"),),
)
def attention_contraction(attention: AttentionView) -> Tensor:
    r"""Largest singular value of the centred attention matrix, :math:`s_1(CP)`, C centring over query rows.

    **Exact**; not offered for attention that is computed a few rows at a time. For rows that sum to one, CP = CPC, so
    :math:`\|CPX\|_F \le s_1(CP)\|CX\|_F` for every X, with equality for some: the worst case over tokens for one
    mixing. 0 when all rows are equal (every X collapses at once),
    1 for the identity; above 1, up to :math:`\sqrt n`, attention may even move tokens apart. Rows outside ``keep`` are
    excluded. Undefined for fewer than two rows and for P = 0.

    Example:
        >>> import torch
        >>> round(attention_contraction(torch.eye(4).unsqueeze(0)).item(), 12)
        1.0
    """
    return attention.largest_centred_singular_value

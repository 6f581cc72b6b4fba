"""Upper bound on how much one attention layer can amplify differences between tokens."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.attention_view import AttentionView
from rankscope.metrics._spec import CHANNEL_ORDER, TOKEN_ORDER, attention_metric


@attention_metric(
    symbol=r"\overline{s_1}(CP)",
    range=(0.0, math.inf),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER,
    needs="spectrum",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    cites=(Cite("wu2024role"),),
)
def attention_contraction_bound(attention: AttentionView) -> Tensor:
    r"""Upper bound on :math:`s_1(CP)`; ``attention_contraction`` is the lower bound.

    **Bound.** The two are equal if all probabilities are held in memory. For attention computed tile by tile, this
    is the smaller of :math:`\sqrt{\max_j \sum_i P_{ij}}` and what the energy outside the tried directions allows, both
    up to rounding; it may be far larger even if ``attention_contraction`` has converged. Undefined for fewer than two
    rows and for P = 0.

    Example:
        >>> import torch
        >>> round(attention_contraction_bound(torch.eye(4).unsqueeze(0)).item(), 12)
        1.0
    """
    return attention.centred_singular_value_bound

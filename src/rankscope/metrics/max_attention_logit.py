"""How large attention scores become."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.attention_scores import AttentionScores
from rankscope.metrics._spec import CHANNEL_ORDER, TOKEN_ORDER, score_metric


@score_metric(
    symbol=r"\max_{ij} S_{ij}",
    range=(-math.inf, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER,
    needs="norms",
    cites=(Cite("zhai2023stabilizing"), Cite("dehghani2023scaling")),
)
def max_attention_logit(scores: AttentionScores) -> Tensor:
    r"""Largest attention score as it enters the softmax, :math:`\max_{ij} S_{ij}`, over the keys a query may see.

    **Exact.** After scale, bias, soft cap and mask, before the softmax. Growth over training precedes entropy collapse
    and divergence; it is the number that QK-norm and QK-clipping hold down. A softmax does not change if a constant is
    added to its row, so the value is that of the model's own arithmetic. Undefined if no row sees a key.

    Example:
        >>> import torch
        >>> max_attention_logit(torch.tensor([[[1.0, -math.inf], [0.5, 2.0]]])).item()
        2.0
    """
    return scores.largest

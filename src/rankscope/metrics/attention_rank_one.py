"""How far attention is from giving every token the same mixture."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.attention_view import AttentionView
from rankscope.metrics._spec import CHANNEL_ORDER, TOKEN_ORDER, attention_metric


@attention_metric(
    symbol=r"\min_p \|P - 1p^T\|_F / \|P\|_F",
    range=(0.0, 1.0),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER,
    needs="norms",
    reads_deviation=True,
    least_count=2,
    cites=(Cite("dong2021attention"),),
)
def attention_rank_one_distance(attention: AttentionView) -> Tensor:
    r"""Relative distance of P from the nearest matrix of equal rows, :math:`\|CP\|_F / \|P\|_F`.

    **Exact.** A stochastic matrix of rank one is :math:`1p^T`; in the nearest, p is the mean row. 0 when every query
    gets the same mixture, so that all tokens are equal after the layer; at most :math:`\sqrt{1 - 1/n}`, for the
    identity, where every token attends only to itself. Undefined for fewer than two rows and for P = 0.

    Example:
        >>> import torch
        >>> round(attention_rank_one_distance(torch.eye(4).unsqueeze(0)).item() ** 2, 12)
        0.75
    """
    return attention.relative_deviation

"""How much attention a token pays to itself."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.attention_view import AttentionView
from rankscope.metrics._spec import TOKEN_ORDER, attention_metric


@attention_metric(
    symbol=r"\overline{P_{ii}}",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER,
    needs="norms",
    cites=(Cite("dong2021attention"),),
)
def diagonal_mass(attention: AttentionView) -> Tensor:
    r"""Mean probability that rows give to their own position.

    **Exact.** 1 when every token attends to itself alone, so that attention mixes nothing; 1/k when attention is
    uniform over k keys. Only rows with a choice count: those that see themselves and at least one other key. Undefined
    when no row has a choice, and in cross-attention with another number of keys than queries.

    Example:
        >>> import torch
        >>> diagonal_mass(torch.eye(4).expand(1, 4, 4)).item()
        1.0
    """
    counts = attention.valid & attention.sees_itself & (attention.support_size >= 2)
    return attention.own_mass.masked_fill(~counts, 0.0).sum(-1) / counts.sum(-1)

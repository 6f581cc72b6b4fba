"""How widely rows of attention spread."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.attention_view import AttentionView
from rankscope.metrics._spec import TOKEN_ORDER, attention_metric


@attention_metric(
    symbol=r"\overline{H(P_{i:})/\log k_i}",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER,
    needs="norms",
    depends_on_length=True,
    cites=(Cite("zhai2023stabilizing"),),
)
def attention_entropy(attention: AttentionView) -> Tensor:
    r"""Entropy of a row relative to its maximum, averaged over rows, :math:`H(P_{i:}) / \log k_i`.

    **Exact.** :math:`k_i` is the number of keys row i may see, so rows of different length are comparable. 0 when every
    row picks one key, 1 when every row is uniform. Rows are normalised by their own mass, which is below one in
    models with a learned sink. Rows that see only one key are excluded; undefined if no row is left, or if an entry is
    negative, as in attention that is mixed with other matrices.

    Example:
        >>> import torch
        >>> round(attention_entropy(torch.full((1, 4, 4), 0.25)).item(), 12)
        1.0
    """
    sums, size = attention.sums, attention.support_size
    entropy = (sums.mass.log() - sums.p_log_p / sums.mass) / size.log()
    counts = attention.valid & (size >= 2) & ~(sums.mass == 0)
    return entropy.masked_fill(~counts, 0.0).sum(-1) / counts.sum(-1)

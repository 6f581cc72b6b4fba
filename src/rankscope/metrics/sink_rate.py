"""How much attention goes to the first token."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.attention_view import AttentionView
from rankscope.metrics._spec import NONE, attention_metric


@attention_metric(
    symbol=r"\overline{P_{i1}}",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=NONE,
    needs="norms",
    cites=(Cite("xiao2024efficient", "sec. 3.1"),),
)
def first_token_sink_rate(attention: AttentionView) -> Tensor:
    r"""Mean probability that rows give to the first key.

    **Exact.** The first key is the first that any row may see, so left padding is not a sink. Only rows with a
    choice count: those that see the first key and at least one other (the first row of a causal mask does not). 1/k
    when attention is uniform over k keys, near 1 at a sink. Undefined when no row has a choice.

    Example:
        >>> import torch
        >>> first_token_sink_rate(torch.full((1, 4, 4), 0.25)).item()
        0.25
    """
    counts = attention.valid & attention.sees_first & (attention.support_size >= 2)
    return attention.first_mass.masked_fill(~counts, 0.0).sum(-1) / counts.sum(-1)

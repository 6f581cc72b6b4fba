"""How undecided a router is."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.routing import Routing
from rankscope.metrics._spec import TOKEN_ORDER, router_metric


@router_metric(
    symbol=r"\overline{H(p_i)} / \log E",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER,
    needs="norms",
    cites=(Cite("fedus2022switch"),),
)
def router_entropy(routing: Routing) -> Tensor:
    r"""Mean over tokens of the entropy of the router's probabilities over all E experts, over :math:`\log E`.

    **Exact.** 0 when every token is sure of one expert, 1 when all experts are equally likely for every token. It says
    how decided the router is, not whether the experts are used evenly; for that see ``effective_experts``. Undefined
    for a router without a softmax over all experts (sigmoid scores, or a softmax over the chosen ones only).

    Example:
        >>> import torch
        >>> probs, chosen = torch.full((3, 4), 0.25), torch.tensor([[0], [1], [2]])
        >>> router_entropy(probs, chosen).item()
        1.0
    """
    entropy = routing.entropies / math.log(routing.experts)
    counts = routing.valid & ~entropy.isnan()
    mean = entropy.masked_fill(~counts, 0.0).sum(-1) / counts.sum(-1)
    return mean.masked_fill(~routing.finite, math.nan)

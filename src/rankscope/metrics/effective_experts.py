"""How many experts are in use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.routing import Routing
from rankscope.linalg.tokens import largest
from rankscope.metrics._spec import CHANNEL_ORDER, TOKEN_ORDER, router_metric


@router_metric(
    symbol=r"e^{H(f)}",
    range=(1.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER,
    needs="norms",
    cites=(Cite("fedus2022switch"),),
)
def effective_experts(routing: Routing) -> Tensor:
    r"""Exponential of the entropy of the load, :math:`e^{H(f)}`, with :math:`f_e` the share of choices of expert e.

    **Exact.** E when all experts get equally many tokens, k when all tokens go to the same k. With n tokens it cannot
    exceed nk: take sequences much longer than the number of experts. Undefined without tokens.

    Example:
        >>> import torch
        >>> probs, chosen = torch.zeros(2, 4), torch.tensor([[0, 1], [1, 0]])
        >>> round(effective_experts(probs, chosen).item(), 12)
        2.0
    """
    entropy: Tensor = torch.special.entr(routing.load).sum(-1)
    return entropy.exp()


@router_metric(
    symbol=r"\max_e f_e",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER,
    needs="norms",
    cites=(Cite("fedus2022switch"),),
)
def largest_expert_share(routing: Routing) -> Tensor:
    r"""Largest share of the choices that one expert gets, :math:`\max_e f_e`.

    **Exact.** 1/E under perfect balance; 1/k when one expert is among the k of every token. Undefined without tokens.

    Example:
        >>> import torch
        >>> largest_expert_share(torch.zeros(2, 4), torch.tensor([[0, 1], [0, 2]])).item()
        0.5
    """
    return largest(routing.load)

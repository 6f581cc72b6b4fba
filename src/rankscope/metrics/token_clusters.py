"""How many tokens are copies of others."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, SCALE, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"\max_i |N(i)| / n",
    range=(0.0, 1.0),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="gram",
    least_count=2,
    cites=(Cite("geshkovski2023emergence"),),
)
def largest_cluster_share(tokens: Tokens) -> Tensor:
    r"""Largest share of the tokens that are copies of one of them, :math:`\max_i |N(i)| / n`.

    **Exact** for up to 128 tokens; longer sequences use 128 evenly spaced ones. :math:`N(i)` is the tokens within a
    relative distance of :math:`0.03\sqrt2` of token i, including itself. From 1/n (no copies) to 1 (all tokens are
    copies of one). Undefined for fewer than two tokens and for X = 0.

    Example:
        >>> import torch
        >>> largest_cluster_share(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.001], [0.0, 5.0]])).item()
        0.75
    """
    return tokens.pairs.largest_cluster


@token_metric(
    symbol=r"|\{i : |N(i)| > 1\}| / n",
    range=(0.0, 1.0),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="gram",
    least_count=2,
    cites=(Cite("geshkovski2023emergence"),),
)
def copied_token_share(tokens: Tokens) -> Tensor:
    r"""Share of the tokens that have a copy among the others, :math:`|\{i : |N(i)| > 1\}| / n`.

    **Exact** for up to 128 tokens; longer sequences use 128 evenly spaced ones. Copies are within a relative
    distance of :math:`0.03\sqrt2`. 0 when no token has a copy, 1 when each has one: at collapse, and when
    the tokens form clusters. Undefined for fewer than two tokens and for X = 0.

    Example:
        >>> import torch
        >>> copied_token_share(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])).item()
        0.5
    """
    return tokens.pairs.copied


@token_metric(
    symbol=r"\sum_i 1/|N(i)|",
    range=(0.0, math.inf),
    at_collapse=1.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | SCALE,
    needs="gram",
    least_count=2,
    depends_on_length=True,
    cites=(Cite("geshkovski2023emergence"),),
)
def distinct_tokens(tokens: Tokens) -> Tensor:
    r"""Number of distinct tokens, copies counted once, :math:`\sum_i 1/|N(i)|`.

    **Exact** for up to 128 tokens; in longer sequences it counts among 128 evenly spaced ones. Copies are within a
    relative distance of :math:`0.03\sqrt2`. 1 when all tokens are copies of one, k when they form k tight clusters, n
    when no two are copies. Undefined for fewer than two tokens and for X = 0.

    Example:
        >>> import torch
        >>> distinct_tokens(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])).item()
        2.0
    """
    return tokens.pairs.distinct

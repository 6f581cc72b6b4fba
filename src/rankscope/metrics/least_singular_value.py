"""How near X is to losing a direction."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, SHIFT, TOKEN_ORDER, token_metric


@token_metric(
    symbol=r"s_{\min}/s_{\max}(X)",
    range=(0.0, 1.0),
    at_collapse=0.0,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="spectrum",
    depends_on_length=True,
    cites=(Cite("golubvanloan2013matrix"),),
)
def least_singular_value(tokens: Tokens) -> Tensor:
    r"""Least singular value of X relative to the largest, :math:`s_{\min(n,d)} / s_1`.

    **Exact.** Inverse condition number: 1 when all singular values are equal, 0 when X lacks full rank, as at collapse
    (a single token or channel has only one and gives 1). At or below the float floor the value is rounding,
    and just above it has fewer than six correct digits; its status says so (``at the float floor``, ``estimated``).
    Undefined for X = 0.

    Example:
        >>> import torch
        >>> least_singular_value(torch.tensor([[2.0, 0.0], [0.0, 1.0]])).item()
        0.5
    """
    return _last_over_first(tokens.singular_values, tokens.rank_limit(centred=False))


@token_metric(
    symbol=r"s_{\min}/s_{\max}(CX)",
    range=(0.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE | SHIFT,
    needs="spectrum",
    reads_deviation=True,
    least_count=2,
    depends_on_length=True,
    cites=(Cite("golubvanloan2013matrix"),),
)
def centred_least_singular_value(tokens: Tokens) -> Tensor:
    r"""Least of the min(n-1, d) singular values of CX that need not be zero, relative to the largest.

    **Exact.** Blind to the mean token, and so to token uniformity: collapsed tokens whose differences are noise read as
    high as noise. Undefined when all tokens are equal.

    Example:
        >>> import torch
        >>> centred_least_singular_value(torch.tensor([[5.0, 1.0], [5.0, -1.0]])).item()
        1.0
    """
    return _last_over_first(tokens.centred_singular_values, tokens.rank_limit(centred=True))


def _last_over_first(singular_values: Tensor, rank: Tensor) -> Tensor:
    last = (rank.long() - 1).clamp_min(0).unsqueeze(-1)
    return (singular_values.gather(-1, last) / singular_values[:, :1]).squeeze(-1)

"""How large a change is relative to the stream it is added to."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.update import Update
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, update_metric


@update_metric(
    symbol=r"\mathrm{med}_i\, \|u_i\| / \|x_i\|",
    range=(0.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="order",
    cites=(Cite("de2020batch"), Cite("csordas2025depth")),
)
def write_ratio(update: Update) -> Tensor:
    r"""Length of what is added to a token over the length of the token, :math:`\|u_i\| / \|x_i\|`; median over tokens.

    **Exact.** 0 if nothing is added; above 1, the change outweighs the stream. The median, because one massive token,
    whose own ratio is tiny, would otherwise decide a ratio of sums, and a token near zero would decide a mean. For an
    even number of tokens it is the mean of the two in the middle. Tokens x = 0 are excluded; undefined if none is left.

    Example:
        >>> import torch
        >>> write_ratio(torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.5]])).item()
        0.35
    """
    return update.median(update.sums.ratio)

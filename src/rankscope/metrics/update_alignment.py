"""Whether a change strengthens the stream or erases it."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.update import Update
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, update_metric


@update_metric(
    symbol=r"\overline{\cos(x_i, u_i)}",
    range=(-1.0, 1.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="norms",
    cites=(Cite("csordas2025depth"),),
)
def update_alignment(update: Update) -> Tensor:
    r"""Mean cosine between a token and what is added to it, :math:`\overline{\cos(x_i, u_i)}`.

    **Exact.** Positive: the change strengthens what the stream holds. Near zero: it writes something new. Negative: it
    erases. Tokens that are zero, or to which zero is added, are excluded; undefined if none is left.

    Example:
        >>> import torch
        >>> update_alignment(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[-2.0, 0.0], [1.0, 0.0]])).item()
        -0.5
    """
    return update.mean(update.sums.alignment)

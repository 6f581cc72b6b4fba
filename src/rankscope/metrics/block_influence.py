"""How far a block turns its tokens."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.update import Update
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, SCALE, TOKEN_ORDER, update_metric


@update_metric(
    symbol=r"1 - \overline{\cos(x_i, x_i + u_i)}",
    range=(0.0, 2.0),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION | SCALE,
    needs="norms",
    cites=(Cite("men2025shortgpt"),),
)
def block_influence(update: Update) -> Tensor:
    r"""One minus the mean cosine between a token before and after the change, :math:`1 - \overline{\cos(x_i, y_i)}`.

    **Exact.** At ``block.update`` this is the Block Influence of ShortGPT. 0 if every token keeps its direction, 1 if
    tokens leave at right angles, 2 if they are reversed. It does not see a change of length: a block that doubles the
    stream has influence 0. Tokens that are zero before or after are excluded; undefined if none is left.

    Example:
        >>> import torch
        >>> block_influence(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[-1.0, 1.0], [0.0, 1.0]])).item()
        0.5
    """
    return update.mean(update.sums.turn)

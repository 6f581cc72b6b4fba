"""A token sees itself and its nearest predecessors."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._spec import Parameter, mask


def _edges(tokens: int, width: int) -> Progressions:
    position = np.arange(tokens)
    return clipped(position - width, position + 1, tokens)


@mask(
    parameters=(Parameter("width", "keys seen before the token, besides itself"),),
    edges=_edges,
    example="causal_window(2)",
    is_causal=True,
    self_loops=True,
    cites=(Cite("wu2024role"),),
)
def causal_window(query: Tensor, key: Tensor, width: int) -> Tensor:
    r"""A query sees itself and ``width`` tokens before it.

    :math:`0 \le q - k \le w`: the same as ``causal & window(width)``, w + 1 keys away from the start. A sliding window
    "of size s" in a model's configuration usually counts the token itself; that is width s - 1.

    Example:
        >>> import torch
        >>> causal_window(torch.tensor([[3]]), torch.arange(6), width=1).tolist()
        [[False, False, True, True, False, False]]
    """
    return (key <= query) & (query - key <= width)

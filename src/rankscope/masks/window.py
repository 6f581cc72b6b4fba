"""A token sees its neighbourhood."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._spec import Parameter, mask


def _edges(tokens: int, width: int) -> Progressions:
    position = np.arange(tokens)
    return clipped(position - width, position + width + 1, tokens)


@mask(
    parameters=(Parameter("width", "keys seen on each side of the token, besides itself"),),
    edges=_edges,
    example="window(2)",
    is_causal=False,
    self_loops=True,
    cites=(Cite("beltagy2020longformer"), Cite("wu2024role")),
)
def window(query: Tensor, key: Tensor, width: int) -> Tensor:
    r"""A query sees itself and ``width`` tokens on each side.

    :math:`|q - k| \le w`: 2w + 1 keys away from the ends; width 0 is the token alone.

    Example:
        >>> import torch
        >>> window(torch.tensor([[3]]), torch.arange(6), width=1).tolist()
        [[False, False, True, True, True, False]]
    """
    return (query - key).abs() <= width

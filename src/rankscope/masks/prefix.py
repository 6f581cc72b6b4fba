"""A prefix that sees itself whole, then causal."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._spec import Parameter, mask


def _edges(tokens: int, length: int) -> Progressions:
    return clipped(0, np.maximum(np.arange(tokens) + 1, length), tokens)


@mask(
    parameters=(Parameter("length", "tokens of the prefix, which see each other in both directions"),),
    edges=_edges,
    example="prefix(3)",
    is_causal=False,
    self_loops=True,
    cites=(Cite("raffel2020exploring", "sec. 3.2.1"),),
)
def prefix(query: Tensor, key: Tensor, length: int) -> Tensor:
    """The first ``length`` tokens see each other; every later query sees itself and all before it.

    Length 0 or 1 is ``causal``; the number of tokens or more is ``complete``.

    Example:
        >>> import torch
        >>> prefix(torch.arange(3).unsqueeze(1), torch.arange(3), length=2).int().tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    return (key <= query) | ((query >= 0) & (query < length) & (key < length))

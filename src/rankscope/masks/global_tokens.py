"""The first tokens see all and are seen by all."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._spec import Parameter, mask


def _edges(tokens: int, count: int) -> Progressions:
    return clipped(0, np.where(np.arange(tokens) < count, tokens, count), tokens)


@mask(
    parameters=(Parameter("count", "tokens at the start that see all and are seen by all", minimum=1),),
    edges=_edges,
    example="global_tokens(2)",
    is_causal=False,
    self_loops=False,
    cites=(Cite("beltagy2020longformer"), Cite("zaheer2020bigbird")),
)
def global_tokens(query: Tensor, key: Tensor, count: int) -> Tensor:
    """The first ``count`` tokens see every key, and every query sees them; meant for unions.

    One global token makes any mask with it strongly connected, of radius 1.

    Example:
        >>> import torch
        >>> global_tokens(torch.arange(3).unsqueeze(1), torch.arange(3), count=1).int().tolist()
        [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    """
    return ((query >= 0) & (query < count)) | (key < count)

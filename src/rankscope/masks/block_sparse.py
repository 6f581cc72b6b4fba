"""Tokens see their own block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._spec import Parameter, mask


def _edges(tokens: int, size: int) -> Progressions:
    first = np.arange(tokens) // size * size
    return clipped(first, first + size, tokens)


@mask(
    parameters=(Parameter("size", "tokens of a block", least=1),),
    edges=_edges,
    example="block_sparse(3)",
    is_causal=False,
    self_loops=True,
    cites=(Cite("child2019generating"),),
)
def block_sparse(query: Tensor, key: Tensor, size: int) -> Tensor:
    """A query sees the block of ``size`` neighbouring tokens that it lies in, counted from the first token.

    Blocks do not interact: each collapses to its own vector unless the mask is united with another.

    Example:
        >>> import torch
        >>> block_sparse(torch.arange(3).unsqueeze(1), torch.arange(3), size=2).int().tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    return torch.div(query, size, rounding_mode="floor") == torch.div(key, size, rounding_mode="floor")

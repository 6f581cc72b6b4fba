"""A token sees itself and what came before."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._spec import mask


def _edges(tokens: int) -> Progressions:
    return clipped(0, np.arange(tokens) + 1, tokens)


@mask(
    edges=_edges,
    example="causal",
    is_causal=True,
    self_loops=True,
    cites=(Cite("vaswani2017attention", "sec. 3.2.3"), Cite("wu2024role")),
)
def causal(query: Tensor, key: Tensor) -> Tensor:
    """A query sees its own position and all before it.

    The uniform matrix over its rows is triangular with eigenvalues 1, 1/2, 1/3, ...: late collapse halves per layer.

    Example:
        >>> import torch
        >>> causal(torch.arange(2).unsqueeze(1), torch.arange(2).unsqueeze(0)).tolist()
        [[True, False], [True, True]]
    """
    return key <= query

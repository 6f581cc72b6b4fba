"""Every token sees every token."""

from __future__ import annotations

import torch
from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._spec import mask


def _edges(tokens: int) -> Progressions:
    return clipped(0, tokens, tokens)


@mask(
    edges=_edges,
    example="complete",
    is_causal=False,
    self_loops=True,
    cites=(Cite("dong2021attention"), Cite("wu2024role")),
)
def complete(query: Tensor, key: Tensor) -> Tensor:
    """Every query sees every key.

    Near collapse attention under it is uniform and contracts with order 3; |lambda_2| of the uniform matrix is 0.

    Example:
        >>> import torch
        >>> complete(torch.tensor([[0]]), torch.arange(3).unsqueeze(0)).tolist()
        [[True, True, True]]
    """
    return torch.ones_like(key, dtype=torch.bool)

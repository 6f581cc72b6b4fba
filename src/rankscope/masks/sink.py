"""The first tokens are seen by all."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions, clipped
from rankscope.masks._spec import Parameter, mask


def _edges(tokens: int, count: int) -> Progressions:
    return clipped(0, count, tokens)


@mask(
    parameters=(Parameter("count", "keys at the start that every query sees", minimum=1),),
    edges=_edges,
    example="sink(2)",
    is_causal=False,
    self_loops=False,
    cites=(Cite("xiao2024efficient"),),
)
def sink(query: Tensor, key: Tensor, count: int) -> Tensor:
    """The first ``count`` keys are seen by every query, and no others; meant for unions.

    As in ``causal_window(4) | sink(1)``. Not causal for two or more keys: the first token sees the second. Intersect
    with ``causal`` if that matters.

    Example:
        >>> import torch
        >>> sink(torch.tensor([[3]]), torch.arange(4).unsqueeze(0), count=1).tolist()
        [[True, False, False, False]]
    """
    return key < count

"""A token sees a neighbourhood with gaps."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import Progressions
from rankscope.masks._spec import Parameter, mask


def _edges(tokens: int, width: int, step: int) -> Progressions:
    position = np.arange(tokens, dtype=np.int64)
    before = np.minimum(position // step, width)
    after = np.minimum((tokens - 1 - position) // step, width)
    return Progressions(position - step * before, position + step * after + 1, step)


@mask(
    parameters=(
        Parameter("width", "keys seen on each side of the token, besides itself"),
        Parameter("step", "distance from one seen key to the next", least=1),
    ),
    edges=_edges,
    example="dilated(width=2, step=2)",
    is_causal=False,
    self_loops=True,
    cites=(Cite("beltagy2020longformer"),),
)
def dilated(query: Tensor, key: Tensor, width: int, step: int) -> Tensor:
    r"""A query sees itself and ``width`` tokens on each side, ``step`` apart.

    :math:`|q - k| \le w s` and s divides q - k. With a step above 1 the tokens fall into ``step`` classes that do not
    interact: not quasi-strongly connected, so no collapse to one vector unless united with another mask.

    Example:
        >>> import torch
        >>> dilated(torch.tensor([[3]]), torch.arange(7), width=1, step=2).int().tolist()
        [[0, 1, 0, 1, 0, 1, 0]]
    """
    distance = (query - key).abs()
    return (distance <= width * step) & (distance % step == 0)

"""Window, random and global attention together."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.masks._edges import United
from rankscope.masks._spec import MASKS, Parameter, mask
from rankscope.masks.global_tokens import global_tokens as seen_globally
from rankscope.masks.random_sparse import MOST_DRAWS, random_sparse
from rankscope.masks.window import window as near


def _edges(tokens: int, window: int, random: int, global_tokens: int, seed: int) -> United:
    parts = (
        MASKS["window"].edges(tokens, width=window),
        MASKS["random_sparse"].edges(tokens, degree=random, seed=seed),
        MASKS["global_tokens"].edges(tokens, count=global_tokens),
    )
    return United(parts, tokens)


@mask(
    parameters=(
        Parameter("window", "keys seen on each side of the token", default=1),
        Parameter("random", "keys drawn for each query", most=MOST_DRAWS, default=2),
        Parameter("global_tokens", "tokens at the start that see all and are seen by all", least=1, default=1),
        Parameter("seed", "another seed, other random keys", default=0),
    ),
    edges=_edges,
    example="bigbird(window=1, random=1, global_tokens=1, seed=0)",
    is_causal=False,
    self_loops=True,
    pointwise=False,
    cites=(Cite("zaheer2020bigbird"),),
)
def bigbird(query: Tensor, key: Tensor, window: int, random: int, global_tokens: int, seed: int) -> Tensor:
    """The union ``window(window) | random_sparse(random, seed) | global_tokens(global_tokens)``, token by token.

    The published model applies the same pattern to blocks of tokens.

    Example:
        >>> import torch
        >>> bigbird(torch.tensor([[4]]), torch.arange(9).unsqueeze(0), 1, 0, 1, 0).int().tolist()
        [[1, 0, 0, 1, 1, 1, 0, 0, 0]]
    """
    scattered = random_sparse(query, key, degree=random, seed=seed)
    return near(query, key, width=window) | scattered | seen_globally(query, key, count=global_tokens)

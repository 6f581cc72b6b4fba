"""Equilibria of every rank: LayerNorm can stop the collapse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._citations import Cite
from rankscope.errors import InputError
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import Evaluation, Hypothesis, LayerBound, claim, log, theorem

SIZE = 6
ROUNDING = 1e-14


def equilibrium_values(tokens: int, weight: float) -> Float[Tensor, "dim dim"]:
    """I plus ``weight`` above the diagonal, as wide as there are tokens."""
    return torch.eye(tokens, dtype=torch.float64) + weight * torch.diag(torch.ones(tokens - 1).double(), 1)


def equilibrium(tokens: int, rank: int, weight: float | None = None) -> Float[Tensor, "tokens dim"]:
    r"""Tokens of unit length and of this rank that causal attention with :math:`W_Q = W_K = 0` leaves unchanged.

    **Exact** to rounding. The first N - k + 1 tokens are :math:`e_d`; from there each solves
    :math:`X_{i+1}(I - W_V) = X_i` (the first one :math:`(N-k+1)e_d` on the right), which determines all entries but the
    last, and unit length determines that: then :math:`(X_1 + \dots + X_{i+1})W_V = X_{i+1}`.

    Args:
        tokens: N, and the width.
        rank: k, from 1 to N.
        weight: w above the diagonal of the values; None for N, which is enough for every rank.

    Raises:
        InputError: there is no equilibrium for this rank or weight.

    Example:
        >>> int(torch.linalg.matrix_rank(equilibrium(5, 3)))
        3
    """
    w = float(tokens if weight is None else weight)
    equal = tokens - rank + 1
    if tokens < 2 or not 1 <= rank <= tokens or (rank > 1 and w < equal):
        raise InputError(
            f"An equilibrium of rank {rank} with {tokens} tokens and weight {w:g}: expected a rank from 1 to the "
            f"number of tokens and a weight of at least {equal} (N - k + 1)."
        )
    X = torch.zeros(tokens, tokens, dtype=torch.float64)
    X[:equal, -1] = 1.0
    target = equal * X[0]
    for i in range(equal, tokens):
        X[i, :-1] = -target[1:] / w
        X[i, -1] = math.sqrt(max(0.0, 1.0 - float(X[i, :-1].square().sum())))
        target = X[i]
    return X


def attended(X: Float[Tensor, "tokens dim"], W_V: Float[Tensor, "dim dim"]) -> Float[Tensor, "tokens dim"]:
    """One layer: the mean of all tokens so far, times the values, scaled to unit length."""
    counts = torch.arange(1, X.shape[0] + 1, dtype=X.dtype)[:, None]
    out = (X.cumsum(0) / counts) @ W_V
    lengths: Tensor = torch.linalg.vector_norm(out, dim=-1, keepdim=True)
    return out / lengths


@theorem(
    cites=(Cite("wu2024role", "thm. 3"),),
    statement=r"\forall k \le N\ \exists X:\ \mathrm{rank}(X) = k,\ D\,P\,X\,W_V = X",
    hypotheses=("causal mask", "uniform attention", "W_V = I + w N with w at least N", "as wide as there are tokens"),
    sides="construction",
)
def wu_2024_equilibria(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    """With LayerNorm there are equilibria of every rank, so collapse is not the only limit.

    **Exact**: an existence claim, so equilibria are constructed for 6 tokens and every rank, and run through the layer.
    It says nothing about the given network.
    """
    W = equilibrium_values(SIZE, SIZE)
    equilibria = [equilibrium(SIZE, rank) for rank in range(1, SIZE + 1)]
    errors = [float(torch.linalg.vector_norm(attended(X, W) - X, dim=-1).max()) for X in equilibria]
    ranks = [int(torch.linalg.matrix_rank(X)) for X in equilibria]
    hypotheses = (
        Hypothesis("largest error of a fixed point", max(errors), ROUNDING),
        claim("every rank is met", ranks == list(range(1, SIZE + 1))),
    )
    depth = LayerBound(None, log_upper=log(ROUNDING), log_measured=log(max(errors)))
    said = f"Built for {SIZE} tokens, ranks {ranks}: fixed to {max(errors):.1e}."
    return Evaluation("wu_2024_equilibria", "error of the fixed points", (), depth, hypotheses, said)

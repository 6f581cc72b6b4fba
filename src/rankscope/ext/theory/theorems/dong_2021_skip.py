"""With skip connections there are parameters that keep the residual, at any depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._citations import Cite
from rankscope.errors import InputError
from rankscope.ext.theory.operator_norms import composite_norm, composite_residual, one_norm
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import Evaluation, Hypothesis, LayerBound, claim, log, theorem

TOKENS = 8
ROUNDING = 1e-14
"""Of the logarithm of a residual of the example after one layer in float64."""


@dataclass(frozen=True, eq=False)
class SkipExample:
    r"""Attention with a skip that never collapses: :math:`W_{QK} = tI`, :math:`W = cI`, tokens on a simplex."""

    tokens: Float[Tensor, "tokens dim"]
    score: float
    value: float

    @property
    def beta(self) -> float:
        r""":math:`\|W_{QK}\|_1\|W\|_{1,\infty}`, as the hypothesis counts it."""
        eye = torch.eye(self.tokens.shape[1], dtype=torch.float64)
        return float(one_norm(self.score * eye) * composite_norm(self.value * eye))

    def layers(self, depth: int) -> list[Float[Tensor, "tokens dim"]]:
        """The stream before each layer and after the last, in units of its largest entry."""
        states = [self.tokens]
        for _ in range(depth):
            X = states[-1]
            scores = self.score * (X @ X.T) / X.shape[1] ** 0.5
            states.append(X + self.value * torch.softmax(scores, -1) @ X)
        return states


def skip_example(beta: float, tokens: int = TOKENS) -> SkipExample:
    r"""Parameters with this :math:`\beta` under which the residual grows at every layer (**Exact**).

    Tokens :math:`e_1, \dots, e_n` attend to each other equally, so attention is :math:`pI + q11^T` with p at least 0 in
    every layer, and the residual is multiplied by :math:`1 + cp \ge 1`.

    Raises:
        InputError: a beta that is not above zero, or fewer than two tokens.

    Example:
        >>> round(skip_example(3.0).beta, 12)
        3.0
    """
    if not beta > 0 or tokens < 2:
        raise InputError(f"beta={beta} and {tokens} tokens: expected a beta above 0 and at least two tokens.")
    value = min(beta, 1.0)
    return SkipExample(torch.eye(tokens, dtype=torch.float64), beta / value, value)


@theorem(
    cites=(Cite("dong2021attention", "claim 3.1"),),
    statement=r"\exists\,\text{parameters}:\ \|res(X^L)\|_{1,\infty} \ge \|res(X)\|_{1,\infty}",
    hypotheses=("a skip around attention", "any depth", "any beta"),
    sides="construction",
)
def dong_2021_skip(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""With skips there are parameters, of any :math:`\beta`, that keep the residual at any depth.

    **Exact**: an existence claim, so the parameters are constructed, with the depth and the :math:`\beta` of the given
    network, and run. It is not a bound on this network.
    """
    beta = max(layer.beta for layer in layers)
    example = skip_example(beta if 0 < beta < math.inf else 1.0)
    residuals = [log(float(composite_residual(X))) for X in example.layers(min(network.depth, 64))]
    bounds = tuple(
        LayerBound(layer.layer, log_lower=before, log_measured=after, log_rounding=ROUNDING)
        for layer, before, after in zip(layers, residuals, residuals[1:], strict=False)
    )
    depth = LayerBound(None, log_lower=residuals[0], log_measured=residuals[-1], log_rounding=64 * ROUNDING)
    hypotheses = (
        Hypothesis("beta of the example", example.beta, beta * (1 + 1e-12)),
        claim("a skip around attention", network.has_skip),
    )
    grown = math.exp(min(residuals[-1] - residuals[0], 700.0))
    said = (
        f"Built with the depth ({network.depth}) and the beta ({beta:.3g}) of this network: {TOKENS} tokens whose "
        f"residual is {grown:.3g} times as large after the last layer. That such parameters exist says nothing of "
        "those at hand."
    )
    return Evaluation("dong_2021_skip", "composite residual of the example", bounds, depth, hypotheses, said)

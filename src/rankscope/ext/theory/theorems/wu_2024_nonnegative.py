"""Exponential collapse with LayerNorm, from tokens without negative cosines."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.ext.theory.theorems._decay import sphere_decay
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import Evaluation, Hypothesis, theorem


@theorem(
    cites=(Cite("wu2024role", "cor. 1"),),
    statement=r"\mu(X^{(t)}) \le C(1 - n\epsilon^{2r})^{t/2r}",
    hypotheses=(
        "one head, attention and scaling to unit length",
        "n tokens that reach every other within r layers, self-loops",
        "orthogonal values",
        "no negative cosine at first",
        "rows of attention add up to one, no biases",
    ),
    sides="upper",
)
def wu_2024_nonnegative(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""With LayerNorm, one token that reaches all is enough if no cosine is negative at first.

    **Bound** on :math:`\mu` of the tokens scaled to unit length, with the constant of the proof,
    :math:`C = \sqrt{(N-1)(1-\phi_0)}`; n counts the tokens that reach all within a window of r
    layers; under one mask r is its radius.
    """
    first = layers[0].passage
    cosine = Hypothesis("least cosine at first", first.stream_in.least_cosine, 0.0, "at least")
    return sphere_decay(
        "wu_2024_nonnegative",
        network,
        layers,
        (cosine,),
        strong=False,
    )

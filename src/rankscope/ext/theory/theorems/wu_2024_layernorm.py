"""Exponential collapse with LayerNorm, from independent tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.ext.theory.theorems._decay import sphere_decay
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network
from rankscope.ext.theory.theorems._spec import Evaluation, Hypothesis, theorem


@theorem(
    cites=(Cite("wu2024role", "thm. 2"),),
    statement=r"\mu(X^{(t)}) \le C(1 - N\epsilon^{2r})^{t/2r}",
    hypotheses=(
        "one head, attention and scaling to unit length",
        "strongly connected mask with self-loops",
        "orthogonal values",
        "N tokens of full rank N",
        "rows of attention add up to one, no biases",
    ),
    sides="upper",
)
def wu_2024_layernorm(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""With LayerNorm (scaling to unit length) and orthogonal values, independent tokens collapse exponentially.

    **Bound** on :math:`\mu` of the tokens scaled to unit length. The paper gives neither C nor the number of layers it
    takes until no cosine is negative; here the bound starts at that layer, with
    :math:`C = \sqrt{(N-1)(1-\phi)}` for the least cosine :math:`\phi` there, and before it is :math:`\sqrt N`. That
    all N tokens reach all within a window is what the N in the rate needs: under one mask r is its diameter.
    """
    first = layers[0].passage
    full = Hypothesis("tokens of full rank", first.stream_in.rank, first.tokens, "at least")
    return sphere_decay(
        "wu_2024_layernorm",
        network,
        layers,
        (full,),
        strong=True,
    )

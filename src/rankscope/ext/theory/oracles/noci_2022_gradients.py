r"""At collapse the gradients of W_Q and W_K vanish exactly.

Scores of equal tokens are equal along a row, and softmax ignores a constant: to first order in the residual R the
gradient is :math:`\propto \|R\|`, since both the score's derivative and what attention mixes depend on differences of
tokens; at R = 0 it is zero for any loss.
"""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.ext.theory.oracles._spec import COMPLETE, ORACLES, POSITION_FREE, Oracle
from rankscope.models.design import Design


def _values(design: Design, tokens: int) -> dict[str, float]:
    return {"query_key_gradient_at_collapse": 0.0}


ORACLES.add(
    "noci_2022_gradients",
    Oracle(
        name="noci_2022_gradients",
        summary="Gradients of queries and keys vanish where tokens are equal",
        assumptions=(COMPLETE, POSITION_FREE),
        cites=(Cite("noci2022signal"),),
        values=_values,
    ),
)

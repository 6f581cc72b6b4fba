r"""At collapse the gradients of W_Q and W_K vanish exactly.

Scores of equal tokens are equal along a row, and softmax ignores a constant: to first order in the residual R the
gradient is :math:`\propto \|R\|`, since both the score's derivative and what attention mixes depend on differences of
tokens; at R = 0 it is zero for any loss.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._citations import Cite
from rankscope.theory.designs.design import Design
from rankscope.theory.oracles._spec import COMPLETE, ORACLES, POSITION_FREE, Oracle


def query_key_gradients(
    X: Float[Tensor, "tokens dim"], W_Q: Tensor, W_K: Tensor, W_V: Tensor, weight: Tensor
) -> tuple[float, float]:
    """Norms of the gradients of W_Q and W_K for the loss <weight, attention(X)>. **Exact**.

    Example:
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
        >>> max(query_key_gradients(torch.ones(3, 2).double(), eye, eye, eye, weight)) < 1e-14
        True
    """
    W_Q, W_K = (matrix.detach().clone().requires_grad_() for matrix in (W_Q, W_K))
    with torch.enable_grad():
        scores = (X @ W_Q) @ (X @ W_K).T / math.sqrt(W_Q.shape[1])
        loss = (weight * (torch.softmax(scores, -1) @ X @ W_V)).sum()
        of_Q, of_K = torch.autograd.grad(loss, (W_Q, W_K))
    return float(torch.linalg.matrix_norm(of_Q)), float(torch.linalg.matrix_norm(of_K))


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

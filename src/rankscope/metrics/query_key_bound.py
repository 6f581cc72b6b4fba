"""How large attention scores can become, by the lengths of queries and keys."""

from __future__ import annotations

import math

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.queries import Queries
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import CHANNEL_ORDER, ROTATION, TOKEN_ORDER, query_metric


@query_metric(
    symbol=r"\max_i \|q_i\| \max_j \|k_j\|",
    range=(0.0, math.inf),
    at_collapse=None,
    invariant_to=TOKEN_ORDER | CHANNEL_ORDER | ROTATION,
    needs="norms",
    cites=(Cite("henry2020querykey"), Cite("dehghani2023scaling")),
)
def query_key_bound(queries: Queries) -> Tensor:
    r"""Longest query times longest key, :math:`\max_i \|q_i\| \max_j \|k_j\|`.

    **Bound** on every product of a query and a key of a head, before scale, bias and mask, by Cauchy and Schwarz. It
    grows before the scores do, also while a mask or an angle hides them; QK-norm fixes it. Undefined without tokens.

    Example:
        >>> import torch
        >>> query_key_bound(torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[0.0, 2.0]]])).item()
        10.0
    """
    return _longest(queries.query) * _longest(queries.key)


def _longest(tokens: Tokens) -> Tensor:
    return tokens.energies.row.amax(-1).sqrt() * tokens.scale

"""The effective rank under the name used for embeddings of many inputs."""

from __future__ import annotations

from torch import Tensor

from rankscope._citations import Cite
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._spec import metric_alias
from rankscope.metrics.effective_rank import effective_rank


@metric_alias(effective_rank, symbol=r"\mathrm{RankMe}(X)", cites=(Cite("garrido2023rankme"),))
def rankme(tokens: Tokens | Tensor) -> Tensor:
    r"""Exponential of the entropy of the singular values of the embeddings, :math:`e^{H(p)}`, without centring.

    **Exact.** The same number as ``effective_rank``: the paper adds :math:`10^{-7}` to every :math:`p_i`, which this
    does not. 1 at rank one, rank(X) when all singular values are equal. A common vector lowers it without any collapse:
    compare ``centred_effective_rank``. Undefined for X = 0.

    Example:
        >>> import torch
        >>> round(rankme(torch.eye(3)).item(), 12)
        3.0
    """
    return effective_rank(tokens)

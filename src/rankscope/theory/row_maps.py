"""What a row-wise map (norm, MLP, activation) does to a residual: its Jacobian, with the error bounded. Ours."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.theory.scaled import centred, centred_unit


def row_map_interval(
    R: Float[Tensor, "*batch tokens dim"],
    jacobian: Float[Tensor, "dim out"],
    curvature: float,
    log_scale: Tensor | float = 0.0,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    r"""(log_lower_bound, log_upper_bound) on the log residual after a map phi of single tokens.

    **Bound.** With J the Jacobian at the mean token x and M a Lipschitz constant of the Jacobian on the ball around x
    that holds the tokens, :math:`\phi(x+r_i) = \phi(x) + r_iJ + e_i`, :math:`\|e_i\| \le \frac M2\|r_i\|^2`, so the
    residual is within :math:`\frac M2 \max_i\|r_i\|\,\|R\|_F` of :math:`\|RJ\|_F`. The lower bound is -inf where that
    is not positive.

    Args:
        R: the residual before the map, or its direction with ``log_scale``.
        jacobian: J, acting on rows from the right.
        curvature: M; 0 for a linear map.
        log_scale: natural log of the factor on R.

    Example:
        A linear map is known exactly.

        >>> low, high = row_map_interval(torch.tensor([[1.0], [-1.0]]), torch.tensor([[3.0]]), 0.0, log_scale=-900.0)
        >>> round(((low + 900).exp() ** 2).item(), 9), round(((high + 900).exp() ** 2).item(), 9)
        (18.0, 18.0)
    """
    eps = torch.finfo(torch.float64).eps
    D, log_r = centred_unit(R, log_scale)
    J = jacobian.detach().to(torch.float64)
    leading = torch.linalg.vector_norm(centred(D @ J), dim=(-2, -1))
    longest = torch.linalg.vector_norm(D, dim=-1).amax(-1)
    rounding = 4 * (sum(D.shape[-2:]) + 4) * eps * torch.linalg.vector_norm(J)
    error = curvature / 2 * longest * log_r.exp() + rounding
    slack = 8 * eps * (1 + torch.nan_to_num(log_r.abs(), posinf=0.0))
    return log_r + (leading - error).clamp_min(0.0).log() - slack, log_r + (leading + error).log() + slack

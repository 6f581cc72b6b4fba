"""Matrices as a direction times the exponential of a log-scale, so that 10^-4000 is an ordinary number."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.precision import as_float64


def centred(R: Float[Tensor, "*batch tokens dim"]) -> Float[Tensor, "*batch tokens dim"]:
    """CR: R minus the mean token.

    Example:
        >>> centred(torch.tensor([[3.0], [1.0]], dtype=torch.float64)).tolist()
        [[1.0], [-1.0]]
    """
    return R - R.mean(-2, keepdim=True)


def unit(R: Float[Tensor, "*batch rows columns"]) -> tuple[Tensor, Float[Tensor, "*batch"]]:
    """R as (direction of Frobenius norm 1, log of its norm); a zero matrix stays zero, with log -inf.

    Example:
        >>> direction, log_norm = unit(torch.tensor([[3e-300, 4e-300]], dtype=torch.float64))
        >>> [round(v, 12) for v in direction[0].tolist()], round(log_norm.exp().item() * 1e300, 12)
        ([0.6, 0.8], 5.0)
    """
    largest = R.abs().amax((-2, -1), keepdim=True)
    safe = torch.where(largest > 0, largest, torch.ones_like(largest))
    scaled = R / safe
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True)
    direction = scaled / torch.where(norm > 0, norm, torch.ones_like(norm))
    return direction, (norm.log() + safe.log()).squeeze(-1).squeeze(-1)


def centred_unit(
    R: Float[Tensor, "*batch tokens dim"], log_scale: Tensor | float
) -> tuple[Float[Tensor, "*batch tokens dim"], Float[Tensor, "*batch"]]:
    """Direction and log-norm of e^log_scale CR, in float64.

    Raises:
        InputError: R is not a floating matrix of at least two tokens, or not finite.
    """
    if not R.is_floating_point() or R.ndim < 2 or R.shape[-2] < 2:
        raise InputError(
            f"The residual was given as a {R.dtype} tensor of shape {tuple(R.shape)}. Expected floating numbers of "
            "shape (*batch, tokens, dim) with at least two tokens."
        )
    if not bool(torch.isfinite(R).all()):
        raise InputError("The residual holds numbers that are not finite. Give a unit direction and its log_scale.")
    first, log_first = unit(as_float64(R.detach()))
    direction, log_norm = unit(centred(first))
    return direction, log_norm + log_first + torch.as_tensor(log_scale, dtype=torch.float64, device=direction.device)

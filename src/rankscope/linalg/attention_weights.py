"""The weights of one attention layer, as the laws need them; any object with these attributes works."""

# The names follow the algebra.
# ruff: noqa: N815

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxtyping import Float
from torch import Tensor

from rankscope.errors import InputError
from rankscope.linalg.precision import as_float64

AttentionWeights: TypeAlias = Any
r"""Anything with the attributes of :class:`HeadTensors`, such as the weights that are read from a model:

attention :math:`\sum_h P_h (X W_{V,h} + 1 b_{V,h}^T) W_{O,h} + 1 b_O^T` with tokens as rows; W_Q and W_K
``(heads, dim, d_qk)``, W_V ``(heads, dim, d_v)``, W_O ``(heads, d_v, dim)``, their biases, and ``scale``, which
multiplies query times key. Key biases are deliberately absent: what they add to scores is constant along each row, and
softmax ignores it.
"""


@dataclass(frozen=True, eq=False)
class HeadTensors:
    """Plain tensors with the interface of :class:`AttentionWeights`; :func:`head_tensors` fills in defaults."""

    W_Q: Float[Tensor, "heads dim d_qk"]
    W_K: Float[Tensor, "heads dim d_qk"]
    W_V: Float[Tensor, "heads dim d_v"]
    W_O: Float[Tensor, "heads d_v dim"]
    b_Q: Float[Tensor, "heads d_qk"]
    b_V: Float[Tensor, "heads d_v"]
    b_O: Float[Tensor, " dim"]
    scale: float
    rotary: bool = False
    qk_norm: bool = False


def head_tensors(
    W_Q: Float[Tensor, "heads dim d_qk"],
    W_K: Float[Tensor, "heads dim d_qk"],
    W_V: Float[Tensor, "heads dim d_v"],
    W_O: Float[Tensor, "heads d_v dim"],
    *,
    scale: float | None = None,
    b_Q: Float[Tensor, "heads d_qk"] | None = None,
) -> HeadTensors:
    r"""Heads from plain tensors, by default with scale :math:`1/\sqrt{d_{qk}}` and no biases.

    Example:
        >>> import torch
        >>> one = torch.ones(2, 4, 4)
        >>> head_tensors(one, one, one, one).scale
        0.5
    """
    return HeadTensors(
        W_Q=W_Q,
        W_K=W_K,
        W_V=W_V,
        W_O=W_O,
        b_Q=W_Q.new_zeros(W_Q.shape[0], W_Q.shape[2]) if b_Q is None else b_Q,
        b_V=W_V.new_zeros(W_V.shape[0], W_V.shape[2]),
        b_O=W_O.new_zeros(W_O.shape[2]),
        scale=W_Q.shape[2] ** -0.5 if scale is None else scale,
    )


def float64_heads(heads: AttentionWeights) -> HeadTensors:
    """The same weights in float64, after checking that shapes match and scores are bilinear and position-free.

    Raises:
        InputError: the shapes do not match, or the cubic law does not describe these scores.
    """
    shapes = [tuple(W.shape) for W in (heads.W_Q, heads.W_K, heads.W_V, heads.W_O)]
    q, k, v, o = shapes
    if any(len(s) != 3 for s in shapes) or q != k or q[:2] != v[:2] or o != (v[0], v[2], q[1]):
        raise InputError(
            f"W_Q, W_K, W_V, W_O have the shapes {q}, {k}, {v}, {o}. Expected (heads, dim, d_qk) twice, "
            "(heads, dim, d_v) and (heads, d_v, dim); with grouped keys and values give them once per query head."
        )
    if heads.rotary or heads.qk_norm:
        what = "rotated by position" if heads.rotary else "normalised before they meet"
        raise InputError(
            f"Queries and keys are {what}, and the cubic law needs scores that are bilinear in the tokens and the same "
            "for every position. "
            + (
                "With positions collapse has order 1: use the spectral law."
                if heads.rotary
                else "Multiply W_Q and W_K by the Jacobians of the two norms at the collapsed point and set qk_norm to "
                "False: that gives the law in the limit."
            )
        )
    return HeadTensors(
        W_Q=_wide(heads.W_Q),
        W_K=_wide(heads.W_K),
        W_V=_wide(heads.W_V),
        W_O=_wide(heads.W_O),
        b_Q=_wide(heads.b_Q),
        b_V=_wide(heads.b_V),
        b_O=_wide(heads.b_O),
        scale=float(heads.scale),
    )


def _wide(tensor: Tensor) -> Tensor:
    return as_float64(tensor.detach())

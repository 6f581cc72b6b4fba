r"""Mean cosine of tokens in a deep residual network with uniform attention and linear MLPs, in closed form.

With :math:`C = \sum_{k,k'}\langle x_k, x_{k'}\rangle` and :math:`N = \sum_k|x_k|^2`, branches scaled by
:math:`\alpha_1, \alpha_2` and weights of variance 1/width: :math:`C_L = [(1+\alpha_1^2)(1+\alpha_2^2)]^LC_0` and
:math:`N_L = (1+\alpha_2^2)^L[N_0 + (C_0/n)((1+\alpha_1^2)^L - 1)]`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.ext.theory.oracles._spec import (
    COMPLETE,
    FLAT,
    ORACLES,
    POSITION_FREE,
    Assumption,
    Oracle,
    squared_residual,
)
from rankscope.models.design import Design


def mean_cosine(
    blocks: int, tokens: int, attention_square: float, mlp_square: float, initial_cosine: float = 0.0
) -> float:
    r"""Mean cosine :math:`\rho_L = (C_L - N_L)/((n-1)N_L)` after ``blocks`` blocks. **Exact** in expectation.

    Args:
        blocks: L.
        tokens: n.
        attention_square: :math:`\alpha_1^2`, what the attention branch adds relative to the stream.
        mlp_square: :math:`\alpha_2^2`, the same for the MLP.
        initial_cosine: of the first tokens, all of one length.

    Example:
        Scaled by 1/sqrt(depth) tokens stay apart.

        >>> round(mean_cosine(50, 32, 1.0, 1.0), 4), round(mean_cosine(50, 32, 1 / 50, 1 / 50), 4)
        (1.0, 0.0502)
    """
    C_0 = tokens * (1 + (tokens - 1) * initial_cosine)
    # both sums divided by (1 + mlp_square)^L, which they share
    C = (1 + attention_square) ** blocks * C_0
    N = tokens + (C - C_0) / tokens
    return (C - N) / ((tokens - 1) * N)


def _is_linear(design: Design, tokens: int) -> tuple[bool, str]:
    return design.mlp in ("linear", "none"), design.mlp


def _has_no_norm(design: Design, tokens: int) -> tuple[bool, str]:
    return design.norm == "none", design.norm


def _has_whole_skips(design: Design, tokens: int) -> tuple[bool, float]:
    return design.attention_skip == design.mlp_skip == 1, design.attention_skip


def _curve(design: Design, tokens: int, blocks: int) -> Sequence[float]:
    attention = design.attention_scale**2 * design.value_gain
    mlp_gain = design.mlp_in_std**2 * design.width * design.mlp_out_std**2 * design.mlp_width
    mlp = 0.0 if design.mlp == "none" else design.mlp_scale**2 * mlp_gain
    cosines = (mean_cosine(block, tokens, attention, mlp, design.initial_cosine) for block in range(blocks + 1))
    return [squared_residual(cosine, tokens) for cosine in cosines]


ORACLES.add(
    "noci_2022_residual_scaling",
    Oracle(
        name="noci_2022_residual_scaling",
        summary="Residual branches with uniform attention and linear MLPs, without norms",
        assumptions=(
            COMPLETE,
            POSITION_FREE,
            FLAT,
            Assumption("no norms", _has_no_norm),
            Assumption("linear MLP or none", _is_linear),
            Assumption("whole skips", _has_whole_skips),
        ),
        cites=(Cite("noci2022signal"),),
        curve=_curve,
    ),
)

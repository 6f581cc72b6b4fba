r"""Order and factor of collapse, layer by layer, from properties of the layer. Ours.

Linearise at the collapsed point: what is left of a small residual after one layer is :math:`\log\|R'\| \approx
p\log\|R\| + \log f`. Order p = 3: attention alone, complete mask, position-free scores. Order 1: a mask, positions or a
skip leave a linear term, with f < 1. Order 0, no collapse: f at least 1. Norms and MLPs change f, never p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rankscope.errors import InputError


@dataclass(frozen=True)
class LayerFacts:
    r"""The properties that determine the class of a layer.

    Attributes:
        complete: every row sees the same keys (key padding is the same for all rows, so this stays True).
        position_free: scores depend on the tokens only: no rotary or relative term, no positions added to the queries.
        skip_gain: gain of the skip around attention; 0 without skip.
        linear_factor: spectral radius of the layer without its skip on centred perturbations, for a mask or positions:
            :math:`|\lambda_2(P_0)|` times the growth of the values. If heads differ, or with a skip: of the layer
            including the skip, by ``stability_factor``.
        row_map_factor: factor of the row-wise maps (norms, MLP with its own skip) at the collapsed point.
        log_cubic_constant: c of the cubic law, if known.
    """

    complete: bool
    position_free: bool
    skip_gain: float = 0.0
    linear_factor: float | None = None
    row_map_factor: float = 1.0
    log_cubic_constant: float | None = None


@dataclass(frozen=True)
class CollapseClass:
    """Order of collapse of a layer and its factor.

    Attributes:
        order: 3, 1, or 0 for none.
        factor: factor of the linear term for order 1 and 0; constant of the cubic law for order 3, nan if unknown.
        reason: one sentence.
    """

    order: Literal[3, 1, 0]
    factor: float
    reason: str


def classify(facts: LayerFacts) -> CollapseClass:
    """Order 3, 1 or 0 of one layer, with the factor and the reason.

    **Exact** for the linearisation that the facts describe: it says nothing about a residual that is not small.

    Raises:
        InputError: there is a mask or positions, but no ``linear_factor``.

    Example:
        >>> classify(LayerFacts(complete=True, position_free=True)).order
        3
        >>> print(classify(LayerFacts(complete=False, position_free=True, linear_factor=0.5)).reason)
        A mask tells rows apart, so a linear term is left: each layer multiplies the residual by 0.5 late in depth.
        >>> classify(LayerFacts(complete=True, position_free=True, skip_gain=1.0)).order
        0
    """
    if facts.complete and facts.position_free and facts.skip_gain == 0:
        constant = math.nan if facts.log_cubic_constant is None else math.exp(facts.log_cubic_constant)
        return CollapseClass(
            3,
            constant,
            "Complete mask, position-free scores and no skip: no linear term is left, and collapse has order 3.",
        )
    factor = _linear_factor(facts) * facts.row_map_factor
    if factor >= 1:
        return CollapseClass(
            0, factor, f"{_cause(facts)}, and its factor {factor:.6g} is not below 1: a small residual does not shrink."
        )
    return CollapseClass(
        1, factor, f"{_cause(facts)}: each layer multiplies the residual by {factor:.6g} late in depth."
    )


def _linear_factor(facts: LayerFacts) -> float:
    if facts.complete and facts.position_free:
        # attention has no linear term, so the skip alone determines the factor
        return abs(facts.skip_gain)
    if facts.linear_factor is None:
        raise InputError(
            "A layer with a mask or positions was to be classified without linear_factor. Give the modulus of the "
            "second eigenvalue of its attention at the collapsed point times the growth of the values, or the "
            "stability_factor of the whole layer if heads differ or there is a skip."
        )
    return facts.linear_factor


def _cause(facts: LayerFacts) -> str:
    causes = []
    if not facts.complete:
        causes.append("a mask tells rows apart")
    if not facts.position_free:
        causes.append("positions tell rows apart")
    if facts.skip_gain != 0:
        causes.append(f"a skip of gain {facts.skip_gain:g} passes the residual on")
    sentence = " and ".join(causes)
    return f"{sentence[0].upper()}{sentence[1:]}, so a linear term is left"


def float_visible_depth(log_relative_residuals: Sequence[float], floor: float) -> int | None:
    """First layer, counted from 1, whose relative residual is at or below ``floor``; None if all are above.

    **Exact.** From that layer on, a forward pass in a dtype with this floor shows only rounding.

    Args:
        log_relative_residuals: natural logs of ||CX|| / ||X||, one per layer.
        floor: relative residual that the dtype can just resolve, above 0.

    Example:
        >>> float_visible_depth([-1.0, -3.0, -9.0, -27.0], floor=1e-7)
        4
    """
    if not floor > 0:
        raise InputError(f"The float floor is {floor}. Expected a number above 0, such as 4.8e-07 for float32.")
    for layer, value in enumerate(log_relative_residuals, 1):
        if value <= math.log(floor):
            return layer
    return None

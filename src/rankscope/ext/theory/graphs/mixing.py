r"""Random tokens under a mask with uniform attention: how their differences decay, layer by layer.

:math:`X_t = P_0^tX_0`, without weights: the mask alone. The common part and the differences are stored separately,
these as a direction and a log-scale, so that the curve continues below the float floor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.ext.theory.graphs.bracket import Bracket
from rankscope.ext.theory.graphs.second_eigenvalue import SecondEigenvalue

AGREEMENT = 1e-3
NEAR = 0.02
"""Relative difference between the logs of a layer's factor and the late factor up to which it counts as settled."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Decay:
    """Random tokens followed through layers of uniform attention.

    Attributes:
        log10_relative: log10 of the relative residual, starting with the tokens themselves (layer 0).
        log_residuals: natural log of the residual itself.
        ended: whether the run ended at the horizon, rather than by agreement and a settled factor.
    """

    log10_relative: Floats
    log_residuals: Floats
    ended: bool


def followed(
    apply: Callable[[Floats], Floats],
    start: Floats,
    anchor: int | None,
    late_factor: float,
    layers: int,
) -> Decay:
    """Follow ``start`` for at most ``layers``, or until tokens agree and the late factor is reached.

    Args:
        apply: multiplication by P0.
        start: random tokens.
        anchor: a token that sees only itself, or None. Relative to it, nothing needs to be subtracted, and each entry
            keeps its own digits; otherwise a long transient would amplify the rounding error.
        late_factor: modulus of the second eigenvalue, nan if unknown.
        layers: horizon.
    """
    common = start[anchor].copy() if anchor is not None else start.mean(axis=0)
    apart, log_scale = start - common, 0.0
    logs, relative = [], []
    for layer in range(layers + 1):
        residual = apart - apart.mean(axis=0)
        log_residual = _log(float(np.linalg.norm(residual))) + log_scale
        size = float(np.linalg.norm(common + apart * math.exp(log_scale)))
        logs.append(log_residual)
        relative.append((log_residual - _log(size)) / math.log(10))
        if math.isinf(log_residual) or (relative[-1] <= math.log10(AGREEMENT) and _settled(logs, late_factor)):
            return Decay(np.array(relative), np.array(logs), ended=False)
        if layer == layers:
            break
        moved = apply(apart)
        shared = moved[anchor] if anchor is not None else moved.mean(axis=0)
        common = common + shared * math.exp(log_scale)
        moved = moved - shared
        norm = float(np.linalg.norm(moved))
        apart, log_scale = (moved / norm, log_scale + math.log(norm)) if norm > 0 else (moved, log_scale)
    return Decay(np.array(relative), np.array(logs), ended=True)


def layers_to_agree(decay: Decay, second: SecondEigenvalue) -> Bracket:
    """Layers until the relative residual of random tokens is 1e-3.

    Read from the run if it got that far. Otherwise from the late law: with the mode's own constant, or from the
    end of the run if its factor is the late one. Otherwise only a lower bound is given.
    """
    below = np.flatnonzero(decay.log10_relative <= math.log10(AGREEMENT))
    if len(below):
        return Bracket.exactly(int(below[0]), "simulated")
    if second.gap <= 0 or math.isnan(second.gap):
        reason = "infinite: the second eigenvalue is 1" if second.gap == 0 else "unknown: no second eigenvalue"
        return Bracket(math.inf if second.gap == 0 else len(decay.log10_relative), math.inf, reason)
    log_late = math.log1p(-second.gap) if second.gap < 1 else -math.inf
    if second.gap < 1 and not math.isnan(second.log_constant):
        layers = math.ceil((math.log(AGREEMENT) - second.log_constant) / log_late)
        return Bracket.exactly(max(layers, len(decay.log10_relative)), "from the second eigenvalue and its mode")
    if second.gap < 1 and _settled(list(decay.log_residuals), 1 - second.gap):
        left = (decay.log10_relative[-1] * math.log(10) - math.log(AGREEMENT)) / -log_late
        return Bracket.exactly(
            len(decay.log10_relative) - 1 + math.ceil(left), "from the end of the run and the second eigenvalue"
        )
    return Bracket(len(decay.log10_relative), math.inf, f"not reached in {len(decay.log10_relative) - 1} layers")


def transient_layers(decay: Decay, second: SecondEigenvalue) -> Bracket:
    """The last layer whose factor is closer to 1 than to the late factor, in logs; 0 if none.

    Before it, the second eigenvalue says nothing about random tokens. A lower bound if the run ended in the transient.
    """
    if math.isnan(second.gap):
        return Bracket(0, math.inf, "unknown: no second eigenvalue")
    if not 0 < second.gap < 1:
        return Bracket.exactly(0, "no late factor between 0 and 1")
    log_late = math.log1p(-second.gap)
    own = np.diff(decay.log_residuals)
    slow = np.flatnonzero(own > log_late / 2)
    last = int(slow[-1]) + 1 if len(slow) else 0
    if not decay.ended or _settled(list(decay.log_residuals), 1 - second.gap):
        return Bracket.exactly(last, "simulated")
    if last == len(own):
        return Bracket(last, math.inf, f"still under way after {last} layers")
    return Bracket.exactly(last, f"simulated for {len(own)} layers")


def _settled(logs: list[float], late_factor: float) -> bool:
    if not late_factor > 0 or len(logs) < 3:
        return not late_factor > 0
    log_late = math.log(late_factor)
    return all(abs(logs[-k] - logs[-k - 1] - log_late) < NEAR * abs(log_late) for k in (1, 2))


def _log(norm: float) -> float:
    return math.log(norm) if norm > 0 else -math.inf

r"""Two numbers per block for any norm, skip and MLP: the mean square of a token and of a difference. Ours.

At large width tokens are described by q, the mean square of an entry, and D = q - p with p the mean product of two
tokens. With Gaussian scores of variance :math:`s^2` (for normed tokens) the shares of two rows of attention satisfy
:math:`n\,\mathbb{E}\sum_jP_{ij}^2 \approx e^{s^2\delta}` and :math:`n\,\mathbb{E}\sum_jP_{ij}P_{i'j} \approx
e^{s^2\rho\delta}`, :math:`\delta = D/q`, :math:`\rho = 1-\delta`. So attention maps D to :math:`D(e^{s^2\delta} -
e^{s^2\rho\delta})/n`, of order :math:`\delta^3`: the cubic law at initialisation.

Second moments of an activation are computed for two correlated Gaussians, and their difference without cancellation.
For u, u' of variance v and correlation :math:`1-\delta`: the mean square :math:`\mathbb{E}\varphi(u)^2`, and
:math:`\mathbb{E}\varphi(u)^2 - \mathbb{E}\varphi(u)\varphi(u') = \tfrac12\mathbb{E}(\varphi(u)-\varphi(u'))^2`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from rankscope.models.design import Design

Floats = NDArray[np.float64]
_TINY = 1e-8
_NODES = 96
_GATES = {"swiglu": "silu", "geglu": "gelu"}


def kernel_of(mlp: str, variance: float, delta: float) -> tuple[float, float]:
    """Mean square of the activation and half the mean square of a difference. **Exact** to quadrature.

    Args:
        mlp: name of the activation, possibly gated.
        variance: of the inputs.
        delta: one minus their correlation.

    Example:
        >>> kernel_of("linear", 2.0, 0.25)
        (2.0, 0.5)
    """
    if mlp == "linear":
        return variance, variance * delta
    if mlp == "relu":
        return variance / 2, variance / 2 * _relu_apart(delta)
    if mlp in _GATES:
        square, apart = kernel_of(_GATES[mlp], variance, delta)
        # the product with an independent linear branch: products of the second moments
        return square * variance, variance * (square * delta + apart * (1 - delta))
    return _smooth(_ACTIVATIONS[mlp], variance, delta)


def _relu_apart(delta: float) -> float:
    """1 - arc-cosine kernel at 1 - delta; its first term for a tiny delta, where the rest is below rounding."""
    if delta < _TINY:
        return delta
    c = max(-1.0, 1 - delta)
    return 1 - (math.sqrt(delta * (2 - delta)) + c * (math.pi - math.acos(c))) / math.pi


def _smooth(activation: Callable[[Floats], Floats], variance: float, delta: float) -> tuple[float, float]:
    nodes, weights = _hermite()
    common, apart = math.sqrt(variance * (1 - delta / 2)) * nodes, math.sqrt(variance * delta / 2) * nodes
    if delta < _TINY:
        step = 1e-4 * math.sqrt(variance)
        u = math.sqrt(variance) * nodes
        slope = (activation(u + step) - activation(u - step)) / (2 * step)
        return float(weights @ activation(u) ** 2), variance * delta * float(weights @ slope**2)
    first = activation(common[:, None] + apart)
    second = activation(common[:, None] - apart)
    square = float(weights @ (first**2) @ weights)
    return square, 0.5 * float(weights @ ((first - second) ** 2) @ weights)


@lru_cache(maxsize=1)
def _hermite() -> tuple[Any, Any]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    return nodes, weights / weights.sum()


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}


_LARGEST_SCORE_STD = 0.5


class Moments(NamedTuple):
    """Mean square of an entry, and the difference between it and the mean product of two tokens."""

    q: float
    D: float


def after_attention(m: Moments, design: Design, tokens: int) -> Moments:
    """What the attention branch adds. **Estimate**: scores small, width large."""
    delta = share_of(m.D, m.q)
    # normed queries and keys: scores do not grow with the tokens
    variance = design.qk_norm**2 if design.qk_norm else (design.score_std * m.q) ** 2
    own = min(float(tokens), math.exp(min(variance * delta, 50.0)))
    # own share minus shared share, exp(a) - exp(b) without cancellation
    apart = own * -math.expm1(-variance * delta * delta)
    gain = design.value_gain
    return Moments(gain * (m.q - m.D + m.D * own / tokens), gain * m.D * apart / tokens)


def after_mlp(m: Moments, design: Design) -> Moments:
    """What the MLP branch adds. **Exact** at large width."""
    variance = m.q * design.mlp_in_std**2 * design.width
    square, apart = kernel_of(design.mlp, variance, share_of(m.D, m.q))
    gain = design.mlp_out_std**2 * design.mlp_width
    return Moments(gain * square, gain * apart)


def next_moments(m: Moments, design: Design, tokens: int) -> Moments:
    """One block."""
    m = _added(
        m, after_attention(_before(m, design), design, tokens), design, design.attention_skip, design.attention_scale
    )
    if design.mlp == "none":
        return m
    return _added(m, after_mlp(_before(m, design), design), design, design.mlp_skip, design.mlp_scale)


def moments(design: Design, tokens: int, blocks: int) -> list[Moments]:
    """Moments by depth, starting with the first tokens, as long as scores are small.

    Example:
        >>> found = moments(Design(depth=2, width=64, heads=4), 16, 2)
        >>> found[0], found[2].D < found[1].D
        (Moments(q=1.0, D=1.0), True)
    """
    q = 1.0 if design.embedding_norm else design.embedding_std**2
    moments_by_block = [Moments(q, q * (1 - design.initial_cosine))]
    for _ in range(blocks):
        if not _scores_are_small(moments_by_block[-1], design):
            break
        moments_by_block.append(next_moments(moments_by_block[-1], design, tokens))
    return moments_by_block


def _scores_are_small(m: Moments, design: Design) -> bool:
    """Without a norm, a growing stream leaves the range in which the moments are valid, and later that of floats."""
    size = 1.0 if design.qk_norm else _before(m, design).q
    return m.q > 0 and design.score_std * size <= _LARGEST_SCORE_STD


def _before(m: Moments, design: Design) -> Moments:
    return _normed(m, design) if design.norm_place == "pre" else m


def _added(m: Moments, branch: Moments, design: Design, skip: float, scale: float) -> Moments:
    if design.branch_norm:
        branch = Moments(1.0, share_of(branch.D, branch.q))
    total = Moments(skip**2 * m.q + scale**2 * branch.q, skip**2 * m.D + scale**2 * branch.D)
    return _normed(total, design) if design.norm_place == "post" else total


def _normed(m: Moments, design: Design) -> Moments:
    size = m.q + design.norm_eps
    return Moments(share_of(m.q, size), share_of(m.D, size))


@dataclass(frozen=True)
class Assumption:
    """A condition on a design and its tokens: in words, whether it holds, and the value found."""

    words: str
    holds: bool
    found: Any


@dataclass(frozen=True)
class OracleAnswer:
    """The answer of one oracle for a design, or why it has none.

    Attributes:
        name: name of the oracle.
        assumptions: all must hold.
        log10_relative: its curve of log10 relative residuals, starting with the first tokens; may be empty.
    """

    name: str
    assumptions: tuple[Assumption, ...]
    log10_relative: tuple[float, ...] = ()

    @property
    def applies(self) -> bool:
        """Whether its assumptions hold."""
        return all(one.holds for one in self.assumptions)

    def to_json(self) -> dict[str, Any]:
        """All fields except the curve, which is in the rows."""
        return {
            "oracle": self.name,
            "applies": self.applies,
            "assumptions": [{"assumption": a.words, "holds": a.holds, "found": a.found} for a in self.assumptions],
        }


def mean_field(design: Design, tokens: int, blocks: int) -> OracleAnswer:
    """The curve of a design at large width with small scores, for ``blocks`` blocks or as long as scores stay small."""
    covered = len(moments(design, tokens, design.depth)) - 1
    starts_normed = design.norm_place != "none" or design.embedding_norm
    small = design.score_std <= _LARGEST_SCORE_STD
    answer = OracleAnswer(
        "mean_field",
        (
            Assumption("every token sees every token", design.is_complete, design.mask),
            Assumption("scores depend on tokens alone", design.is_position_free, design.positions),
            Assumption("score standard deviation on normed tokens at most 0.5", small, design.score_std),
            Assumption("width at least twice the tokens", design.width >= 2 * tokens, design.width),
            Assumption("tokens of unit mean square at the start, or normed", starts_normed, design.norm_place),
            Assumption("scores stay that small through every block", covered == design.depth, covered),
        ),
    )
    if not answer.applies:
        return answer
    curve = [share_of(m.D, m.q) * (tokens - 1) / tokens for m in moments(design, tokens, blocks)]
    # NaN stays NaN: a stream of zeros has no relative residual, which is not the same as tokens that are equal.
    logs = tuple(value if math.isnan(value) else 0.5 * math.log10(value) if value > 0 else -math.inf for value in curve)
    return replace(answer, log10_relative=logs)


def share_of(part: float, whole: float) -> float:
    """``part / whole``; NaN if the whole is zero.

    Example:
        >>> share_of(1.0, 4.0), share_of(0.0, 0.0)
        (0.25, nan)
    """
    return part / whole if whole != 0 else math.nan

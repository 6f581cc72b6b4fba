r"""Where attention over n keys turns from an average into a choice: the random energy model.

The scores of a query are n independent Gaussians of standard deviation :math:`\sigma`, and softmax is their Gibbs
measure. Its participation :math:`Y = \mathbb{E}\sum_jp_j^2` tends to 0 for :math:`\sigma < \sigma_c = \sqrt{2\log n}`,
where attention is an average over many keys, and to :math:`1 - \sigma_c/\sigma` above, where a few keys have all the
weight. So a fixed :math:`\sigma` freezes up to :math:`n = e^{\sigma^2/2}` keys and averages beyond: scores have to grow
like :math:`\sqrt{\log n}` to stay at the same distance. For scaled cosines of *equiangular* tokens, where the query's
own key stands out, they have to grow like :math:`\log n` instead.

For a finite n, with :math:`Z = \sum_je^{\sigma x_j}` and :math:`Z^{-2} = \int_0^\infty te^{-tZ}dt`,

.. math:: Y = n\int_0^\infty t\,g_2(t)\,g_0(t)^{n-1}dt, \quad g_k(t) = \mathbb{E}\,e^{k\sigma x}e^{-te^{\sigma x}}.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rankscope._citations import Cite
from rankscope.ext.theory.oracles import Assumption, OracleAnswer
from rankscope.models.design import Design


def critical_score_std(keys: int) -> float:
    r"""Standard deviation :math:`\sqrt{2\log n}` of independent Gaussian scores at which attention freezes.

    **Exact** as n grows.

    Example:
        >>> round(critical_score_std(512), 3), round(critical_score_std(512**4) / critical_score_std(512), 12)
        (3.532, 2.0)
    """
    return math.sqrt(2 * math.log(keys))


def critical_keys(score_std: float) -> float:
    r"""Number of keys :math:`e^{\sigma^2/2}` up to which scores of this standard deviation freeze; inf if too large.

    Example:
        >>> round(critical_keys(critical_score_std(512)), 6)
        512.0
    """
    return math.exp(score_std**2 / 2) if score_std < 37 else math.inf


def participation(score_std: float, keys: int) -> float:
    r"""Expected participation :math:`Y = \mathbb{E}\sum_jp_j^2` of a row of n keys. **Exact** to quadrature.

    From 1/n (uniform) to 1 (one key); 1/Y is the effective number of keys.

    Args:
        score_std: standard deviation of the independent Gaussian scores.
        keys: n.

    Example:
        >>> round(participation(0.0, 8), 12), round(participation(5.0, 1), 12)
        (0.125, 1.0)
    """
    if score_std == 0 or keys == 1:
        return 1 / keys
    # Trapezoidal rules in x and in u = log t. The integrands fall off at least exponentially at both ends and vary over
    # lengths 1/sigma and 1, so the error is far below rounding. What is cut off has probability below 1e-17.
    least, largest = _range_of_largest(keys)
    x = np.arange(-9.0, min(9.0 + 2 * score_std, largest), min(0.1, 0.3 / score_std))
    lowest = -22 - min(score_std**2 + math.log(keys) / 2, math.log(keys) + score_std * largest)
    highest = 10 - score_std * least
    step = 0.3
    total = 0.0
    log_density = -(x**2) / 2 - 0.5 * math.log(2 * math.pi) + math.log(x[1] - x[0])
    for u in np.array_split(np.arange(lowest, highest, step), 1 + int((highest - lowest) / (256 * step))):
        rate = np.exp(np.minimum(u[:, None] + score_std * x, 700.0))
        missing = -np.expm1(-rate) @ np.exp(log_density)
        with np.errstate(divide="ignore"):
            log_others = (keys - 1) * np.log1p(-np.minimum(missing, 1.0))
        own = np.exp(2 * u[:, None] + 2 * score_std * x + log_density - rate).sum(axis=1)
        total += step * float(own @ np.exp(log_others))
    return keys * total


def _range_of_largest(keys: int) -> tuple[float, float]:
    """Numbers between which the largest of n standard Gaussians falls, but for a probability of about 1e-18."""
    grid = np.linspace(-10, 10, 401)
    log_below = np.array([math.log(max(0.5 * math.erfc(-y / math.sqrt(2)), 1e-300)) for y in grid])
    return float(grid[int(np.argmax(keys * log_below > -42))]), math.sqrt(2 * math.log(keys)) + 9


def random_energy(design: Design, tokens: int) -> OracleAnswer:
    """The score size at which attention over n keys turns from an average into a choice, and that of a design.

    Scores of one query vary over keys with the part of the tokens that they do not share.
    """
    answer = OracleAnswer(
        "derrida_1981_random_energy",
        (
            Assumption("every token sees every token", design.is_complete, design.mask),
            Assumption("scores depend on tokens alone", design.is_position_free, design.positions),
            Assumption("normed tokens", design.norm_place != "none", design.norm_place),
        ),
        cites=(str(Cite("derrida1981random")), str(Cite("giorlandino2026"))),
    )
    if not answer.applies:
        return answer
    spread = design.score_std * math.sqrt(1 - design.initial_cosine)
    values = {
        "score_std": spread,
        "critical_score_std": critical_score_std(tokens),
        "critical_keys": critical_keys(spread),
        "effective_keys": 1 / participation(spread, tokens),
    }
    return replace(answer, values=values)

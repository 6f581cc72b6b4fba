"""Lower bound on attention entropy from the size of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.ext.theory.theorems._quantities import LayerQuantities, Network, log_of_rounding
from rankscope.ext.theory.theorems._spec import Evaluation, Hypothesis, LayerBound, claim, log, rows_add_up, theorem


def log_entropy_bound(tokens: int, logit_size: float) -> float:
    r"""Logarithm of the least entropy of a softmax over T logits of norm at most :math:`\sigma`. **Bound**, attained.

    :math:`\log(1+(T-1)b) + \sigma\sqrt{T(T-1)}\,b/(1+(T-1)b)`, :math:`b = e^{-\sigma\sqrt{T/(T-1)}}`: one logit stands
    out and the others are equal. Undefined below two tokens.

    Example:
        Without logits attention is uniform.

        >>> round(math.exp(log_entropy_bound(8, 0.0)), 12) == round(math.log(8), 12)
        True
    """
    if tokens < 2 or math.isnan(logit_size):
        return math.nan
    log_b = -logit_size * math.sqrt(tokens / (tokens - 1))
    weight = logit_size * math.sqrt(tokens * (tokens - 1))
    u = (tokens - 1) * math.exp(log_b)
    if u < 1e-12:
        return log_b + math.log(tokens - 1 + weight) - u
    return math.log(math.log1p(u) + weight * math.exp(log_b) / (1 + u))


@theorem(
    cites=(Cite("zhai2023stabilizing", "thm. 3.1"),),
    statement=r"\mathrm{Ent}(P_i) \ge \log(1+(T-1)b) + \frac{\sigma\sqrt{T(T-1)}\,b}{1+(T-1)b},"
    r"\quad b = e^{-\sigma\sqrt{T/(T-1)}}",
    hypotheses=("logits of a row bounded by sigma, from weights and tokens", "rows of attention add up to one"),
    sides="lower",
)
def zhai_2023_entropy(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""The entropy of attention is bounded from below by the spectral norm of the scores.

    **Bound** on the entropy of the sharpest row of each head, T the tokens it sees; :math:`\sigma` is
    :math:`s\|W_{QK}\|_2\|X\|_2^2` with biases as one more feature, and with rotary positions
    :math:`s\max_i\|q_i\|\,\|K\|_F`. Of the heads the one nearest to its bound is reported, of those
    whose entropy is more than the rounding of attention to one.
    """
    bounds = tuple(_layer(layer) for layer in layers)
    slack = [b.log_slack for b in bounds if b.log_slack is not None and math.isfinite(b.log_slack) and not b.at_floor]
    said = (
        f"The sharpest row of a layer has an entropy at least 10^{min(slack) / math.log(10):.3g} times the bound."
        if slack
        else "No bound on the logits from the weights: scores are more than query times key."
    )
    return Evaluation("zhai_2023_entropy", "entropy of the sharpest row", bounds, None, (), said)


def _layer(layer: LayerQuantities) -> LayerBound:
    seen = layer.passage
    if not seen.least_entropy:
        return LayerBound(layer.layer)
    rows = zip(seen.least_entropy, seen.entropy_tokens, seen.logit_size, seen.logit_spread, strict=True)
    bounds = [
        (log(entropy), log_entropy_bound(tokens, size), tokens, size, spread) for entropy, tokens, size, spread in rows
    ]
    seen_well = [row for row in bounds if row[0] > log(seen.entropy_floor)]
    measured, lower, tokens, size, spread = min(
        seen_well or bounds, key=lambda row: row[0] - row[1] if row[1] > -math.inf else math.inf
    )
    known = claim("norm of the logits is known", not math.isnan(size))
    # a logit read off attention has an error of one rounding unit, and one more for the normalisation
    within = Hypothesis("logits stay within sigma", spread, size + seen.unit * (size + math.sqrt(tokens)))
    tested = (known,) if math.isnan(size) else (known, within)
    return LayerBound(
        layer.layer,
        log_lower=lower,
        log_measured=measured,
        hypotheses=(*tested, rows_add_up(seen)),
        at_floor=not seen_well,
        log_rounding=log_of_rounding(seen.entropy_floor / math.exp(measured)) if seen_well else 0.0,
    )

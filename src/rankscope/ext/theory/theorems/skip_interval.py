"""Two-sided bounds for stream plus attention, if attention reads the stream itself. Ours."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.ext.theory.theorems._quantities import MOST_ROUNDING, LayerQuantities, Network, log_of_rounding
from rankscope.ext.theory.theorems._spec import Evaluation, LayerBound, claim, heads_make_it_up, log, log_ratio, theorem


@theorem(
    cites=(),
    statement=r"\big||g| - \sigma_{\max}(T)\big|_+ \le \frac{\|gR + T(R)\|_F}{\|R\|_F} \le |g| + \sigma_{\max}(T)",
    hypotheses=(
        "attention reads the stream itself (no norm before it)",
        "attention stays within the tokens that count",
        "what attention gives is the sum of its heads",
    ),
    sides="two-sided",
)
def skip_interval(network: Network, layers: Sequence[LayerQuantities]) -> Evaluation:
    r"""Lower and upper bound on the factor by which skip plus attention changes the residual.

    **Bound**, two-sided, on :math:`\|R'\|_F/\|R\|_F` from the stream to the stream plus attention, before any
    post-norm, both as the model computed them. The leak of rows that do not sum to one is included in both ends, as in
    ``contraction_interval``. With a norm before attention, the sum is not a function of the residual alone, and
    the theorem makes no statement.
    """
    bounds = tuple(_layer(layer) for layer in layers)
    known = [b for b in bounds if b.log_upper is not None]
    kept = sum(b.log_lower is not None and b.log_lower >= 0 for b in known)
    inside = sum(not b.is_violated for b in known)
    said = (
        f"The measured factor lies inside the interval in {inside} of {len(known)} layers; the lower end shows that no "
        f"residual shrinks in {kept}."
        if known
        else "A norm stands before attention in every layer, or there is no skip: the sum is not bounded."
    )
    return Evaluation("skip_interval", "residual after skip and attention over before", bounds, None, (), said)


def _layer(layer: LayerQuantities) -> LayerBound:
    gains = layer.passage.sum_gains
    reads = claim("attention reads the stream itself, past a skip", gains is not None)
    if gains is None:
        return LayerBound(layer.layer, hypotheses=(reads,))
    lower, upper = gains.narrowest
    return LayerBound(
        layer.layer,
        log_upper=log(upper),
        log_lower=log(lower),
        log_measured=log_ratio(layer.passage.sum_out, layer.passage.frobenius_in),
        hypotheses=(reads, *heads_make_it_up(layer.passage)),
        at_floor=layer.passage.sum_rounding >= MOST_ROUNDING,
        log_rounding=log_of_rounding(layer.passage.sum_rounding),
    )

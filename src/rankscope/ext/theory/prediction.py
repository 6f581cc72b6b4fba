"""The prediction for a design: depth of agreement, class, and a sentence."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

AGREEMENT = 1e-3
"""Relative residual at which tokens count as equal."""
CollapseName = Literal["order 3", "order 1", "slower than exponential", "no collapse"]


@dataclass(frozen=True)
class Agreement:
    """The depth at which tokens agree up to a given relative residual.

    Attributes:
        level: that residual.
        depth: mean over seeds, linear (in the logarithm) between blocks; None if some seed did not reach the level.
        spread: standard deviation over seeds.
        block: the block after which they agree.
        reached: number of seeds that reached the level.
        seeds: number of seeds.
        followed: number of blocks computed for every seed.
    """

    level: float
    depth: float | None
    spread: float | None
    block: int | None
    reached: int
    seeds: int
    followed: int

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types; an undefined spread is None."""
        facts = dataclasses.asdict(self)
        return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in facts.items()}


def predicted_sentence(
    name: str,
    depth: int,
    kind: CollapseName,
    factor: float,
    agreement: Agreement,
    final: float,
    interval: tuple[float, float],
) -> str:
    """What is left after the last block, how tokens approach each other, and at which depth they agree.

    It follows the words that name the state; see :mod:`rankscope.ext.theory.predict.judge`.

    Args:
        name: name of the design.
        depth: number of blocks.
        kind: its class.
        factor: late factor per block.
        agreement: depth of agreement.
        final: mean of log10 of the relative residual after the last block.
        interval: contains it in 95% of initialisations; nan if unknown.
    """
    cubing = final <= math.log10(agreement.level)
    words = {
        "order 3": "Each block cubes the distance between tokens (order 3)"
        if cubing
        else "Blocks cube the distance between tokens (order 3) once they nearly agree, which they do not here",
        "order 1": f"Each block multiplies the distance between tokens (order 1), in the end by {factor:.4g}",
        "slower than exponential": "Tokens approach each other more slowly than exponentially: the factor per block "
        f"is {factor:.4g} in the end and tends to 1",
        "no collapse": f"Tokens are not seen to approach each other: the factor per block is {factor:.4g} in the end"
        + (", which these seeds cannot tell from 1" if factor < 1 else ""),
    }[kind]
    if agreement.depth is None:
        when = (
            f"{agreement.reached} of {agreement.seeds} seeds agree to {agreement.level:g} within "
            f"{agreement.followed} blocks"
        )
    else:
        place = "within" if agreement.depth <= depth else "beyond"
        spread = "" if agreement.spread is None or math.isnan(agreement.spread) else f" ± {agreement.spread:.1f}"
        when = f"Tokens agree to {agreement.level:g} at depth {agreement.depth:.1f}{spread}, {place} its {depth} blocks"
    low, high = interval
    within = "" if math.isnan(low) else f" ({_power(low)} to {_power(min(0.0, high))} in 95% of initialisations)"
    return f"Relative residual {_power(final)} after block {depth - 1}{within}. {words}. {when}."


def _power(log10: float) -> str:
    if log10 == -math.inf:
        return "0"
    return f"{10**log10:.3g}" if log10 > -4 else f"10^{log10:.1f}" if log10 > -1000 else f"10^{log10:.0f}"

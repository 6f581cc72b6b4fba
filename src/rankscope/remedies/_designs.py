"""Remedies of a design without weights."""

from __future__ import annotations

from rankscope._errors import UnsupportedOperationError
from rankscope.remedies._spec import REMEDIES
from rankscope.theory.designs.design import Design


def remedied(design: Design, name: str, strength: float | None = None) -> Design:
    """The design that a remedy makes of another.

    Args:
        design: without the remedy.
        name: from ``rankscope ls remedies``.
        strength: None for the remedy's own default.

    Raises:
        UnknownNameError: no such remedy.
        UnsupportedOperationError: a design has no parameter that could say it.

    Example:
        >>> remedied(Design(depth=16, width=64, heads=4), "residual_scale").attention_scale
        0.25
    """
    entry = REMEDIES[name]
    if entry.design is None:
        raise UnsupportedOperationError(
            f"{name} cannot be told by the parameters of a design. Run it on a random initialisation instead: "
            f"rankscope remedy init:NAME --remedies {name}"
        )
    return design.changed(**entry.design(design, entry.strength if strength is None else strength))

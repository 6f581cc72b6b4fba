"""How a remedy is asked for: by name, or by name and strength."""

from __future__ import annotations

from rankscope._errors import InputError
from rankscope.remedies import REMEDIES


def parsed_remedy(word: str) -> tuple[str, float | None]:
    """Name and strength; None for the remedy's own.

    Raises:
        UnknownNameError: no such remedy.
        InputError: a strength that is no number.

    Example:
        >>> parsed_remedy("stronger_skip=3"), parsed_remedy("deepnorm")
        (('stronger_skip', 3.0), ('deepnorm', None))
    """
    name, equals, amount = word.partition("=")
    entry = REMEDIES[name.strip()]
    if not equals:
        return entry.name, None
    try:
        return entry.name, float(amount)
    except ValueError:
        raise InputError(f"{word!r}: expected {entry.name}=NUMBER ({entry.strength_means}).") from None

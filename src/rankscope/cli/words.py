"""Lists written on a command line."""

from __future__ import annotations

from collections.abc import Sequence


def split_names(given: Sequence[str] | None) -> list[str] | None:
    """Names from a repeated option, each of which may hold several with commas; None when there are none.

    Numbers after a comma belong to the name before them, as in ``block.in@0,5``.

    Example:
        >>> split_names(["block.in@0,5,block.out", "final"])
        ['block.in@0,5', 'block.out', 'final']
    """
    names: list[str] = []
    for word in given or ():
        pieces = [piece.strip() for piece in word.split(",") if piece.strip()]
        for position, piece in enumerate(pieces):
            if position > 0 and piece.isdigit() and "@" in names[-1]:
                names[-1] += f",{piece}"
            else:
                names.append(piece)
    return names or None

"""Cosines between tokens, as ``measure(similarity=True)`` stores them under ``extra["similarity"]``.

Stored as integers in thousandths, the upper triangle row by row, None if a token is zero. This is small and round-trips
exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_TOKENS = 64
SCALE = 1000


@dataclass(frozen=True, eq=False)
class Similarity:
    """Cosines of one stack.

    Args:
        sequence: number of the sequence.
        tokens: number of its tokens that count.
        positions: positions of the stored tokens, ascending.
        labels: the tokens as text; may be empty.
        blocks: numbers of the blocks.
        matrices: one symmetric matrix per block; NaN if a token is zero.
    """

    sequence: int
    tokens: int
    positions: tuple[int, ...]
    labels: tuple[str, ...]
    blocks: tuple[int, ...]
    matrices: tuple[NDArray[np.float64], ...]


def shown_positions(count: int, most: int = MOST_TOKENS) -> list[int]:
    """Which of ``count`` tokens to keep: all, or ``most`` evenly spaced ones including both ends.

    Example:
        >>> shown_positions(5, 3)
        [0, 2, 4]
    """
    return sorted({int(place) for place in np.linspace(0, count - 1, min(count, most)).round()}) if count else []


def packed(cosines: NDArray[np.float64]) -> list[int | None]:
    """The upper triangle as integers in thousandths.

    Example:
        >>> packed(np.array([[1.0, 0.5], [0.5, 1.0]]))
        [1000, 500, 1000]
    """
    upper = cosines[np.triu_indices(cosines.shape[0])]
    return [round(float(value) * SCALE) if np.isfinite(value) else None for value in upper]


def similarities_in(extra: Mapping[str, Any]) -> dict[str, Similarity]:
    """The similarities stored in a run, by stack (an empty name for a model with one); may be empty.

    Raises what a malformed entry raises, which :func:`~rankscope.runs.presenting.showing` explains.
    """
    stored = extra.get("similarity")
    if stored is None:
        return {}
    return {str(name): _read(stored, part) for name, part in stored["stacks"].items() if part["blocks"]}


def _read(stored: Mapping[str, Any], part: Mapping[str, Any]) -> Similarity:
    positions = tuple(int(place) for place in part["positions"])
    if len(positions) > MOST_TOKENS:
        raise ValueError(f"{len(positions)} tokens, at most {MOST_TOKENS} are stored")
    labels = tuple(str(label) for label in part.get("labels") or ())
    if labels and len(labels) != len(positions):
        raise ValueError(f"{len(labels)} labels for {len(positions)} tokens")
    blocks = tuple(int(block) for block in part["blocks"])
    matrices = tuple(_unpacked(upper, len(positions)) for upper in part["cosines"])
    if len(matrices) != len(blocks):
        raise ValueError(f"{len(matrices)} matrices for {len(blocks)} blocks")
    return Similarity(int(stored["sequence"]), int(part["tokens"]), positions, labels, blocks, matrices)


def _unpacked(upper: Sequence[int | None], size: int) -> NDArray[np.float64]:
    values = np.array([np.nan if value is None else float(value) for value in upper]) / SCALE
    matrix = np.full((size, size), np.nan)
    rows, columns = np.triu_indices(size)
    if values.shape != rows.shape:
        raise ValueError(f"{values.size} cosines for {size} tokens, expected {rows.size}")
    matrix[rows, columns] = values
    matrix[columns, rows] = values
    return matrix

"""What the playground shows: numbers only, drawn elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.playground.choices import Choices

Points = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Frame:
    """The tokens after one block, as directions.

    Attributes:
        sphere: one unit vector (x, y, z) per token. The north pole is the direction of the mean token; the angle from
            it is the true angle in all dimensions; the longitude is that of the two principal directions of what
            departs from the pole, turned to follow the frame before.
        lens: the same departures seen from above the pole, magnified until the farthest is at distance 1.
        log10_angle: log10 of the largest angle from the pole, in radians; minus infinity where tokens are equal.
    """

    sphere: Points
    lens: Points
    log10_angle: float


@dataclass(frozen=True)
class TokenCourse:
    """How far tokens differ, block by block, in exact arithmetic.

    Attributes:
        log10_relative: log10 of the relative residual, from the first tokens on: depth + 1 numbers.
        order: of each block: how many times the log-residual behind it follows that before it, when its input is drawn
            to its mean by a factor e; under a remedy, when the first tokens are, as ``rankscope.exact`` has it.
    """

    log10_relative: tuple[float, ...]
    order: tuple[float, ...]


@dataclass(frozen=True)
class Law:
    """What the law says of each block, from its weights and the collapsed token alone.

    Attributes:
        order: 3 or 1 (or higher, where leading terms vanish) of a residual that is small enough; 0 where unknown.
        log10_relative: of the tokens behind the block, from those before it; the first entry is that behind block 1.
    """

    order: tuple[int, ...]
    log10_relative: tuple[float, ...]


@dataclass(frozen=True)
class Sight:
    """What a float format makes of the same network.

    Attributes:
        floor: relative residual at and below which the format shows its own rounding.
        block: first block, counted from 1, behind which the exact curve is at or below the floor; None where it stays
            above.
        log10_relative: as a forward pass in this format reads it; minus infinity where tokens read as equal.
    """

    floor: float
    block: int | None
    log10_relative: tuple[float, ...]


@dataclass(frozen=True)
class Treated:
    """The same network under a remedy.

    Attributes:
        name: of the remedy.
        summary: what it does.
        course: in exact arithmetic; None where it could not be had.
        refused: why not; empty otherwise.
    """

    name: str
    summary: str
    course: TokenCourse | None
    refused: str = ""


@dataclass(frozen=True)
class Picture:
    """Everything the playground shows of some choices.

    Attributes:
        choices: what was asked for.
        course: the exact residuals.
        law: the prediction beside them.
        order: 3, 1 or 0 of the network (0: a small residual does not shrink).
        factor: per block late in depth, of the relative residual, for orders 1 and 0; nan for order 3.
        reason: why it has this order, in one sentence.
        sights: float formats by name, coarsest first.
        frames: tokens from the first ones on: depth + 1.
        treated: under the remedy that was asked for, if one was.
    """

    choices: Choices
    course: TokenCourse
    law: Law
    order: int
    factor: float
    reason: str
    sights: Mapping[str, Sight]
    frames: tuple[Frame, ...]
    treated: Treated | None

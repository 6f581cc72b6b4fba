"""The data the playground shows; other modules draw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.ext.playground.choices import Choices

Points = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Frame:
    """The tokens after one block, as directions.

    Attributes:
        sphere: one unit vector (x, y, z) per token. The north pole is the direction of the mean token; the angle from
            it is the true angle in all dimensions; the longitude comes from the two principal directions of the
            deviations from the pole, rotated to follow the previous frame.
        lens: the same deviations seen from above the pole, magnified until the farthest is at distance 1.
        log10_angle: log10 of the largest angle from the pole, in radians; minus infinity if tokens are equal.
    """

    sphere: Points
    lens: Points
    log10_angle: float


@dataclass(frozen=True)
class TokenCourse:
    """How far tokens differ, block by block, in exact arithmetic.

    Attributes:
        log10_relative: log10 of the relative residual, starting with the first tokens: depth + 1 numbers.
        order: of each block: change of the log-residual after it per change before it, when its input is drawn to its
            mean by a factor e; under a remedy, when the first tokens are, as in ``rankscope.exact``.
    """

    log10_relative: tuple[float, ...]
    order: tuple[float, ...]


@dataclass(frozen=True)
class Law:
    """The law's prediction for each block, from its weights and the collapsed token alone.

    Attributes:
        order: 3 or 1 (or higher, if leading terms vanish) for a small enough residual; 0 if unknown.
        log10_relative: of the tokens after the block, from those before it; the first entry is that after block 1.
    """

    order: tuple[int, ...]
    log10_relative: tuple[float, ...]


@dataclass(frozen=True)
class Sight:
    """The same network in a float format.

    Attributes:
        floor: relative residual at and below which the format shows its own rounding.
        block: first block after which the exact curve is at or below the floor; None if it stays above.
        log10_relative: as measured by a forward pass in this format; minus infinity if tokens are equal in it.
    """

    floor: float
    block: int | None
    log10_relative: tuple[float, ...]


@dataclass(frozen=True)
class Treated:
    """The same network under a remedy.

    Attributes:
        name: name of the remedy.
        summary: what it does.
        course: in exact arithmetic; None if it could not be computed.
        refused: why not; empty otherwise.
        frames: its tokens before the first block and after each; empty if it could not be computed.
    """

    name: str
    summary: str
    course: TokenCourse | None
    refused: str = ""
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Picture:
    """Everything the playground shows for given choices.

    Attributes:
        choices: the configuration.
        course: the exact residuals.
        law: the prediction for them.
        order: 3, 1 or 0 of the network (0: a small residual does not shrink).
        factor: per block late in depth, of the relative residual, for orders 1 and 0; nan for order 3.
        reason: why it has this order, in one sentence.
        sights: float formats by name, coarsest first.
        frames: tokens before the first block and after each block: depth + 1.
        treated: the network under the chosen remedy, if there is one.
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

"""States that one number cannot tell apart, told apart by the battery.

One huge token makes every rank read one and the residual read full; one huge channel makes every rank read one; a
common vector makes cosines and residuals read like collapse while the tokens stay as distinct as before. Each threshold
below is a convention with a reason, not a law; a verdict always prints the value beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from rankscope.results.battery import Battery

COLLAPSED_RESIDUAL = 0.01
"""Relative residual below which tokens count as collapsed: one ten-thousandth of the energy is left to tell them apart,
and the difference is of the size of one bfloat16 step (2^-8 to 2^-7), so half-precision layers above cannot use it."""

SHARED_RESIDUAL = 0.5
"""Relative residual below which a common vector dominates: its share of the energy, 1 - r^2, passes three quarters."""

DOMINANT_SHARE = 0.5
"""Share of the energy above which a single token or channel dominates: it outweighs all the others together."""

NARROW_DIMENSION = 2.0
"""Centred dimension below which the tokens lie on little more than a line."""

MAJORITY = 0.5
"""Share of sequences from which on a state is the layer's and not that of a few sequences."""


class State(IntEnum):
    """What the tokens of one sequence look like at one layer, milder to graver."""

    UNKNOWN = 0
    HEALTHY = 1
    MEAN_OFFSET = 2
    NARROW = 3
    HUGE_CHANNEL = 4
    HUGE_TOKEN = 5
    COLLAPSED = 6
    FLOOR = 7

    @property
    def code(self) -> str:
        """The word used in results, e.g. ``"huge token"``."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Segment:
    """Consecutive layers in one state; positions are rows of the battery, both ends included."""

    state: State
    first: int
    last: int


def spread_of(battery: Battery) -> NDArray[np.float64]:
    """The relative residual, or what the mean cosine implies for it when it was not measured: sqrt(1 - cosine)."""
    spread, cosine = battery.values["spread"], battery.values["cosine"]
    implied = np.sqrt(np.clip(1.0 - cosine, 0.0, None))
    return np.where(np.isfinite(spread), spread, implied)


def classify(battery: Battery, floor_relative: float | None) -> NDArray[np.int64]:
    """State of every layer and sequence, shape ``(layers, sequences)``; later rules overrule earlier ones.

    A residual of 0.01 cannot come with a dominant token (the residual is then near 1), and means the same whether or
    not a channel dominates: so collapse overrules both.
    """
    spread = spread_of(battery)
    known = np.any([np.isfinite(grid) for grid in battery.values.values()], axis=0) | battery.floor
    states = np.where(known, int(State.HEALTHY), int(State.UNKNOWN))
    rules = (
        (spread <= SHARED_RESIDUAL, State.MEAN_OFFSET),
        (battery.values["centred_dimension"] < NARROW_DIMENSION, State.NARROW),
        (battery.values["channel_share"] > DOMINANT_SHARE, State.HUGE_CHANNEL),
        (battery.values["token_share"] > DOMINANT_SHARE, State.HUGE_TOKEN),
        (spread <= COLLAPSED_RESIDUAL, State.COLLAPSED),
        (battery.floor, State.FLOOR),
        (spread <= (floor_relative or 0.0), State.FLOOR),
    )
    for holds, state in rules:
        states[holds] = int(state)
    return states


def layer_states(states: NDArray[np.int64]) -> list[State]:
    """Per layer the gravest state that at least half of its sequences have reached.

    Example:
        >>> layer_states(np.array([[1, 1, 6], [1, 6, 6]]))
        [<State.HEALTHY: 1>, <State.COLLAPSED: 6>]
    """
    chosen = []
    for row in states:
        measured = np.sort(row[row > State.UNKNOWN])[::-1]
        needed = max(int(np.ceil(MAJORITY * measured.size)), 1)
        chosen.append(State(int(measured[needed - 1])) if measured.size else State.UNKNOWN)
    return chosen


def segments(states: list[State]) -> list[Segment]:
    """Runs of equal states over depth."""
    found: list[Segment] = []
    for row, state in enumerate(states):
        if found and found[-1].state == state:
            found[-1] = Segment(state, found[-1].first, row)
        else:
            found.append(Segment(state, row, row))
    return found

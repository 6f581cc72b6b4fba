"""Classifies values into states: one per layer and sequence, and a trend over depth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rankscope.verdicts.battery import Battery, Flags, Floats
from rankscope.verdicts.states import (
    ALIGNED_COSINE,
    CLUSTERED_SHARE,
    COLLAPSED_RESIDUAL,
    COPIES_SHARE,
    DOMINANT_SHARE,
    FEW_DIRECTIONS,
    LEAST_TOKENS,
    MAJORITY,
    NARROW_DIMENSION,
    SHARED_RESIDUAL,
    TREND_FALL,
    State,
)


@dataclass(frozen=True)
class Trend:
    """A residual that falls by a steady factor per block.

    Attributes:
        factor: per block, over the second half.
        first: residual at the first block.
        last: residual at the last block.
        crossing: the block at which it would pass the threshold of collapse at this rate.
    """

    factor: float
    first: float
    last: float
    crossing: int


def classify(battery: Battery) -> NDArray[np.int64]:
    """State of every layer and sequence, shape ``(layers, sequences)``; later rules override earlier ones.

    A residual below the threshold overrides a dominant channel only if the typical residual, which excludes outlier
    channels, agrees or was not measured.
    """
    spread, typical, values = battery.spread(), battery.values["typical"], battery.values
    many = _at_least(battery.tokens, LEAST_TOKENS) & (battery.dim is None or battery.dim >= LEAST_TOKENS)
    low = np.nan_to_num(typical, nan=-np.inf) <= COLLAPSED_RESIDUAL
    # A single cloud a little wider than the tolerance has many near pairs, but no gap around them.
    cloud = (typical > COLLAPSED_RESIDUAL) & (typical <= 2 * COLLAPSED_RESIDUAL)
    # With two tokens, one of them is already half, and is not a copy of anything.
    repeated = ~(values["copied_share"] == 0.0) & ~cloud
    grouped = repeated & (values["copied_share"] >= CLUSTERED_SHARE) & (values["cluster_share"] <= CLUSTERED_SHARE)
    # Two clusters, one with most of the pairs, also have a median direction; so nearly all pairs must agree.
    aligned = ~(values["cosine"] < ALIGNED_COSINE)
    known = np.any([np.isfinite(grid) for part, grid in values.items() if part != "size"], axis=0)
    # If the residual was measured but is undefined, no other metric replaces it.
    states = np.where((known & ~battery.undefined) | battery.floor, int(State.HEALTHY), int(State.UNKNOWN))
    rules = (
        (spread <= SHARED_RESIDUAL, State.MEAN_OFFSET),
        (many & (values["centred_dimension"] < NARROW_DIMENSION), State.FEW_DIRECTIONS),
        (many & (values["directions"] <= FEW_DIRECTIONS), State.FEW_DIRECTIONS),
        (_beyond_chance(values["channel_share"], battery.dim) > DOMINANT_SHARE, State.HUGE_CHANNEL),
        (_beyond_chance(values["token_share"], battery.tokens) > DOMINANT_SHARE, State.HUGE_TOKEN),
        (grouped, State.CLUSTERS),
        (aligned & (battery.direction() <= COLLAPSED_RESIDUAL), State.SAME_DIRECTION),
        (~grouped & repeated & (values["cluster_share"] >= COPIES_SHARE), State.COPIES),
        (low & (spread <= COLLAPSED_RESIDUAL), State.COLLAPSED),
        (low & battery.floor, State.FLOOR),
        (battery.vanished, State.VANISHED),
    )
    # From mild to grave: the last rule that holds wins. An undefined residual stays unknown unless X = 0.
    for holds, state in rules:
        states[holds & (battery.vanished | ~battery.undefined)] = int(state)
    return states


def trends(battery: Battery, states: NDArray[np.int64]) -> list[Trend | None]:
    """For each sequence, the steady decrease of its residual over the second half of the blocks, if there is one.

    Uses the larger of the relative and the typical residual, because both must be small under collapse. The decrease
    counts if it is at least threefold, happens in every block, is at least half as fast as the average in the last, and
    the residual ends below one half. If every block adds the same common vector, the residual falls as 1/depth:
    twofold over the second half, however deep the model is.
    """
    line = np.fmax(battery.values["spread"], battery.values["typical"])
    line = np.where(battery.floor | (states >= State.COLLAPSED), np.nan, line)
    return [_trend(line[:, column], battery.layers) for column in range(line.shape[1])]


def _trend(line: Floats, layers: NDArray[np.int64]) -> Trend | None:
    half = line.size // 2
    late = line[-half - 1 :]
    if half < 2 or not np.isfinite(late).all() or not (late > 0).all() or late[-1] > SHARED_RESIDUAL:
        return None
    if not (np.diff(late) < 0).all() or late[0] < TREND_FALL * late[-1]:
        return None
    blocks = int(layers[-1] - layers[-half - 1])
    log_factor = math.log(late[-1] / late[0]) / blocks
    if math.log(late[-1] / late[-2]) > log_factor / 2:  # it stopped falling
        return None
    # Blocks until the residual passes the threshold at this factor: late * factor^n = threshold.
    more = math.ceil(math.log(COLLAPSED_RESIDUAL / late[-1]) / log_factor)
    return Trend(math.exp(log_factor), float(line[0]), float(late[-1]), int(layers[-1]) + max(1, more))


def overall(states: NDArray[np.int64], falling: list[Trend | None]) -> NDArray[np.int64]:
    """The gravest state of each sequence over depth, including trends."""
    gravest = states.max(axis=0) if states.size else np.zeros(states.shape[1], dtype=np.int64)
    trend = np.array([int(State.COLLAPSING) if one else int(State.UNKNOWN) for one in falling], dtype=np.int64)
    return np.maximum(gravest, trend) if trend.size else gravest


def headline(by_sequence: NDArray[np.int64]) -> State:
    """The state a run is named after: the gravest that half of the sequences reach, or any if it is grave.

    Example:
        >>> headline(np.array([1, 1, 5, 5])), headline(np.array([1, 1, 1, 5])), headline(np.array([1, 1, 1, 11]))
        (<State.HUGE_TOKEN: 5>, <State.HEALTHY: 1>, <State.COLLAPSED: 11>)
    """
    known = np.sort(by_sequence[by_sequence > State.UNKNOWN])[::-1]
    if not known.size:
        return State.UNKNOWN
    if State(int(known[0])).is_grave:
        return State(int(known[0]))
    return State(int(known[max(math.ceil(MAJORITY * known.size), 1) - 1]))


def _at_least(tokens: Floats | None, least: int) -> Flags | bool:
    return True if tokens is None else ~(tokens < least)


def _beyond_chance(share: Floats, count: Floats | int | None) -> Floats:
    """A share among ``count`` items, rescaled so that an equal share is 0: 55% of two is not an outlier."""
    if count is None:
        return share
    equal = 1.0 / np.maximum(np.asarray(count, dtype=np.float64), 1.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(equal < 1.0, (share - equal) / (1.0 - equal), np.nan)

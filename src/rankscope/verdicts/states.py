"""The states a model can be in, and the one table of thresholds that decides between them.

No single metric distinguishes them. With one huge token, every rank is one and the residual is full; one huge channel
does the same to ranks; with a common vector, cosines and residuals look like collapse while the tokens stay as distinct
as before; and sums over tokens do not show that nine tokens in ten are copies if the tenth is large.

Every verb, the gauge and the experiments use this table and nothing else to decide what is collapsed. A threshold is a
convention with a reason, not a law; a verdict prints the value next to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

COLLAPSED_RESIDUAL = 0.03
SHARED_RESIDUAL = 0.5
DOMINANT_SHARE = 0.5
NARROW_DIMENSION = 2.0
FEW_DIRECTIONS = 3.0
CLUSTERED_SHARE = 0.9
COPIES_SHARE = 0.5
ALIGNED_COSINE = 0.9
TREND_FALL = 3.0
MAJORITY = 0.5
LEAST_TOKENS = 8
IDLE_EXPERTS = 0.1
LEAST_INPUTS = 8
AVERAGING = 0.5
REMAINING_SPREAD = 0.1
UNIFORM_ENTROPY = 0.999
ONE_HOT_ENTROPY = 0.02


@dataclass(frozen=True)
class Threshold:
    """One row of the table: what is compared with which value, and the reason for that value.

    Attributes:
        state: code of the state it decides.
        condition: what is compared.
        value: with which value.
        reason: why this one.
        axis: the axis along which it applies, a key of :data:`rankscope.verdicts.AXES`.
    """

    state: str
    condition: str
    value: float
    reason: str
    axis: str = "tokens"


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold("mean offset", "relative residual at most", SHARED_RESIDUAL,
              "a common vector then carries more than three quarters of the energy, 1 - r²"),
    Threshold("few directions", "centred effective rank below", NARROW_DIMENSION,
              "tokens then lie on little more than a line"),
    Threshold("few directions", "directions that hold 99% of the differences, at most", FEW_DIRECTIONS,
              "three numbers per token then say nearly all that distinguishes tokens"),
    Threshold("huge channel", "largest channel share beyond chance above", DOMINANT_SHARE,
              "the channel then outweighs all others together"),
    Threshold("huge token", "largest token share beyond chance above", DOMINANT_SHARE,
              "the token then outweighs all others together"),
    Threshold("clusters", "share of tokens that have a copy at least, largest cluster share at most", CLUSTERED_SHARE,
              "nearly every token then repeats another, and not all the same one; repeated words do not reach it"),
    Threshold("same direction", "direction residual at most", COLLAPSED_RESIDUAL,
              "directions have the same limit as tokens"),
    Threshold("same direction", "and mean cosine at least", ALIGNED_COSINE,
              "at most one token in twenty then points elsewhere"),
    Threshold("copies", "largest cluster share at least", COPIES_SHARE,
              "every second token is then a copy of one"),
    Threshold("collapsing", "fall of the residual over the second half of the blocks at least", TREND_FALL,
              "a common vector that grows by the same amount in every block halves the residual there, and no more"),
    Threshold("collapsed", "relative residual and typical residual at most", COLLAPSED_RESIDUAL,
              "a thousandth of the energy is left to distinguish tokens; bfloat16 (4 eps = 0.031) does not resolve it"),
    Threshold("collapsed", "different inputs at least", LEAST_INPUTS,
              "fewer may be alike by chance; the same limit as for the directions of tokens", "inputs"),
    Threshold("collapsed", "relative residual below that before the first block times", REMAINING_SPREAD,
              "a hundredth of the energy that distinguished the inputs as they entered is left",
              "inputs"),
    Threshold("collapsed", "relative residual below that of independent tokens times", AVERAGING,
              "the mean of n independent tokens varies by 1/√n of what they do, which is not a collapse", "inputs"),
    Threshold("collapsed", "relative residual over streams, after the last block, at most", COLLAPSED_RESIDUAL,
              "streams have the same limit as tokens", "streams"),
    Threshold("collapsed", "experts in use beyond the k of one token, (e^H - k)/(E - k), at most", IDLE_EXPERTS,
              "nearly every token then goes to the same k experts", "experts"),
    Threshold("collapsed", "relative entropy of every head of every block at least", UNIFORM_ENTROPY,
              "1 - s²/(2 log k): scores of standard deviation s < 0.12 (k up to 1024) change weights by a tenth",
              "attention"),
    Threshold("collapsed", "or at most", ONE_HOT_ENTROPY,
              "one key then has 99% of the weight, and the softmax passes hardly any gradient", "attention"),
    Threshold("healthy", "a sink is named if the first token has a share of the weight above", DOMINANT_SHARE,
              "it then outweighs all other tokens; usual in trained models, and not looked for below eight tokens",
              "attention"),
    Threshold("collapsed", "change of the stream (write ratio) by half of the blocks below", COLLAPSED_RESIDUAL,
              "what a block adds is then no more than what is left of collapsed tokens", "depth"),
)  # fmt: skip
"""Chosen before the confusion matrix was drawn, except for the mean cosine; see ``docs/verdicts.md``."""


class State(IntEnum):
    """State of the tokens of one sequence, from mild to grave."""

    UNKNOWN = 0
    HEALTHY = 1
    MEAN_OFFSET = 2
    FEW_DIRECTIONS = 3
    HUGE_CHANNEL = 4
    HUGE_TOKEN = 5
    CLUSTERS = 6
    SAME_DIRECTION = 7
    COPIES = 8
    COLLAPSING = 9
    FLOOR = 10
    COLLAPSED = 11
    VANISHED = 12
    NOT_FINITE = 13

    @property
    def code(self) -> str:
        """The word used in results, e.g. ``"huge token"``."""
        return self.name.lower().replace("_", " ")

    @property
    def is_grave(self) -> bool:
        """Whether one sequence is enough to name the run after this state. Other states need half of them."""
        return self >= State.FLOOR


MEANINGS: Mapping[State, str] = {
    State.UNKNOWN: "nothing a verdict is drawn from was measured, or no value is defined",
    State.HEALTHY: "tokens differ, and none of the states below holds",
    State.MEAN_OFFSET: "tokens share a large common vector, around which they differ",
    State.FEW_DIRECTIONS: "tokens differ along a few directions only",
    State.HUGE_CHANNEL: "one channel carries most of the energy",
    State.HUGE_TOKEN: "one token carries most of the energy",
    State.CLUSTERS: "nearly every token is a copy of another, and not all of the same one",
    State.SAME_DIRECTION: "tokens point the same way; what differs is mostly their norm",
    State.COPIES: "half of the tokens or more are copies of one vector, the others are not",
    State.COLLAPSING: "the residual falls by a steady factor per block, and is not yet below the threshold",
    State.FLOOR: "tokens agree to the last digits of their float format",
    State.COLLAPSED: "tokens are equal up to a small residual",
    State.VANISHED: "the stream is exactly zero",
    State.NOT_FINITE: "NaN or infinity",
}
"""One line about each state, for the documentation. A collapse that was seen outranks a floor below which nothing can
be seen."""


def is_collapsed(residual: float) -> bool:
    """Whether a relative residual counts as collapsed, for code that has only that number."""
    return residual <= COLLAPSED_RESIDUAL

"""What is read off a run of random tokens: curves with a known law, so that every answer is a closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rankscope.ext.theory.graphs.bracket import Bracket
from rankscope.ext.theory.graphs.mixing import Decay, followed, layers_to_agree, transient_layers
from rankscope.ext.theory.graphs.second_eigenvalue import SecondEigenvalue


def factors(*own: float, ended: bool = True, first: float = 0.0) -> Decay:
    """A run whose residual is multiplied by these, layer by layer; its tokens keep their size."""
    logs = first * math.log(10) + np.concatenate([[0.0], np.cumsum(np.log(own))])
    return Decay(logs / math.log(10), logs, ended)


def second(modulus: float, log_constant: float = math.nan) -> SecondEigenvalue:
    return SecondEigenvalue(Bracket.exactly(modulus), 1 - modulus, log_constant)


def ends(found: Bracket) -> tuple[float, float]:
    return found.lower, found.upper


def test_the_first_layer_at_a_thousandth_is_the_layer_of_agreement() -> None:
    assert layers_to_agree(factors(0.5, 0.5, 0.002, 0.5), second(0.5)) == Bracket.exactly(3, "simulated")
    assert layers_to_agree(factors(0.5, first=-3.5), second(0.5)) == Bracket.exactly(0, "simulated")
    assert layers_to_agree(Decay(np.array([0.0, -3.0]), np.zeros(2), True), second(0.5)).lower == 1


def test_a_settled_run_is_continued_with_its_late_factor() -> None:
    """A residual of 0.5 x 0.8^t from layer 1 on: a thousandth is reached at the first t with 0.8^t <= 0.002."""
    found = layers_to_agree(factors(0.5, 0.8, 0.8, 0.8), second(0.8))
    assert ends(found) == (1 + math.ceil(math.log(0.002) / math.log(0.8)),) * 2
    assert found.status == "from the end of the run and the second eigenvalue"


def test_the_constant_of_a_mode_gives_the_layer_without_a_settled_run() -> None:
    """2 x 0.9^t = 1e-3 at t = 72.14; never before the end of a run that did not get there."""
    found = layers_to_agree(factors(0.99, 0.99), second(0.9, math.log(2)))
    assert ends(found) == (73, 73)
    assert found.status == "from the second eigenvalue and its mode"
    assert ends(layers_to_agree(factors(*[0.99] * 99), second(0.9, math.log(2)))) == (100, 100)


def test_without_a_late_factor_there_is_no_layer_of_agreement() -> None:
    assert layers_to_agree(factors(0.9, 1.0), second(1.0)) == Bracket(
        math.inf, math.inf, "infinite: the second eigenvalue is 1"
    )
    assert layers_to_agree(factors(0.9, 1.0), second(math.nan)) == Bracket(3, math.inf, "unknown: no second eigenvalue")


def test_the_transient_ends_with_the_last_layer_nearer_to_one_than_to_the_late_factor() -> None:
    """Late factor 0.25: slower than 0.5 is transient, 0.5 itself is not (in logs, half way)."""
    run = factors(0.9, 0.4, 0.6, 0.4, 0.25, 0.25)
    assert transient_layers(run, second(0.25)) == Bracket.exactly(3, "simulated")
    assert transient_layers(factors(0.4, 0.4, 0.25, 0.25), second(0.25)) == Bracket.exactly(0, "simulated")
    assert transient_layers(factors(0.51, 0.49, 0.25, 0.25), second(0.25)).lower == 1
    assert transient_layers(factors(0.4, 0.51, 0.49, 0.25, 0.25), second(0.25)).lower == 2


def test_a_run_that_ended_in_its_transient_gives_a_lower_bound() -> None:
    assert transient_layers(factors(0.9, 0.9, 0.9), second(0.25)) == Bracket(
        3, math.inf, "still under way after 3 layers"
    )
    assert transient_layers(factors(0.9, 0.4, 0.4), second(0.25)) == Bracket.exactly(1, "simulated for 3 layers")
    over = factors(0.9, 0.9, 0.9, ended=False)
    assert transient_layers(over, second(0.25)) == Bracket.exactly(3, "simulated")


def halving(x: np.ndarray) -> np.ndarray:
    """Two tokens, the first sees only itself: differences halve in every layer, exactly."""
    return np.array([[1.0, 0.0], [0.5, 0.5]]) @ x


@pytest.mark.parametrize("anchor", [0, None])
def test_a_run_stops_where_tokens_agree_and_the_factor_has_settled(anchor: int | None) -> None:
    start = np.array([[1.0], [3.0]])
    decay = followed(halving, start, anchor, 0.5, 100)
    # |(1, 1 + d)| is sqrt(1 + (1 + d)^2), and the residual d / sqrt 2
    sizes = [
        2.0**-t * 2 / math.sqrt(2) / math.sqrt(1 + (1 + 2 * 2.0**-t) ** 2) for t in range(len(decay.log10_relative))
    ]
    assert 10**decay.log10_relative == pytest.approx(sizes, rel=1e-12)
    assert np.diff(decay.log_residuals) == pytest.approx(math.log(0.5), rel=1e-12)
    assert not decay.ended
    assert sizes[-1] <= 1e-3 < sizes[-2]


def test_the_curve_goes_on_below_the_float_floor() -> None:
    decay = followed(halving, np.array([[1.0], [3.0]]), 0, 0.9, 2000)
    assert decay.log_residuals[-1] == pytest.approx(math.log(math.sqrt(2)) - 2000 * math.log(2), rel=1e-12)

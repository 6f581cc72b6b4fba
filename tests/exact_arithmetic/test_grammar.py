"""No wrong exponent without a status, on random networks of the grammar."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath as mp
import pytest
import torch

from tests.exact_arithmetic.grammar import Compared, compared
from tests.reference.grammar import Network, draw_network
from tests.reference.grammar_mpmath import Truth, truth_of
from tests.reference.grammar_torch import Toy

FEW = range(40)
MANY = range(40, 440)
FEW_DIGITS, MANY_DIGITS = 960, 3840

PLAIN = Network(
    seed=5, tokens=2, width=3, heads=1, head_width=2, blocks=1, norm="none", placement="pre", activation="none",
    mask="complete", start="different", skip="none", scale=1.0, cap=0.0, sinks=False, bias=0.0, score_bias=0.0,
    cancelling=False, rotary=False, fused=True, dtype="float64",
)  # fmt: skip
"""One head on two tokens and nothing else."""


def told(network: Network, found: Compared) -> str:
    true = [None if exponent is None else round(exponent, 6) for exponent in found.truth.exponents]
    got = [round(value, 6) for value in found.got]
    return f"{network.described()}\n  true {true}\n  got  {got} {list(found.statuses)}"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", FEW)
def test_no_wrong_exponent_without_a_status(seed: int) -> None:
    network = draw_network(seed)
    found = compared(network, FEW_DIGITS)
    assert "wrong" not in found.outcomes, told(network, found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_wrong_exponent_without_a_status_in_400_networks() -> None:
    wrong = []
    for seed in MANY:
        network = draw_network(seed)
        found = compared(network, MANY_DIGITS)
        if "wrong" in found.outcomes:
            wrong.append(told(network, found))
    assert not wrong, "\n".join(wrong)


def test_the_two_programs_are_the_same_network() -> None:
    """Tamed so that float64 can see it, the module and the reference give the same residual."""
    seen = 0
    for seed in range(36):
        drawn = draw_network(seed)
        tame = {"dtype": "float64", "score_bias": min(drawn.score_bias, 0.3), "scale": min(drawn.scale, 2.0)}
        network = replace(drawn, blocks=2, skip="none" if drawn.skip == "cut" else drawn.skip, **tame)
        x = Toy(network)(network.input[None])[0].detach()
        true = truth_of(network, 120).exponents[-1]
        if true is not None and true > -6:
            relative = float(torch.linalg.norm(x - x.mean(0)) / torch.linalg.norm(x))
            assert math.log10(relative) == pytest.approx(true, abs=1e-8), network.described()
            seen += 1
    assert seen >= 24


def test_a_wrong_exponent_is_seen() -> None:
    truth = Truth((-3.0, -9.0, None, None), (False, False, False, True), 240)
    ok = ("ok",) * 4
    assert Compared(truth, (-3.0, -9.0, -math.inf, math.nan), (*ok[:3], "undefined")).outcomes == (
        "right", "right", "right", "marked",
    )  # fmt: skip
    equal = Truth((None, None), (False, False), 240)
    assert Compared(equal, (-math.inf, -math.inf), ok[:2], is_equal=True).outcomes == ("right", "right")
    assert Compared(equal, (-math.inf, -5000.0), ok[:2], is_equal=True).outcomes == ("right", "wrong")
    assert Compared(truth, (-3.00001, -9.00001, -60.0, -math.inf), ok).outcomes == ("wrong",) * 4


def test_networks_that_are_equal_by_construction_are_so_in_the_reference() -> None:
    equal = [network for network in map(draw_network, range(200)) if network.is_equal]
    assert len(equal) >= 20
    for network in equal[:10]:
        assert set(truth_of(network, 240).exponents) == {None}, network.described()


@pytest.mark.parametrize("scale", [0.1, 3.0, 200.0])
def test_the_reference_has_the_closed_form_of_two_tokens(scale: float) -> None:
    """The rows of one attention head on two tokens differ by (p1 - p2) W_O W_V (x1 - x2), p the weight of the first."""
    network = replace(PLAIN, scale=scale)
    with mp.workdps(2000):
        w = {name: mp.matrix(value.tolist()) for name, value in network.weights[0].items()}
        x = [mp.matrix(row) for row in network.input.tolist()]
        keys = w["k"] * (x[0] - x[1])
        first, second = (1 / (1 + mp.exp(-mp.mpf(scale) * ((w["q"] * row).T * keys)[0])) for row in x)
        values = [w["o"] * w["v"] * row for row in x]
        gap = values[0] - values[1]
        rows = [values[1] + p * gap for p in (first, second)]
        residual = abs(first - second) * mp.norm(gap) / mp.sqrt(2)
        expected = mp.log10(residual / mp.sqrt(mp.norm(rows[0]) ** 2 + mp.norm(rows[1]) ** 2))
    assert truth_of(network, 2000).exponents[0] == pytest.approx(float(expected), abs=1e-9)

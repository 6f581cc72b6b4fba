"""Remedies in the playground: what they do can be had by other choices, and is compared with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope.ext.playground.choices import Choices
from rankscope.ext.playground.model import Transformer, first_tokens
from rankscope.ext.playground.simulating import simulate
from rankscope.remedies import REMEDIES, applied

SMALL = {"depth": 4, "tokens": 12, "width": 16, "heads": 2}


def test_a_stronger_skip_is_the_skip_gain_made_larger() -> None:
    strength = REMEDIES["stronger_skip"].strength
    given = simulate(Choices(**SMALL, skip_gain=0.5, remedy="stronger_skip")).treated
    other = simulate(Choices(**SMALL, skip_gain=0.5 * strength)).course
    assert given is not None
    assert given.course is not None
    np.testing.assert_allclose(given.course.log10_relative, other.log10_relative, rtol=1e-9, atol=1e-12)


def test_a_local_mask_is_the_window() -> None:
    given = simulate(Choices(**SMALL, skip_gain=0.0, remedy="local_mask")).treated
    other = simulate(Choices(**SMALL, skip_gain=0.0, mask="window(4)")).course
    assert given is not None
    assert given.course is not None
    np.testing.assert_allclose(given.course.log10_relative, other.log10_relative, rtol=1e-9, atol=1e-12)


def test_the_untreated_curve_stays_as_it_is() -> None:
    assert simulate(Choices(**SMALL, remedy="skipinit")).course == simulate(Choices(**SMALL)).course


@pytest.mark.parametrize(
    ("remedy", "choices", "says"),
    [
        ("pre_norm", {"norm_place": "pre"}, "post-norm"),
        ("layernorm_scaling", {"norm": "none"}, "pre-norm"),
        ("skipinit", {"skip_gain": 0.0}, "nothing is left"),
    ],
)
def test_what_cannot_be_is_said(remedy: str, choices: dict[str, object], says: str) -> None:
    given = simulate(Choices(**SMALL, remedy=remedy, **choices)).treated
    assert given is not None
    assert given.course is None
    assert says in given.refused


@pytest.mark.parametrize("remedy", list(REMEDIES))
def test_every_remedy_gives_a_curve_or_a_reason(remedy: str) -> None:
    given = simulate(Choices(**{**SMALL, "depth": 2}, skip_gain=0.5, remedy=remedy)).treated
    assert given is not None
    if given.course is None:
        assert given.refused
    else:
        assert all(math.isfinite(value) for value in given.course.log10_relative)
        assert len(given.course.order) == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "remedy", ["qk_norm", "critical_temperature", "logit_softcap", "attention_out_norm", "highway_skip", "peri_ln"]
)
def test_exact_arithmetic_follows_a_remedy_as_floats_do(remedy: str) -> None:
    """Tokens that are far from equal: float64 has digits to spare, and both must agree to 1e-9."""
    chosen = Choices(**SMALL, norm_place="pre" if remedy == "peri_ln" else "post", remedy=remedy)
    given = simulate(chosen).treated
    assert given is not None
    assert given.course is not None
    design = chosen.design()
    model, x = Transformer(design, chosen.seed), first_tokens(design, chosen.seed)
    with torch.no_grad(), applied(model, remedy, inputs=x):
        out = model(x)[0]
    relative = (out - out.mean(dim=0)).norm() / out.norm()
    assert math.log10(float(relative)) == pytest.approx(given.course.log10_relative[-1], rel=1e-9)

"""Points on the sphere against plain geometry in float64."""

from __future__ import annotations

import math

import numpy as np
import torch

from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.playground.spheres import Projector


def cloud(spread: float, *, tokens: int = 9, dim: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    common = torch.randn(1, 1, dim, dtype=torch.float64, generator=generator)
    return common + spread * torch.randn(1, tokens, dim, dtype=torch.float64, generator=generator)


def angles_by_hand(x: torch.Tensor) -> np.ndarray:
    mean = x.mean(1, keepdim=True)
    cosine = (x * mean).sum(-1) / (x.norm(dim=-1) * mean.norm(dim=-1))
    return cosine.acos()[0].numpy()


def test_angles_from_the_pole_are_the_true_ones() -> None:
    x = cloud(2.0)
    frame = Projector().frame(Deviation.from_tokens(x))
    points = np.array(frame.sphere)
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(np.arccos(points[:, 2]), angles_by_hand(x), rtol=1e-9)
    assert math.isclose(10**frame.log10_angle, angles_by_hand(x).max(), rel_tol=1e-12)


def test_angles_far_below_any_float() -> None:
    x = cloud(1e-3)
    state = Deviation.from_tokens(x)
    near, far = Projector().frame(state), Projector().frame(state.shrunk(-1000 * math.log(10)))
    assert math.isclose(far.log10_angle, near.log10_angle - 1000, rel_tol=1e-5)
    assert np.array(far.sphere)[:, 2].min() == 1.0
    np.testing.assert_allclose(np.abs(far.lens), np.abs(near.lens), atol=1e-6)


def test_the_lens_is_filled() -> None:
    lens = np.array(Projector().frame(Deviation.from_tokens(cloud(0.1))).lens)
    assert math.isclose(np.linalg.norm(lens, axis=1).max(), 1, rel_tol=1e-12)


def test_a_frame_turns_with_the_one_before() -> None:
    x = cloud(0.5)
    turn, _ = torch.linalg.qr(torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    projector = Projector()
    first, second = (projector.frame(Deviation.from_tokens(tokens)) for tokens in (x, x @ turn))
    np.testing.assert_allclose(second.sphere, first.sphere, atol=1e-9)
    np.testing.assert_allclose(second.lens, first.lens, atol=1e-9)


def test_equal_tokens_are_one_point() -> None:
    frame = Projector().frame(Deviation(torch.ones(1, 1, 5, dtype=torch.float64), (), (1, 3, 5)))
    assert frame.sphere == ((0.0, 0.0, 1.0),) * 3
    assert frame.log10_angle == -math.inf


def test_two_tokens_and_a_mean_of_zero() -> None:
    frame = Projector().frame(Deviation.from_tokens(torch.tensor([[[1.0, 2.0], [-1.0, -2.0]]])))
    assert np.isfinite(np.array(frame.sphere)).all()
    assert np.isfinite(np.array(frame.lens)).all()

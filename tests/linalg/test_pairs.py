"""Distances of pairs of tokens, and channels that outweigh the others."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rankscope._types import Status
from rankscope.linalg import tokens
from rankscope.linalg.pairs import MOST_TOKENS, NEAR
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS, evaluate

STATUS = list(Status)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(x: Tensor) -> tuple[float, float]:
    """Median relative distance and median distance of directions, pair by pair."""
    pairs = [(i, j) for i in range(len(x)) for j in range(i)]
    apart = [float((x[i] - x[j]).norm() / max(x[i].norm(), x[j].norm())) for i, j in pairs]
    turned = [float((x[i] / x[i].norm() - x[j] / x[j].norm()).norm()) for i, j in pairs]
    return tuple(float(torch.tensor(values, dtype=torch.float64).median()) for values in (apart, turned))


@pytest.mark.parametrize("noise", [1.0, 1e-3, 1e-9, 1e-12])
@pytest.mark.parametrize("outliers", [0, 3])
def test_medians_are_right_far_below_the_rounding_of_a_dot_product(noise: float, outliers: int) -> None:
    """Beside a few tokens that are 1e8 times as large, too: each pair has its own scale."""
    x = random(1, 20, seed=1) + noise * random(24, 20)
    x[:outliers] = 1e8 * random(outliers, 20, seed=2)
    distance, direction = by_hand(x)
    got = Tokens(x[None]).pairs
    assert got.distance.item() == pytest.approx(distance, rel=1e-12 + 4e-16 / noise)
    assert got.direction.item() == pytest.approx(direction, rel=1e-12 + 4e-16 / noise)


def test_long_sequences_are_sampled_evenly_with_both_ends() -> None:
    n = 5 * MOST_TOKENS + 3
    x = random(2, n, 8)
    places = torch.linspace(0, n - 1, MOST_TOKENS, dtype=torch.float64).round().long()
    assert {0, n - 1} <= set(places.tolist())
    for name in ("distance", "direction", "largest_cluster", "distinct"):
        assert torch.equal(getattr(Tokens(x).pairs, name), getattr(Tokens(x[:, places]).pairs, name))


@pytest.mark.parametrize("kept", [3, 100, 300])
def test_dropped_tokens_were_never_there(kept: int) -> None:
    """Also where so many are left that they are sampled."""
    x = random(1, 400, 6)
    places = torch.randperm(400, generator=torch.Generator().manual_seed(1))[:kept].sort().values
    keep = torch.zeros(1, 400, dtype=torch.bool)
    keep[:, places] = True
    with_holes = torch.where(keep[..., None], x, math.nan)
    got, want = Tokens(with_holes, keep).pairs, Tokens(x[:, places]).pairs
    for name in ("distance", "direction", "largest_cluster", "copied", "distinct"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=0)


@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_the_tolerance_of_copies(factor: float) -> None:
    x = torch.eye(4, dtype=torch.float64)
    x[1] = x[0] * (1 - factor * NEAR)
    got = Tokens(x[None]).pairs
    near = factor < 1
    assert got.largest_cluster.item() == (0.5 if near else 0.25)
    assert got.copied.item() == (0.5 if near else 0.0)
    assert got.distinct.item() == pytest.approx(3.0 if near else 4.0)


def test_zero_tokens_are_copies_of_each_other_and_have_no_direction() -> None:
    x = torch.zeros(1, 5, 3)
    x[0, 0, 0], x[0, 1, 1] = 1.0, 2.0
    got = Tokens(x).pairs
    assert (got.largest_cluster.item(), got.distinct.item()) == (pytest.approx(0.6), pytest.approx(3.0))
    assert got.direction.item() == pytest.approx(math.sqrt(2))
    nothing = Tokens(torch.zeros(1, 5, 3)).pairs
    assert torch.isnan(torch.stack([nothing.distance, nothing.direction, nothing.largest_cluster])).all()


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_a_constant_channel_is_scaled_down(size: float) -> None:
    x = random(1, 64, 256)
    x[..., 7] = size
    assert Tokens(x).relative_deviation.item() < 20 / size
    assert Tokens(x).pairs.distance.item() > 1.0


def made(kind: str) -> Tensor:
    """Three sequences of float32 tokens."""
    x, token = random(3, 40, 96), random(3, 1, 96, seed=1)
    if kind in ("close", "close, beside large tokens", "close, with a large channel"):
        x = token + 1e-3 * x
    if kind == "at the floor":
        x = token + 1e-6 * x
    if "large tokens" in kind:
        x[:, :2] *= 1e5
    if "large channel" in kind:
        x[..., 7] = 1e3
        x[1, :, 9] *= 1e3
    if kind == "zero tokens":
        x[:, 3:5] = 0.0
        x[1] = 0.0
    if kind == "one direction":
        x = token * random(3, 40, 1).exp()
    return x.float()


AGAIN = {"large tokens", "close, beside large tokens", "zero tokens", "one direction"}
KINDS = {"ordinary", "close", "at the floor", "large channel", "close, with a large channel"}


@pytest.mark.parametrize("kind", sorted(AGAIN | KINDS))
@pytest.mark.parametrize("some", [False, True])
def test_a_gram_matrix_gives_the_distances_that_unit_vectors_give(
    kind: str, some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float64 tokens go through unit vectors; float32 ones only if a Gram matrix would not have the digits."""
    x = made(kind)
    keep = torch.rand(3, 40, generator=torch.Generator().manual_seed(2)) < 0.7 if some else None
    want = Tokens(x.double(), keep).pairs
    again: list[slice] = []
    by_units = tokens._of_group
    monkeypatch.setattr(tokens, "_of_group", lambda view, group: again.append(group) or by_units(view, group))
    got = Tokens(x, keep).pairs
    for name in ("distance", "direction", "largest_cluster", "copied", "distinct"):
        torch.testing.assert_close(
            getattr(got, name), getattr(want, name), rtol=1e-9 if kind in KINDS else 0, atol=0, equal_nan=True
        )
    assert bool(again) == (kind in AGAIN)


def floored(x: Tensor) -> set[Status]:
    reading = evaluate([METRICS["relative_residual"]], Tokens(x), float_floor(x.dtype))
    return {STATUS[code] for code in reading.statuses.flatten().tolist()}


def test_rounding_is_compared_channel_by_channel() -> None:
    """One huge channel does not put the others at the float floor, and does not lift equal tokens off it."""
    x = random(1, 64, 256).bfloat16()
    x[..., 7] = 1000.0
    assert float(Tokens(x).relative_deviation) < float_floor(torch.bfloat16)
    assert floored(x) == {Status.OK}
    equal = random(1, 1, 256).bfloat16().expand(1, 64, 256).clone()
    equal[..., 7] = 1000.0
    assert floored(equal) == {Status.FLOOR}
    moved = equal.clone()
    moved[:, ::2, 7] = 1008.0  # the next number bfloat16 has
    assert floored(moved) == {Status.FLOOR}
    moved[:, ::2, 7] = 2000.0
    assert floored(moved) == {Status.OK}

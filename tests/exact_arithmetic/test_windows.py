"""Attention inside windows: tokens of one window become alike, windows do not, and exact arithmetic knows both."""

from __future__ import annotations

import mpmath as mp
import pytest
import torch
from torch import Tensor

from rankscope.exact_arithmetic.tensor import Deviation

WINDOWS, TOKENS, DIM = 3, 4, 6


def weights(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(DIM, DIM, dtype=torch.float64, generator=generator) / DIM**0.5 for _ in range(3))
    return q, k, v


def windowed(x: Tensor, w: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Single-head attention in windows of neighbours, as vision models write it: windows folded into the batch."""
    folded = x.view(1, WINDOWS, TOKENS, DIM).view(WINDOWS, TOKENS, DIM)
    q, k, v = (folded @ matrix for matrix in w)
    out = (q @ k.transpose(-1, -2)).softmax(dim=-1) @ v
    return out.view(1, WINDOWS, TOKENS, DIM).view(1, WINDOWS * TOKENS, DIM)


def reference(base: Tensor, departure: Tensor, log_scale: float, w: tuple[Tensor, Tensor, Tensor]) -> mp.mpf:
    """Logarithm of the residual, token by token, in 400 digits."""
    scale = mp.e ** mp.mpf(log_scale)
    rows = [
        [mp.mpf(b) + scale * mp.mpf(d) for b, d in zip(base.tolist(), row, strict=True)] for row in departure.tolist()
    ]
    q, k, v = ([_through(row, matrix) for row in rows] for matrix in w)
    out = []
    for i in range(len(rows)):
        first = i // TOKENS * TOKENS
        scores = [mp.fdot(q[i], k[j]) for j in range(first, first + TOKENS)]
        exps = [mp.e**score for score in scores]
        out.append(
            [mp.fdot([e / sum(exps) for e in exps], [v[first + j][c] for j in range(TOKENS)]) for c in range(DIM)]
        )
    means = [sum(row[c] for row in out) / len(out) for c in range(DIM)]
    return mp.log(mp.sqrt(sum((row[c] - means[c]) ** 2 for row in out for c in range(DIM))))


def _through(row: list[mp.mpf], matrix: Tensor) -> list[mp.mpf]:
    return [mp.fdot(row, [mp.mpf(m) for m in column]) for column in matrix.T.tolist()]


@pytest.mark.parametrize("log_scale", [0.0, -20.0, -200.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_means_of_windows_stay_apart_at_order_one(log_scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 10)
    tokens = torch.randn(1, WINDOWS * TOKENS, DIM, dtype=torch.float64, generator=generator)
    x, w = Deviation.from_tokens(tokens).shrunk(log_scale), weights(seed)
    found = windowed(x, w).log_residual()  # type: ignore[attr-defined]
    scale, values = x.terms[0]
    with mp.workdps(400):
        expected = float(reference(x.base.reshape(-1), values[0], scale, w))
    assert found == pytest.approx(expected, rel=1e-13, abs=1e-12)


def test_one_window_is_of_order_three() -> None:
    tokens = torch.randn(1, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    q, k, v = weights(3)
    logs = []
    for shrink in (-200.0, -201.0):
        x = Deviation.from_tokens(tokens).shrunk(shrink)
        out = ((x @ q) @ (x @ k).transpose(-1, -2)).softmax(dim=-1) @ (x @ v)
        logs.append(out.log_residual())  # type: ignore[attr-defined]
    assert logs[0] - logs[1] == pytest.approx(3.0, rel=1e-12)


def test_heads_that_share_their_values_keep_order_three() -> None:
    """The part common to all tokens differs between heads where it enters the sum, and between features after it."""
    tokens = torch.randn(1, TOKENS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    many = [weights(seed) for seed in (5, 6)]
    logs = []
    for shrink in (-200.0, -201.0):
        x = Deviation.from_tokens(tokens).shrunk(shrink)
        q = torch.stack([x @ w[0] for w in many], dim=1)
        k = torch.stack([x @ w[1] for w in many], dim=1)
        v = (x @ many[0][2]).unsqueeze(1).expand(1, 2, TOKENS, DIM)
        out = (q @ k.transpose(-1, -2)).softmax(dim=-1) @ v
        merged = out.transpose(1, 2).reshape(1, TOKENS, 2 * DIM)
        logs.append(merged.log_residual())  # type: ignore[attr-defined]
    assert logs[0] - logs[1] == pytest.approx(3.0, rel=1e-12)

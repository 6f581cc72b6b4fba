from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.linalg import tiles, tokens
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, METRICS, NORM_METRICS, evaluate

# One piece for all, one per sequence, and several per sequence with a short one at the end.
BUDGETS = [1 << 17, 2 * 7 * 5, 11]


def ragged(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropped tokens hold what no sum survives."""
    x = (torch.randn(3, 7, 5, dtype=torch.float64) + 1.0).to(dtype)
    keep = torch.ones(3, 7, dtype=torch.bool)
    keep[0, 4:] = False
    keep[2, :2] = False
    x[0, 4], x[0, 5], x[2, 0] = torch.nan, torch.inf, -torch.inf
    return x, keep


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_walk_passes_every_token_once(monkeypatch: pytest.MonkeyPatch, budget: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(tiles, "_PAIRED_ENTRIES", 0)
    monkeypatch.setattr(tiles, "_CPU_ENTRIES", budget)
    monkeypatch.setattr(tiles, "_MOST_CPU_ENTRIES", budget)
    x, keep = ragged(dtype)
    view = Tokens(x, keep)
    plain, centred, columns, means = [], [], [], torch.zeros(len(x), 1, x.shape[-1], dtype=torch.float64)
    for piece in tokens.walk(view):
        plain.append(piece.X.sum(-1))
        columns.append(piece.X.square().sum(-2))
        means[piece.group] = piece.mean.value
        centred.append(piece.centre_().square().sum(-1))
    mean = means * view.scale[:, None, None]
    exact = x.double().masked_fill(~keep.unsqueeze(-1), 0.0)
    want = exact.sum(-2, keepdim=True) / keep.sum(-1)[:, None, None]
    deviation = (exact - want).masked_fill(~keep.unsqueeze(-1), 0.0)
    scale = view.scale.unsqueeze(-1)
    for got, true in (
        (mean, want),
        (tokens.join_rows(view, plain) * scale, exact.sum(-1)),
        (tokens.join_rows(view, centred) * scale**2, deviation.square().sum(-1)),
        (tokens.add_columns(view, columns) * scale**2, exact.square().sum(-2)),
    ):
        torch.testing.assert_close(got, true, rtol=1e-14, atol=1e-14)


def test_float64_means_are_kept_to_more_than_float64() -> None:
    """Three tokens 1, 1, 1 + eps: the mean 1 + eps/3 rounds to 1, and only the tail tells the difference."""
    eps = torch.finfo(torch.float64).eps
    view = Tokens(torch.tensor([[1.0], [1.0], [1.0 + eps]], dtype=torch.float64))
    (piece,) = tokens.walk(view)
    assert piece.mean.value.item() == 1.0
    assert piece.mean.tail is not None
    assert piece.mean.tail.item() == pytest.approx(eps / 3, rel=1e-15, abs=0)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3)])
def test_a_walk_over_nothing(shape: tuple[int, ...]) -> None:
    view = Tokens(torch.empty(shape))
    assert view.energies.row.shape == shape[:2]
    assert view.energies.channel.tolist() == [[0.0] * 3] * shape[0]


class LargestFloat64(TorchDispatchMode):
    """Watches the size of every float64 tensor that an operation gives."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        got = func(*args, **(kwargs or {}))
        for value in got if isinstance(got, tuple | list) else (got,):
            if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
                self.entries = max(self.entries, value.numel())
        return got


def test_no_float64_copy_of_the_whole_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_PAIRED_ENTRIES", 0)
    monkeypatch.setattr(tiles, "_CPU_ENTRIES", 300)
    monkeypatch.setattr(tiles, "_MOST_CPU_ENTRIES", 300)
    keep = torch.rand(6, 40) < 0.8
    tokens, probs = torch.randn(6, 40, 30), torch.softmax(torch.randn(6, 2, 40, 40), -1)
    for names, view in (
        (NORM_METRICS, Tokens(tokens, keep)),
        (DEFAULT_ATTENTION_METRICS, AttentionMatrix(probs, keep=keep)),
    ):
        with LargestFloat64() as watch:
            evaluate([METRICS[name] for name in names], view, 1e-7)
        assert 0 < watch.entries <= 6 * 40 * 30 / 4

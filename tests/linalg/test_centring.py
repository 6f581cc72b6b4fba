from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.linalg import tiles, tokens
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, METRICS, NORM_METRICS, evaluate


def test_float64_means_are_kept_to_more_than_float64() -> None:
    """Three tokens 1, 1, 1 + eps: the mean 1 + eps/3 rounds to 1, and only the tail tells the difference."""
    eps = torch.finfo(torch.float64).eps
    view = Tokens(torch.tensor([[1.0], [1.0], [1.0 + eps]], dtype=torch.float64))
    (piece,) = tokens.walk(view)
    assert piece.mean.value.item() == 1.0
    assert piece.mean.tail is not None
    assert piece.mean.tail.item() == pytest.approx(eps / 3, rel=1e-15, abs=0)


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

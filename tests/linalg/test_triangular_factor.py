"""Tall matrices of tokens: same spectra without a second copy of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope.linalg.tokens import Tokens
from rankscope.linalg.triangular_factor import triangular_factor
from rankscope.metrics import METRICS, evaluate


def graded(tokens: int, dim: int) -> Tensor:
    X = torch.randn(tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return X * torch.logspace(0, -13, dim, dtype=torch.float64)


@pytest.mark.parametrize("step", [3, 16, 200])
def test_singular_values_keep_their_digits(step: int) -> None:
    """The least is 1e-13 of the largest: the Gram matrix would give it no digit."""
    X = graded(200, 8)
    got = torch.linalg.svdvals(triangular_factor(X.split(step)))
    torch.testing.assert_close(got, torch.linalg.svdvals(X), rtol=1e-2, atol=0)
    torch.testing.assert_close(got[:4], torch.linalg.svdvals(X)[:4], rtol=1e-9, atol=0)


@pytest.mark.parametrize("centred", [False, True])
def test_tokens_use_it(centred: bool) -> None:
    X = graded(600, 8)
    view = Tokens(X.unsqueeze(0))
    got = (view.centred_singular_values if centred else view.singular_values)[0] * view.scale
    want = torch.linalg.svdvals(X - X.mean(0) if centred else X)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)


class Largest(TorchDispatchMode):
    """The largest float64 tensor that comes to be beside one that is there."""

    def __init__(self, there: Tensor) -> None:
        super().__init__()
        self._there, self.entries = there.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor) and one.dtype == torch.float64:
                storage = one.untyped_storage()
                self.entries = max(self.entries, storage.nbytes() // 8 * (storage.data_ptr() != self._there))
        return out


def test_long_sequences_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token metric of 32,768 tokens, and no float64 copy of them all."""
    monkeypatch.setattr("rankscope.linalg.tokens._SLAB_ENTRIES", 1 << 18)
    specs = [spec for spec in METRICS.values() if spec.side == "tokens"]
    x = torch.randn(1, 32768, 64, generator=torch.Generator().manual_seed(1))
    with Largest(x) as seen:
        evaluate(specs, Tokens(x), 1e-7)
    assert seen.entries < x.numel() / 2
    wide = (x * torch.logspace(0, -12, 64)).double()
    with Largest(wide) as seen:
        view = Tokens(wide)
        assert view.singular_values.shape == (1, 64)
        assert view.column_median_deviation.shape == (1, 64)
    assert seen.entries < wide.numel() / 2


@pytest.mark.parametrize("padded", [False, True])
def test_medians_by_slabs(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 50, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    keep = torch.rand(3, 50, generator=torch.Generator().manual_seed(3)) < 0.6 if padded else None
    monkeypatch.setattr("rankscope.linalg.tokens._SLAB_ENTRIES", 300)
    view = Tokens(x, keep)
    for i in range(3):
        kept = x[i] if keep is None else x[i][keep[i]]
        want = (kept - kept.median(0).values).abs().sum(0)
        torch.testing.assert_close(view.column_median_deviation[i] * view.scale[i], want, rtol=1e-12, atol=0)

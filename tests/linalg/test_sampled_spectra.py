"""Ranks of large shapes are those of 1,024 evenly spaced tokens, and a run says so."""

from __future__ import annotations

import pytest
import torch

import rankscope as rs
from rankscope._types import Status
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import SAMPLED_TOKENS, Tokens
from rankscope.metrics import DEFAULT_TOKEN_METRICS, METRICS, evaluate, is_left_out
from rankscope.verbs.measure.judge import RANKS

SPECS = [METRICS[name] for name in DEFAULT_TOKEN_METRICS if METRICS[name].estimate]
STATUSES = list(Status)


def long_tokens(count: int = 1500, dim: int = 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, count, dim, generator=generator) * torch.linspace(0.01, 1.0, dim) + 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_they_are_the_exact_ranks_of_the_sample(dtype: torch.dtype) -> None:
    x = long_tokens().to(dtype)
    found = evaluate(SPECS, Tokens(x, spectra="estimated"), float_floor(dtype))
    place = torch.linspace(0, 1499, SAMPLED_TOKENS, dtype=torch.float64).round().long()
    wanted = evaluate(SPECS, Tokens(x[:, place]), float_floor(dtype))
    assert {STATUSES[code] for code in found.statuses.flatten().tolist()} == {Status.ESTIMATE}
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-12, atol=0)
    # The rows of a Gaussian matrix are alike: a sample of them has nearly the ranks of all.
    exact = evaluate(SPECS, Tokens(x), float_floor(dtype))
    torch.testing.assert_close(found.values, exact.values, rtol=0.1, atol=0)


def test_sequences_of_different_lengths_and_broken_ones() -> None:
    x = long_tokens()
    keep = torch.ones(3, 1500, dtype=torch.bool)
    keep[0, ::2] = False
    keep[1, 900:] = False
    x[~keep] = torch.nan  # dropped tokens do not exist
    x[2, 7, 7] = torch.inf
    found = evaluate(SPECS, Tokens(x, keep, spectra="estimated"), float_floor(x.dtype))
    for row, kept in enumerate((x[0, 1::2], x[1, :900])):
        wanted = evaluate(SPECS, Tokens(kept[None]), float_floor(x.dtype))
        torch.testing.assert_close(found.values[:, row], wanted.values[:, 0], rtol=1e-10, atol=0)
    assert {STATUSES[code] for code in found.statuses[:, 2].tolist()} == {Status.NOT_FINITE}


def test_exact_up_to_the_limit_and_on_request() -> None:
    small, large = torch.zeros(1, 1, 1).expand(1, 1024, 4096), torch.zeros(1, 1, 1).expand(1, 1025, 4096)
    assert not Tokens(small, spectra=None).has_estimated_spectra
    assert not Tokens(small, spectra="estimated").has_estimated_spectra
    assert not Tokens(long_tokens(), spectra=None).has_estimated_spectra
    assert Tokens(large, spectra=None).has_estimated_spectra
    assert not Tokens(large).has_estimated_spectra
    assert not Tokens(torch.zeros(0, 2000, 2000), spectra=None).has_estimated_spectra


def test_every_spectral_metric_is_estimated_or_left_out() -> None:
    view = Tokens(torch.randn(1100, 140), spectra="estimated")
    needing = {name for name, spec in METRICS.items() if spec.side == "tokens" and spec.needs == "spectrum"}
    left_out = {name for name in needing if is_left_out(METRICS[name], view)}
    assert {"least_singular_value", "centred_least_singular_value", "alpha_req"} <= left_out
    assert {name for name in needing if METRICS[name].estimate} == needing - left_out
    assert not any(is_left_out(METRICS[name], Tokens(torch.randn(130, 140))) for name in needing)
    assert {name for name, spec in METRICS.items() if spec.estimate} == RANKS


def test_a_run_says_of_which_tokens_the_ranks_are() -> None:
    states = long_tokens(1100)[None, :2]
    found, exact = (rs.judge(states, layout="layers batch tokens dim", spectra=way) for way in ("estimated", "exact"))
    assert (found.provenance.spectra, exact.provenance.spectra) == ("estimated", "exact")
    rows = {row["metric"]: row for row in found.table.to_pylist() if row["site"] == "block.out"}
    assert rows["centred_effective_rank"]["status"] == "estimated"
    assert rows["relative_residual"]["status"] == "ok"
    assert "least_singular_value" not in rows
    assert any("not estimated at this size" in note and "least_singular_value" in note for note in found.notes)
    assert any("1,024 evenly spaced tokens" in note and "effective_rank" in note for note in found.notes)
    assert not any("evenly spaced tokens of each" in note for note in exact.notes)

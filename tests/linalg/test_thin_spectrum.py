"""Estimated ranks: the continued fraction against mpmath, the intervals against exact spectra, the hostile cases."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

from rankscope._types import Status
from rankscope.linalg import thin_spectrum
from rankscope.linalg.precision import float_floor
from rankscope.linalg.thin_spectrum import Chains, jacobi, largest_eigenvalue, remainders
from rankscope.linalg.tokens import LARGEST_EXACT_SIDE, Tokens
from rankscope.metrics import DEFAULT_TOKEN_METRICS, METRICS, evaluate, is_left_out

SPECS = [METRICS[name] for name in DEFAULT_TOKEN_METRICS if METRICS[name].estimate is not None]
STATUSES = list(Status)


def both(x: Tensor, keep: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Exact values, and the ends of the intervals."""
    exact = evaluate(SPECS, Tokens(x, keep), float_floor(x.dtype)).values
    found = evaluate(SPECS, Tokens(x, keep, spectra="estimated"), float_floor(x.dtype))
    assert found.interval is not None
    return exact, *found.interval


def decaying(n: int, d: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(*shape, generator=generator) for shape in ((n, n), (n, d)))
    return (left / torch.arange(1, n + 1)) @ right


def cases() -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = decaying(160, 200)
    token, channel = torch.randn(160, 200), torch.randn(160, 200)
    token[3] *= 300
    channel[:, 5] *= 300
    return {
        "wide": x,
        "tall": x.T.contiguous(),
        "seed 0": torch.randn(200, 150, generator=torch.Generator().manual_seed(0)),
        "collapsed to 1e-6": 1e-6 * x / x.std() + torch.randn(200),
        "offset": x + 1e4 * torch.randn(200),
        "huge token": token,
        "huge channel": channel,
        "rank one": torch.randn(160, 1) @ torch.randn(1, 200),
        "rank two": torch.randn(160, 2) @ torch.randn(2, 200),
        "more equal directions than the basis": torch.eye(180)[:, :160] * (torch.arange(160) < 60).float(),
        "bfloat16": x.bfloat16(),
        "float64": x.double(),
        "huge numbers": 1e30 * x,
        "tiny numbers": 1e-30 * x,
    }


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_intervals_contain_the_exact_ranks(name: str) -> None:
    exact, low, high = both(CASES[name])
    inside = (low <= exact) & (exact <= high)
    assert bool(inside.all()), [(spec.name, *row) for spec, *row in zip(SPECS, low, exact, high, strict=True)]


def test_intervals_are_narrow_when_few_directions_hold_the_energy() -> None:
    _, low, high = both(CASES["rank two"])
    assert bool((high / low < 1.001).all())


def test_sequences_of_different_lengths_and_broken_ones() -> None:
    x = torch.randn(4, 300, 150) + torch.randn(150)
    keep = torch.rand(4, 300) > torch.tensor([0.0, 0.2, 0.4, 0.0])[:, None]
    x[~keep] = math.nan  # dropped tokens do not exist
    x[3, 7, 7] = math.inf
    exact, low, high = both(x, keep)
    assert bool(((low <= exact) & (exact <= high))[:, :3].all())
    found = evaluate(SPECS, Tokens(x, keep, spectra="estimated"), float_floor(x.dtype))
    assert {STATUSES[code] for code in found.statuses[:, :3].flatten().tolist()} == {Status.ESTIMATE}
    assert {STATUSES[code] for code in found.statuses[:, 3].tolist()} == {Status.NOT_FINITE}
    assert found.interval is not None
    assert bool(found.interval[:, :, 3].isnan().all())


def test_equal_tokens_and_no_tokens_at_all() -> None:
    x = torch.zeros(2, 140, 160)
    x[0] = 1.0
    found = evaluate(SPECS, Tokens(x, spectra="estimated"), float_floor(x.dtype))
    for spec, values in zip(SPECS, found.values, strict=True):
        want = math.nan if spec.name.startswith("centred") else 1.0
        assert values[0].item() == pytest.approx(want, rel=1e-3, nan_ok=True), spec.name
    assert bool(found.values[:, 1].isnan().all())
    assert not Tokens(torch.zeros(0, 2000, 2000), spectra=None).has_estimated_spectra


def test_exact_up_to_the_limit_and_on_request() -> None:
    small, large = torch.zeros(1, 1, 1).expand(1, 1024, 4096), torch.zeros(1, 1, 1).expand(1, 1025, 4096)
    assert LARGEST_EXACT_SIDE == 1024
    assert not Tokens(small, spectra=None).has_estimated_spectra
    assert Tokens(large, spectra=None).has_estimated_spectra
    assert not Tokens(large).has_estimated_spectra
    # Too small to estimate: exact, bit for bit.
    x = torch.randn(2, 127, 127)
    for a, b in zip(evaluate(SPECS, Tokens(x), 0.0).values, evaluate(SPECS, Tokens(x, spectra="estimated"), 0.0).values,
                    strict=True):  # fmt: skip
        assert torch.equal(a, b)


def test_every_spectral_metric_is_estimated_or_left_out() -> None:
    view = Tokens(torch.randn(130, 140), spectra="estimated")
    needing = {name for name, spec in METRICS.items() if spec.side == "tokens" and spec.needs == "spectrum"}
    left_out = {name for name in needing if is_left_out(METRICS[name], view)}
    assert {"least_singular_value", "centred_least_singular_value", "alpha_req"} <= left_out
    assert {name for name in needing if METRICS[name].estimate is not None} == needing - left_out
    assert not any(is_left_out(METRICS[name], Tokens(torch.randn(130, 140))) for name in needing)


def test_continued_fraction_bounds_the_resolvent() -> None:
    """Against mpmath: cut after an even coefficient it is a lower, after an odd one an upper bound."""
    size = thin_spectrum.STEPS + 6
    mpmath.mp.dps = 40
    nodes = [mpmath.mpf(2) ** (-3 * i) for i in range(size)]
    # Lanczos in exact arithmetic from equal weights, then the entries of the bidiagonal factor.
    v, before, beta = [mpmath.sqrt(mpmath.mpf(1) / size)] * size, [mpmath.mpf(0)] * size, mpmath.mpf(0)
    squares, previous = [], mpmath.mpf(0)
    for _ in range(thin_spectrum.STEPS):
        u = [node * a - beta * b for node, a, b in zip(nodes, v, before, strict=True)]
        alpha = mpmath.fdot(u, v)
        u = [a - alpha * b for a, b in zip(u, v, strict=True)]
        q = alpha - previous
        before, beta = v, mpmath.sqrt(mpmath.fdot(u, u))
        v = [a / beta for a in u]
        previous = beta**2 / q
        squares += [q, previous]
    column = torch.tensor([float(square) for square in squares], dtype=torch.float64)
    vectors = thin_spectrum.PROBES + 1 + thin_spectrum.DEFLATED
    chains = Chains(column[:, None, None].expand(-1, 1, vectors), 200, 2 * thin_spectrum.STEPS)
    for log_t in (-20.0, -8.0, 0.0, 5.0):
        t = torch.full((1, 1, 1, 1), log_t, dtype=torch.float64).exp()
        low, high = ((R / (t[0, 0] + R))[0, 0].item() for R in remainders(chains, t)[0])
        level = mpmath.exp(log_t)
        true = float(mpmath.fsum(node / (node + level) for node in nodes) / size)
        assert low * (1 - 1e-12) <= true <= high * (1 + 1e-12)
        if log_t >= 0:
            assert high == pytest.approx(low, rel=1e-9)


def test_largest_eigenvalue_of_tridiagonal_matrices() -> None:
    squares = torch.rand(2 * 9, 3, 5, dtype=torch.float64)
    diagonal, off = jacobi(squares)
    T = torch.diag_embed(diagonal) + torch.diag_embed(off.sqrt(), 1) + torch.diag_embed(off.sqrt(), -1)
    true = torch.linalg.eigvalsh(T)[..., -1]
    got = largest_eigenvalue(diagonal, off)
    assert bool((got <= true * (1 + 1e-14)).all())
    torch.testing.assert_close(got, true, rtol=2e-7, atol=0)


def test_nothing_waits_for_a_device() -> None:
    """No branch on a value: on the meta device, which has none, everything runs."""
    W, mean = torch.empty(2, 140, 150, device="meta"), torch.empty(2, 150, device="meta")
    energy = torch.empty(2, dtype=torch.float64, device="meta")
    found = thin_spectrum.ranks(thin_spectrum.bidiagonalised(W, mean, energy), energy, 1e-7)
    assert found.plain.effective_rank.value.shape == (2,)


def test_a_run_says_that_ranks_are_estimates_and_what_is_not_decided() -> None:
    import rankscope as rs
    from rankscope.errors import InputError
    from rankscope.runs.conditions import parse_condition

    torch.manual_seed(0)
    states = torch.randn(1, 2, 160, 1) @ torch.randn(1, 140) + 0.0085 * torch.randn(1, 2, 160, 140)
    found, exact = (rs.judge(states, layout="layers batch tokens dim", spectra=way) for way in ("estimated", "exact"))
    assert (found.provenance.spectra, exact.provenance.spectra) == ("estimated", "exact")
    assert "low" not in exact.table.column_names
    rows, true = (
        {row["metric"]: row for row in run.table.to_pylist() if row["site"] == "block.out"} for run in (found, exact)
    )
    rank = rows["centred_effective_rank"]
    assert rank["status"] == "estimated"
    assert rank["low"] <= true["centred_effective_rank"]["value"] <= rank["high"]
    assert rows["relative_residual"]["low"] is None
    assert "least_singular_value" in true
    assert "least_singular_value" not in rows
    assert any("not estimated at this size" in note and "least_singular_value" in note for note in found.notes)
    assert any("interval" in note for note in found.notes)
    # A condition inside the interval is refused, one outside is decided.
    mine = [row for row in found.table.to_pylist() if row["metric"] == rank["metric"] and row["site"] == "block.out"]
    middle = sum(row["low"] + row["high"] for row in mine) / (2 * len(mine))
    with pytest.raises(InputError, match="--spectra exact"):
        parse_condition(f"any centred_effective_rank@block.out < {middle}").held_in(found.table)
    assert parse_condition(f"any centred_effective_rank@block.out < {rank['high'] + 1}").held_in(found.table)
    # The interval of a difference contains that of the estimate.
    two = [
        rs.compare(run, exact, metrics=["centred_effective_rank"], paired=True).table.to_pylist()[0]
        for run in (found, exact)
    ]
    assert two[1]["low"] == two[1]["high"] == 0.0
    assert two[0]["high"] - two[0]["low"] >= rank["high"] - rank["low"]


def test_a_threshold_inside_an_interval_is_said() -> None:
    from rankscope.runs.rows import RowWriter
    from rankscope.verdicts import judge_rows

    def judged(low: float, high: float) -> str:
        writer = RowWriter()
        for metric, value, ends in (("relative_residual", 0.9, None), ("centred_effective_rank", 2.1, (low, high))):
            writer.add(
                metric=metric,
                site="block.out",
                stack=None,
                layer=0,
                first_sequence=0,
                values=torch.tensor([value]).double().numpy(),
                statuses=torch.tensor([0]).numpy(),
                head_axis=False,
                interval=None if ends is None else torch.tensor(ends).double().reshape(2, 1).numpy(),
            )
        return judge_rows(writer.table(), dim=64, lengths={None: {0: 64}}).sentence

    assert "Not decided" in judged(1.9, 2.5)
    assert "Not decided" not in judged(2.05, 2.5)

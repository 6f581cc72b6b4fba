"""The ratios against float64: planted residuals, large channels, masks, windows, values that are not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope import blockstats
from tests.blockstats.nets import DEPTH, RATIOS, TOKENS, attached, batches, decoder, expected, furthest, of_block


def read(*microbatches: tuple[Tensor, ...], **options: Any) -> dict[str, float]:
    stats = blockstats.attach([nn.Identity()], microbatches[0][0].shape[-1], **options)
    stats.count()
    for given in microbatches:
        stats.taps[0](*given)
    return of_block(stats.flush(), 0)


def planted(residual: float, dtype: torch.dtype) -> Tensor:
    """Sequences with this relative residual, before they are rounded; one channel is 300 times larger."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(8, 1, 96, generator=generator, dtype=torch.float64)
    mean[..., 7] *= 300
    noise = torch.randn(8, 64, 96, generator=generator, dtype=torch.float64)
    noise -= noise.mean(1, keepdim=True)
    ratio = residual / math.sqrt(1 - residual**2)
    noise *= ratio * mean.norm(dim=-1, keepdim=True) * 8 / noise.norm(dim=(1, 2), keepdim=True)
    return (mean + noise).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("residual", "close"),
    [(1 - 1e-9, 1e-7), (0.1, 1e-7), (1e-2, 1e-7), (1e-3, 1e-6), (1e-4, 1e-5), (1e-5, 1e-4), (1e-6, 1e-2), (1e-7, 1.0)],
)
def test_planted_residuals_are_read(residual: float, close: float, dtype: torch.dtype) -> None:
    """Down to 1e-6 in float32: the mean of a group is rounded to about 1e-7, which is the floor."""
    x = planted(residual, dtype)
    found, wanted = read((x, x)), expected([(x, x)], window=64)
    assert found["relative_residual"] == pytest.approx(wanted["relative_residual"], rel=close, abs=0)
    assert found["between_groups"] == pytest.approx(wanted["between_groups"], rel=1e-6, abs=1e-8)
    assert found["largest"] == wanted["largest"]


def test_a_plain_float32_sum_would_miss_them() -> None:
    """The control: the sum of squares minus that of the mean cancels where the two-pass form does not."""
    x = planted(1e-4, torch.float32)
    sums = x.square().sum() - 64 * x.mean(1).square().sum()
    plain = (sums.clamp_min(0) / x.square().sum()).sqrt()
    wanted = expected([(x, x)], window=64)["relative_residual"]
    assert abs(float(plain) / wanted - 1) > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_block_writes_is_not_rounded_to_the_stream(dtype: torch.dtype) -> None:
    before = torch.randn(4, 16, 32).to(dtype)
    after = before + (0.03 * torch.randn(4, 16, 32)).to(dtype)
    wanted = expected([(after, before)], window=16)
    found = read((after, before))
    for name in RATIOS:
        assert found[name] == pytest.approx(wanted[name], rel=1e-7, abs=0)


def test_many_microbatches_add_up() -> None:
    parts = [(x, x - 0.1) for x in torch.randn(400, 2, 16, 32) + 0.5]
    found, wanted = read(*parts), expected(parts, window=16)
    for name in RATIOS:
        assert found[name] == pytest.approx(wanted[name], rel=1e-7, abs=0)
    assert (found["tokens"], found["group_tokens"]) == (400 * 32, 16)


@pytest.mark.parametrize("window", [8, 4, 1])
def test_windows_are_groups_and_the_whole_does_not_depend_on_them(window: int) -> None:
    x = torch.randn(4, 16, 32) + torch.randn(4, 1, 32)
    found, whole = read((x, x), window=window), read((x, x))
    wanted = expected([(x, x)], window)
    for name in RATIOS:
        assert found[name] == pytest.approx(wanted[name], rel=1e-7, abs=1e-12)
    both = [math.hypot(one["relative_residual"], one["between_groups"]) for one in (found, whole)]
    assert both[0] == pytest.approx(both[1], rel=1e-7)
    # Parts of each sequence, as ranks hold them.
    assert read(*((part, part) for part in x.split(8, 1)), window=window) == pytest.approx(found, rel=1e-7)


def test_a_mask_leaves_out_what_padding_holds() -> None:
    x, before = torch.randn(2, 3, 16, 32), torch.randn(2, 3, 16, 32)
    mask = torch.arange(16) < torch.tensor([[16, 7, 1], [0, 12, 3]])[..., None]
    x[~mask], before[~mask] = torch.nan, torch.inf
    found = read((x, before, mask))
    rows = [(x[i, j, : int(n)].double(), before[i, j, : int(n)].double()) for (i, j), n in _lengths(mask)]
    size = sum(float(a.square().sum()) for a, _ in rows)
    within = sum(float((a - a.mean(0)).square().sum()) for a, _ in rows)
    mean = torch.cat([a for a, _ in rows]).mean(0)
    between = sum(len(a) * float((a.mean(0) - mean).square().sum()) for a, _ in rows)
    written = sum(float((a - b).square().sum()) for a, b in rows)
    assert found["relative_residual"] == pytest.approx(math.sqrt(within / size), rel=1e-7)
    assert found["between_groups"] == pytest.approx(math.sqrt(between / size), rel=1e-7)
    assert found["relative_write"] == pytest.approx(math.sqrt(written / size), rel=1e-7)
    assert found["largest"] == max(float(a.abs().max()) for a, _ in rows)
    assert (found["tokens"], found["group_tokens"], found["not_finite"]) == (39, 39 / 5, 0)


def _lengths(mask: Tensor) -> list[tuple[tuple[int, int], int]]:
    return [((i, j), int(mask[i, j].sum())) for i in range(2) for j in range(3) if mask[i, j].any()]


def test_a_mask_and_a_window_group_the_tokens_that_count() -> None:
    x, mask = torch.randn(2, 16, 32), torch.rand(2, 16) < 0.7
    found = read((x, x, mask), window=4)
    groups = [row[kept].double() for row, kept in zip(x.reshape(-1, 4, 32), mask.reshape(-1, 4), strict=True)]
    within = sum(float((a - a.mean(0)).square().sum()) for a in groups if len(a))
    size = sum(float(a.square().sum()) for a in groups)
    assert found["relative_residual"] == pytest.approx(math.sqrt(within / size), rel=1e-7)
    assert found["group_tokens"] == float(mask.sum()) / sum(len(a) > 0 for a in groups)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_microbatch_that_is_not_finite_adds_nothing_but_its_number(value: float) -> None:
    good, bad = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    bad[1, 3, 5] = value
    alone, both = read((good, good)), read((good, good), (bad, bad))
    assert both == {**alone, "not_finite": 1.0}
    none = read((bad, bad))
    assert (none["not_finite"], none["tokens"]) == (1, 0)
    assert math.isnan(none["relative_residual"])


def test_streams_with_tokens_first_and_other_layouts() -> None:
    model, ids = decoder(), batches(1)[0]
    stats = attached(model)
    model(ids)
    wanted = stats.flush()
    stats.detach()

    def turned(args: Any, kwargs: Any, output: Tensor) -> tuple[Tensor, Tensor]:
        return output.transpose(0, 1).contiguous().transpose(0, 1), args[0].transpose(0, 1).transpose(0, 1)

    turned_stats = attached(model, stream=turned, window=TOKENS)
    model(ids)
    assert furthest(turned_stats.flush(), wanted) < 1e-7


def test_autocast_and_bfloat16_weights() -> None:
    model, ids = decoder(), batches(1)[0]
    stats = attached(model)
    model(ids)
    plain = stats.flush()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids)
    half = stats.flush()
    model.bfloat16()
    model(ids)
    low = stats.flush()
    for i in range(DEPTH):
        for found in (half, low):
            assert found[f"relative_residual/{i}"] == pytest.approx(plain[f"relative_residual/{i}"], rel=1e-2)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((torch.ones(2, 16, 33), torch.ones(2, 16, 33)), {}, "width 32"),
        ((torch.ones(2, 16, 32), torch.ones(2, 8, 32)), {}, r"\(2, 8, 32\)"),
        ((torch.ones(2, 16, 32), torch.ones(2, 16, 32)), {"window": 5}, "window 5"),
        ((torch.ones(2, 16, 32), torch.ones(2, 16, 32)), {"window": 32}, "window 32"),
        ((torch.ones(2, 16, 32), torch.ones(2, 16, 32), torch.ones(2, 1) > 0), {}, r"\(2, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(given: tuple[Tensor, ...], options: dict[str, int], message: str) -> None:
    stats = blockstats.attach([nn.Identity()], 32, **options)
    with pytest.raises(ValueError, match=message):
        stats.taps[0](*given)

"""Estimated ranks of several blocks, evaluated together on a device: the values and intervals of the processor."""

from __future__ import annotations

import pytest
import torch

from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS, evaluate
from rankscope.verbs.pending import PendingReadings
from tests.device.simulated import SimulatedDevice

SPECS = [METRICS[name] for name in ("relative_residual", "stable_rank", "centred_effective_rank")]


@pytest.mark.parametrize("waiting", [0, 4], ids=["without activations", "four with their activations"])
def test_intervals_of_joined_blocks_are_those_of_the_processor(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    blocks = [torch.randn(1, 130, 140, generator=torch.Generator().manual_seed(block)) for block in range(5)]
    monkeypatch.setattr("rankscope.verbs.pending.HELD_ENTRIES", waiting * blocks[0].numel())
    floor = float_floor(torch.float32)
    pending, found = PendingReadings(), []
    for block in blocks:
        view = Tokens(block.to(str(device)), spectra="estimated")
        pending.evaluate(SPECS, view, floor, lambda *tensors: found.append(tensors))
        view.raw(slice(None)).zero_()  # as a model that adds in place
    pending.settle()
    for block, (values, statuses, interval) in zip(blocks, found, strict=True):
        want = evaluate(SPECS, Tokens(block, spectra="estimated"), floor)
        assert want.interval is not None
        assert values.tolist() == [pytest.approx(row, rel=1e-9) for row in want.values.tolist()]
        assert torch.equal(statuses, want.statuses)
        ends = want.interval.movedim(0, -1)
        assert torch.equal(interval.isnan(), ends.isnan())
        torch.testing.assert_close(interval.nan_to_num(), ends.nan_to_num(), rtol=1e-5, atol=0.0)


def test_without_float64_the_products_stay_on_the_device(without_float64: SimulatedDevice) -> None:
    x = torch.randn(1, 130, 140) + 1e3
    keep = torch.arange(130)[None] < 129
    without_float64.reset()
    found = evaluate(SPECS, Tokens(x.to(str(without_float64)), keep, spectra="estimated"), float_floor(x.dtype))
    assert without_float64.counts().by_name["kernel:aten::baddbmm"] >= 31
    want = evaluate(SPECS, Tokens(x, keep, spectra="estimated"), float_floor(x.dtype))
    assert torch.equal(found.values, want.values)

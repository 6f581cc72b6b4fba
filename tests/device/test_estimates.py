"""Ranks of a sample of the tokens, of several blocks, on a device: the values of the processor."""

from __future__ import annotations

import pytest
import torch

from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS, evaluate
from rankscope.verbs.pending import PendingReadings
from tests.device.simulated import SimulatedDevice

SPECS = [METRICS[name] for name in ("relative_residual", "stable_rank", "centred_effective_rank")]


@pytest.mark.parametrize("waiting", [0, 4], ids=["each at once", "four together"])
def test_ranks_of_a_sample_are_those_of_the_processor(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    blocks = [torch.randn(1, 1100, 24, generator=torch.Generator().manual_seed(block)) for block in range(5)]
    monkeypatch.setattr("rankscope.verbs.pending.WAITING_ENTRIES", waiting * blocks[0].numel())
    floor = float_floor(torch.float32)
    pending, found = PendingReadings(), []
    for block in blocks:
        there = block.to(str(device))
        pending.evaluate(SPECS, Tokens(there, spectra="estimated"), floor, lambda *tensors: found.append(tensors))
        there.zero_()  # as a model that adds in place
    pending.settle()
    for block, (values, statuses) in zip(blocks, found, strict=True):
        want = evaluate(SPECS, Tokens(block, spectra="estimated"), floor)
        assert values.tolist() == [pytest.approx(row, rel=1e-9) for row in want.values.tolist()]
        assert torch.equal(statuses, want.statuses)

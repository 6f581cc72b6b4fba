"""Ceilings, on the simulated device: the kernels of a pass per block, and how often the host waits in a pass.

A pass is counted from the announcement of its batch until its rows are written, without the model's own work. The cost
of a block is the difference between two depths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

import rankscope as rs
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, NORM_METRICS
from rankscope.models.inputs import Batch
from rankscope.verbs import pending
from rankscope.verbs.measure.passes import Observers
from tests.device.simulated import SimulatedDevice
from tests.flat_calls import flat

DEPTHS = 2, 4
SPECTRA = "aten::_linalg_eigh"
"""The two spectra of a block: each waits for the device."""

BATTERIES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "norms": {"metrics": NORM_METRICS, "sites": ["block.out"]},
    "attention by tiles": {"metrics": DEFAULT_ATTENTION_METRICS, "attention_algorithm": "blockwise"},
}


def llama(device: SimulatedDevice, depth: int) -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        max_position_embeddings=64,
    )
    return LlamaModel(config).eval().to(str(device))


def ids(sequences: int) -> torch.Tensor:
    return torch.randint(0, 50, (sequences, 24), generator=torch.Generator().manual_seed(0))


class PassCounts:
    """Counts from the announcement of a batch until its rows are written; the last pass stays."""

    def __init__(self, device: SimulatedDevice, patch: pytest.MonkeyPatch) -> None:
        self._device = device
        self._batch: Batch | None = None
        self.last: Counter[str] = Counter()
        start, commit = Observers.start, Observers.commit

        def starting(observers: Observers, batch: Batch) -> None:
            self._batch = batch
            device.reset()
            start(observers, batch)

        def committing(observers: Observers) -> None:
            commit(observers)
            self.last = Counter(device.counts().by_name)

        patch.setattr(Observers, "start", starting)
        patch.setattr(Observers, "commit", committing)

    def added(self, options: Mapping[str, Any]) -> tuple[Counter[str], Counter[str]]:
        """What the second of two passes adds to the model's own work: for every block, and once."""
        found = []
        for depth in DEPTHS:
            model = llama(self._device, depth)
            flat(rs.measure, model, {"input_ids": ids(4)}, batch=2, **options)
            assert self._batch is not None
            self._device.reset()
            with torch.no_grad():
                self._batch.run(model)
            own = self._device.counts().by_name
            found.append(Counter({name: n - own.get(name, 0) for name, n in self.last.items()}))
        few, many = found
        per_block = Counter({name: (many[name] - few[name]) / (DEPTHS[1] - DEPTHS[0]) for name in many | few})
        return per_block, Counter({name: few[name] - DEPTHS[0] * per_block[name] for name in many | few})


def total(counts: Mapping[str, float], kind: str, without: Sequence[str] = ()) -> float:
    return sum(n for name, n in counts.items() if name.startswith(kind) and not any(part in name for part in without))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("battery", "kernels", "kernels_once", "waits"),
    [
        ("norms", 10, 136, 0),
        ("attention by tiles", 280, 100, 0),
        ("default", 27, 550, 0),  # 12 of them check the eigenvalues
    ],
)
def test_a_pass_waits_for_the_device_once(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, battery: str, kernels: int, kernels_once: int, waits: int
) -> None:
    per_block, once = PassCounts(device, monkeypatch).added(BATTERIES[battery])
    assert total(per_block, "sync:") <= waits, per_block
    # The copy at the end, and for each of two spectra the check of its eigenvalues.
    checks = 2 if battery == "default" else 0
    assert total(once, "sync:", [SPECTRA]) <= 1 + checks, once
    assert total(per_block, "kernel:") <= kernels, per_block
    assert total(once, "kernel:") <= kernels_once, once


def test_blocks_whose_activations_are_too_large_to_wait(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "WAITING_ENTRIES", 0)
    per_block, once = PassCounts(device, monkeypatch).added(BATTERIES["default"])
    assert total(per_block, "sync:", [SPECTRA]) <= 2, per_block  # the check of each spectrum
    # The copy at the end, and the check of each spectrum of the embedding and of the last norm.
    assert total(once, "sync:", [SPECTRA]) <= 5, once
    assert total(per_block, "kernel:") <= 545, per_block  # each view is measured by itself


def test_a_reading_of_the_gauge_does_not_wait_in_any_block(device: SimulatedDevice) -> None:
    found = []
    for depth in DEPTHS:
        model = llama(device, depth)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with rs.Gauge(model, {"input_ids": ids(2)}, schedule=1, strict=True, alarms=()) as gauge:
            gauge.step(0)
            device.reset()
            gauge.after_backward(1)
            gauge.step(1)
            found.append(Counter(device.counts().by_name))
    few, many = found
    per_block = Counter({name: (many[name] - few[name]) / (DEPTHS[1] - DEPTHS[0]) for name in many | few})
    assert total(per_block, "sync:", [SPECTRA]) == 0, per_block

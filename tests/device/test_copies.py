"""Copies that are started early, on the simulated device with and without streams."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rankscope as rs
from rankscope.linalg.to_host import start_to_host
from rankscope.monitor.schedules import Linear
from tests.device.simulated import SimulatedDevice
from tests.device.test_ceilings import ids, llama

GIVEN = (torch.arange(3.0), torch.tensor(True), torch.randn(2, 3, dtype=torch.float64), torch.arange(6)[::2])


@pytest.mark.parametrize("streams", [False, True])
def test_a_copy_has_the_values_of_its_start(device: SimulatedDevice, streams: bool) -> None:
    there = [one.to("sim") for one in GIVEN]
    there[3] = torch.arange(6, device="sim")[::2]
    with device.with_streams() if streams else nullcontext():
        copies = start_to_host([*there, GIVEN[0].clone()])
        for one in there:
            one.zero_()
        found = copies()
    for here, copied in zip((*GIVEN, GIVEN[0]), found, strict=True):
        assert torch.equal(here, copied)
        assert here.dtype == copied.dtype


def test_two_copies_are_waited_for_one_by_one(device: SimulatedDevice) -> None:
    with device.with_streams() as done:
        first, second = (start_to_host([torch.full((2,), value, device="sim")]) for value in (1.0, 2.0))
        assert done == ["copy", "copy"]
        assert second()[0].tolist() == [2.0, 2.0]
        assert first()[0].tolist() == [1.0, 1.0]
        assert first()[0].tolist() == [1.0, 1.0]
    assert done == ["copy", "copy", "wait", "wait"]


class Loop:
    """A training on the device, of which the gauge's own synchronisations are counted step by step."""

    def __init__(self, device: SimulatedDevice, *, gradients_stay: bool) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
            max_position_embeddings=64,
        )
        self.model = LlamaForCausalLM(config).to(str(device)).train()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self._device, self._stay = device, gradients_stay

    def step(self, gauge: rs.Gauge | None, step: int) -> Mapping[str, int]:
        batch = torch.randint(0, 50, (4, 24), generator=torch.Generator().manual_seed(step)).to(str(self._device))
        self._device.reset()
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        if gauge is not None:
            gauge.after_backward(step)
        self._optimizer.step()
        if gauge is not None:
            gauge.step(step, loss=loss.detach(), batch={"input_ids": batch})
        if not self._stay:
            self._optimizer.zero_grad()
        return self._device.counts().by_name


@pytest.mark.parametrize("gradients_stay", [False, True])
def test_a_step_that_is_not_read_never_waits_for_the_device(device: SimulatedDevice, gradients_stay: bool) -> None:
    loop = Loop(device, gradients_stay=gradients_stay)
    own = loop.step(None, 0)
    with (
        device.with_streams() as done,
        rs.Gauge(loop.model, {"input_ids": ids(8)}, schedule=4, strict=True) as gauge,
    ):
        for step in range(10):
            done.clear()
            found = loop.step(gauge, step)
            waits = {name: n for name, n in found.items() if name.startswith("sync:") and n != own.get(name, 0)}
            if step % 4:
                assert waits == {}, (step, waits)
                # The loss of the step before is waited for; copied are that of this step and, after a reading, the
                # gradient of one parameter.
                assert done.count("wait") == 1, (step, done)
                assert done.count("copy") == (2 if step % 4 == 1 else 1), (step, done)
            else:
                assert waits, step
    assert gauge.last is not None
    assert gauge.last.step == 8
    (carried,) = (row.mean for row in gauge.last.table if row.metric == "gradient_carried")
    assert (carried > 0.1) == gradients_stay


@pytest.mark.parametrize("streams", [False, True])
def test_every_loss_is_looked_at_one_step_later(device: SimulatedDevice, streams: bool) -> None:
    class Noting(Linear):
        def notice(self, step: int, name: str, value: float) -> None:
            seen.append((step, name, value))

    seen: list[tuple[int, str, float]] = []
    with (
        device.with_streams() if streams else nullcontext(),
        rs.Gauge(llama(device, 2), {"input_ids": ids(2)}, schedule=Noting(100), alarms=(), strict=True) as gauge,
    ):
        total_loss = torch.zeros((), device="sim")
        for step in range(5):
            total_loss += float(step)  # in place: the value of the step counts
            gauge.notice(step, "loss", total_loss)
    assert seen == [(0, "loss", 0.0), (1, "loss", 1.0), (2, "loss", 3.0), (3, "loss", 6.0)]

"""The simulated device keeps the rules of an accelerator, and counts what it should."""

from __future__ import annotations

import pytest
import torch

from tests.device.simulated import Counts, SimulatedDevice

SCALE = torch.arange(16.0).reshape(4, 4)


def counted(device: SimulatedDevice, work: object) -> Counts:
    device.reset()
    work()  # type: ignore[operator]
    return device.counts()


def test_it_refuses_what_an_accelerator_refuses(device: SimulatedDevice) -> None:
    here, there = SCALE, SCALE.to("sim")
    assert there.device == torch.device("sim:0")
    for mixed in (
        lambda: here + there,
        lambda: there @ here,
        lambda: torch.cat([there, here]),
        lambda: torch.where(here > 0, there, there),
        lambda: here * there.sum(),
        lambda: there + SCALE.to("sim:1"),
        lambda: torch.stack([there.sum(), here.sum()]),
        lambda: torch.searchsorted(there[0], here[0]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, device="sim", generator=torch.Generator())
    assert torch.equal((there * here.sum()).cpu(), here * 120)  # a processor scalar is allowed
    assert torch.equal(there[torch.tensor([2, 0])].cpu(), here[[2, 0]])  # so is an index


@pytest.mark.parametrize(
    ("work", "synchronisations"),
    [
        (lambda x: x @ x, 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: bool((x > 0).all()), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.to("cpu", non_blocking=True), 0),
        (lambda x: torch.tensor([1.0, 2.0], device="sim"), 1),
        (lambda x: torch.full((2,), 1.0, device="sim"), 0),
        (lambda x: x[x > 0], 1),
        (lambda x: x.masked_fill_(x > 0, 0.0), 0),
        (lambda x: torch.linalg.eigvalsh(x @ x.mT), 1),
        (lambda x: torch.linalg.svdvals(x), 1),
        (lambda x: torch.linalg.cholesky_ex(x @ x.mT + torch.eye(4, device="sim")), 0),
        (lambda x: torch.linalg.solve(x + 99 * torch.eye(4, device="sim"), x), 1),
        (lambda x: x.transpose(0, 1)[1:].reshape(3, 4, 1), 0),
    ],
)
def test_it_counts_where_the_host_waits(device: SimulatedDevice, work: object, synchronisations: int) -> None:
    x = SCALE.to("sim")
    assert counted(device, lambda: work(x)).synchronisations == synchronisations  # type: ignore[operator]

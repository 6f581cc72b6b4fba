"""The simulated device keeps the rules of an accelerator, and counts what it should."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def test_it_may_lack_float64(without_float64: SimulatedDevice) -> None:
    there = SCALE.to("sim")
    for wide in (
        there.double,
        lambda: torch.zeros(2, dtype=torch.float64, device="sim"),
        lambda: SCALE.double().to("sim"),
        lambda: there.sum(dtype=torch.float64),
    ):
        with pytest.raises(TypeError, match="no float64"):
            wide()
    assert there.cpu().double().dtype == torch.float64


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


def test_it_counts_kernels_and_bytes(device: SimulatedDevice) -> None:
    x = SCALE.to("sim")
    counts = counted(device, lambda: (x @ x + x).T.cpu())
    assert (counts.kernels, counts.copies) == (2, 1)
    assert counts.by_name["bytes:to_host"] == 16 * 4


def test_gradients_are_bit_equal_to_the_processors(device: SimulatedDevice) -> None:
    """The kernels are the processor's, also for fused attention, norms, convolutions and their gradients."""

    def gradients(name: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.Flatten(1), nn.Unflatten(1, (6, 8)), layer).to(name)
        torch.manual_seed(1)  # of all devices
        out = model(torch.randn(2, 3, 6, device=name))
        F.scaled_dot_product_attention(out, out, out).square().mean().backward()
        return [out.detach().cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]

    for here, there in zip(gradients("cpu"), gradients("sim"), strict=True):
        assert torch.equal(here, there)


def test_autocast_lowers_products(device: SimulatedDevice) -> None:
    x = SCALE.to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32

"""Gradients that a format rounds to zero, and zeros that are meant to be there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.monitor.alarms.facts import LOST
from rankscope.monitor.underflow import lost_to_underflow
from tests.monitor.trainings import alarms_raised, gpt2

WIDTH, UNITS, VOCABULARY = 32, 64, 4096
Gradients = dict[str, Tensor]


class Net(nn.Module):
    """Tokens, an MLP with ReLUs of which most are off, and a head."""

    def __init__(self, bias: float = -0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, UNITS)
        self.down, self.head = nn.Linear(UNITS, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.gain = nn.Parameter(torch.ones(()))
        nn.init.constant_(self.up.bias, bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        logits: Tensor = self.head(x + self.gain * self.down(self.up(x).relu()))
        return logits


def tokens(most: int = VOCABULARY) -> Tensor:
    return torch.randint(most, (4, 16), generator=torch.Generator().manual_seed(1))


def gradients_of(model: nn.Module, *, most: int = 64) -> nn.Module:
    ids = tokens(most)
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten()).backward()
    return model


def rare_tokens() -> nn.Module:
    return gradients_of(Net())


def dead_units() -> nn.Module:
    return gradients_of(Net(bias=-1.5))


def adapters() -> nn.Module:
    """At the first step the gradient of one half of each adapter is exactly zero."""
    model = Net().requires_grad_(False)
    down, up = nn.Linear(UNITS, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
    nn.init.zeros_(up.weight)
    model.down = nn.Sequential(down, up)
    found = gradients_of(model)
    assert not bool(down.weight.grad.any())  # type: ignore[union-attr]
    return found


def zero_branch() -> nn.Module:
    """ReZero, SkipInit: the branch gets no gradient at the first step."""
    model = Net()
    nn.init.zeros_(model.gain)
    return gradients_of(model)


class Experts(nn.Module):
    """The first of eight experts takes all tokens; the weights of all are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(8, UNITS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight[0] + 0.0 * self.weight.sum(0)).T


def unused_experts() -> nn.Module:
    model: Any = Net()
    model.up = Experts()
    return gradients_of(model)


def pruned() -> nn.Module:
    """Nine tenths of each matrix are masked, with their gradients."""
    model = gradients_of(Net(bias=0.0))
    for one in model.parameters():
        if one.dim() > 1 and one.grad is not None:
            one.grad[one.abs() < one.detach().abs().flatten()[:4096].quantile(0.9)] = 0.0
    return model


def padded_vocabulary() -> nn.Module:
    """Rows of the head beyond the vocabulary are masked out of the loss."""
    model, ids = Net(), tokens(64)
    nn.functional.cross_entropy(model(ids)[..., :64].flatten(0, 1), ids.roll(1).flatten()).backward()
    return model


def largest_only() -> nn.Module:
    """Sparse communication sends a hundredth of the entries."""
    model = gradients_of(Net(bias=0.0))
    for one in model.parameters():
        if one.dim() > 1 and one.grad is not None:
            one.grad[one.grad.abs() < one.grad.abs().flatten()[:4096].quantile(0.99)] = 0.0
    return model


def signs() -> nn.Module:
    model = gradients_of(Net())
    for one in model.parameters():
        one.grad = one.grad.sign()  # type: ignore[union-attr]
    return model


ZEROS_ON_PURPOSE = (
    rare_tokens, dead_units, adapters, zero_branch, unused_experts, pruned, padded_vocabulary, largest_only, signs,
)  # fmt: skip


def facts(model: nn.Module) -> dict[str, float]:
    return {row.metric: row.mean for row in lost_to_underflow(model)}


def stored(model: nn.Module, scale: float, dtype: torch.dtype) -> nn.Module:
    """Scale each gradient, store it in another format, and remove the scale again."""
    for one in model.parameters():
        if one.grad is not None:
            one.grad = (scale * one.grad).to(dtype).float() / scale
    return model


@pytest.mark.parametrize("build", ZEROS_ON_PURPOSE, ids=lambda build: build.__name__)
def test_zeros_that_are_meant_to_be_there_are_not_counted(build: Callable[[], nn.Module]) -> None:
    model = build()
    zeros = [float((one.grad == 0.0).double().mean()) for one in model.parameters() if one.grad is not None]
    assert max(zeros) > 0.5, "a case without zeros would show nothing"
    assert facts(model) == {"gradient_underflow": 0.0}
    assert facts(stored(build(), 1.0, torch.bfloat16)) == {"gradient_underflow": 0.0}
    fits = facts(stored(build(), 2.0**14, torch.float16))["gradient_underflow"]
    assert fits < LOST / 2, "in float16 with a loss scale that fits"


def smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16])
def test_entries_below_the_smallest_number_of_a_format_are_counted(dtype: torch.dtype) -> None:
    model = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(4)])
    torch.manual_seed(0)
    for one in model.parameters():
        drawn = torch.randn(64, 64, dtype=torch.float64) * torch.rand(64, 1, dtype=torch.float64)
        one.grad = (0.5 * smallest(dtype) * drawn).to(dtype).float()
    true = [float((one.grad == 0.0).double().mean()) for one in model.parameters() if one.grad is not None]
    found = facts(model)
    assert found["gradient_underflow"] == pytest.approx(sum(true) / 4, abs=0.03)
    assert found["gradient_underflow"] > LOST
    assert found["gradient_spacing"] == smallest(dtype)


def test_what_happens_to_gradients_after_they_were_rounded_does_not_hide_it() -> None:
    """Summed over batches and processes, divided, clipped, unscaled."""
    model = nn.Linear(128, 128)
    torch.manual_seed(0)
    parts = [(0.4 * smallest(torch.float16) * torch.randn(128, 128)).half().float() for _ in range(3)]
    model.weight.grad = 0.37 * sum(parts) / 3 * 1e6  # type: ignore[assignment]
    found = facts(model)
    assert found["gradient_underflow"] == pytest.approx(float((model.weight.grad == 0.0).double().mean()), abs=0.05)  # type: ignore[union-attr]
    assert found["gradient_spacing"] == pytest.approx(0.37 / 3 * 1e6 * smallest(torch.float16), rel=1e-5)


def test_sparse_gradients_not_finite_ones_and_none_at_all_are_read() -> None:
    model = nn.Embedding(100, 8, sparse=True)
    assert facts(model) == {}
    model(tokens(50)).square().sum().backward()
    assert facts(model) == {"gradient_underflow": 0.0}
    model = Net()
    for one in model.parameters():
        one.grad = torch.full_like(one, torch.inf)
    assert facts(model) == {"gradient_underflow": 0.0}
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    assert facts(model) == {"gradient_underflow": 0.0}, "no gradient at all is not underflow"


def rounding(scale: float, since: int) -> Callable[[Any, Any, int], None]:
    """A training whose gradients are stored in float16 from a step on, with a loss scale."""

    def change(model: Any, optimizer: Any, step: int) -> None:
        if step == since:
            for one in model.parameters():
                one.register_hook(lambda gradient: (scale * gradient).half().float() / scale)

    return change


def test_underflow_is_an_alarm_with_its_numbers_and_a_loss_scale_that_fits_ends_it() -> None:
    alarms = alarms_raised(gpt2(dropout=0.0), rounding(2.0**-18, 6), steps=16)
    (alarm,) = [one for one in alarms if one.name == "gradient_underflow"]
    assert (alarm.component, alarm.step) == ("gradients", 8)
    assert "small multiples of 0.016" in alarm.sentence  # 2^-24 * 2^18
    others = alarms_raised(gpt2(dropout=0.0), rounding(2.0**10, 6), steps=16)
    assert {one.state for one in others} == {"noted"}
    assert "gradient_underflow" not in {one.name for one in others}


def test_autocast_to_float16_underflows_without_a_loss_scale_and_not_with_one() -> None:
    """The true thing: forward and backward in float16, of a loss whose gradients are small."""

    def share(scale: float) -> float:
        model = gpt2(dropout=0.0)
        with torch.autocast("cpu", torch.float16):
            loss = model(input_ids=tokens(50), labels=tokens(50)).loss
        (1e-5 * scale * loss).backward()
        return facts(model)["gradient_underflow"]

    assert share(1.0) > LOST
    assert share(2.0**16) < LOST / 4

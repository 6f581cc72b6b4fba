"""Gradients that are kept from step to step are told from accumulated, clipped, scaled and changed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.monitor import Alarm, Gauge
from rankscope.monitor.watch import watch
from tests.monitor.trainings import batches, bert, gpt2, probe

STEPS = 12
Clear = Callable[[torch.optim.Optimizer, int], None]


def cleared(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()


def zeroed(optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)


def kept(optimizer: torch.optim.Optimizer, step: int) -> None:
    return


def from_four_on(optimizer: torch.optim.Optimizer, step: int) -> None:
    if step < 4:
        optimizer.zero_grad()


def alarms(
    clear: Clear, *, late: bool = False, clip: float = 1.0, scale: float = 1.0, passes: int = 1, noise: float = 0.0,
    same: bool = False, build: Callable[..., Any] = gpt2,
) -> list[Alarm]:  # fmt: skip
    """Those on gradients of a watched training; ``late`` clears after the forward and not before."""
    model = build(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(STEPS * passes)
    with watch(model, optimizer, probe={"input_ids": probe()["input_ids"]}, schedule=1, actions=(), strict=True) as one:
        for step in range(STEPS):
            if not late:
                clear(optimizer, step)
            for part in range(passes):
                loss = model(**data[0 if same else step * passes + part]).loss
                if late and part == 0:
                    clear(optimizer, step)
                (scale * loss).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scale
                parameter.grad += noise * torch.randn_like(parameter.grad)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return [alarm for alarm in one.alarms if alarm.name == "kept_gradients"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{}, {"clip": 1e9}, {"clip": 0.1}, {"passes": 3}, {"same": True}, {"build": bert}])
@pytest.mark.parametrize("clear", [kept, from_four_on])
def test_kept_gradients_are_found(clear: Clear, options: dict[str, Any]) -> None:
    found = alarms(clear, **options)
    assert [alarm.component for alarm in found] == ["gradients"]
    assert "of a gradient is the one before it" in found[0].sentence


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "options",
    [{}, {"late": True}, {"clip": 0.01}, {"scale": 65536.0}, {"passes": 3}, {"passes": 3, "late": True},
     {"noise": 0.1}, {"same": True}, {"same": True, "noise": 0.01}],
)  # fmt: skip
@pytest.mark.parametrize("clear", [cleared, zeroed])
def test_cleared_gradients_are_not(clear: Clear, options: dict[str, Any]) -> None:
    """Hostile cases: one batch again and again, accumulation, clipping, a loss scale, noise on the gradients."""
    assert alarms(clear, **options) == []


def test_micro_steps_that_a_loop_counts_are_not_kept_gradients() -> None:
    model = gpt2(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: list[Alarm] = []
    with Gauge(model, {"input_ids": probe()["input_ids"]}, schedule=1, actions=(), strict=True) as gauge:
        for step, one in enumerate(batches(24)):
            model(**one).loss.backward()
            gauge.after_backward(step)
            if step % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            reading = gauge.step(step)
            found += [] if reading is None else reading.alarms
    assert [alarm for alarm in found if alarm.name == "kept_gradients"] == []


def test_nothing_is_left_on_the_parameters() -> None:
    model = gpt2(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, optimizer, probe={"input_ids": probe()["input_ids"]}, schedule=1, actions=()):
        for one in batches(3):
            model(**one).loss.backward()
            optimizer.step()
    assert not any(parameter._backward_hooks for parameter in model.parameters())

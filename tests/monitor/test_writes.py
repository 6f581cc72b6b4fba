"""Writes between two steps: averages that stay, merges, loads and hooks are found; what belongs there is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rankscope as rs
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.monitor.causes import WRITTEN
from rankscope.monitor.readings import LayerValue
from rankscope.monitor.writes import Writes
from rankscope.stream.viewing import view_of
from tests.monitor.trainings import adapted, alarms_raised, batches, gpt2, probe

STEPS = 40
Act = Callable[[Any, int], None]


def plain() -> Any:
    return gpt2(dropout=0.0)


def with_teacher() -> Any:
    model = plain()
    model.teacher = copy.deepcopy(model.transformer).requires_grad_(False)
    return model


def rows_of(
    act: Act,
    *,
    build: Callable[[], Any] = plain,
    kind: Any = torch.optim.AdamW,
    parts: int = 1,
    every: int = 4,
    rate: float = 3e-3,
) -> list[LayerValue]:
    """What is reported of a training in which something is done after every step."""
    torch.manual_seed(0)
    model = build()
    view = view_of(model, prepare_inputs(load(model), {"input_ids": probe()["input_ids"]})[0])
    learned = [one for one in model.parameters() if one.requires_grad]
    optimizers = [kind(learned[part::parts], lr=rate) for part in range(parts)]
    writes, found = Writes(optimizers), []
    writes.model = model
    for step, given in enumerate(batches(STEPS)):
        model(**given).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        writes.step = step
        if step % every == 0:
            found += [row for row in writes.take(view) if row.mean >= 1.0 and row.metric in WRITTEN]
        act(model, step)
    writes.close()
    assert not any(one._optimizer_step_pre_hooks or one._optimizer_step_post_hooks for one in optimizers)
    return found


class Averaged:
    """Keeps an average of the weights, and uses it in evaluations every twelve steps."""

    def __init__(self, *, stays: bool) -> None:
        self.stays, self.average = stays, {}

    def __call__(self, model: Any, step: int) -> None:
        for name, one in model.named_parameters():
            self.average.setdefault(name, one.detach().clone()).lerp_(one.detach(), 0.01)
        if step % 12 == 11:
            own = copy.deepcopy(model.state_dict())
            for name, one in model.named_parameters():
                one.data.copy_(self.average[name])
            if not self.stays:
                model.load_state_dict(own)


class Lookahead:
    def __init__(self, share: float = 0.5) -> None:
        self.share, self.slow = share, {}

    def __call__(self, model: Any, step: int) -> None:
        for name, one in model.named_parameters():
            slow = self.slow.setdefault(name, one.detach().clone())
            if step % 10 == 9:
                one.data.copy_(slow.lerp_(one.detach(), self.share))


def unit_rows(model: Any, step: int) -> None:
    table = model.transformer.wte.weight
    table.data.copy_(nn.functional.normalize(table.data, dim=-1))


def clipped(model: Any, step: int) -> None:
    for one in model.parameters():
        one.data.clamp_(-0.03, 0.03)


def rounded(to: float) -> Act:
    """Matrices on a grid after every step, as if they were stored in few bits."""

    def act(model: Any, step: int) -> None:
        for one in model.parameters():
            if one.ndim > 1:
                one.data.copy_((one.data / to).round() * to)

    return act


def rounded_at_random(model: Any, step: int) -> None:
    """To bfloat16, up or down."""
    for one in model.parameters():
        bits = one.data.view(torch.int32)
        one.data.copy_(((bits + torch.randint_like(bits, 1 << 16)) >> 16 << 16).view(torch.float32))


def pruned(model: Any, step: int) -> None:
    """The smaller half of each matrix is set to zero, and kept there, from step 4 on."""
    for one in model.parameters():
        if one.ndim > 1 and step >= 4:
            if step == 4:
                one.mask = one.data.abs() > one.data.abs().median()
            one.data.mul_(one.mask)


def one_length(model: Any, step: int) -> None:
    for one in model.transformer.h.parameters():
        if one.ndim > 1:
            one.data.mul_(3.0 / one.data.norm())


def noisy(model: Any, step: int) -> None:
    for one in model.transformer.h[1].parameters() if step > 20 else ():
        one.data.add_(0.05 * one.data.norm() / one.numel() ** 0.5 * torch.randn_like(one))


def shrinking(model: Any, step: int) -> None:
    model.transformer.h[0].mlp.c_fc.weight.data.mul_(0.95 if step > 20 else 1.0 - 1e-4)


def merged(model: Any, step: int) -> None:
    for block in model.transformer.h:
        if step > 20 and step % 2 == 0:
            block.attn.c_attn.merge(8.0)


def merged_and_taken_out(model: Any, step: int) -> None:
    for block in model.transformer.h:
        block.attn.c_attn.merge()
        block.attn.c_attn.merge(-1.0)


def teach(model: Any, step: int) -> None:
    for one, other in zip(model.teacher.parameters(), model.transformer.parameters(), strict=True):
        one.data.lerp_(other.data, 0.1)


def moved_in_memory(model: Any, step: int) -> None:
    for one in model.parameters():
        one.data = one.data.clone()


def new_parameters(model: Any, step: int) -> None:
    if step == 20:
        model.transformer.h[0].mlp.c_fc.weight = nn.Parameter(torch.zeros(16, 64))


def partly_loaded(model: Any, step: int) -> None:
    if step == 29:
        with torch.no_grad():
            model.transformer.h[1].mlp.load_state_dict(plain().transformer.h[0].mlp.state_dict())


def swapped_storage(model: Any, step: int) -> None:
    if step == 29:
        model.transformer.wte.weight.data = torch.randn_like(model.transformer.wte.weight)


class Restored:
    def __call__(self, model: Any, step: int) -> None:
        if step == 9:
            self.kept = copy.deepcopy(model.state_dict())
        if step > 9:
            model.load_state_dict(self.kept)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("act", "options"),
    [
        (lambda model, step: None, {}),
        (lambda model, step: None, {"parts": 2}),
        (lambda model, step: None, {"rate": 0.1}),
        (unit_rows, {}),
        (clipped, {}),
        (clipped, {"rate": 5e-3}),
        (clipped, {"kind": torch.optim.RMSprop}),
        (rounded(2.0**-10), {}),
        (rounded_at_random, {}),
        (rounded_at_random, {"rate": 1e-4}),
        (pruned, {}),
        (one_length, {}),
        (lambda model, step: [one.data.mul_(1.0 - 1e-4) for one in model.parameters()] and None, {}),
        (Lookahead(), {}),
        (Lookahead(), {"rate": 0.02}),
        (Averaged(stays=False), {}),
        (merged_and_taken_out, {"build": adapted}),
        (teach, {"build": with_teacher}),
        (moved_in_memory, {}),
        (new_parameters, {}),
        (lambda model, step: None, {"kind": torch.optim.SGD, "rate": 0.5}),
    ],
)  # fmt: skip
def test_what_belongs_between_two_steps_is_not_reported(act: Act, options: dict[str, Any]) -> None:
    assert rows_of(act, **options) == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("act", "options", "metric", "where", "step"),
    [
        (Averaged(stays=True), {}, "weights_undone", "other matrices", 23),
        (Restored(), {}, "weights_undone", "other matrices", 17),
        (rounded(0.05), {}, "weights_undone", "other matrices", 10),
        (merged, {"build": adapted}, "weights_written", "c_attn.base.weight (block 0)", 24),
        (partly_loaded, {}, "weights_written", "h.1.mlp", 29),
        (noisy, {"rate": 3e-4}, "weights_written", "(block 1)", 28),
        (shrinking, {"rate": 3e-4}, "weights_written", "h.0.mlp.c_fc.weight (block 0)", 28),
        (swapped_storage, {}, "weights_written", "wte.weight (embedding)", 29),
    ],
)  # fmt: skip
def test_what_something_else_writes_is_found_with_the_step(
    act: Act, options: dict[str, Any], metric: str, where: str, step: int
) -> None:
    found = [row for row in rows_of(act, **options) if row.metric == metric]
    assert found
    assert where in found[0].site
    assert abs(found[0].most - step) <= 4, "the last step before it was written"


def test_the_alarm_says_what_to_look_for_and_not_to_lower_the_rate() -> None:
    average = Averaged(stays=True)
    alarms = alarms_raised(plain(), lambda model, optimizer, step: average(model, step), steps=40, every=4, lr=2e-4)
    alarm = next(one for one in alarms if one.name == "weights_replaced")
    assert alarm.component == "weights"
    assert "something other than the optimizer wrote" in alarm.sentence
    assert "between steps 22 and 23" in alarm.sentence
    assert "averaged weights" in alarm.sentence
    assert "learning rate" not in alarm.sentence
    assert not any(one.component == "rate" for one in alarms)


def test_an_error_while_weights_are_compared_never_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, schedule=1) as watch:
        for number, given in enumerate(batches(4, sequences=8)):
            model(**given).loss.backward()
            if number == 2:
                watch._writes._groups[0]._views = []
            optimizer.step()
    assert "What is written between steps is no longer read" in caplog.text
    assert watch.disabled is None
    assert len(watch.history) == 4

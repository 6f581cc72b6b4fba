"""Between two steps nothing writes weights or settings, unless it is declared; a step does what its settings say."""

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
from rankscope.monitor.ledger import Ledger
from rankscope.monitor.readings import Alarm
from rankscope.monitor.steps import predicted
from rankscope.stream.viewing import view_of
from tests.monitor.trainings import adapted, alarms_raised, batches, gpt2, probe

STEPS = 40
Act = Callable[[Any, int], None]


def plain() -> Any:
    return gpt2(dropout=0.0)


def events_of(
    act: Act,
    *,
    build: Callable[[], Any] = plain,
    kind: Any = torch.optim.AdamW,
    parts: int = 1,
    every: int = 4,
    rate: float = 3e-3,
) -> list[Alarm]:
    """The events of a training in which something is done after every step."""
    torch.manual_seed(0)
    model = build()
    view = view_of(model, prepare_inputs(load(model), {"input_ids": probe()["input_ids"]})[0])
    learned = [one for one in model.parameters() if one.requires_grad]
    optimizers = [kind(learned[part::parts], lr=rate) for part in range(parts)]
    ledger, found = Ledger(optimizers), list[Alarm]()
    ledger.model = model
    for step, given in enumerate(batches(STEPS)):
        model(**given).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        ledger.step = step
        if step % every == 0:
            found += ledger.take(view)
        act(model, step)
    ledger.close()
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


def pruned(model: Any, step: int) -> None:
    """The smaller half of each matrix is set to zero, and kept there, from step 4 on."""
    for one in model.parameters():
        if one.ndim > 1 and step >= 4:
            if step == 4:
                one.mask = one.data.abs() > one.data.abs().median()
            one.data.mul_(one.mask)


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


def written(events: list[Alarm]) -> list[Alarm]:
    return [one for one in events if one.name == "weights_written"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("act", "options"),
    [
        (lambda model, step: None, {}),
        (lambda model, step: None, {"parts": 2}),
        (lambda model, step: None, {"rate": 0.1}),
        (Averaged(stays=False), {}),
        (merged_and_taken_out, {"build": adapted}),
        (moved_in_memory, {}),
        (new_parameters, {}),
        (lambda model, step: None, {"kind": torch.optim.SGD, "rate": 0.5}),
    ],
)  # fmt: skip
def test_what_leaves_weights_as_they_are_is_no_event(act: Act, options: dict[str, Any]) -> None:
    assert [one.name for one in events_of(act, **options)] == ["learning_rate"] * options.get("parts", 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("act", "options", "where", "step"),
    [
        (Averaged(stays=True), {}, "other parameters", 12),
        (Restored(), {}, "other parameters", 11),
        (rounded(0.05), {}, "other parameters", 1),
        (clipped, {}, "other parameters", 1),
        (pruned, {}, "other parameters", 5),
        (merged, {"build": adapted}, "c_attn.base.weight (block 0)", 23),
        (partly_loaded, {}, "h.1.mlp", 30),
        (noisy, {"rate": 3e-4}, "(block 1)", 22),
        (shrinking, {"rate": 3e-4}, "h.0.mlp.c_fc.weight (block 0)", 22),
        (swapped_storage, {}, "wte.weight", 30),
    ],
)  # fmt: skip
def test_what_something_else_writes_is_an_event_with_its_size(
    act: Act, options: dict[str, Any], where: str, step: int
) -> None:
    found = written(events_of(act, **options))
    assert found
    assert where in found[0].sentence
    assert abs(found[0].step - step) <= 4, "the largest write since the last reading"
    assert found[0].evidence["size"] > 1e-3


def test_what_is_written_after_every_step_is_told_once() -> None:
    assert len(written(events_of(unit_rows))) <= 2
    undone = written(events_of(Restored()))
    assert sum("back to where they were, not for the first time" in one.sentence for one in undone) == 1


def test_what_is_declared_is_the_event_that_was_declared() -> None:
    torch.manual_seed(0)
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, schedule=1, actions=()) as watch:
        for number, given in enumerate(batches(8, sequences=8)):
            if number == 4:
                with watch.planned("begin anew"), torch.no_grad():
                    model.transformer.wte.weight.mul_(2.0)
                    optimizer.param_groups[0]["momentum"] = 0.5
            model(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert "Step 4: planned: begin anew." in [one.sentence for one in watch.notes]
    assert not {"weights_written", "optimizer_settings"} & {one.name for one in watch.notes}


def test_rates_settings_and_switches_are_events_with_both_numbers() -> None:
    def change(model: Any, optimizer: Any, step: int) -> None:
        if step == 5:
            optimizer.param_groups[0]["lr"] = 1.0
        if step == 7:
            optimizer.param_groups[0]["weight_decay"] = 100.0
        if step == 8:
            model.transformer.h[1].requires_grad_(False)

    found = {one.name: one for one in alarms_raised(plain(), change, steps=10) if one.state == "noted"}
    assert found["learning_rate"].sentence == "Step 5: learning rate 1 instead of 0.001 (x 1,000)."
    assert found["optimizer_settings"].sentence == "Step 7: weight_decay 100 instead of 0.01 (x 10,000)."
    assert "12 of 28 parameters frozen" in found["requires_grad"].sentence
    assert found["requires_grad"].evidence["declared"] == 1.0


def test_a_negative_rate_is_no_plan_of_anybody() -> None:
    def change(model: Any, optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = -1e-3 if step >= 5 else 1e-3

    found = [one for one in alarms_raised(plain(), change, steps=8) if one.name == "learning_rate"]
    assert found[-1].sentence == "Step 5: learning rate -0.001 instead of 0.001 (x -1): steps go uphill."
    assert found[-1].evidence["declared"] == 0.0


def test_the_rates_of_a_schedule_are_declared() -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 6)
    with rs.watch(model, optimizer, schedule=1, actions=()) as watch:
        for given in batches(14, sequences=8):
            model(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    rates = [one for one in watch.notes if one.name == "learning_rate"]
    assert len(rates) > 2
    assert all(one.evidence["declared"] for one in rates)
    assert "by its schedule" in rates[-1].sentence


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "maximize": True}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-3}),
    ],
)
def test_the_formula_of_a_step_is_that_of_torch(kind: Any, options: dict[str, Any]) -> None:
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    optimizer = kind([weight], lr=0.1, **options)
    for _ in range(4):
        weight.grad = torch.randn(5, dtype=torch.float64)
        state = {name: one.clone() for name, one in optimizer.state[weight].items() if isinstance(one, torch.Tensor)}
        expected = predicted(optimizer, optimizer.param_groups[0], weight.detach().clone(), weight.grad, state)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)


def test_a_step_that_does_something_else_is_an_event() -> None:
    def decayed(optimizer: Any, args: Any, kwargs: Any) -> None:
        for one in optimizer.param_groups[0]["params"]:
            one.data.mul_(0.9)

    for is_hooked in (False, True):
        torch.manual_seed(0)
        model = plain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with rs.watch(model, optimizer, schedule=1, actions=()) as watch:
            for number, given in enumerate(batches(20, sequences=8)):
                if is_hooked and number == 10:
                    optimizer.register_step_pre_hook(decayed)
                model(**given).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        told = [one.sentence for one in watch.notes if one.name == "step_differs"]
        assert len(told) == is_hooked
        assert all(one.startswith("Step 16: a step of AdamW moved ") for one in told)


def test_an_error_while_weights_are_compared_never_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, schedule=1) as watch:
        for number, given in enumerate(batches(4, sequences=8)):
            model(**given).loss.backward()
            if number == 2:
                watch._ledger._groups[0]._views = []
            optimizer.step()
    assert "What is written between steps is no longer read" in caplog.text
    assert watch.disabled is None
    assert len(watch.history) == 4

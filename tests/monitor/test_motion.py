"""Motion of every weight: what healthy trainings do is never a jump, and what something else writes is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.monitor import Gauge
from rankscope.monitor.steps import contradiction
from tests.monitor.trainings import Low, adapted, batches, bert, gpt2, probe

STEPS = 40
Change = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def trained(
    change: Change | None = None,
    *,
    kind: Callable[..., Any] = torch.optim.AdamW,
    build: Callable[[], Any] = lambda: gpt2(dropout=0.0),
    clip: Callable[[int], float] = lambda step: 1.0,
    given: Callable[[int], int] = lambda step: step,
    **options: Any,
) -> list[Any]:
    """The alarms of a training with these settings of its optimizer, read at every second step."""
    model = build()
    options = {"lr": 1e-3, **options}
    optimizer = kind(model.parameters(), **options)
    gauge = Gauge(model, {"input_ids": probe()["input_ids"]}, schedule=2, actions=(), strict=True)
    gauge.optimizers, found, data = (optimizer,), [], batches(48)
    for step in range(48):
        if change is not None:
            change(model, optimizer, step)
        optimizer.zero_grad()
        loss = model(**data[given(step)]).loss
        loss.backward()
        gauge.after_backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), clip(step))
        optimizer.step()
        reading = gauge.step(step, loss=loss)
        found += [] if reading is None else [alarm for alarm in reading.alarms if alarm.state == "raised"]
    return found


def setting(name: str, value: float, step: int) -> Change:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, now: int) -> None:
        if now >= step:
            for group in optimizer.param_groups:
                group[name] = value

    return change


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("options", "component", "words"),
    [
        ({"change": setting("eps", 10.0, 24)}, "optimizer", "eps is 10 instead of 1e-08 since step 24"),
        ({"eps": 10.0}, "optimizer", "its epsilon is"),
        ({"kind": torch.optim.RMSprop, "eps": 100.0}, "optimizer", "its epsilon is"),
        ({"lr": 1e-9}, "rate", "Cause: the learning rate: at 1e-09"),
        ({"kind": torch.optim.SGD, "lr": 0.1, "clip": lambda step: 1e-4 if step > 24 else 1.0},
         "optimizer", "clipping"),
    ],
)  # fmt: skip
def test_weights_that_hardly_move_are_found(options: dict[str, Any], component: str, words: str) -> None:
    (alarm,) = [alarm for alarm in trained(**options) if alarm.name == "still_weights"]
    assert alarm.component == component
    assert words in alarm.sentence
    assert "lower the learning rate" not in alarm.sentence


def test_adapters_that_begin_at_zero_twice_are_named_whatever_gradients_frozen_weights_kept() -> None:
    def built() -> Any:
        model = gpt2(dropout=0.0)
        model(**batches(1)[0]).loss.backward()
        model.requires_grad_(False)
        for block in model.transformer.h:
            block.attn.c_attn = Low(block.attn.c_attn)
            nn.init.zeros_(block.attn.c_attn.down.weight)
        return model

    def keep(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:  # an optimizer of what learns clears nothing else
            learned = [one for one in model.parameters() if one.requires_grad]
            optimizer.param_groups[0]["params"] = learned

    first, later = trained(build=built, change=keep)
    assert (first.name, first.component) == ("shown_faults", "structure")
    assert "two factors of a branch begin at zero" in first.sentence
    assert (later.name, later.component) == ("still_weights", "gradients")
    assert "the gradient of every parameter is exactly zero" in later.sentence


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "options",
    [
        {"change": lambda m, o, step: o.param_groups[0].update(lr=1e-3 * max(0.0, 1 - step / 40))},
        {"change": lambda m, o, step: o.param_groups[0].update(lr=1e-3 if step < 24 else 1e-6)},
        {"change": lambda m, o, step: o.param_groups[0].update(lr=1e-8 * step)},
        {"lr": 0.05, "given": lambda step: 0},
        {"kind": torch.optim.SGD, "lr": 0.5, "given": lambda step: 0},
        {"kind": torch.optim.Adagrad, "lr": 1e-2},
        {"kind": torch.optim.RMSprop, "lr": 1.0, "eps": 1.0},
        {"lr": 1e-6},
        {"build": adapted, "lr": 1e-4},
    ],
)  # fmt: skip
def test_healthy_trainings_do_not_hardly_move(options: dict[str, Any]) -> None:
    """Hostile cases: rates that fall to zero or begin there, one batch that is learned by heart, a large epsilon with a
    rate to match, fine-tuning, adapters."""
    assert [alarm.sentence for alarm in trained(**options) if alarm.name == "still_weights"] == []


def test_block_that_never_gets_a_gradient_is_found_if_an_optimizer_holds_it() -> None:
    def detached() -> Any:
        model = gpt2(dropout=0.0)
        model.transformer.h[1].register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
        return model

    (alarm,) = [alarm for alarm in trained(build=detached) if alarm.name == "still_weights"]
    assert (alarm.layer, alarm.component, alarm.step) == (0, "gradients", 16)


def test_blocks_that_an_optimizer_leaves_out_are_nobodys_fault() -> None:
    def upper(parameters: Any, **options: Any) -> Any:
        kept = list(parameters)
        return torch.optim.AdamW(kept[len(kept) // 2 :], **options)

    assert [alarm for alarm in trained(kind=upper) if alarm.name == "still_weights"] == []


def at(step: int, act: Callable[[Any], object]) -> Change:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, now: int) -> None:
        if now == step:
            with torch.no_grad():
                act(model)

    return change


def watched(model: Any, change: Change | None, *, loss_is_bad: bool = False) -> list[tuple[str, str, str]]:
    """Name, component and sentence of the alarms of a training in which something is changed before a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    gauge = Gauge(model, {"input_ids": probe()["input_ids"]}, schedule=4, actions=(), strict=True)
    gauge.optimizers = (optimizer,)
    found = []
    for step, given in enumerate(batches(STEPS)):
        if change is not None:
            change(model, optimizer, step)
        optimizer.zero_grad()
        loss = model(**given).loss / (0.0 if loss_is_bad and step >= 36 else 1.0)
        loss.backward()
        gauge.after_backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        reading = gauge.step(step, loss=loss)
        found += [] if reading is None else reading.alarms
    return [(alarm.name, alarm.component, alarm.sentence) for alarm in found if alarm.state == "raised"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["cls.predictions.transform.dense.weight", "bert.embeddings.word_embeddings.weight",
             "bert.encoder.layer.1.output.LayerNorm.weight"],
)  # fmt: skip
def test_first_parameter_that_is_not_finite_is_the_cause_although_an_update_spread_it(name: str) -> None:
    def spoil(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 36:
            model.get_parameter(name).data.fill_(math.nan)

    _, component, sentence = next(one for one in watched(bert(dropout=0.0), spoil) if one[0] == "not_finite")
    assert component == "weights"
    assert f"entries of {name}" in sentence
    assert "before the update" in sentence


def frozen(*, at: dict[int, int], is_new: bool = False) -> Change:
    """Blocks that stop requiring gradients at a step, by number; with a new optimizer without them, or not."""

    def change(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        for block, begin in at.items():
            if step == begin:
                model.transformer.h[block].requires_grad_(False)
                if is_new:
                    for group in optimizer.param_groups:
                        group["params"] = [one for one in group["params"] if one.requires_grad]

    return change


def test_all_blocks_that_stop_at_once_are_an_alarm_and_a_schedule_that_freezes_them_is_not() -> None:
    ((name, component, sentence),) = watched(gpt2(dropout=0.0), frozen(at={0: 18, 1: 18}))
    assert (name, component) == ("still_weights", "gradients")
    assert "100% of the weights that moved stopped requiring gradients 16 steps ago, at once" in sentence
    assert "deepcopy" in sentence
    assert watched(gpt2(dropout=0.0), frozen(at={0: 14, 1: 22})) == [], "one block after the other"
    assert watched(gpt2(dropout=0.0), frozen(at={0: 18, 1: 18}, is_new=True)) == [], "a stage of its own"
    assert watched(gpt2(dropout=0.0), frozen(at={0: 0, 1: 0})) == [], "from the start"


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (torch.optim.AdamW, {"betas": (0.999, 0.9)}, "averages gradients over 1,000 steps and their squares over 10;"),
        (torch.optim.NAdam, {"betas": (0.99, 0.9)}, "averages gradients over 100 steps and their squares over 10;"),
        (torch.optim.SGD, {"momentum": 1.0, "lr": 1e-4}, "keeps 1 of its velocity at each step"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_an_alarm(kind: Any, options: dict[str, Any], words: str) -> None:
    alarm = trained(kind=kind, **options)[0]
    assert (alarm.name, alarm.component, alarm.step) == ("optimizer_settings", "optimizer", 2)
    assert words in alarm.sentence


def half_moments(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """From step 20 on, what the optimizer holds is stored in float16 between steps."""

    def store(*_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].half())

    if step == 20:
        optimizer.register_step_post_hook(store)


def test_second_moments_that_underflow_are_named_and_not_the_weights_that_jump() -> None:
    found = trained(half_moments)
    assert found
    assert {alarm.component for alarm in found if alarm.step <= 24} == {"optimizer"}
    assert "and no gradients give more than 7.3" in found[0].sentence


def test_decay_inside_adam_that_outweighs_gradients_is_an_alarm_and_one_beside_them_is_not() -> None:
    found = trained(kind=torch.optim.Adam, weight_decay=1.0)
    assert [alarm.component for alarm in found if alarm.name == "optimizer_settings"] == ["optimizer"]
    assert "a decay that is added to gradients outweighs them (weight_decay)" in found[0].sentence
    for kind, decay in ((torch.optim.AdamW, 1.0), (torch.optim.Adam, 1e-4)):
        alarms = trained(kind=kind, weight_decay=decay)
        assert "optimizer_settings" not in {alarm.name for alarm in alarms}, kind


class Adan(torch.optim.AdamW):
    """Has three betas, of which the second is that of differences of gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            group["reported"] = group["betas"]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["betas"] = group["reported"]
        super().step(closure)
        for group in self.param_groups:
            group["betas"] = (0.98, 0.2, 0.99)


@pytest.mark.parametrize(
    "build",
    [
        *(partial(torch.optim.AdamW, betas=betas) for betas in
          [(0.9, 0.999), (0.95, 0.95), (0.95, 0.9), (0.9, 0.95), (0.0, 0.9), (0.98, 0.9), (0.5, 0.5)]),
        partial(torch.optim.SGD, momentum=0.99), torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad,
        torch.optim.Adafactor, Adan,
    ],
)  # fmt: skip
def test_settings_of_usual_recipes_do_not_contradict_each_other(build: Any) -> None:
    layer = nn.Linear(4, 4)
    optimizer = build(layer.parameters())
    layer(torch.ones(1, 4)).sum().backward()
    assert contradiction([optimizer]) == (0.0, ""), "before its first step, nothing is said of it"
    optimizer.step()
    assert contradiction([optimizer])[0] < 1.0


def test_loss_that_is_not_finite_is_the_cause_although_an_update_spread_it() -> None:
    found = [one for one in watched(bert(dropout=0.0), None, loss_is_bad=True) if one[0] == "not_finite"]
    assert [component for _, component, _ in found] == ["loss"]

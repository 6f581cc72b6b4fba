from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.exam.reports.parts import LanguageModel, next_token, text
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import InputError, UnknownNameError
from rankscope.monitor.loss_level import LossLevel
from rankscope.monitor.readings import ENOUGH, one_line
from tests.monitor.trainings import assert_bit_equal, batches, bert, gpt2


def loop(
    model: Any, watched: bool = True, *, steps: int = 6, accumulate: int = 1, call: Any = None, **options: Any
) -> tuple[dict[str, Tensor], Any]:
    """A loop as a user writes it; final weights and random state, and the watch."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    call = model if call is None else call
    watch = rs.watch(call, optimizer, strict=True, **options) if watched else None
    for number, batch in enumerate(batches(steps * accumulate, sequences=8)):
        loss = call(**batch).loss / accumulate
        loss.backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    if watch is not None:
        watch.close()
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return found | {"random state": torch.get_rng_state()}, watch


@pytest.mark.parametrize("build", [gpt2, bert])
def test_training_computes_the_same_bits_and_is_read_densely(build: Any) -> None:
    plain, _ = loop(build(), watched=False)
    seen, watch = loop(build())
    assert_bit_equal(plain, seen)
    assert list(watch.history.index) == [*range(6)]
    assert {"loss", "relative_residual/least", "learning_rate", "qk_to_v_gradient/least"} <= set(watch.history.columns)
    assert watch.history["loss"].notna().all(), "the loss that the model returned"
    assert watch.alarms == ()


def test_short_run_is_not_called_healthy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rankscope.monitor"):
        _, watch = loop(gpt2(), steps=3)
    assert "too few readings to judge (3 of 8)" in repr(watch)
    assert "Too few readings to judge" in caplog.text
    _, long = loop(gpt2(), steps=ENOUGH)
    assert repr(long).endswith("no alarm")
    assert "no fault seen (8 readings)" in repr(long)


def test_everything_prints_in_one_line_and_as_a_small_picture() -> None:
    _, watch = loop(gpt2())
    gauge = watch.gauge
    for thing in (watch, gauge, gauge.last):
        assert len(str(thing)) < 200
        assert "\n" not in str(thing)
    assert one_line(gauge.last).startswith("step 5: no fault seen, residual ")
    assert "<svg" in watch._repr_html_()
    assert len(watch._repr_html_()) < 20_000


def test_probe_is_the_first_eight_training_sequences_and_no_evaluation_batch() -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, schedule=1, strict=True) as watch:
        model.eval()
        with torch.no_grad():
            model(input_ids=torch.zeros(8, 4, dtype=torch.long))
        model.train()
        small = batches(4, sequences=3)
        for batch in small:  # accumulated: three micro-batches and a fourth
            model(**batch).loss.backward()
        optimizer.step()
        kept = watch._batches.probe()
    assert kept is not None
    wanted = torch.cat([batch["input_ids"] for batch in small])[:8]
    assert torch.equal(kept["input_ids"], wanted)
    assert len(watch.history) == 1


def test_accumulated_losses_are_averaged_and_steps_are_those_of_the_optimizer() -> None:
    _, watch = loop(gpt2(), steps=3, accumulate=4)
    assert list(watch.history.index) == [0, 1, 2]


def test_own_loss_replaces_the_one_of_the_model() -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, schedule=1, strict=True) as watch:
        for batch in batches(2, sequences=8):
            watch.loss(model(**batch).loss * 0 + 7.0).backward()
            optimizer.step()
    assert list(watch.history["loss"]) == [7.0, 7.0]


def outside(model: nn.Module, watched: bool, scaler: Any = None) -> tuple[dict[str, Tensor], Any, list[float]]:
    """A loop whose loss is computed outside the model, beside another model with a loss of its own."""
    torch.manual_seed(5)
    other = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watch = rs.watch(model, optimizer, schedule=1, strict=True) if watched else None
    losses, criterion = [], nn.CrossEntropyLoss()
    for batch in batches(4, sequences=8):
        other(torch.ones(1, 3)).sum().backward()
        logits = model(input_ids=batch["input_ids"]).logits
        loss = criterion(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        losses.append(loss.item())
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    if watch is not None:
        watch.close()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, watch, losses


def test_loss_outside_the_model_is_the_one_whose_gradient_reaches_it() -> None:
    backward = torch.autograd.backward
    plain, _, losses = outside(gpt2(), watched=False)
    seen, watch, _ = outside(gpt2(), watched=True)
    assert_bit_equal(plain, seen)
    assert list(watch.history["loss"]) == pytest.approx(losses)
    assert torch.autograd.backward is backward
    _, scaled, losses = outside(gpt2(), watched=True, scaler=torch.amp.GradScaler("cpu", init_scale=65536.0))
    assert list(scaled.history["loss"]) == pytest.approx(losses), "not times 65,536"


def test_two_watches_hear_their_own_loss_whichever_is_closed_first() -> None:
    backward = torch.autograd.backward
    models = [gpt2(), gpt2()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    both = [rs.watch(*pair, schedule=1, strict=True) for pair in zip(models, optimizers, strict=True)]
    for factor, model, optimizer in zip((1.0, 2.0), models, optimizers, strict=True):
        (batch,) = batches(1, sequences=8)
        (factor * model(input_ids=batch["input_ids"]).logits.square().mean()).backward()
        optimizer.step()
    one, two = (watch.history["loss"].iloc[0] for watch in both)
    assert two == pytest.approx(2.0 * one, rel=0.5)
    for watch in both:
        watch.close()
    for watch in both:
        watch.close()
    models[0](input_ids=batch["input_ids"]).logits.mean().backward()
    assert [len(watch._losses) for watch in both] == [0, 0]
    torch.autograd.backward = backward


def test_outputs_and_losses_of_any_kind_pass_as_they_are() -> None:
    """A hook on what a model returns must not raise in the loop, whatever that is."""

    class Slotted:
        __slots__ = ("logits",)

        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = gpt2()

        def forward(self, input_ids: Tensor) -> Slotted:
            return Slotted(self.body(input_ids=input_ids).logits)

    model = Returning()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with rs.watch(model, optimizer, schedule=1) as watch:
        for batch in batches(2, sequences=8):
            logits = model(batch["input_ids"]).logits
            parts = [logits.square().mean(), logits.mean()]
            torch.autograd.backward(parts)
            assert model.body.lm_head.weight.grad is not None
            optimizer.step()
    assert watch.step == 2


class OfDictionaries(nn.Module):
    """Takes one dictionary, as models of sentence-transformers and Composer do."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.inner = nn.Linear(4, 4), nn.ModuleDict({"net": gpt2()})

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.inner["net"](**batch)


def test_a_model_that_takes_a_dictionary_is_read_at_the_part_that_takes_tensors() -> None:
    model = OfDictionaries()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with rs.watch(model, optimizer, schedule=1, strict=True) as watch:
        for batch in batches(3, sequences=8):
            model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(watch.history) == 3
    assert watch.history["loss"].notna().all()
    assert watch.gauge is not None
    assert watch.gauge._prober.model is model.inner["net"]


def test_steps_that_a_scaler_skips_are_not_counted_and_skipping_all_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with rs.watch(model, optimizer, schedule=1, strict=True) as watch, caplog.at_level(logging.WARNING):
        for number, batch in enumerate(batches(70, sequences=2)):
            loss = model(**batch).loss
            scaler.scale(loss * float("inf") if number >= 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert watch.step == 2
    assert "64 training forwards without a step of the optimizer" in caplog.text


def test_several_optimizers_make_one_step_also_if_one_of_them_rests() -> None:
    model = gpt2()
    parameters = list(model.parameters())
    one, two = (torch.optim.SGD(part, lr=1e-3) for part in (parameters[:5], parameters[5:]))
    with rs.watch(model, [one, two], schedule=1, strict=True) as watch:
        for number, batch in enumerate(batches(4, sequences=8)):
            model(**batch).loss.backward()
            one.step()
            if number % 2 == 0:
                two.step()
            model.zero_grad()
    assert list(watch.history.index) == [0, 1, 2, 3]
    assert watch.history["gradient_norm/least"].gt(0).all(), "read before the first of them"


def test_optimizer_of_other_parameters_is_found() -> None:
    model, other = gpt2(), gpt2()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, schedule=4, strict=True) as watch:
        for batch in batches(20, sequences=8):
            model(**batch).loss.backward()
            optimizer.step()
            model.zero_grad()
    found = [(alarm.name, alarm.component) for alarm in watch.alarms]
    assert found == [("shown_faults", "structure"), ("still_weights", "optimizer")]
    assert "The optimizer holds none of the model's parameters" in watch.alarms[0].sentence


def test_hooks_are_gone_afterwards_and_silence_works() -> None:
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer) as watch:
        watch.silence("still_weights", "token_collapse")
        with pytest.raises(UnknownNameError):
            watch.silence("sudden_chang")
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_what_is_not_an_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match="pass it"):
        rs.watch(gpt2())
    with pytest.raises(InputError, match="cannot be counted"):
        rs.watch(gpt2(), object())  # type: ignore[arg-type]


class Nano(nn.Module):
    """Attention with one ``c_attn`` as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 16)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 50)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.head(x)
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.c_attn(x).split(16, dim=2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def test_nanogpt_loop_with_positional_arguments_and_fused_queries() -> None:
    torch.manual_seed(0)
    model = Nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, strict=True) as watch:
        for batch in batches(4, sequences=8):
            _, loss = model(batch["input_ids"], batch["labels"])
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    assert len(watch.history) == 4
    assert watch.history["loss"].notna().all(), "the only scalar that the model returned"
    assert watch.history["qk_to_v_gradient/least"].gt(0).all()
    assert "batch_copies" in watch.history


def without_skips(self: Block, x: Tensor) -> Tensor:
    return self.mlp(self.ln_2(self.attn(self.ln_1(x))))


@pytest.mark.parametrize(("since", "alarm"), [(0, "shown_faults"), (20, "model_changed")])
def test_skips_that_the_code_leaves_out_are_the_cause_from_the_start_and_later(
    since: int, alarm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Nano()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, strict=True, schedule=2) as watch:
        for step, batch in enumerate(batches(40, sequences=8)):
            if step == since:
                monkeypatch.setattr(Block, "forward", without_skips)
            model(batch["input_ids"], batch["labels"])[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {one.name: one for one in (*watch.alarms, *watch.notes)}
    assert found[alarm].component in ("skip", "structure")
    assert found[alarm].step <= since + 16
    assert ("test_watch.py:" if since else "skip") in found[alarm].sentence


@pytest.mark.parametrize("bug", ["", "softmax axis", "off by one", "norm axis"])
def test_fault_of_the_wiring_is_an_alarm_before_the_first_step(bug: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(bug=bug, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids, labels = text()
    with rs.watch(model, optimizer, strict=True) as watch:
        for _ in range(3):
            next_token(model(ids), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(one.name, one.step, one.component) for one in watch.alarms] == (
        [("shown_faults", 0, "structure")] if bug else []
    )
    assert all("Shown by: " in one.sentence for one in watch.alarms)


def test_small_initial_weights_are_no_fault_of_the_wiring() -> None:
    """Hostile: tokens are alike after the first blocks, and training leads out of it."""
    torch.manual_seed(0)
    model = LanguageModel(depth=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1 if parameter.ndim > 1 else 1.0)
    ids, labels = text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with rs.watch(model, optimizer, strict=True) as watch:
        next_token(model(ids), labels).backward()
        optimizer.step()
    assert watch.alarms == ()


def test_a_loss_that_jumps_and_stays_up_is_told_with_its_onset_and_what_rises_slowly_has_no_size() -> None:
    def rise_of(loss: Any, steps: int = 240) -> Any:
        level = LossLevel()
        for step in range(steps):
            level.take(step, loss(step))
        return level.rise()

    noise = [0.1 * math.sin(37.0 * step) for step in range(400)]
    jumped = rise_of(lambda step: (2.0 if step < 150 else 3.0) + noise[step])
    assert (jumped.step, jumped.size > 1.0) == (150, True)
    assert (jumped.before, jumped.after) == (pytest.approx(2.0, abs=0.1), pytest.approx(3.0, abs=0.1))
    assert rise_of(lambda step: (3.0 if 150 <= step < 190 else 2.0) + noise[step]) is None, "a burst"
    assert rise_of(lambda step: 3.0 - step / 200 + (step >= 150) + noise[step]) is None, "as high as it began"
    slowly = rise_of(lambda step: 2.0 + 0.002 * step + noise[step])
    assert slowly is None or slowly.size < 1.0, "hostile: the loss of a generator rises slowly"


def nano_loop(call: Any, watch: Any, optimizer: torch.optim.Optimizer) -> None:
    for batch in batches(3, sequences=8):
        call(batch["input_ids"], batch["labels"])[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.close()


def test_compiled_model_is_watched_if_it_is_what_is_passed_and_named_if_it_is_compiled_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = Nano()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    watch = rs.watch(compiled, optimizer, strict=True)
    nano_loop(compiled, watch, optimizer)
    assert len(watch.history) == 3
    torch._dynamo.reset()
    watch = rs.watch(model, optimizer)
    nano_loop(torch.compile(model, backend="eager", fullgraph=True), watch, optimizer)
    assert "pass what torch.compile returned" in caplog.text
    assert len(watch.history) == 3, "what needs no pass of the model is read all the same"


def test_model_in_eval_mode_is_told_to_train(caplog: pytest.LogCaptureFixture) -> None:
    model = Nano().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = rs.watch(model, optimizer)
    nano_loop(model, watch, optimizer)
    assert "model.train()" in caplog.text
    assert watch.disabled is None


class Plain(nn.Module):
    """No blocks: what a gauge of layers reads is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return self.second(self.first(x).relu() if scale is None else scale * self.first(x))


def plain_training(update: Callable[[Tensor, torch.optim.Optimizer, int], None], steps: int = 96) -> Any:
    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch = rs.watch(model, optimizer, actions=())
    for step in range(steps):
        x = torch.randn(16, 8)
        update((model(x, None) - x[:, :1]).square().mean(), optimizer, step)
    watch.close()
    assert watch.disabled is None
    return watch


def usual(loss: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_a_model_without_blocks_is_watched_for_what_holds_in_every_training() -> None:
    assert plain_training(usual).alarms == ()

    def kept(loss: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
        loss.backward()
        optimizer.step()

    assert plain_training(kept).alarms[0].name == "kept_gradients"
    broken = plain_training(
        lambda loss, optimizer, step: usual(loss * (float("nan") if step == 40 else 1.0), optimizer, step)
    )
    assert broken.alarms[0].name == "not_finite"


def test_two_steps_for_one_gradient_are_a_gradient_that_is_not_cleared() -> None:
    def twice(loss: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
        usual(loss, optimizer, step)
        optimizer.step()

    alarm = plain_training(twice).alarms[0]
    assert (alarm.name, alarm.evidence["gradient_carried"]) == ("kept_gradients", 1.0)


def test_a_closure_that_gives_the_same_gradient_again_is_no_kept_one() -> None:
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(16, 8)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    watch = rs.watch(model, optimizer, actions=(), schedule=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x, None) - x[:, :1]).square().mean()
        loss.backward()
        return loss

    for _ in range(40):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    watch.close()
    assert watch.alarms == ()


@pytest.mark.parametrize("every", [3, 1000])
def test_an_optimizer_that_rarely_steps_leaves_no_kept_gradient(every: int) -> None:
    torch.manual_seed(0)
    model = Plain()
    optimizers = [torch.optim.Adam(part.parameters(), 1e-2) for part in (model.first, model.second)]
    watch = rs.watch(model, optimizers, actions=(), schedule=1)
    for step in range(30):
        x = torch.randn(16, 8)
        model.zero_grad()
        (model(x, None) - x[:, :1]).square().mean().backward()
        optimizers[0].step()
        if step % every == every - 1:
            optimizers[1].step()
    watch.close()
    assert [one for one in watch.alarms if one.name == "kept_gradients"] == []


def test_steps_by_another_optimizer_are_an_alarm_only_if_it_was_so_from_the_start() -> None:
    def another(loss: Tensor, optimizer: torch.optim.Optimizer, step: int, since: int) -> None:
        usual(loss, torch.optim.Adam(optimizer.param_groups[0]["params"], 1e-2) if step >= since else optimizer, step)

    (alarm,) = plain_training(lambda *given: another(*given, since=0)).alarms
    assert "another optimizer makes the steps" in alarm.sentence
    assert plain_training(lambda *given: another(*given, since=20)).alarms == (), "a new phase"


def test_a_step_that_is_always_skipped_is_an_alarm_and_accumulation_is_none() -> None:
    def skipped(loss: Tensor, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        (loss * float("inf")).backward()

    (alarm,) = plain_training(skipped).alarms
    assert "gradients are NaN or infinite" in alarm.sentence
    assert plain_training(lambda loss, optimizer, step: loss.backward()).alarms == ()


def test_a_switch_to_evaluation_mode_is_an_event() -> None:
    torch.manual_seed(0)
    model = Plain()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch = rs.watch(model, optimizer, actions=(), schedule=1)
    for step in range(12):
        model.train(step < 6)
        usual(model(torch.randn(16, 8), None).square().mean(), optimizer, step)
    watch.close()
    assert [(one.name, one.step) for one in watch.notes if not one.evidence.get("declared")] == [("mode_switched", 6)]


def test_the_options_are_written_out() -> None:
    names = inspect.signature(rs.watch).parameters
    assert {"schedule", "record", "silence", "blocks"} <= set(names)
    assert not any(one.kind is one.VAR_KEYWORD for one in names.values())

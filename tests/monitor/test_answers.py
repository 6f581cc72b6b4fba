from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope as rs
from rankscope.monitor.answers import WINDOW, Answers, criteria


def losses_of(*losses: Tensor) -> dict[str, float]:
    """What is read of a run with these losses, one per reading."""
    answers = Answers()
    for step in range(WINDOW // 2):
        for loss in losses:
            answers.keep(loss)
        found = answers.facts(step, 1.0)
    return found


def logits(*rows: list[float]) -> Tensor:
    return torch.tensor(rows * 8, dtype=torch.float64).requires_grad_()


def test_classes_have_the_cross_entropies_of_the_answers_and_of_their_mean() -> None:
    x, y = logits([math.log(3.0), 0.0], [0.0, math.log(3.0)]), torch.tensor([0, 1] * 8)
    found = losses_of(F.cross_entropy(x, y))
    assert found["answers_loss"] == pytest.approx(math.log(4 / 3), rel=1e-12)
    assert found["mean_answer_loss"] == pytest.approx(math.log(2.0), rel=1e-12)


def test_yes_and_no_have_those_of_each_answer() -> None:
    x, y = logits([math.log(3.0)], [-math.log(3.0)]), torch.tensor([[1.0], [0.0]] * 8, dtype=torch.float64)
    found = losses_of(F.binary_cross_entropy_with_logits(x, y))
    assert found["answers_loss"] == pytest.approx(math.log(4 / 3), rel=1e-12)
    assert found["mean_answer_loss"] == pytest.approx(math.log(2.0), rel=1e-12)


def test_shares_of_yes_have_the_same() -> None:
    x, y = logits([0.75], [0.25]), torch.tensor([[1.0], [0.0]] * 8, dtype=torch.float64)
    found = losses_of(F.binary_cross_entropy(x, y))
    assert found["answers_loss"] == pytest.approx(math.log(4 / 3), rel=1e-12)
    assert found["mean_answer_loss"] == pytest.approx(math.log(2.0), rel=1e-12)


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_numbers_have_mean_squares_whatever_robust_loss_is_trained(loss: object) -> None:
    x, y = logits([1.0, 5.0], [3.0, 5.0]), torch.tensor([[1.5, 5.0], [3.5, 6.0]] * 8, dtype=torch.float64)
    found = losses_of(loss(x, y))  # type: ignore[operator]
    assert found["answers_loss"] == pytest.approx((0.25 + 0.25 + 0.0 + 1.0) / 4, rel=1e-12)
    assert found["mean_answer_loss"] == pytest.approx((0.25 + 2.25 + 0.0 + 1.0) / 4, rel=1e-12)


def test_ignored_labels_do_not_count() -> None:
    x = logits([math.log(3.0), 0.0], [0.0, math.log(3.0)], [50.0, -50.0])
    found = losses_of(F.cross_entropy(x, torch.tensor([0, 1, -100] * 8)))
    assert found["answers_loss"] == pytest.approx(math.log(4 / 3), rel=1e-12)
    assert found["mean_answer_loss"] == pytest.approx(math.log(2.0), rel=1e-12)


def test_a_batch_of_one_class_tells_nothing() -> None:
    assert "answers_loss" not in losses_of(F.cross_entropy(logits([0.0, 1.0]), torch.zeros(8, dtype=torch.long)))


def test_what_surrounds_the_loss_does_not_hide_it() -> None:
    x, y = logits([1.0, 0.0]), torch.tensor([0, 1] * 4)
    plain = F.cross_entropy(x, y)
    smoothed = F.cross_entropy(x, y, label_smoothing=0.1)
    focal = ((1 - (-F.cross_entropy(x, y, reduction="none")).exp()) ** 2).mean() * 3.0
    for loss in (plain / 7 + x.square().sum(), smoothed, focal, 1024.0 * plain):
        assert [node.name() for node in criteria(loss)] == ["NllLossBackward0"]


def test_nothing_is_read_from_a_checkpoint_which_still_runs_backward() -> None:
    x, y = logits([1.0, 0.0]), torch.tensor([0, 1] * 4)
    loss = checkpoint(lambda: F.cross_entropy(2 * x, y), use_reentrant=False)
    assert isinstance(loss, Tensor)
    assert losses_of(loss) == {}
    loss.backward()
    assert x.grad is not None


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_answers_and_targets_that_are_broadcast_are_seen() -> None:
    x, y = torch.randn(16, 1, requires_grad=True), torch.randn(16)
    assert losses_of(F.mse_loss(x, y))["answers_crossed"] == 1.0
    assert losses_of(F.smooth_l1_loss(x[:, 0], y))["answers_crossed"] == 0.0
    assert losses_of(F.mse_loss(torch.randn(16, 4, requires_grad=True), y[:, None]))["answers_crossed"] == 0.0
    assert losses_of(F.mse_loss(x.expand(16, 5), torch.randn(16, 5)))["answers_crossed"] == 0.0


def test_other_losses_are_not_read() -> None:
    x = logits([1.0, 0.0])
    for loss in (
        x.square().mean(),
        (x - 1).abs().mean(),
        F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), reduction="batchmean"),
    ):
        assert losses_of(loss) == {}
    assert losses_of(x.detach().sum()) == {}


def test_the_loss_is_left_as_it_was() -> None:
    x, y = torch.randn(300, 5, requires_grad=True), torch.randint(0, 5, (300,))
    state = torch.get_rng_state()
    loss = F.cross_entropy(x, y)
    Answers().keep(loss)
    loss.backward()
    twin = x.detach().clone().requires_grad_()
    F.cross_entropy(twin, y).backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is not None
    assert twin.grad is not None
    assert torch.equal(x.grad, twin.grad)


class Net(nn.Module):
    """A classifier of series, whose output ``after`` changes."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, **settings) for _ in range(2))
        self.head = nn.Linear(16, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.scale * self.head(x.mean(1))


def watched(
    *, scale: float = 1.0, shuffled: bool = False, rate: float = 1e-3, look: Callable[[int, Any], None] | None = None
) -> rs.monitor.watch.Watch:
    torch.manual_seed(0)
    model, generator = Net(), torch.Generator().manual_seed(1)
    model.scale = scale
    centres = torch.randn(4, 6, 8, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with rs.watch(model, optimizer, schedule=8, metrics=["relative_residual"]) as watch:
        for step in range(224):
            y = torch.randint(0, 4, (32,), generator=generator)
            x = centres[y] + 0.5 * torch.randn(32, 6, 8, generator=generator)
            y = y[torch.randperm(32, generator=generator)] if shuffled else y
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if look is not None:
                look(step, watch)
    return watch


def test_a_run_that_learns_raises_nothing() -> None:
    watch = watched()
    assert "constant_answer" not in {alarm.name for alarm in watch.alarms}
    assert "no fault seen (" in repr(watch)


def test_labels_of_other_inputs_are_found_without_a_cause_and_said_in_the_line_before() -> None:
    said: dict[int, tuple[str, int]] = {}
    watch = watched(shuffled=True, look=lambda step, watch: said.update({step: (repr(watch), len(watch.alarms))}))
    assert "no better than a constant" in said[99][0]
    assert said[99][1] == 0
    alarm = next(alarm for alarm in watch.alarms if alarm.name == "constant_answer")
    assert alarm.component == "unknown"
    assert alarm.evidence["answers_loss"] == pytest.approx(math.log(4.0), rel=0.02)


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
def test_the_loss_of_another_model_is_not_taken_for_its_own() -> None:
    torch.manual_seed(0)
    model, other = Net(), nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    y = torch.arange(4).repeat(8)
    with rs.watch(model, optimizer, schedule=1, metrics=["relative_residual"], alarms=()) as watch:
        for _ in range(2):
            x = torch.randn(32, 6, 8)
            F.cross_entropy(other(x.mean(1)), y).backward()
            F.mse_loss(other(x.mean(1))[:, :1], y.float(), reduction="mean").backward()
            model(x).square().mean().backward()
            optimizer.step()
    assert watch.gauge is not None
    assert watch.gauge.last is not None
    assert "answers_alike" not in {row.metric for row in watch.gauge.last.table}

"""The training loop: seeded, under surgery, with gradients in sight."""

from __future__ import annotations

import pytest
import torch

from rankscope.errors import InputError
from rankscope.ext.papers.training.fitting import Fit, FitMoment, TrainingPlan, as_batch, batches, fit, share_right
from rankscope.ext.papers.training.networks import WITHOUT_MLP, encoder_for
from rankscope.ext.papers.training.tasks import hull_task, memory_task, sort_task
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation

PLAN = TrainingPlan(steps=6, batch=8, rate=3e-3)


def fitted(seed: int = 0, **options) -> tuple[torch.nn.Module, Fit]:
    task = sort_task(0, train=24, held=8)
    model = encoder_for(task, layers=2, width=8, seed=seed)
    return model, fit(model, task, PLAN, seed=seed, operation=WITHOUT_MLP, **options)


def test_the_same_seed_gives_the_same_weights() -> None:
    torch.manual_seed(1)
    first, how = fitted()
    torch.manual_seed(2)
    again, how_again = fitted()
    assert how.losses == how_again.losses
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert fitted(seed=1)[1].losses != how.losses


def test_a_dropped_mlp_learns_nothing_and_attention_does() -> None:
    seen: list[FitMoment] = []
    moved: list[bool] = []

    def watch(moment: FitMoment) -> None:
        seen.append(moment)
        layer = moment.model.bert.encoder.layer[1]
        moved.append(bool(layer.attention.self.query.weight.grad.abs().sum() > 0))
        mlp = layer.output.dense.weight.grad
        assert mlp is None or not mlp.any()

    fitted(on_step=watch)
    assert [moment.step for moment in seen] == list(range(6))
    assert all(moved)


def test_a_schedule_is_asked_at_every_step() -> None:
    asked: list[int] = []

    def schedule(step: int) -> Operation:
        asked.append(step)
        return Operation(attention_skip=1.0 - 0.1 * step, mlp="drop")

    task = sort_task(0, train=24, held=8)
    model = encoder_for(task, layers=2, width=8)
    changing = fit(model, task, PLAN, operation=schedule)
    assert asked == list(range(6))
    assert changing.losses[0] == fitted()[1].losses[0]
    assert changing.losses[2] != fitted()[1].losses[2]


def test_every_example_comes_once_per_round() -> None:
    task = sort_task(0, train=20, held=1)
    parts = list(batches(task.train, TrainingPlan(steps=6, batch=8), seed=0))
    assert [len(part) for part in parts] == [8, 8, 4, 8, 8, 4]
    seen = torch.cat([part.inputs["input_ids"] for part in parts[:3]])
    assert sorted(seen.tolist()) == sorted(task.train.inputs["input_ids"].tolist())


def test_the_rate_rises_and_falls() -> None:
    plan = TrainingPlan(steps=100, warmup=0.1)
    assert plan.factor(0) == pytest.approx(0.1)
    assert plan.factor(9) == pytest.approx(1.0)
    assert plan.factor(55) == pytest.approx(0.5)
    assert plan.factor(100) == pytest.approx(0.0, abs=1e-12)
    assert TrainingPlan(steps=100, warmup=0.1, falls=False).factor(90) == 1.0
    with pytest.raises(InputError, match="steps=0"):
        TrainingPlan(steps=0)


@pytest.mark.parametrize("task", [hull_task(0, train=8, held=4), memory_task(0, sentences=6, vocabulary=30)])
def test_without_positions_order_does_not_matter(task) -> None:
    model = encoder_for(task, layers=2, heads=2, width=8)
    fit(model, task, TrainingPlan(steps=2, batch=4), operation=WITHOUT_MLP)
    part = task.held.take(slice(1))
    order = torch.randperm(part.labels.shape[1], generator=torch.Generator().manual_seed(0))
    mixed = {name: value[:, order] for name, value in part.inputs.items()}
    with operating(model, WITHOUT_MLP, inputs=as_batch(part).inputs), torch.no_grad():
        torch.testing.assert_close(model(**mixed).logits, model(**part.inputs).logits[:, order])
        assert 0.0 <= share_right(model, part) <= 1.0

"""NaN, infinity, and faults of the data."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rankscope.monitor import Alarm, Gauge
from rankscope.monitor.batches import BatchWatch
from tests.monitor.trainings import batches, bert, gpt2, probe


def alarms_of(gauge: Gauge, step: int, **given: Any) -> list[Alarm]:
    reading = gauge.step(step, **given)
    assert reading is not None
    told = [one for one in (*reading.alarms, *reading.notes) if one.component != "none"]
    return [one for one in told if one.state in ("raised", "noted")]


class OverflowingLinear(nn.Module):
    """A projection whose output is stored in float16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.factor = inner, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.factor * self.inner(x)).half().float()


def test_first_bad_weight_is_named_at_once_with_the_last_good_step() -> None:
    model = bert()
    gauge = Gauge(model, probe(), schedule=1, actions=(), strict=True)
    assert not alarms_of(gauge, 3)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.key.weight[0, :2] = math.nan
    (alarm,) = [alarm for alarm in alarms_of(gauge, 4) if alarm.name == "not_finite"]
    assert alarm.component == "weights"
    assert "2 of 256 entries of bert.encoder.layer.1.attention.self.key.weight" in alarm.sentence
    assert "finite at step 3" in alarm.sentence


def test_module_in_which_the_stream_overflows_is_named_although_all_weights_are_finite() -> None:
    model = bert()
    part = OverflowingLinear(model.bert.encoder.layer[1].output.dense)
    model.bert.encoder.layer[1].output.dense = part
    gauge = Gauge(model, probe(), schedule=1, actions=(), strict=True)
    assert not alarms_of(gauge, 0)
    part.factor = 1e9
    (alarm,) = [alarm for alarm in alarms_of(gauge, 1) if alarm.name == "not_finite"]
    assert (alarm.component, alarm.layer) == ("activations", 1)
    assert "bert.encoder.layer.1.output.dense (OverflowingLinear)" in alarm.sentence


def test_one_sequence_of_eight_that_is_not_finite_is_enough() -> None:
    model = bert()
    rows = {"input_ids": torch.arange(5, 45).view(8, 5)}
    gauge = Gauge(model, rows, schedule=1, actions=(), strict=True)
    gauge.step(0)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[7] = 1e30  # finite: its variance is not
    found = [alarm for alarm in alarms_of(gauge, 1) if alarm.name == "not_finite"]
    assert [alarm.component for alarm in found] == ["activations"]
    assert found[0].evidence["not_finite"] == 1 / 8


def test_gradients_of_a_skipped_step_are_no_alarm_but_three_in_a_row_are() -> None:
    """Hostile case: a loss scaler looks for its scale with infinite gradients and skips those steps."""
    model = gpt2()
    gauge = Gauge(model, {"input_ids": probe()["input_ids"]}, schedule=1, actions=(), strict=True)
    raised = []
    for step, is_bad in enumerate([True, True, False, True, True, True]):
        model(**batches(1)[0]).loss.backward()
        if is_bad:
            model.transformer.h[1].mlp.c_fc.weight.grad[0, 0] = math.inf
        gauge.after_backward(step)
        model.zero_grad()
        raised += [(step, alarm) for alarm in alarms_of(gauge, step)]
    ((step, alarm),) = raised
    assert (step, alarm.name, alarm.component) == (5, "not_finite_gradients", "gradients")
    assert "transformer.h.1.mlp.c_fc.weight" in alarm.sentence


def test_loss_that_is_not_finite_is_an_alarm_and_points_at_the_batch() -> None:
    gauge = Gauge(bert(), probe(), schedule=1, actions=(), strict=True)
    assert not alarms_of(gauge, 0, loss=2.0)
    (alarm,) = alarms_of(gauge, 1, loss=torch.tensor(math.nan))
    assert (alarm.name, alarm.component, alarm.layer) == ("not_finite", "loss", None)


def facts_of(given: Any, watch: BatchWatch | None = None) -> dict[str, float]:
    return (watch or BatchWatch()).facts(given)


def test_facts_of_a_batch_are_counts() -> None:
    ids = torch.tensor([[5, 6, 7, 0], [5, 6, 7, 0], [8, 9, 0, 0]])
    mask = (ids != 0).long()
    found = facts_of({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([[-100, -100, 7, 1]])})
    of_content = {"batch_copies": 0.5, "batch_common": 2 / 8, "batch_stuck": 0.0}
    assert found == {**of_content, "batch_padding": pytest.approx(4 / 12), "batch_ignored": 0.5}
    # padding differs, content does not
    longer = torch.tensor([[5, 6, 1, 1], [5, 6, 2, 2]])
    assert facts_of({"input_ids": longer, "attention_mask": (longer > 2).long()})["batch_copies"] == 1.0
    # nothing marks padding: the most common token
    assert facts_of(torch.tensor([[3, 3, 3, 4]]))["batch_padding"] == 0.75
    flat = {"batch_copies": 1.0, "batch_stuck": 0.0, "batch_not_finite": 0.0}
    assert facts_of({"pixel_values": torch.full((2, 1, 3, 3), 2.0)}) == flat
    assert facts_of({"lengths": torch.tensor(3), "text": "x"}) == {}


@pytest.mark.parametrize("fault", ["copies", "padding", "one token"])
def test_data_fault_is_named_and_the_same_data_as_before_are_not(fault: str) -> None:
    model = bert(layers=1)
    gauge = Gauge(model, probe(), schedule=1, metrics=["relative_residual"], actions=(), strict=True)
    gauge.silence("still_weights")  # nothing is trained here
    good = batches(24, sequences=8)
    for step in range(20):
        ids = good[step]["input_ids"].clamp(max=25)
        assert not alarms_of(gauge, step, batch={"input_ids": ids})
    bad = {
        "copies": {"input_ids": ids[:1].expand(8, -1)},
        "padding": {"input_ids": ids, "attention_mask": torch.zeros_like(ids)},
        "one token": {"input_ids": torch.where((torch.arange(8) == 0) & (torch.arange(8)[:, None] < 4), ids, 9)},
    }[fault]
    raised = [alarm for step in range(20, 23) for alarm in alarms_of(gauge, step, batch=bad)]
    expected = "repeated_sequences" if fault == "copies" else "padding_only"
    assert expected in {alarm.name for alarm in raised}
    assert {alarm.component for alarm in raised} <= {"data", "none"}


def test_two_views_of_each_input_from_the_start_are_no_fault() -> None:
    gauge = Gauge(bert(layers=1), probe(), schedule=1, metrics=["relative_residual"], actions=(), strict=True)
    for step, batch in enumerate(batches(6)):
        assert not alarms_of(gauge, step, batch=batch["input_ids"].repeat(2, 1))


def test_update_that_makes_all_weights_bad_is_blamed_on_gradients() -> None:
    model = gpt2(dropout=0.0)
    gauge = Gauge(
        model, {"input_ids": probe()["input_ids"]}, schedule=1, alarms=["not_finite"], actions=(), strict=True
    )
    for step in range(3):
        assert not alarms_of(gauge, step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    (alarm,) = alarms_of(gauge, 4)
    assert alarm.component == "gradients"


def text(count: int, seed: int = 0, tokens: int = 24) -> list[Any]:
    """Batches of eight stretches of the sample text, character by character."""
    from rankscope.models.inputs.text import sample_text

    ids = torch.tensor([ord(letter) % 128 for letter in sample_text()])
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - tokens, (count, 8), generator=generator)
    return [torch.stack([ids[start : start + tokens] for start in row.tolist()]) for row in starts]


def test_batch_that_no_longer_changes_is_found_and_one_that_never_did_is_not() -> None:
    data = text(30)
    stuck = [facts["batch_stuck"] for watch in [BatchWatch()] for facts in
             (watch.facts(data[min(n, 20)]) for n in range(30))]  # fmt: skip
    assert stuck == [0.0] * 21 + [float(n) for n in range(1, 10)]
    watch = BatchWatch()
    assert {watch.facts(data[0])["batch_stuck"] for _ in range(30)} == {0.0}
    watch = BatchWatch()
    assert {watch.facts(data[n % 2])["batch_stuck"] for n in range(30)} == {0.0}


def test_batches_of_one_class_each_are_found_and_rare_classes_and_few_classes_are_not() -> None:
    def counted(labels: list[list[int]]) -> list[float]:
        watch = BatchWatch()
        return [watch.facts({"labels": torch.tensor(one)})["batch_one_class"] for one in labels]

    assert counted([[n // 2] * 8 for n in range(8)]) == [0.0, 0.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert set(counted([[0] * 19 + [n % 2] for n in range(20)])) == {0.0}  # one class is rare
    assert set(counted([[n, n, n + 1, n + 1] for n in range(20)])) == {0.0}  # two of each of two classes
    assert counted([[0] * 8, [1] * 8, [0, 1] * 4, [1] * 8]) == [0.0, 2.0, 0.0, 0.0]


def test_a_feature_that_drowns_the_others_is_found_and_large_ones_that_vary_are_not() -> None:
    def drowns(x: torch.Tensor) -> float:
        return BatchWatch().facts({"inputs": x})["batch_feature"]

    x = torch.randn(4, 16, 3, generator=torch.Generator().manual_seed(0))
    assert drowns(x) == -1.0
    assert drowns(x * torch.tensor([1.0, 1000.0, 1.0])) == -1.0
    assert drowns(x + torch.tensor([0.0, 0.0, 2026.0])) == 2.0
    assert drowns(x + 2026.0) == -1.0  # all of them: the pixels of a white image
    assert "batch_feature" not in BatchWatch().facts({"inputs": 1e3 + torch.rand(4, 1, 16, 16)})

"""A loss that stays at that of guessing: models that ignore their inputs, dead and tiny outputs, a softmax of examples.

The healthy twins answer alike for every input, too, or have losses that depend on other examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.exam.reports.parts import Block, Classifier, signals
from torch import Tensor, nn

import rankscope as rs
from rankscope.errors import IgnoredInputError
from rankscope.examination.experiments.operations import depends_on_inputs
from rankscope.examination.experiments.parameters import AGAIN
from rankscope.verbs.doctor.checks import DoctorReport

MOST_PASSES = 14
"""Forward passes for a stuck model: those of a sound one with its control and its pass in training mode, at most 12,
and two for the edited copy."""

Loss = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A classifier with one thing done to its inputs or outputs."""

    def __init__(self, kind: str = "", *, classes: int = 4, begin: float = 0.0) -> None:
        super().__init__()
        blocks = nn.Sequential(*(Block(32, 4) for _ in range(2)))
        self.inner, self.kind = Classifier(blocks, features=8, width=32, classes=classes), kind
        self.last = nn.ReLU()
        if kind in ("gate", "tanh", "scale"):
            self.gain = nn.Parameter(torch.full((1,), begin))

    def enter(self, x: Tensor) -> Tensor:
        if self.kind == "zero":
            x = x * 0
        if self.kind == "small":
            x = x / x.abs().amax() * 1e-6
        if self.kind == "constant":
            x = torch.zeros_like(x)
        if self.kind == "in place":
            x = x.clone()
            x.clamp_(9, 10)
        if self.kind == "numpy":
            x = torch.from_numpy(x.numpy() * 0)
        return x

    def leave(self, z: Tensor) -> Any:
        if self.kind == "relu":
            z = F.relu(z - 5)
        if self.kind == "relu as a module":
            z = self.last(z - 5)
        if self.kind == "relu of weights":
            z = F.relu(z)
        if self.kind == "where":
            z = torch.where(z > 9, z, torch.zeros_like(z))
        if self.kind == "argmax":
            z = self.inner.head.weight[(z - z).argmax(-1), :4]
        if self.kind == "temperature":
            z = z * 1e-4
        if self.kind in ("gate", "scale"):
            z = self.gain * z
        if self.kind == "tanh":
            z = torch.tanh(self.gain) * z
        if self.kind == "masked":
            z = z.masked_fill(torch.arange(4) % 2 == 1, torch.finfo(z.dtype).min)
        return (torch.ones(len(z), 3), z) if self.kind == "two outputs" else z

    def forward(self, x: Tensor) -> Any:
        return self.leave(self.inner(self.enter(x)))


def seeded(kind: str = "", **options: Any) -> Model:
    torch.manual_seed(0)
    return Model(kind, **options)


def examined(model: nn.Module, loss: Loss | None = None, labels: Tensor | None = None) -> DoctorReport:
    x, y = signals()
    x = x.to(next(model.parameters()).dtype)
    given: dict[str, Any] = {} if loss is None else {"loss": loss, "labels": y if labels is None else labels}
    report = rs.doctor(model, x, **given)
    assert isinstance(report, DoctorReport)
    return report


def codes(report: DoctorReport) -> list[str]:
    return [one.code for one in report.faults]


@pytest.mark.parametrize(
    ("kind", "place", "change"),
    [
        ("zero", "`x * 0` in `Model.enter`", "write `x` instead of `x * 0`"),
        ("constant", "`torch.zeros_like(x)` in `Model.enter`", "remove `x = torch.zeros_like(x)`"),
        ("in place", "`x.clamp_(9, 10)` in `Model.enter`", "write `x` instead of `x.clamp_(9, 10)`"),
        ("numpy", "was not found", "Look at where forward uses its inputs"),
        ("relu", "`F.relu(z - 5)` in `Model.leave`", "write `z - 5` instead of `F.relu(z - 5)`"),
        ("relu as a module", "last (ReLU)", "Give this operation values that it"),
        (
            "where",
            "`torch.where(z > 9, z, torch.zeros_like(z))`",
            "Give this operation values that it",
        ),
        ("argmax", "`z - z` in `Model.leave`", "write `z` instead of `z - z`"),
    ],
)
def test_inputs_that_are_ignored_are_followed_to_where_they_are_lost(kind: str, place: str, change: str) -> None:
    for loss in (None, F.cross_entropy) if kind in ("zero", "numpy", "relu") else (F.cross_entropy,):
        report = examined(seeded(kind), loss)
        assert codes(report) == ["inputs_ignored"]
        found = report.faults[0]
        assert found.certainty == "shown"
        assert found.sentence.startswith("All outputs are the same, whatever the inputs are")
        assert place in found.sentence
        assert change in found.change
        assert report.passes[0] <= MOST_PASSES


class Images(nn.Module):
    """Patches of images, of which one kind is rounded to whole numbers and one divided too often."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.enter, self.head = kind, nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 4)
        self.place = nn.Parameter(torch.randn(16, 32) * 0.1)
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(2))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = pixel_values / 255
        if self.kind == "whole numbers":
            x = x.round()
        if self.kind == "divided":
            x = x / 255 / 255
        x = self.enter(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("", ""),
        ("whole numbers", "`x.round()` in `Images.forward` returns the same for all of them"),
        ("divided", "enter (Conv2d) returns the same for all of them"),
    ],
)
def test_images_that_are_ignored(kind: str, sentence: str) -> None:
    torch.manual_seed(0)
    images = (255 if not kind else 1) * torch.rand(8, 3, 16, 16)
    found = rs.doctor(Images(kind), images).findings
    assert [one.code for one in found if one.kind == "fault"] == (["inputs_ignored"] if kind else [])
    assert not kind or sentence in found[0].sentence


@pytest.mark.parametrize("kind", ["zero", "small"])
def test_measure_and_watch_are_refused_with_the_true_reason(kind: str) -> None:
    with pytest.raises(IgnoredInputError, match=r"^The output does not depend on the inputs"):
        rs.measure(seeded(kind), signals()[0])
    failed = [check for check in examined(seeded(kind)).checks if check.status == "fail"]
    assert [check.name for check in failed] == ["inputs"]
    assert "The output does not depend on the inputs" in failed[0].detail


def test_a_watch_raises_it_before_the_first_step() -> None:
    x, y = signals()
    model = seeded("relu").train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rs.watch(model, optimizer, schedule=1) as watched:
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    raised = [alarm for alarm in watched.alarms if alarm.name == "shown_faults"]
    assert [alarm.step for alarm in raised] == [0]
    assert "All outputs are the same, whatever the inputs are" in raised[0].sentence


def zeroed(*, bias: bool) -> Model:
    model = seeded()
    nn.init.zeros_(model.inner.head.weight)
    if bias:
        nn.init.zeros_(model.inner.head.bias)
    return model


def small_head(deviation: float) -> Model:
    model = seeded()
    nn.init.normal_(model.inner.head.weight, std=deviation)
    nn.init.zeros_(model.inner.head.bias)
    return model


def of_logits(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(output[1] if isinstance(output, tuple) else output, labels // 2 * 2)


HEALTHY: dict[str, Callable[[], Model]] = {
    "as it is": seeded,
    "head of zeros": lambda: zeroed(bias=True),
    "head of zeros with a bias": lambda: zeroed(bias=False),
    "head of zeros in bfloat16": lambda: zeroed(bias=True).bfloat16(),
    "small head": lambda: small_head(0.02),
    "tiny head": lambda: small_head(1e-4),
    "gate of zero": lambda: seeded("gate"),
    "tanh of a gate of zero": lambda: seeded("tanh"),
    "learned scale": lambda: seeded("scale", begin=1e-4),
    "masked classes": lambda: seeded("masked"),
    "bfloat16": lambda: seeded().bfloat16(),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_models_that_answer_alike_at_first_are_not_accused(name: str) -> None:
    _, y = signals()
    report = examined(HEALTHY[name]())
    assert codes(report) == []
    for labels in (y, torch.zeros_like(y)):
        report = examined(HEALTHY[name](), of_logits, labels)
        assert codes(report) == []
        # What begins at zero is read again after some steps on a copy, which are passes too.
        assert report.passes[0] <= MOST_PASSES + (AGAIN if "zero" in name else 0)


def test_another_output_that_depends_on_the_inputs_counts() -> None:
    assert codes(examined(seeded("two outputs"))) == []


def test_rounding_is_that_of_the_columns_that_change() -> None:
    masked = torch.tensor([[1.0, -3e38], [1.0, -3e38]])
    moved = masked + torch.tensor([[1e-3, 0.0], [0.0, 0.0]])
    assert depends_on_inputs(masked, moved)
    assert not depends_on_inputs(masked, masked * torch.tensor([1 + 1e-6, 1.0]))
    assert depends_on_inputs(masked.bfloat16(), moved.bfloat16() * 1.01)


def triplets(output: Tensor, labels: Tensor) -> Tensor:
    apart = torch.cdist(output, output)
    same = labels[:, None] == labels[None]
    return F.relu(1 + (apart * same).amax(1) - (apart + 1e6 * same).amin(1)).mean()


def supervised_contrast(output: Tensor, labels: Tensor) -> Tensor:
    one = F.normalize(output, dim=-1)
    own = torch.eye(len(one))
    scores = (one @ one.T / 0.1 - 1e9 * own).log_softmax(-1)
    same = (labels[:, None] == labels[None]).float() - own
    return -(scores * same).sum(1).div(same.sum(1).clamp_min(1)).mean()


def ranked(output: Tensor, labels: Tensor) -> Tensor:
    """Each class compares its examples with all others, as a loss of the area under the curve does."""
    total = output.new_zeros(())
    for one in range(output.shape[-1]):
        inside, outside = output[labels == one, one], output[labels != one, one]
        if len(inside) and len(outside):
            total = total + F.softplus(outside[None] - inside[:, None]).mean()
    return total


def standardised(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((output - output.mean(0)) / (output.std(0) + 1e-5), labels)


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output - F.one_hot(labels, output.shape[-1])).square().mean()


def pairs(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.T, labels)


def smoothed(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [triplets, supervised_contrast, ranked, standardised, squares, smoothed])
def test_losses_that_depend_on_other_examples_are_not_accused(loss: Loss) -> None:
    assert codes(examined(seeded(classes=6), loss)) == []


def test_a_matrix_of_all_pairs_may_be_normalised_along_both_axes() -> None:
    assert codes(examined(seeded(classes=16), pairs, torch.arange(16))) == []


def over_examples(output: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(output, 0), labels)


def over_examples_by_hand(output: Tensor, labels: Tensor) -> Tensor:
    probabilities = output.softmax(dim=0)
    return -probabilities[torch.arange(len(labels)), labels].log().sum()


def over_columns(output: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(output.T, -1).T, labels)


@pytest.mark.parametrize(
    ("loss", "change"),
    [
        (over_examples, "write `F.log_softmax(output, -1)` instead of `F.log_softmax(output, 0)`"),
        (over_examples_by_hand, "write `output.softmax(dim=-1)` instead of `output.softmax(dim=0)`"),
        (over_columns, "Take the softmax of the loss over the last axis, or use"),
    ],
)
def test_a_softmax_over_examples_is_found(loss: Loss, change: str) -> None:
    _, y = signals()
    for labels in (y, torch.zeros_like(y)):
        found = examined(seeded(), loss, labels).faults
        assert [one.code for one in found] == ["loss_softmax_axis"]
        assert change in found[0].change
        assert found[0].to_json()["before"] > 0.01


def test_labels_are_permuted_at_outputs_that_differ() -> None:
    assert "loss_ignores_labels" not in codes(examined(seeded("relu"), F.cross_entropy))
    assert "loss_ignores_labels" in codes(examined(seeded("relu"), lambda output, labels: output.square().mean()))

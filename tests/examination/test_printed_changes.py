"""Printed changes can be made as they stand, and quote nothing where the source has another form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from benchmarks.exam.reports.further import FURTHER
from benchmarks.exam.reports.patterns import PATTERNS
from benchmarks.exam.reports.printed import NotLiteralError, applied, written
from torch import Tensor, nn
from transformers.models.mra.modeling_mra import MraAttention

import rankscope as rs
from rankscope.examination import source
from rankscope.examination.experiments.scan import Scan
from rankscope.examination.source import Edit

REPORTS = {one.number: one for one in (*PATTERNS, *FURTHER)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", ["5", "6", "19", "23", "F1", "F3", "F5", "F6", "F7", "F8"])
def test_the_printed_change_makes_the_symptom_go_away(number: str) -> None:
    pattern = REPORTS[number]
    case = pattern.broken()
    change = rs.doctor(case.model, rs.Inputs(case.inputs), **case.arguments()).faults[0].change
    assert not pattern.gone(pattern.symptom(pattern.broken()))
    assert pattern.gone(pattern.symptom(applied(change, pattern.broken()))), change


@pytest.mark.parametrize(
    "change",
    [
        "Use a smaller learning rate",
        "In `Block.forward`, write `x + f(x)` instead of `f(x)`",
        "Run `model.front.2.reset_parameters()`",
        "Look at `scores`",
        "Pass `batch_first=True` to `nn.GRU`",
    ],
)
def test_what_cannot_be_made_as_it_stands_is_not_counted(change: str) -> None:
    with pytest.raises(NotLiteralError):
        applied(change, written("stack(2, 8)"))


class Styles(nn.Module):
    """Ways to write a softmax, a mask and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.softmax = nn.LayerNorm(4), nn.Linear(4, 4), nn.Softmax(1)

    def function(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, dim=1)

    def torchs(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, 1)

    def module(self, scores: Tensor) -> Tensor:
        return self.softmax(scores)

    def two(self, scores: Tensor) -> Tensor:
        return scores.softmax(1) + scores.softmax(0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = torch.relu(y)
        x = self.norm(y + x)
        return self.norm(x + self.linear(x) * 0.5)


@pytest.mark.parametrize(
    ("method", "edits"),
    [
        ("function", [Edit("F.softmax(scores, dim=1)", "F.softmax(scores, dim=-1)")]),
        ("torchs", [Edit("torch.softmax(scores, 1)", "torch.softmax(scores, -1)")]),
        ("module", []),
        ("two", []),
    ],
)
def test_a_softmax_is_quoted_as_it_is_written_or_not_at_all(method: str, edits: list[Edit]) -> None:
    mode = Scan(None)
    with mode:
        getattr(Styles(), method)(torch.randn(2, 3, 4))
    place = mode.calls[0].place
    assert place is not None
    assert place.name == f"Styles.{method}"
    assert source.fitting(source.over_axis, place, -1) == edits


def test_only_sums_of_the_known_form_are_rewritten() -> None:
    block = Styles()
    place = source.place_of(Styles.forward)
    assert place is not None
    old, new = "return self.norm(x + self.linear(x) * 0.5)", "return x + self.linear(self.norm(x)) * 0.5"
    assert source.with_norms_first(place, block) == [Edit(old, new)]


def test_an_edited_forward_runs_only_inside_the_context() -> None:
    block, x, original = Styles(), torch.randn(2, 3, 4), Styles.forward
    place = source.place_of(original)
    assert place is not None
    before = block(x)
    edits = source.with_norms_first(place, block)
    assert source.tried(place, edits, lambda: not torch.equal(block(x), before))
    assert not source.tried(place, edits, lambda: False)
    assert not source.tried(place, [Edit("not in the file", "")], lambda: True)
    assert Styles.forward is original
    assert torch.equal(block(x), before)


def test_sources_of_installed_packages_are_not_quoted() -> None:
    assert source.place_of(nn.TransformerEncoderLayer.forward) is None
    assert source.place_of(rs.doctor) is None
    assert source.place_of(MraAttention.forward) is None  # in whichever environment transformers is installed


def _subject(kind: str) -> tuple[rs.Model, Tensor | None]:
    torch.manual_seed(0)
    if kind == "nn.TransformerEncoder":
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        return rs.Model(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)), torch.randn(6, 20, 32)
    if kind == "written by hand":
        case = written("nano(4)")
        return rs.Model(case.model), case.inputs
    name, _, of = kind.partition(" of ")
    return rs.Model(f"init:{name}"), torch.randint(5, 99, (6, 20)) if of else None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "kind",
    [
        "nn.TransformerEncoder",
        "written by hand",
        "tiny-bert",
        "tiny-gpt2",
        "tiny-t5",
        "tiny-xlnet",
        "tiny-xlnet of ids",
    ],
)
def test_all_passes_are_counted_and_few(kind: str) -> None:
    """At most 8 forward and 2 backward passes for checks and examination, and 11 before to find the structure."""
    subject, inputs = _subject(kind)
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    handle = subject.loaded.model.register_forward_pre_hook(count)
    report = rs.doctor(subject, inputs)
    handle.remove()
    assert not [one for one in report.faults if one.certainty == "shown"]
    forward, backward = report.passes
    assert passes == forward + report.structure_passes
    assert forward <= (12 if report.findings else 8)
    assert backward <= 2
    assert report.structure_passes <= 11

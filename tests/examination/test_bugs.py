"""Bugs of hand-written transformers: each is found in the model that has it, and not claimed of its twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.exam.reports import printed
from benchmarks.exam.reports.further import FURTHER
from benchmarks.exam.reports.parts import Block, Case, Classifier, LanguageModel, encoder, next_token, signals, text
from benchmarks.exam.reports.patterns import PATTERNS, experts, seeded
from torch import Tensor, nn

import rankscope as rs
from rankscope.examination import Diagnosis, examine, find
from rankscope.models.inputs import Inputs
from rankscope.models.model import as_model
from rankscope.verbs.doctor.reaching import batch_for


def diagnosed(case: Case) -> Diagnosis:
    given = case.arguments()
    inputs = Inputs(case.inputs, axes=given.pop("axes", None))
    batch, labels, _ = batch_for(as_model(case.model), inputs, given.pop("labels", None))
    return find(examine(case.model, batch, labels=labels, **given))


def report(number: str) -> Case:
    return next(one for one in PATTERNS if one.number == number).broken()


def shown(found: Diagnosis) -> list[str]:
    return [one.code for one in found.findings if one.kind == "fault" and one.certainty == "shown"]


def language(bug: str = "", **options: Any) -> Callable[[], Case]:
    return seeded(lambda: Case(LanguageModel(bug=bug, depth=2, **options), *text(), next_token))


def vectors(bug: str = "", *, causal: bool = False) -> Callable[[], Case]:
    def build() -> Case:
        blocks = nn.Sequential(*(Block(32, 4, bug=bug, causal=causal) for _ in range(2)))
        x, y = signals()
        return Case(Classifier(blocks, features=8, width=32, classes=4), x, y, F.cross_entropy)

    return seeded(build)


class BatchFirst(nn.Module):
    """Vectors of shape (batch, tokens, width) through layers that expect tokens first."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=batch_first, norm_first=True)
        self.enter, self.body, self.head = (
            nn.Linear(8, 32),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.enter(x)).mean(1))


class Probabilities(nn.Module):
    """Returns probabilities, or logits."""

    def __init__(self, inner: nn.Module, *, softmax: bool) -> None:
        super().__init__()
        self.inner, self.softmax = inner, softmax

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).softmax(-1) if self.softmax else self.inner(x)


class New(nn.Module):
    """Makes its last layer in forward."""

    def __init__(self, inner: nn.Module, *, new: bool) -> None:
        super().__init__()
        self.inner, self.new = inner, new
        if not new:
            self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        last = nn.Linear(4, 4) if self.new else self.last
        return last(self.inner(x))


class Cut(nn.Module):
    """Detaches what its body returns."""

    def __init__(self, inner: nn.Module, *, cut: bool) -> None:
        super().__init__()
        self.inner, self.cut, self.last = inner, cut, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        states = self.inner(x)
        return self.last(states.detach() if self.cut else states)


class Gated(Block):
    """Branches with a gain and a last matrix, of which both may begin at zero."""

    def __init__(self, *, both: bool) -> None:
        super().__init__(32, 4)
        self.scale = nn.Parameter(torch.zeros(32))
        nn.init.zeros_(self.mlp[2].bias)
        if both:
            nn.init.zeros_(self.mlp[2].weight)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), keep)
        return x + self.scale * self.mlp(self.norm2(x))


def wrapped(make: Callable[[nn.Module], nn.Module], *, steady: bool = True) -> Callable[[], Case]:
    def build() -> Case:
        case = vectors()()
        return Case(make(case.model), case.inputs, case.labels, case.loss)

    return seeded(build)


def gated(*, both: bool) -> Case:
    x, y = signals()
    body = nn.Sequential(*(Gated(both=both) for _ in range(2)))
    return Case(Classifier(body, features=8, width=32, classes=4), x, y, F.cross_entropy)


def dropping(p: float) -> Case:
    x, y = signals()
    body = nn.Sequential(*(Block(32, 4, dropout=p) for _ in range(2)), nn.Dropout(p))
    return Case(Classifier(body, features=8, width=32, classes=4), x, y, F.cross_entropy)


class Functional(nn.Module):
    """Drops by a function, in a forward of its own."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.inner, self.p = vectors()().model, p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), self.p, self.training)


class Einsum(nn.Module):
    """Attention by ``einsum`` inside a block, with the mask before or after the softmax."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, self.norm = bug, nn.LayerNorm(32)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = torch.einsum("bid,bjd->bij", self.q(y), self.k(y)) / 32**0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if self.bug == "mask after":
            probs = scores.softmax(-1).masked_fill(hidden, 0.0)
        else:
            probs = scores.masked_fill(hidden, -1e9).softmax(1 if self.bug == "over queries" else -1)
        return x + torch.einsum("bij,bjd->bid", probs, self.v(y))


def mixed(bug: str) -> Case:
    x, y = signals()
    body = nn.Sequential(*(Einsum(bug) for _ in range(2)))
    return Case(Classifier(body, features=8, width=32, classes=4), x, y, F.cross_entropy)


def padded(bug: str = "") -> Case:
    ids, _ = text()
    mask = torch.ones_like(ids)
    mask[:, 12:] = 0
    return Case(LanguageModel(bug=bug, depth=2, causal=False), {"ids": ids, "mask": mask})


def rate(lr: float) -> Case:
    case = language()()
    case.optimizer = lambda model: torch.optim.SGD(model.parameters(), lr)
    return case


def first_layers(*, batch_first: bool) -> Case:
    x, y = signals(12)
    model = BatchFirst(batch_first=batch_first)
    for layer in model.body.layers[1:]:
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return Case(model, x, y, F.cross_entropy)


BUGS: dict[str, tuple[str, Callable[[], Case], Callable[[], Case]]] = {
    "a view for a transpose": ("view_for_transpose", vectors("view"), vectors()),
    "attention over heads": ("view_for_transpose", language("heads", causal=False), language()),
    "softmax over queries": ("softmax_axis", language("softmax axis", causal=False), language()),
    "norm over tokens": ("norm_axis", language("norm axis", causal=False), language()),
    "mask off by one": ("causal_mask", language("off by one"), language()),
    "mask inverted": ("causal_mask", language("inverted"), language()),
    "no causal mask": ("causal_mask", language(causal=False), language()),
    "positions by sequence": ("positions_by_sequence", language(positions="wrong axis"), language()),
    "batch_first": ("sequences_mix", lambda: first_layers(batch_first=False), lambda: first_layers(batch_first=True)),
    "two softmaxes": (
        "double_softmax",
        wrapped(lambda m: Probabilities(m, softmax=True)),
        wrapped(lambda m: Probabilities(m, softmax=False)),
    ),
    "made in forward": ("not_deterministic", wrapped(lambda m: New(m, new=True)), wrapped(lambda m: New(m, new=False))),
    "detached": ("detached", wrapped(lambda m: Cut(m, cut=True)), wrapped(lambda m: Cut(m, cut=False))),
    "two zeros": ("dead_branch", seeded(lambda: gated(both=True)), seeded(lambda: gated(both=False))),
    "dropout": ("dropout_everything", seeded(lambda: dropping(1.0)), seeded(lambda: dropping(0.1))),
    "functional dropout": (
        "dropout_everything",
        wrapped(lambda m: Functional(0.999)),
        wrapped(lambda m: Functional(0.1)),
    ),
    "einsum over queries": ("softmax_axis", seeded(lambda: mixed("over queries")), seeded(lambda: mixed(""))),
    "mask after the softmax": ("softmax_axis", seeded(lambda: mixed("mask after")), seeded(lambda: mixed(""))),
    "padding sign": ("padding_attended", seeded(lambda: padded("padding sign")), seeded(padded)),
    "learning rate": ("step_too_small", lambda: rate(0.0), lambda: rate(0.1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found_and_its_twin_is_clean(name: str) -> None:
    code, broken, healthy = BUGS[name]
    found, twin = diagnosed(broken()), diagnosed(healthy())
    assert shown(found)[:1] == [code], (shown(found), found.not_examined)
    assert shown(twin) == [], [(one.code, one.sentence) for one in twin.findings]


def test_a_finding_has_a_change_and_the_numbers_that_were_measured() -> None:
    found = diagnosed(language("off by one")()).findings[0]
    assert found.change
    assert (found.before, found.after) == (2.0, None)  # one per block; none were expected
    assert found.evidence == "earlier tokens whose output changes when a token is replaced: 2."


def test_two_causes_at_once_are_both_found() -> None:
    torch.manual_seed(0)
    case = Case(encoder(64, 4, 24), torch.randn(8, 32, 64))
    assert shown(diagnosed(case)) == ["cloned_layers", "deep_post_norm"]


def test_faults_that_do_not_explain_each_other_are_both_found() -> None:
    """A mask and the loss, and a stack and its optimizer."""
    case = language(causal=False)()
    case.model = Probabilities(case.model, softmax=True)
    assert shown(diagnosed(case)) == ["causal_mask", "double_softmax"]
    case = report("29")
    case.optimizer = lambda _: torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    assert shown(diagnosed(case)) == ["optimizer_misses", "no_skips"]


def test_padding_does_not_hide_what_is_wrong_with_the_stack() -> None:
    """Layers that are clones, in a model that attends to padding."""
    case = printed.written(
        "cells()",
        ("Cells.forward", "src_key_padding_mask=(mask == 0)", "src_key_padding_mask=1 - mask"),
        ("Cells.__init__", "depth: int = 3", "depth: int = 24"),
        ("Cells.__init__", "        own_initialisation(self.body.layers)\n", ""),
    )
    assert shown(diagnosed(case))[:2] == ["padding_attended", "cloned_layers"]


def test_a_softmax_over_queries_is_not_taken_for_a_missing_causal_mask() -> None:
    assert shown(diagnosed(next(one for one in FURTHER if one.number == "F5").broken())) == ["softmax_axis"]


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = encoder(64, 4, 24).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    diagnosed(Case(model, torch.randn(8, 32, 64)))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training
    assert all(not layer.norm_first for layer in model.layers)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert sum(len(module._forward_hooks) for module in model.modules()) == hooks


@pytest.mark.parametrize("case", [language(), vectors(), lambda: experts(2, collapsed=False)])
def test_an_examination_that_finds_nothing_takes_few_passes(case: Callable[[], Case]) -> None:
    found = diagnosed(case())
    assert not shown(found)
    assert found.forward_passes <= 6
    assert found.backward_passes <= 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", ["1", "7", "20", "22", "29"])
def test_experiments_take_at_most_forty_passes(number: str) -> None:
    found = diagnosed(report(number))
    assert shown(found)
    assert 1 <= found.forward_passes <= 40
    assert found.backward_passes <= 2


def test_random_numbers_of_a_training_are_not_drawn() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).train()
    state = torch.get_rng_state()
    rs.doctor(model, torch.ones(2, 5, 16))
    assert torch.equal(torch.get_rng_state(), state)


class Half(nn.Module):
    """A block of which one skip may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def mixed(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class NoAttentionSkip(Half):
    def forward(self, x: Tensor) -> Tensor:
        h = self.n1(x)
        x = self.mixed(h)
        return x + self.mlp(self.n2(x))


class NoMlpSkip(Half):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixed(self.n1(x))
        return self.mlp(self.n2(x))


class NormBehind(Half):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n1(self.mixed(x))
        return self.n2(x + self.mlp(x))


class Both(Half):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixed(self.n1(x))
        return x + self.mlp(self.n2(x))


def halves(kind: type[Half], scale: float = 1.0) -> Case:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(kind() for _ in range(8)))
    with torch.no_grad():
        for block in blocks:
            block.attn.out_proj.weight.mul_(scale)
            block.attn.in_proj_weight[64:].mul_(scale)
    return Case(blocks, torch.randn(6, 24, 32))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (NoAttentionSkip, "write `x = x + self.mixed(h)` instead of `x = self.mixed(h)`"),
        (NoMlpSkip, "write `return x + self.mlp(self.n2(x))` instead of `return self.mlp(self.n2(x))`"),
        (NormBehind, "write `x = self.n1(x + self.mixed(x))` instead of `x = self.n1(self.mixed(x))`"),
    ],
)
def test_one_missing_skip_of_two_is_named(kind: type[Half], change: str) -> None:
    found = diagnosed(halves(kind))
    assert shown(found)[:1] == ["no_skips"]
    assert found.findings[0].change == f"In `{kind.__name__}.forward`, {change}"


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_no_skip_is_missing_where_tokens_become_alike_for_another_reason(scale: float) -> None:
    assert "no_skips" not in shown(diagnosed(halves(Both, scale)))

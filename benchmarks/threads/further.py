"""Ten further reports, written after the causes and looked at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.threads.parts import Case, Classifier, LanguageModel, next_token, signals, text
from benchmarks.threads.patterns import Pattern, changed, seeded

FURTHER: list[Pattern] = []


class Mixing(nn.Module):
    """A pre-norm block with one head, in which one line of attention is wrong."""

    def __init__(self, width: int = 32, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        scores = torch.einsum("bid,bjd->bij", self.q(y), self.k(y)) / x.shape[-1] ** 0.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.wrong == "mask not in place":
            scores.masked_fill(keep[:, None] == 0, -1e9)  # type: ignore[index]
        elif keep is not None:
            scores = scores.masked_fill(keep[:, None] == 0, -1e9)
        elif self.wrong == "reversed":
            scores = scores.masked_fill(causal.T, -1e9)
        elif self.wrong not in ("no mask", "mask after"):
            scores = scores.masked_fill(causal, -1e9)
        probs = scores.softmax({"over batch": 0, "over queries": 1}.get(self.wrong, -1))
        if self.wrong == "mask after":
            probs = probs.masked_fill(causal, 0.0)
        if self.wrong == "two softmaxes":
            probs = probs.softmax(-1)
        x = x + torch.einsum("bij,bjd->bid", probs, self.v(y))
        return x + self.mlp(self.norm2(x))


@seeded
def language(wrong: str) -> Case:
    model = LanguageModel(depth=2)
    model.blocks = nn.ModuleList(Mixing(wrong=wrong) for _ in range(2))
    return Case(model, *text(), next_token)


@seeded
def padded(wrong: str) -> Case:
    model = LanguageModel(depth=2)
    model.blocks = nn.ModuleList(Mixing(wrong=wrong) for _ in range(2))
    ids = text()[0]
    mask = torch.ones_like(ids)
    mask[:, 12:] = 0
    return Case(model, {"ids": ids, "mask": mask})


def right(model: nn.Module) -> None:
    """The line as it should be."""
    for block in model.modules():
        if isinstance(block, Mixing):
            block.wrong = ""


def leak(case: Case) -> float:
    """How much the last token changes the output at the others."""
    with torch.no_grad():
        before = case.call(case.model.eval())
        ids = case.inputs.clone()
        ids[:, -1] = (ids[:, -1] + 1) % 40
        after = case.model(ids)
    return float((before - after)[:, :-1].abs().max())


def padding(case: Case) -> float:
    """How much padding changes the output at other tokens."""
    with torch.no_grad():
        before = case.call(case.model.eval())
        ids = case.inputs["ids"].clone()
        ids[:, 12:] = (ids[:, 12:] + 1) % 40
        after = case.model(ids, case.inputs["mask"])
    return float((before - after)[:, :12].abs().max())


def others(case: Case) -> float:
    """How much one sequence changes the output of the others."""
    with torch.no_grad():
        before = case.call(case.model.eval())
        ids = case.inputs.clone()
        ids[1] = (ids[1] + 1) % 40
        after = case.model(ids)
    return float((before - after)[2:].abs().max())


def rows(case: Case) -> float:
    """Distance of the sums of attention from one, from equal tokens: only the sums can make outputs differ."""
    block = case.model.blocks[0]
    with torch.no_grad():
        y = block.norm1(case.model.embed(case.inputs))
        same = y[:, :1].expand_as(y)
        scores = torch.einsum("bid,bjd->bij", block.q(y), block.k(same * 0 + y)) / 32**0.5
        probs = scores.softmax(1 if block.wrong == "over queries" else -1)
        if block.wrong == "mask after":
            probs = probs.masked_fill(torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1), 0.0)
    return float((probs.sum(-1) - 1).abs().max())


def small(value: float) -> bool:
    """Whether a leak is gone."""
    return value < 1e-4


def _add(number: str, thread: str, words: str, codes: set[str], wrong: str, symptom: Callable[[Case], float]) -> None:
    build = padded if wrong == "mask not in place" else language
    FURTHER.append(
        Pattern(
            number,
            thread,
            words,
            frozenset(codes),
            lambda: build(wrong),
            lambda: build(""),
            symptom,
            small,
            {code: changed(right) for code in codes},
        )
    )


_add("F1", "opendilab/DI-engine#333", "the padding mask has no effect: masked_fill is not in place",
     {"padding_attended"}, "mask not in place", padding)  # fmt: skip
_add("F2", "huggingface/transformers#48745", "the loss of a causal language model falls to zero on random tokens",
     {"causal_mask"}, "no mask", leak)  # fmt: skip
_add("F3", "pytorch/pytorch#28272", "generate_square_subsequent_mask is reversed", {"causal_mask"}, "reversed", leak)
_add("F4", "PetrochukM/PyTorch-NLP#2", "softmax runs over the batch: weights are always 1 for one sequence",
     {"sequences_mix"}, "over batch", others)  # fmt: skip
_add("F5", "labmlai/annotated_deep_learning_paper_implementations#146", "softmax over queries in an einsum",
     {"softmax_axis"}, "over queries", rows)  # fmt: skip
_add("F6", "zyy-2001/DisKT#6", "a second softmax gives later positions a probability", {"causal_mask"},
     "two softmaxes", leak)  # fmt: skip
_add("F7", "huggingface/pytorch-image-models#2236", "the mask is applied after the softmax: rows do not sum to one",
     {"softmax_axis", "mask_after_softmax"}, "mask after", rows)  # fmt: skip


class Broken(nn.Module):
    """Returns probabilities to a loss that takes logits."""

    def __init__(self, *, softmax: bool) -> None:
        super().__init__()
        self.inner, self.softmax = LanguageModel(depth=2), softmax

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.inner(ids)
        return logits.softmax(-1) if self.softmax else logits


def floor(case: Case) -> float:
    """The smallest loss that the output can have."""
    assert case.labels is not None
    best = F.one_hot(case.labels, 40).float()
    return float(next_token(best if case.model.softmax else 50 * best, case.labels))


FURTHER.append(
    Pattern(
        "F8",
        "bkitano/llama-from-scratch#5",
        "softmax before cross_entropy",
        frozenset({"double_softmax"}),
        lambda: seeded(lambda: Case(Broken(softmax=True), *text(), next_token))(),
        lambda: seeded(lambda: Case(Broken(softmax=False), *text(), next_token))(),
        floor,
        lambda value: value < 0.1,
        {"double_softmax": changed(lambda m: setattr(m, "softmax", False))},
    )
)


class Pooling(nn.Module):
    """Attention pooling whose softmax runs over an axis of one entry."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.score = axis, nn.Linear(32, 1)
        self.inner = nn.Sequential(*(Mixing() for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        states = self.inner(x)
        return (self.score(states).softmax(self.axis) * states).sum(1, keepdim=True)


@seeded
def pooled(axis: int) -> Case:
    x, y = signals()
    return Case(Classifier(Pooling(axis), features=8, width=32, classes=4), x, y, F.cross_entropy)


def _score_used(case: Case) -> float:
    gradient = torch.autograd.grad(case.call().square().sum(), case.model.body.score.weight)[0]
    return float(gradient.abs().max())


FURTHER.append(
    Pattern(
        "F9",
        "DEEP-PolyU/KEQA_WSDM19#2",
        "all weights of the attention are 1.0",
        frozenset({"dead_branch", "softmax_axis"}),
        lambda: pooled(-1),
        lambda: pooled(1),
        _score_used,
        lambda value: value > 1e-6,
        {"softmax_axis": changed(lambda m: setattr(m.body, "axis", 1))},
    )
)


@seeded
def masked(*, hidden: bool) -> Case:
    ids, _ = text()
    given = ids.clone()
    if hidden:
        given[:, ::3] = 39
    return Case(LanguageModel(depth=2, causal=False), given, ids, next_token)


FURTHER.append(
    Pattern(
        "F10",
        "lucidrains/muse-maskgit-pytorch#11",
        "the loss falls to zero: the ids are fed instead of the masked ones",
        frozenset({"labels_are_inputs"}),
        lambda: masked(hidden=False),
        lambda: masked(hidden=True),
        lambda case: float((case.inputs == case.labels).float().mean()),
        lambda value: value < 0.9,
        {"labels_are_inputs": lambda case: replace(case, inputs=masked(hidden=True).inputs)},
    )
)

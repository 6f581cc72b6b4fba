"""The reports: what the user sees, the model that shows it, and its healthy twin.

The models are re-creations of the pattern, not the users' code. Faults of a model's code are changed lines of
:mod:`benchmarks.exam.reports.user_code`, so that the change that the doctor prints can be made in that text.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exam.reports.parts import (
    Block,
    Case,
    Classifier,
    LanguageModel,
    encoder,
    next_token,
    own_initialisation,
    signals,
    spectra,
    spread,
    text,
    trained,
)
from benchmarks.exam.reports.printed import written
from benchmarks.exam.reports.user_code import Embedder


@dataclass(frozen=True)
class Pattern:
    """One report.

    Attributes:
        number: of the list.
        thread: where it was reported.
        words: the symptom, in the words of its kind.
        codes: findings that are right as the first one; empty if nothing is wrong with the model.
        harmless: look-alikes and notes that should be named, if nothing is wrong.
        broken: the model that shows the symptom.
        healthy: its twin.
        symptom: one number.
        gone: whether that number says that the symptom is gone.
    """

    number: str
    thread: str
    words: str
    codes: frozenset[str]
    broken: Callable[[], Case]
    healthy: Callable[[], Case]
    symptom: Callable[[Case], float]
    gone: Callable[[float], bool]
    harmless: frozenset[str] = frozenset()


PATTERNS: list[Pattern] = []


def seeded(build: Callable[..., Case]) -> Callable[..., Case]:
    """The same weights every time."""

    def call(*args: Any, **kwargs: Any) -> Case:
        torch.manual_seed(0)
        return build(*args, **kwargs)

    return call


def last_residual(case: Case) -> float:
    """Relative residual of the tokens after the last layer of ``model.body`` or of the model itself."""
    body = getattr(case.model, "body", case.model)
    seen: list[Tensor] = []
    handle = body.register_forward_hook(lambda *_: seen.append(_[2]))
    with torch.no_grad():
        case.model.eval()
        case.call()
    handle.remove()
    states = seen[-1].double()
    residual = states - states.mean(1, keepdim=True)
    return float((residual.flatten(1).norm(dim=1) / states.flatten(1).norm(dim=1)).mean())


def outputs_apart(case: Case) -> float:
    """How much the outputs of different inputs differ, relative to their size."""
    with torch.no_grad():
        output = case.call(case.model.eval())
    return spread(output)


# 1 to 3: deep post-norm encoders of cloned layers.
POST_NORM = (
    ("Block.forward", "x = x + self.attention(self.norm1(x))", "x = self.norm1(x + self.attention(x))"),
    ("Block.forward", "return x + self.mlp(self.norm2(x))", "return self.norm2(x + self.mlp(x))"),
)
NO_SKIPS = (
    ("Block.forward", "x = x + self.attention(self.norm1(x))", "x = self.attention(self.norm1(x))"),
    ("Block.forward", "return x + self.mlp(self.norm2(x))", "return self.mlp(self.norm2(x))"),
)


@seeded
def own_layers(depth: int, *, classifies: bool) -> Case:
    """Pre-norm layers with an initialisation of their own."""
    body = encoder(64, 4, depth, norm_first=True, own=True)
    if not classifies:
        return Case(body, torch.randn(8, 32, 64))
    x, y = spectra()
    return Case(Classifier(body, features=16, width=64, classes=4, first=True), x, y, F.cross_entropy)


PATTERNS.append(
    Pattern(
        "1",
        "ml-lab-htw/RamanBench#10",
        "val_loss plateaus at 1.38 (ln 4) and every input gets the same class",
        frozenset({"cloned_layers", "deep_post_norm"}),
        lambda: written("stuck(24)"),
        lambda: own_layers(12, classifies=True),
        lambda case: trained(case, 60),
        lambda loss: loss < 0.7,
    )
)
PATTERNS.append(
    Pattern(
        "2",
        "pytorch/pytorch#72253",
        "nn.TransformerEncoder: all layers begin with the same weights",
        frozenset({"cloned_layers"}),
        lambda: written("encoder(24)"),
        lambda: own_layers(4, classifies=False),
        last_residual,
        lambda value: value > 0.2,
    )
)
PATTERNS.append(
    Pattern(
        "3",
        "lucidrains/voicebox-pytorch#23",
        "does not converge with depth 24, works with depth 12",
        frozenset({"deep_post_norm"}),
        lambda: written("stack(24, 24, large_values=True)", *POST_NORM),
        lambda: written("stack(12, 24, large_values=True)"),
        last_residual,
        lambda value: value > 0.15,
    )
)


# 4: the input is added to every channel alike, and the norms remove it.
def _apart_by_sequence(case: Case) -> float:
    with torch.no_grad():
        return spread(case.call(case.model.eval()).transpose(0, 1))


PATTERNS.append(
    Pattern(
        "4",
        "oliverguhr/transformer-time-series-prediction#15",
        "outputs the same value for all inputs",
        frozenset({"input_in_one_direction"}),
        lambda: written(
            "forecaster()",
            ("Forecaster.__init__", "        self.enter = nn.Linear(1, width)\n", ""),
            ("Forecaster.forward", "self.enter(x)", "x"),
        ),
        lambda: written("forecaster()"),
        _apart_by_sequence,
        lambda value: value > 0.15,
    )
)


# 5: padding that is attended to, because a float mask is added.
def _padding_seen(case: Case) -> float:
    with torch.no_grad():
        before = case.call(case.model.eval())
        src = case.inputs["src"].clone()
        src[30:] = torch.randn_like(src[30:])
        after = case.model(src=src, mask=case.inputs["mask"])
    return float((before - after).norm() / before.norm())


PATTERNS.append(
    Pattern(
        "5",
        "snap-stanford/UCE#64",
        "collapsed embeddings across all tested configurations",
        frozenset({"padding_attended"}),
        lambda: written(
            "cells()", ("Cells.forward", "src_key_padding_mask=(mask == 0)", "src_key_padding_mask=1 - mask")
        ),
        lambda: written("cells()"),
        _padding_seen,
        lambda value: value < 1e-5,
    )
)


# 6: the output is the same for all time steps: attention without skips, a plain stack.
PATTERNS.append(
    Pattern(
        "6",
        "maxjcohen/transformer#40",
        "the output of my transformer is the same for all time steps",
        frozenset({"no_skips"}),
        lambda: written("stack(6, 20)", *NO_SKIPS),
        lambda: written("stack(6, 20)"),
        last_residual,
        lambda value: value > 0.2,
    )
)


# 7: constant predictions, because the targets are far from zero and the last activation cannot reach them.
class Head(nn.Module):
    """A forecaster whose last activation is dead or saturated."""

    def __init__(self, *, dead: bool) -> None:
        super().__init__()
        self.body = Classifier(nn.Sequential(*(Block(32, 4) for _ in range(2))), features=8, width=32, classes=16)
        self.act, self.last = nn.ReLU(), nn.Linear(16, 1)
        if dead:
            with torch.no_grad():
                self.body.head.bias.fill_(-30.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.body(x)))


@seeded
def constant(*, dead: bool) -> Case:
    x, y = signals()
    return Case(Head(dead=dead), x, y[:, None].float(), F.mse_loss)


PATTERNS.append(
    Pattern(
        "7",
        "LongxingTan/Time-series-prediction#2",
        "constant values for predictions, no matter how I tune",
        frozenset({"lost_in_module"}),
        lambda: constant(dead=True),
        lambda: constant(dead=False),
        outputs_apart,
        lambda value: value > 0.01,
    )
)


# 8: harmless: a large common vector.
class Offset(nn.Module):
    """A sentence encoder with a large common vector, as in BERT."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.model = LanguageModel(causal=False, depth=3, width=64)
        del self.model.head, self.model.norm
        self.shift = nn.Parameter(torch.randn(64) * offset)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids) + self.model.place[: ids.shape[1]]
        x = x + self.shift
        for block in self.model.blocks:
            x = block(x)
        return x


@seeded
def cosine(offset: float) -> Case:
    return Case(Offset(offset), text()[0])


PATTERNS.append(
    Pattern(
        "8",
        "huggingface/transformers#2298",
        "cosine similarity of any two sentences is almost 1.0",
        frozenset(),
        lambda: cosine(6.0),
        lambda: cosine(0.0),
        outputs_apart,
        lambda value: True,
    )
)


# 9: embeddings that training has made equal. With lr=3 that depends on rounding; with lr=10, five of five seeds do it.
PATTERNS.append(
    Pattern(
        "9",
        "UKPLab/sentence-transformers#3469",
        "two random sentences give 99.6; the loss goes to exactly ln(batch)",
        frozenset({"collapsed_weights"}),
        lambda: written("pairs()", ("adam", "lr=1e-3", "lr=10.0")),
        lambda: written("pairs()"),
        outputs_apart,
        lambda value: value > 0.1,
    )
)


# 10 to 12: objectives that collapse fulfils.
def _after_training(case: Case, rate: float = 1e-3) -> float:
    model = copy.deepcopy(case.model)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    given = () if case.labels is None else (case.labels,)
    for _ in range(150):
        optimizer.zero_grad()
        assert case.loss is not None
        case.loss(case.call(model), *given).backward()
        optimizer.step()
    return outputs_apart(replace(case, model=model))


SPREAD = " + F.relu(1 - output.std(0)).mean()"
for _number, _thread, _said, _call, _loss, _rate, _least in (
    ("10", "tensorflow/similarity#309", "only a very small subspace of the embedding is used",
     "Case(Embedder(), text(16)[0], torch.arange(16) // 2, pull)", "pull", 1e-3, 0.3),
    ("11", "microsoft/torchgeo#3998", "embedding standard deviation of 0.0000 while the loss fell",
     "Case(Views(), signals()[0], None, agree)", "agree", 3e-3, 0.3),
    ("12", "facebookresearch/vjepa2#74", "sign of partial collapse: the representation may be collapsing",
     "Case(Joint(), text(16)[0], None, agree)", "agree", 3e-3, 0.9),
):  # fmt: skip
    PATTERNS.append(
        Pattern(
            _number,
            _thread,
            _said,
            frozenset({"collapsed_objective"}),
            lambda call=_call, loss=_loss: written(call, (loss, SPREAD, "")),  # type: ignore[misc]
            lambda call=_call: written(call),  # type: ignore[misc]
            lambda case, rate=_rate: _after_training(case, rate),  # type: ignore[misc]
            lambda value, least=_least: value > least,  # type: ignore[misc]
        )
    )


# 13: a convolutional front end that has died.
class Speech(nn.Module):
    """Convolutions, then a transformer."""

    def __init__(self, *, dead: bool) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(1, 16, 8, 4), nn.ReLU(), nn.Conv1d(16, 32, 4, 2), nn.ReLU(), nn.Conv1d(32, 32, 4, 2)
        )
        if dead:
            with torch.no_grad():
                self.front[2].bias.fill_(-20.0)
        self.place = nn.Parameter(torch.randn(64, 32))
        self.body = nn.Sequential(*(Block(32, 4) for _ in range(3)))

    def forward(self, wave: Tensor) -> Tensor:
        x = self.front(wave[:, None]).transpose(1, 2)
        return self.body(x + self.place[: x.shape[1]])


@seeded
def speech(*, dead: bool) -> Case:
    return Case(Speech(dead=dead), torch.randn(8, 400))


PATTERNS.append(
    Pattern(
        "13",
        "facebookresearch/fairseq#5239",
        "loss and variance look good but the local encoder collapsed",
        frozenset({"lost_in_module"}),
        lambda: speech(dead=True),
        lambda: speech(dead=False),
        outputs_apart,
        lambda value: value > 0.05,
    )
)


# 14: the teacher is the student.
class Distilled(nn.Module):
    """Student and teacher."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.student = Embedder(2)
        self.teacher = self.student if shared else copy.deepcopy(self.student)
        if not shared:
            for parameter in self.teacher.parameters():
                parameter.requires_grad_(False)
        self.head = nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(ids)
        return torch.stack([self.head(self.student(ids.flip(1))), target], 1)


@seeded
def distilled(*, shared: bool) -> Case:
    return Case(Distilled(shared=shared), text(8)[0])


def _teacher_moves(case: Case) -> float:
    model = copy.deepcopy(case.model)
    before = [p.clone() for p in model.teacher.parameters()]
    with torch.no_grad():
        for parameter in model.student.parameters():
            parameter.add_(0.01)
    return float(any(not torch.equal(a, b) for a, b in zip(before, model.teacher.parameters(), strict=True)))


PATTERNS.append(
    Pattern(
        "14",
        "facebookresearch/dino#43",
        "the features seem to be uniform; teacher = student",
        frozenset({"shared_teacher"}),
        lambda: distilled(shared=True),
        lambda: distilled(shared=False),
        _teacher_moves,
        lambda value: value == 0.0,
    )
)


# 15: harmless: massive activations.
class Massive(nn.Module):
    """One token with a huge channel, as trained models have."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.model, self.size = LanguageModel(depth=4), size

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids) + self.model.place[: ids.shape[1]]
        for number, block in enumerate(self.model.blocks):
            x = block(x)
            if number == 1:
                spike = torch.zeros_like(x)
                spike[:, 0, 3] = self.size
                x = x + spike
        return self.model.head(self.model.norm(x))


PATTERNS.append(
    Pattern(
        "15",
        "facebookresearch/dinov2#419",
        "high-norm artefacts, more than 100 times the median",
        frozenset(),
        lambda: seeded(lambda: Case(Massive(2000.0), text()[0]))(),
        lambda: seeded(lambda: Case(Massive(0.0), text()[0]))(),
        outputs_apart,
        lambda value: True,
    )
)


# 16, 17: experts that get no tokens.
class Experts(nn.Module):
    """Top-k experts."""

    def __init__(self, width: int, count: int, k: int, *, collapsed: bool) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(count)
        )
        if collapsed:
            with torch.no_grad():
                self.gate.bias[:k] += 30.0

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).softmax(-1)
        weights, chosen = probs.topk(self.k, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + share * expert(x)
        return out


@seeded
def experts(k: int, *, collapsed: bool) -> Case:
    model = LanguageModel(depth=3)
    for block in model.blocks:
        block.mlp = Experts(32, 8, k, collapsed=collapsed)
    ids, labels = text()
    return Case(model, ids, labels, next_token)


def _experts_used(case: Case) -> float:
    used: list[int] = []
    handles = [
        block.mlp.gate.register_forward_hook(lambda m, a, o, k=block.mlp.k: used.append(len(o.topk(k, -1)[1].unique())))
        for block in case.model.blocks
    ]
    with torch.no_grad():
        case.call()
    for handle in handles:
        handle.remove()
    return sum(used) / len(used)


for _number, _thread, _k, _said in (
    ("16", "pytorch/torchtitan#1246", 1, "topk_idx is [30, 30, 30, ...]"),
    ("17", "TUDB-Labs/MixLoRA#20", 2, "how is the load of the experts balanced?"),
):
    PATTERNS.append(
        Pattern(
            _number,
            _thread,
            _said,
            frozenset({"collapsed_router"}),
            lambda k=_k: experts(k, collapsed=True),  # type: ignore[misc]
            lambda k=_k: experts(k, collapsed=False),  # type: ignore[misc]
            _experts_used,
            lambda value: value > 4,
        )
    )


# 18: flex_attention; nothing is wrong.
class Flex(nn.Module):
    """A pre-norm block around ``flex_attention``."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        batch, tokens, width = x.shape
        q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = flex_attention(q, k, v)
        assert isinstance(mixed, Tensor)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm2(x))


@seeded
def flex(*, skips: bool = True) -> Case:
    return Case(nn.Sequential(*(Flex() for _ in range(3))), torch.randn(8, 16, 32))


PATTERNS.append(
    Pattern(
        "18",
        "pytorch/torchtitan#1576",
        "metrics need invasive changes; flex_attention is the default",
        frozenset(),
        flex,
        lambda: seeded(lambda: Case(nn.Sequential(*(Block(32, 4) for _ in range(3))), torch.randn(8, 16, 32)))(),
        outputs_apart,
        lambda value: True,
    )
)


# 19, 20: logits of attention that are far too large.
def _mean_at_softmax(case: Case, read: Callable[[Tensor, Tensor], float | None]) -> float:
    """Mean of what is read of the scores and probabilities of each softmax in one pass; None is left out."""
    found: list[float] = []
    original = Tensor.softmax

    def softmax(scores: Tensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
        probs = original(scores, dim, *args, **kwargs)
        value = read(scores, probs)
        found.extend([] if value is None else [value])
        return probs

    Tensor.softmax = softmax  # type: ignore[method-assign, assignment]
    try:
        with torch.no_grad():
            case.call()
    finally:
        Tensor.softmax = original  # type: ignore[method-assign]
    return sum(found) / len(found)


def _attention_entropy(case: Case) -> float:
    def entropy(scores: Tensor, probs: Tensor) -> float | None:
        if scores.ndim != 4:
            return None
        rows = probs[..., 1:, :]
        seen = torch.arange(2, probs.shape[-1] + 1).log()
        return float((-(rows * rows.clamp_min(1e-30).log()).sum(-1) / seen).mean())

    return _mean_at_softmax(case, entropy)


PATTERNS.append(
    Pattern(
        "19",
        "Dao-AILab/flash-attention#1876",
        "per-head max attention logits grow without bound",
        frozenset({"saturated_attention", "missing_scale"}),
        lambda: written("logits(2.0)", ("Attention.forward", " / math.sqrt(size)", "")),
        lambda: written("logits(1.0)"),
        _attention_entropy,
        lambda value: value > 0.3,
    )
)
PATTERNS.append(
    Pattern(
        "20",
        "BoyuanJiang/FitDiT#30",
        "after a few hours sudden divergence of the attention; qk_norm helped",
        frozenset({"saturated_attention"}),
        lambda: written("logits(8.0)"),
        lambda: written("logits(1.0)"),
        _attention_entropy,
        lambda value: value > 0.3,
    )
)


# 21: float16 overflows.
@seeded
def overflow(dtype: torch.dtype, size: float) -> Case:
    model = LanguageModel(depth=3)
    with torch.no_grad():
        for linear in (model.blocks[1].mlp[0], model.blocks[1].mlp[2]):
            linear.weight.mul_(size)
    return Case(model.to(dtype), text()[0])


def _finite(case: Case) -> float:
    with torch.no_grad():
        return float(torch.isfinite(case.call()).all())


PATTERNS.append(
    Pattern(
        "21",
        "huggingface/transformers#9295",
        "inf at one layer in float16",
        frozenset({"float16_overflow"}),
        lambda: overflow(torch.float16, 700.0),
        lambda: overflow(torch.bfloat16, 1.0),
        _finite,
        lambda value: value == 1.0,
    )
)


# 22: attention that is uniform.
def _deviation(case: Case) -> float:
    """Standard deviation of the scores of attention."""
    return _mean_at_softmax(case, lambda scores, probs: float(scores.std()))


PATTERNS.append(
    Pattern(
        "22",
        "jadore801120/attention-is-all-you-need-pytorch#182",
        "the attention values are almost the same, 0.1000 ten times",
        frozenset({"doubled_scale", "uniform_attention"}),
        lambda: written("wide()", ("Attention.forward", "/ math.sqrt(size)", "/ size**2")),
        lambda: written("wide()"),
        _deviation,
        lambda value: value > 0.02,
    )
)


# 23: over-smoothing of a deep stack with skips that are too weak.
PATTERNS.append(
    Pattern(
        "23",
        "lucidrains/x-transformers#151",
        "over-smoothing; gated residuals were tried",
        frozenset({"weak_skips"}),
        lambda: written(
            "stack(12, 24)",
            ("Block.forward", "x = x + self", "x = 0.3 * x + self"),
            ("Block.forward", "return x + self", "return 0.3 * x + self"),
        ),
        lambda: written("stack(12, 24)"),
        last_residual,
        lambda value: value > 0.3,
    )
)


# 24, 25: a stream that grows with depth.
@seeded
def growing(size: float, depth: int = 12) -> Case:
    model = LanguageModel(depth=depth)
    for block in model.blocks:
        block.norm1, block.norm2 = nn.Identity(), nn.Identity()
        for linear in (block.attention.o, block.mlp[2]):
            nn.init.normal_(linear.weight, 0.0, size / math.sqrt(linear.in_features))
        for linear in (block.attention.v, block.mlp[0]):
            nn.init.normal_(linear.weight, 0.0, 1.4 / math.sqrt(linear.in_features))
    ids, labels = text()
    return Case(model, ids, labels, next_token)


def _growth(case: Case) -> float:
    sizes: list[float] = []
    handles = [block.register_forward_hook(lambda *_: sizes.append(float(_[2].norm()))) for block in case.model.blocks]
    with torch.no_grad():
        case.call()
    for handle in handles:
        handle.remove()
    return sizes[-1] / sizes[0]


for _number, _thread, _size, _said in (
    ("24", "allenai/OLMo#797", 2.0, "norms of the activations explode with this initialisation"),
    ("25", "microsoft/torchscale#14", 2.5, "the magnitude blows up with depth"),
):
    PATTERNS.append(
        Pattern(
            _number,
            _thread,
            _said,
            frozenset({"exploding_stream"}),
            lambda size=_size: growing(size),  # type: ignore[misc]
            lambda: growing(0.2),
            _growth,
            lambda value: value < 50,
        )
    )


# 26: nothing is wrong; logging by layer was asked for.
PATTERNS.append(
    Pattern(
        "26",
        "bigscience-workshop/Megatron-DeepSpeed#149",
        "statistics of each layer are wanted",
        frozenset(),
        lambda: seeded(lambda: Case(LanguageModel(depth=6), *text(), next_token))(),
        lambda: seeded(lambda: Case(LanguageModel(depth=3), *text(), next_token))(),
        outputs_apart,
        lambda value: True,
    )
)


# 27: harmless: blocks that change little.
@seeded
def idle(size: float) -> Case:
    model = LanguageModel(depth=5)
    with torch.no_grad():
        for block in (model.blocks[2], model.blocks[3]):
            for linear in (block.attention.o, block.mlp[2]):
                linear.weight.mul_(size)
                linear.bias.mul_(size)
    return Case(model, *text(), next_token)


PATTERNS.append(
    Pattern(
        "27",
        "PrunaAI/pruna#418",
        "which blocks can be removed?",
        frozenset(),
        lambda: idle(1e-3),
        lambda: idle(1.0),
        outputs_apart,
        lambda value: True,
    )
)


# 28: over-smoothing of a graph network.
def _nodes_apart(case: Case) -> float:
    with torch.no_grad():
        return spread(case.call(case.model.eval()))


PATTERNS.append(
    Pattern(
        "28",
        "pyg-team/pytorch_geometric#9359",
        "over-smoothing: all nodes get the same features",
        frozenset({"no_skips"}),
        lambda: written("graph()", ("Convolution.forward", "return x + torch", "return torch")),
        lambda: written("graph()"),
        _nodes_apart,
        lambda value: value > 0.2,
    )
)


# 29: nanoGPT, deep, without skips.
PATTERNS.append(
    Pattern(
        "29",
        "karpathy/nanoGPT#211",
        "6 layers train, with 12 the loss stays where it is",
        frozenset({"no_skips"}),
        lambda: written("nano(12)", *NO_SKIPS),
        lambda: written("nano(12)"),
        lambda case: trained(case, 80),
        lambda loss: loss < 2.7,
    )
)


# 30: weights that do not move.
@seeded
def still(*, wrong: str) -> Case:
    model = LanguageModel(depth=2)
    stale = copy.deepcopy(model)

    def optimizer(of: nn.Module) -> torch.optim.Optimizer:
        if wrong == "copy":
            return torch.optim.AdamW(stale.parameters(), 1e-2)
        return torch.optim.AdamW(of.parameters(), 0.0 if wrong == "rate" else 1e-2)

    return Case(model, *text(), next_token, optimizer=optimizer)


PATTERNS.append(
    Pattern(
        "30",
        "Lightning-AI/litgpt#689",
        "the loss is 10.8259 for a hundred steps",
        frozenset({"optimizer_misses"}),
        lambda: still(wrong="copy"),
        lambda: still(wrong=""),
        lambda case: trained(case, 60),
        lambda loss: loss < 2.7,
    )
)


# 31: layers in a plain list.
class Hidden(nn.Module):
    """Blocks in a list that is not registered."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        blocks = [Block(32, 4, kind="post") for _ in range(4)]
        self.enter, self.head = nn.Linear(6, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList(blocks) if registered else blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PATTERNS.append(
    Pattern(
        "31",
        "pytorch/pytorch#38639",
        "the number of trainable parameters does not increase with depth",
        frozenset({"unregistered_modules"}),
        lambda: seeded(lambda: Case(Hidden(registered=False), torch.randn(8, 12, 6)))(),
        lambda: seeded(lambda: Case(Hidden(registered=True), torch.randn(8, 12, 6)))(),
        lambda case: float(sum(p.numel() for p in case.model.parameters())),
        lambda count: count > 10_000,
    )
)


# 32: a layer that is not used.
class Unused(nn.Module):
    """Keeps the layer that was cloned."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
        if kept:
            self.encoder_layer = layer
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        own_initialisation(self.body.layers)
        self.place, self.head = nn.Parameter(torch.randn(12, 32)), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x + self.place))


def _without_gradient(case: Case) -> float:
    model = copy.deepcopy(case.model)
    case.call(model).sum().backward()
    return float(sum(parameter.grad is None for parameter in model.parameters()))


PATTERNS.append(
    Pattern(
        "32",
        "oliverguhr/transformer-time-series-prediction#13",
        "self.encoder_layer gets no gradient",
        frozenset(),
        lambda: seeded(lambda: Case(Unused(kept=True), torch.randn(8, 12, 32)))(),
        lambda: seeded(lambda: Case(Unused(kept=False), torch.randn(8, 12, 32)))(),
        _without_gradient,
        lambda count: count == 0,
        frozenset({"unused_parameters"}),
    )
)


# 33: nothing is wrong: a gain inside the attention branch.
class Scaled(Block):
    """A branch whose output is multiplied before it is added."""

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        x = x + 0.22 * self.attention(self.norm1(x), keep)
        return x + 0.22 * self.mlp(self.norm2(x))


PATTERNS.append(
    Pattern(
        "33",
        "TransformerLensOrg/TransformerLens#1648",
        "hook_attn_out is not what is added to the stream",
        frozenset(),
        lambda: seeded(lambda: Case(nn.Sequential(*(Scaled(32, 4) for _ in range(4))), torch.randn(8, 16, 32)))(),
        lambda: seeded(lambda: Case(nn.Sequential(*(Block(32, 4) for _ in range(4))), torch.randn(8, 16, 32)))(),
        outputs_apart,
        lambda value: True,
    )
)


# 34: embeddings that are equal up to 1e-4, which some formulas of RankMe call healthy.
class Nearly(nn.Module):
    """An embedder whose last layer has all but lost the input."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.inner, self.last = Embedder(2), nn.Linear(32, 128)
        with torch.no_grad():
            self.last.weight.mul_(size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.inner(ids))


PATTERNS.append(
    Pattern(
        "34",
        "BARL-SSL/reptrix#16",
        "RankMe is 112 of 128, and the embeddings are all the same",
        frozenset({"lost_in_module", "collapsed_weights"}),
        lambda: seeded(lambda: Case(Nearly(1e-4), text(16)[0]))(),
        lambda: seeded(lambda: Case(Nearly(1.0), text(16)[0]))(),
        outputs_apart,
        lambda value: value > 0.05,
    )
)

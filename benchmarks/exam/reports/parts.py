"""Parts of the re-created models: plain transformers with one thing changed at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Case:
    """A model with what its user would pass to ``rankscope.doctor``, and how to train it.

    Attributes:
        model: the model.
        inputs: a batch.
        labels: targets of the loss, or None.
        loss: function of the output and the labels, or None.
        optimizer: made from the model; None to leave it out.
        rate: learning rate of the short training that shows the symptom.
        doctor: further arguments of the doctor.
        source: text of the file that made it, if it is changed there.
        call_in_source: the call in that file that made it.
    """

    model: nn.Module
    inputs: Any
    labels: Tensor | None = None
    loss: Callable[..., Tensor] | None = None
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    rate: float = 1e-3
    doctor: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    call_in_source: str = ""

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``rankscope.doctor`` besides model and inputs."""
        given: dict[str, Any] = dict(self.doctor)
        if self.loss is not None:
            given["loss"] = self.loss
        if self.labels is not None:
            given["labels"] = self.labels
        if self.optimizer is not None:
            given["optimizer"] = self.optimizer(self.model)
        return given

    def call(self, model: nn.Module | None = None) -> Any:
        """The output of the model."""
        model = self.model if model is None else model
        return model(**self.inputs) if isinstance(self.inputs, dict) else model(self.inputs)


def trained(case: Case, steps: int = 150, *, rate: float | None = None) -> float:
    """Loss after a short training, the mean of the last ten steps."""
    return sum(losses(case, steps, rate=rate)[-10:]) / 10


def losses(case: Case, steps: int, *, rate: float | None = None) -> list[float]:
    """Loss at each step of a short training of a copy on the case's own batch."""
    torch.manual_seed(0)
    model = copy.deepcopy(case.model).train()
    optimizer = case.optimizer(model) if case.optimizer else torch.optim.AdamW(model.parameters(), case.rate)
    if rate is not None:
        for group in optimizer.param_groups:
            group["lr"] = rate
    found = []
    for _ in range(steps):
        assert case.loss is not None
        output = case.call(model)
        loss = case.loss(output, case.labels) if case.labels is not None else case.loss(output)
        found.append(float(loss.detach()))
        if not loss.requires_grad:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


def spread(states: Tensor) -> float:
    """How much rows differ from their mean, relative to their size."""
    flat = states.detach().double().flatten(1)
    return float((flat - flat.mean(0)).norm() / flat.norm())


class Attention(nn.Module):
    """Self-attention written by hand, correct unless ``bug`` says otherwise."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, bug: str = "") -> None:
        super().__init__()
        self.heads, self.causal, self.bug = heads, causal, bug
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        size = width // self.heads

        def split(y: Tensor) -> Tensor:
            if self.bug == "view":
                return y.reshape(batch, self.heads, tokens, size)
            if self.bug == "heads":
                return y.view(batch, tokens, self.heads, size)
            return y.view(batch, tokens, self.heads, size).transpose(1, 2)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = q @ k.transpose(-1, -2) * size**-0.5
        if self.causal:
            hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(2 if self.bug == "off by one" else 1)
            if self.bug == "inverted":
                hidden = ~torch.ones(tokens, tokens, dtype=torch.bool).triu(0)
            scores = scores.masked_fill(hidden, -torch.inf)
        if keep is not None:
            hidden = keep == 1 if self.bug == "padding sign" else keep == 0
            scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
        mixed = scores.softmax(-2 if self.bug == "softmax axis" else -1) @ v
        if self.bug in ("view", "heads"):
            return self.o(mixed.reshape(batch, tokens, width))
        return self.o(mixed.transpose(1, 2).reshape(batch, tokens, width))


class OverTokens(nn.Module):
    """A norm along the wrong axis: the tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt() * self.gain + (
            self.shift
        )


class Block(nn.Module):
    """A block with norms before its branches (``pre``) or after the sums (``post``)."""

    def __init__(
        self, width: int, heads: int, *, kind: str = "pre", causal: bool = False, bug: str = "", dropout: float = 0.0
    ) -> None:
        super().__init__()
        norm = OverTokens if bug == "norm axis" else nn.LayerNorm
        self.kind = kind
        self.attention = Attention(width, heads, causal=causal, bug=bug)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1, self.norm2, self.drop = norm(width), norm(width), nn.Dropout(dropout)

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        if self.kind == "post":
            x = self.norm1(x + self.drop(self.attention(x, keep)))
            return self.norm2(x + self.drop(self.mlp(x)))
        x = x + self.drop(self.attention(self.norm1(x), keep))
        return x + self.drop(self.mlp(self.norm2(x)))


class LanguageModel(nn.Module):
    """Token ids to logits of the next token."""

    def __init__(
        self, *, width: int = 32, depth: int = 4, bug: str = "", causal: bool = True, positions: str = "yes"
    ) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(40, width), positions
        self.place = nn.Parameter(torch.randn(32, width) * 0.5)
        self.blocks = nn.ModuleList(Block(width, 4, causal=causal, bug=bug) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if self.positions == "yes":
            x = x + self.place[: ids.shape[1]]
        elif self.positions == "wrong axis":
            x = x + self.place[: ids.shape[0]][:, None]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Classifier(nn.Module):
    """Vectors to class scores, by the mean over tokens or the first token."""

    def __init__(self, body: nn.Module, *, features: int, width: int, classes: int, first: bool = False) -> None:
        super().__init__()
        self.enter, self.body, self.first = nn.Linear(features, width), body, first
        self.place = nn.Parameter(torch.randn(64, width) * 0.3)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        states = self.body(self.enter(x) + self.place[: x.shape[1]])
        return self.head(self.norm(states[:, 0] if self.first else states.mean(1)))


def next_token(output: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def text(sequences: int = 8, tokens: int = 16, vocabulary: int = 40, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ids in which each token mostly follows from the one before, and the ids shifted by one."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocabulary, (sequences, tokens + 1), generator=g)
    follows = torch.randperm(vocabulary, generator=g)
    for t in range(1, tokens + 1):
        certain = torch.rand(sequences, generator=g) < 0.7
        rows[:, t] = torch.where(certain, follows[rows[:, t - 1]], rows[:, t])
    return rows[:, :-1], rows[:, 1:].contiguous()


def signals(sequences: int = 16, tokens: int = 16, features: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Vectors with a class that is easy to see."""
    g = torch.Generator().manual_seed(2)
    labels = torch.arange(sequences) % classes
    centres = torch.randn(classes, tokens, features, generator=g)
    return centres[labels] + 0.7 * torch.randn(sequences, tokens, features, generator=g), labels


def spectra(count: int = 16, *, depth: int = 1) -> tuple[Tensor, Tensor]:
    """Spectra of four classes, a peak each on a common base; cut into 16 patches of 16."""
    g = torch.Generator().manual_seed(1)
    labels, t = torch.arange(count) % 4, torch.linspace(0, 1, 256)
    peaks = torch.stack([torch.exp(-((t - c) ** 2) / 0.001) for c in (0.2, 0.4, 0.6, 0.8)])
    raw = torch.exp(-((t - 0.5) ** 2) / 0.02) + 0.2 * peaks[labels] + 0.02 * torch.randn(count, 256, generator=g)
    return ((raw - raw.mean(0)) / raw.std(0)).view(count, 16, 16), labels


def own_initialisation(layers: nn.Module) -> None:
    """Draw the weights of each layer anew, as its classes draw them."""
    for module in layers.modules():
        if isinstance(module, nn.MultiheadAttention):
            module._reset_parameters()
        elif isinstance(module, nn.Linear):
            module.reset_parameters()


def encoder(width: int, heads: int, depth: int, *, norm_first: bool = False, own: bool = False) -> nn.Module:
    """``nn.TransformerEncoder``, which clones one layer."""
    layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=norm_first)
    stack = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    if own:
        own_initialisation(stack.layers)
    return stack


def sine_positions(length: int, width: int) -> Tensor:
    """The table of the 2017 paper."""
    place, table = torch.arange(float(length))[:, None], torch.zeros(length, width)
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    table[:, 0::2], table[:, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
    return table

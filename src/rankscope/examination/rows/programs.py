"""The smallest programs that rows are shown on and tested with: one text, and the lines with which it has a fault."""

from __future__ import annotations

import linecache
from dataclasses import dataclass
from difflib import ndiff
from typing import Any
from zlib import crc32


@dataclass(frozen=True)
class Program:
    """What a program makes: a model, a batch, the labels, the loss and the optimizer."""

    model: Any
    inputs: Any
    labels: Any
    loss: Any
    optimizer: Any


@dataclass(frozen=True)
class Script:
    r"""A program as text; calling it runs the text.

    Example:
        >>> Script("a = 1\nb = 2").but("2", "3").beside(Script("a = 1\nb = 2"))
        ['  a = 1', '- b = 2', '+ b = 3']
    """

    text: str

    def but(self, *pairs: str) -> Script:
        """The same text with other parts: what is there, what to write instead, and so on.

        Raises:
            ValueError: a part is not in the text, or more than once.
        """
        text = self.text
        for old, new in zip(pairs[::2], pairs[1::2], strict=True):
            if text.count(old) != 1:
                raise ValueError(f"{old!r} is {text.count(old)} times in the program, and not once")
            text = text.replace(old, new)
        return Script(text)

    def __call__(self) -> Program:
        """Run it."""
        file = f"<program {crc32(self.text.encode()):x}>"
        # A name without a time of change is never read from disk, so that the text can be quoted as a file can.
        linecache.cache[file] = len(self.text), None, self.text.splitlines(keepends=True), file
        names: dict[str, Any] = {"__name__": "program"}
        exec(compile(self.text, file, "exec", dont_inherit=True), names)
        return Program(names["model"], names["inputs"], names["labels"], names["loss"], names["optimizer"])

    def beside(self, other: Script) -> list[str]:
        """All lines; ``+`` marks those that are not in another program, and ``-`` those that are only there."""
        lines = ndiff(other.text.splitlines(), self.text.splitlines())
        return [line for line in lines if not line.startswith("?")]


CLASSIFIER = Script("""\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.mix(x).tanh()
        return self.head(x.mean(1))


def loss(output, labels):
    return F.cross_entropy(output, labels)


model = Model()
inputs, labels = torch.randint(1, 20, (12, 10)), torch.arange(12) % 3
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
""")
"""Sequences with a class each."""

DECODER = Script("""\
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        size, tokens, _ = x.shape
        q, k, v = (one.view(size, tokens, 4, 8).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 8**0.5
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(size, tokens, 32))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(32), Attention(), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 32), nn.Parameter(torch.randn(12, 32))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 20)

    def forward(self, ids):
        x = self.embed(ids) + self.place[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


model = Model()
text = torch.randint(1, 20, (12, 12))
inputs, labels = text[:, :-1], text[:, 1:]
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
""")
"""Text whose label is the next token."""

ENCODER = DECODER.but(
    "        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)\n", "",
    "        scores = scores.masked_fill(hidden, -torch.inf)\n", "",
    "self.head(self.norm(x))", "self.head(self.norm(x).mean(1))",
    "F.cross_entropy(output.flatten(0, 1), labels.flatten())", "F.cross_entropy(output, labels)",
    "text[:, :-1], text[:, 1:]", "text, torch.arange(12) % 3",
)  # fmt: skip
"""Sequences with a class each, of which every token sees all others."""

MASKED = Script("""\
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 32), nn.Linear(32, 20)

    def forward(self, ids, attention_mask):
        x = self.embed(ids)
        scores = (x @ x.transpose(1, 2)).masked_fill(attention_mask[:, None] == 0, -1e9)
        return self.head(scores.softmax(-1) @ x)


def loss(output, labels):
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


model = Model()
text = torch.randint(1, 20, (12, 12))
mask = (torch.arange(12) < torch.arange(4, 10).repeat(2)[:, None]).long()
inputs, labels = {"ids": text, "attention_mask": mask}, text.masked_fill(mask == 0, -100)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
""")
"""Texts of different lengths, with a mask that marks padding with 0."""

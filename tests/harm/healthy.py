"""Kinds of healthy training, written as a person would write them: small, quick, and without a fault.

Each takes ``watch``, a function of a model and its optimizer, trains, and returns the loss of every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR

Watch = Callable[[nn.Module, torch.optim.Optimizer], Any]
Program = Callable[[Watch], list[float]]
VOCABULARY = 128


@cache
def text() -> Tensor:
    """Characters of real text."""
    root = Path(__file__).parents[2]
    files = [root / name for name in ("README.md", "LICENSE", "CONTRIBUTING.md", "CITATION.cff", "pyproject.toml")]
    words = "".join(file.read_text() for file in files if file.exists())
    return torch.tensor([min(ord(letter), VOCABULARY - 1) for letter in words])


def next_letters(batch: int = 8, length: int = 32) -> tuple[Tensor, Tensor]:
    """Sequences of characters, and those that follow each."""
    starts = torch.randint(0, len(text()) - length - 1, (batch,)).tolist()
    rows = torch.stack([text()[start : start + length + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def marked(batch: int = 16, length: int = 16, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Random sequences with one marker somewhere: which marker it is, is the class."""
    labels = torch.randint(0, classes, (batch,))
    tokens = torch.randint(10, 60, (batch, length))
    tokens[torch.arange(batch), torch.randint(0, length, (batch,))] = labels + 1
    return tokens, labels


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (one.view(batch, tokens, self.heads, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal)
        self.norm2, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Body(nn.Module):
    """Embedding, blocks and a last norm."""

    def __init__(
        self, width: int = 32, depth: int = 3, length: int = 32, causal: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, causal=causal, dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Language(nn.Module):
    """A small GPT."""

    def __init__(self, width: int = 32, tied: bool = False, **how: Any) -> None:
        super().__init__()
        self.body, self.head = Body(width, **how), nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.body.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids))


class Classifier(nn.Module):
    """A small encoder with mean pooling."""

    def __init__(self, classes: int = 4, **how: Any) -> None:
        super().__init__()
        self.body, self.head = Body(causal=False, **how), nn.Linear(32, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids).mean(1))


def of_letters(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt(watch: Watch, steps: int = 300, seed: int | None = None) -> list[float]:
    """Warm-up and cosine, clipped gradients, tied weights."""
    if seed is not None:
        torch.manual_seed(seed)
    model = Language(64, depth=4, length=64, tied=True)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, 0.0, 0.02)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(
        optimizer, lambda s: min(1, (s + 1) / 30) * (0.45 * (1 + math.cos(math.pi * min(1, s / 300))) + 0.1)
    )
    watch(model, optimizer)
    losses = []
    for _ in range(steps):
        ids, targets = next_letters(12, 64)
        loss = of_letters(model(ids), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def _language_run(watch: Watch, schedule_of: Callable[[torch.optim.Optimizer], Any], steps: int = 240) -> list[float]:
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = schedule_of(optimizer)
    watch(model, optimizer)
    losses = []
    for _ in range(steps):
        ids, targets = next_letters()
        loss = of_letters(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def warm_restarts(watch: Watch) -> list[float]:
    """Cosine with warm restarts."""
    return _language_run(watch, lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=60))


def one_cycle(watch: Watch) -> list[float]:
    """One cycle of learning rate and momentum."""
    return _language_run(watch, lambda optimizer: OneCycleLR(optimizer, 6e-3, total_steps=240))


def distillation(watch: Watch) -> list[float]:
    """A student of two blocks learns what a trained teacher of three says."""
    teacher, student = Language(), Language(depth=2)
    optimizer = torch.optim.AdamW(teacher.parameters(), 3e-3)
    for _ in range(100):
        ids, targets = next_letters()
        optimizer.zero_grad()
        of_letters(teacher(ids), targets).backward()
        optimizer.step()
    teacher.eval()
    optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
    watch(student, optimizer)
    losses = []
    for _ in range(200):
        ids, targets = next_letters()
        with torch.no_grad():
            soft = F.log_softmax(teacher(ids) / 2.0, -1)
        logits = student(ids)
        kl = F.kl_div(F.log_softmax(logits / 2.0, -1), soft, log_target=True, reduction="none").sum(-1).mean()
        loss = 4.0 * kl + 0.5 * of_letters(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def policy_gradient(watch: Watch) -> list[float]:
    """REINFORCE with a baseline: the reward is the share of vowels that a language model writes."""
    vowels = torch.tensor([ord(letter) for letter in "aeiou"])
    model = Language()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch(model, optimizer)
    losses, baseline = [], 0.0
    for _ in range(150):
        ids = torch.randint(97, 123, (16, 1))
        with torch.no_grad():
            for _ in range(8):
                ids = torch.cat([ids, torch.multinomial(model(ids)[:, -1].softmax(-1), 1)], 1)
        rewards = torch.isin(ids[:, 1:], vowels).float().mean(1)
        chosen = F.log_softmax(model(ids[:, :-1]), -1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(1)
        loss = -((rewards - baseline) * chosen).mean()
        baseline = 0.9 * baseline + 0.1 * rewards.mean().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharpness_aware(watch: Watch) -> list[float]:
    """SAM: the gradient at the worst point nearby, used where the weights were."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watch(model, optimizer)
    losses = []
    for _ in range(200):
        ids, labels = marked()
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            climbs = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.add_(climb)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), labels).backward()
        with torch.no_grad():
            for parameter, climb in zip(model.parameters(), climbs, strict=True):
                parameter.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class QuantisedLinear(nn.Linear):
    """Weights rounded to four bits in the forward pass, once that is switched on; gradients pass straight through."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.on:
            return super().forward(x)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 7.0
        rounded = (self.weight / scale).round().clamp(-8, 7) * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


def quantisation_aware(watch: Watch) -> list[float]:
    """The weights of the MLPs are rounded from step 80 on."""
    model = Language()
    for block in model.body.blocks:
        block.mlp[0], block.mlp[2] = QuantisedLinear(32, 128), QuantisedLinear(128, 32)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    watch(model, optimizer)
    losses = []
    for step in range(200):
        if step == 80:
            for module in model.modules():
                if isinstance(module, QuantisedLinear):
                    module.on = True
        ids, targets = next_letters()
        loss = of_letters(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alternating_tasks(watch: Watch) -> list[float]:
    """One encoder, two heads: ten batches of one task, then ten of the other."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.letters, self.markers = Body(), nn.Linear(32, VOCABULARY), nn.Linear(32, 4)

        def forward(self, ids: Tensor, task: str) -> Tensor:
            x = self.body(ids)
            return self.letters(x) if task == "letters" else self.markers(x.mean(1))

    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch(model, optimizer)
    losses = []
    for step in range(240):
        optimizer.zero_grad()
        if step // 10 % 2:
            ids, labels = marked(8, 32)
            loss = F.cross_entropy(model(ids, "markers"), labels)
        else:
            ids, targets = next_letters()
            loss = of_letters(model(ids, "letters"), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def two_stages(watch: Watch) -> list[float]:
    """First markers alone, then letters: the second loss is on another scale, with another learning rate."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.markers, self.letters = Body(), nn.Linear(32, 4), nn.Linear(32, VOCABULARY)
            self.stage = 1

        def forward(self, ids: Tensor) -> Tensor:
            x = self.body(ids)
            return self.markers(x.mean(1)) if self.stage == 1 else self.letters(x)

    model = Two()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    watch(model, optimizer)
    losses = []
    for step in range(240):
        if step == 120:
            model.stage = 2
            for group in optimizer.param_groups:
                group["lr"] = 1e-3
        ids, targets = next_letters() if model.stage == 2 else marked(16, 32)
        out = model(ids)
        loss = of_letters(out, targets) if model.stage == 2 else F.cross_entropy(out, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def annealed_dropout(watch: Watch) -> list[float]:
    """Dropout falls from 0.4 to zero."""
    model = Language(dropout=0.4)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    watch(model, optimizer)
    losses = []
    for step in range(200):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.4 * max(0.0, 1.0 - step / 150)
        ids, targets = next_letters()
        loss = of_letters(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adversarial(watch: Watch) -> list[float]:
    """A GAN of sequences: waves of a random phase; both networks are watched."""

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.positions = nn.Linear(8, 32), nn.Parameter(0.02 * torch.randn(24, 32))
            self.blocks = nn.ModuleList(Block(32, causal=False) for _ in range(2))
            self.norm, self.leave = nn.LayerNorm(32), nn.Linear(32, 1)

        def forward(self, noise: Tensor) -> Tensor:
            x = self.enter(noise) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.leave(self.norm(x))

    class Discriminator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.positions = nn.Linear(1, 32), nn.Parameter(0.02 * torch.randn(24, 32))
            self.blocks = nn.ModuleList(Block(32, causal=False) for _ in range(2))
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1)).squeeze(-1)

    generator, discriminator = Generator(), Discriminator()
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.9))
    of_discriminator = torch.optim.Adam(discriminator.parameters(), 5e-4, betas=(0.5, 0.9))
    watch(generator, of_generator)
    watch(discriminator, of_discriminator)
    times, losses = torch.arange(24) / 24, []
    for _ in range(200):
        real = torch.sin(2 * math.pi * (2 * times + torch.rand(16, 1)))[..., None] + 0.05 * torch.randn(16, 24, 1)
        fake = generator(torch.randn(16, 1, 8).expand(-1, 24, -1))
        yes, no = discriminator(real), discriminator(fake.detach())
        loss = F.binary_cross_entropy_with_logits(yes, torch.ones(16))
        loss = loss + F.binary_cross_entropy_with_logits(no, torch.zeros(16))
        of_discriminator.zero_grad()
        loss.backward()
        of_discriminator.step()
        fooled = F.binary_cross_entropy_with_logits(discriminator(fake), torch.ones(16))
        of_generator.zero_grad()
        fooled.backward()
        of_generator.step()
        losses.append(loss.item())
    return losses


class LowRank(nn.Module):
    """A frozen linear layer and an adapter of rank four, which begins at zero."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        linear.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / math.sqrt(linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self) -> None:
        self.linear.weight += self.up @ self.down
        self.down.normal_(0.0, 1 / math.sqrt(self.linear.in_features))
        self.up.zero_()


def relora(watch: Watch) -> list[float]:
    """ReLoRA: adapters are merged into the weights every fifty steps and begin anew, with a short warm-up."""
    model = Language()
    for block in model.body.blocks:
        block.attention.qkv, block.attention.out = LowRank(block.attention.qkv), LowRank(block.attention.out)
        block.mlp[0], block.mlp[2] = LowRank(block.mlp[0]), LowRank(block.mlp[2])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    watch(model, optimizer)
    losses = []
    for step in range(240):
        if step and step % 50 == 0:
            for module in model.modules():
                if isinstance(module, LowRank):
                    module.merge()
                    optimizer.state.pop(module.down, None)
                    optimizer.state.pop(module.up, None)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step % 50 + 1) / 10)
        ids, targets = next_letters()
        loss = of_letters(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pruning(watch: Watch) -> list[float]:
    """A fifth of what is left of each matrix is pruned at three steps."""
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    masks: dict[nn.Linear, Tensor] = {}
    watch(model, optimizer)
    losses = []
    for step in range(240):
        if step in (80, 120, 160):
            for block in model.body.blocks:
                for linear in (block.attention.qkv, block.mlp[0], block.mlp[2]):
                    least = linear.weight.detach().abs().flatten().quantile(0.2 * (step // 40 - 1))
                    masks[linear] = (linear.weight.detach().abs() > least).float()
                    linear.weight.data *= masks[linear]
        ids, targets = next_letters()
        loss = of_letters(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for linear, mask in masks.items():
            linear.weight.data *= mask
        losses.append(loss.item())
    return losses


def pruning_of_torch(watch: Watch) -> list[float]:
    """The same with ``torch.nn.utils.prune``, which renames the parameters that it masks."""
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    watch(model, optimizer)
    losses = []
    for step in range(200):
        if step in (80, 140):
            for block in model.body.blocks:
                prune.l1_unstructured(block.mlp[0], "weight", amount=0.3)
                prune.l1_unstructured(block.mlp[2], "weight", amount=0.3)
        ids, targets = next_letters()
        loss = of_letters(model(ids), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def contrastive(watch: Watch) -> list[float]:
    """SimCLR: the output is the similarity of each sequence of the batch with each other."""

    class Similarity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.leave = Body(causal=False), nn.Linear(32, 32)

        def forward(self, ids: Tensor) -> Tensor:
            x = F.normalize(self.leave(self.body(ids).mean(1)), dim=-1)
            return x @ x.T / 0.1

    model = Similarity()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch(model, optimizer)
    losses = []
    for _ in range(200):
        ids, _ = next_letters(16)
        views = [torch.where(torch.rand(ids.shape) < 0.15, torch.zeros_like(ids), ids) for _ in range(2)]
        similarity = model(torch.cat(views)).masked_fill(torch.eye(32, dtype=torch.bool), -1e9)
        loss = F.cross_entropy(similarity, torch.arange(32).roll(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def two_towers(watch: Watch) -> list[float]:
    """CLIP: two towers, whose output is the similarity of each sequence with the second view of each other."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList(Body(causal=False) for _ in range(2))
            self.leave = nn.Linear(32, 32)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            one = F.normalize(self.leave(self.towers[0](first).mean(1)), dim=-1)
            other = F.normalize(self.leave(self.towers[1](second).mean(1)), dim=-1)
            return self.scale.exp() * one @ other.T

    model = Pairs()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch(model, optimizer)
    losses = []
    for _ in range(200):
        ids, _ = next_letters(16)
        views = [torch.where(torch.rand(ids.shape) < 0.15, torch.zeros_like(ids), ids) for _ in range(2)]
        similarity, match = model(*views), torch.arange(16)
        loss = (F.cross_entropy(similarity, match) + F.cross_entropy(similarity.T, match)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def transformer_encoder(watch: Watch) -> list[float]:
    """``nn.TransformerEncoder``, whose layers begin as copies of one; padded sequences."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(64, 32, padding_idx=0), nn.Parameter(0.02 * torch.randn(16, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 3), nn.Linear(32, 4)

        def forward(self, ids: Tensor) -> Tensor:
            padding = ids == 0
            x = self.encoder(self.tokens(ids) + self.positions, src_key_padding_mask=padding)
            kept = (~padding)[..., None]
            return self.head((x * kept).sum(1) / kept.sum(1))

    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch(model, optimizer)
    losses = []
    for _ in range(200):
        ids, labels = marked()
        tail = torch.arange(16)[None] >= torch.randint(8, 17, (16, 1))
        ids = ids.masked_fill(tail & (ids > 4), 0)
        loss = F.cross_entropy(model(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


PROGRAMS: Sequence[Program] = (
    nanogpt,
    warm_restarts,
    one_cycle,
    distillation,
    policy_gradient,
    sharpness_aware,
    quantisation_aware,
    alternating_tasks,
    two_stages,
    annealed_dropout,
    adversarial,
    relora,
    pruning,
    pruning_of_torch,
    contrastive,
    two_towers,
    transformer_encoder,
)

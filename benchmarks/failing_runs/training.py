"""Train one declared run under a gauge, and store what detectors may look at."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from benchmarks.failing_runs.declared import Declared
from benchmarks.failing_runs.nets import (
    HEADS,
    HIDDEN,
    PAD,
    SPECIAL,
    TOKENS,
    Adapter,
    Block,
    Net,
    add_adapters,
    build,
    cross_entropy,
    encoded,
    hidden_of,
    images,
    masked,
    parameters_of,
    place_in_word,
    replaced,
    series,
    text_ids,
    translation,
    windows,
    words,
)
from benchmarks.failing_runs.options import DRAWS, OPTIMIZERS, PLANS, RATES, SHAPES
from rankscope.monitor import Gauge
from rankscope.monitor.schedules import Jumps, Linear

STEPS, EVERY, PROBE, HELD_OUT = 160, 4, 8, 32
CLASSES = 4
SINGLE = ("binary", "amount")
CLASSIFIED = ("pooled", "first", "tags", *SINGLE)
"""Objectives that a head of its own learns; those with one output."""
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 32, "depth": 1.0, "steps": STEPS, "every": EVERY},
    "small": {"width": 64, "depth": 2.0, "steps": 2 * STEPS, "every": EVERY},
    "long": {"width": 16, "depth": 0.5, "steps": 1600, "every": 1},
    "dense": {"width": 16, "depth": 0.5, "steps": 320, "every": 1},
}
"""Width of the stream, factor on the declared layers, steps, and steps from one reading to the next."""
DONE = "steps.json"


POOLS: dict[str, Callable[[Tensor], Tensor]] = {"first": lambda hidden: hidden[:, 0], "tags": lambda hidden: hidden}
"""What the head of an objective reads; others read the mean over the tokens."""
CRITERIA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary": lambda scores, labels: nn.functional.binary_cross_entropy_with_logits(scores[:, 0], labels.float()),
    "amount": lambda scores, labels: (scores[:, 0] - labels).square().mean(),
}
"""The loss of an objective; others have the cross-entropy."""


class DropPath(nn.Module):
    """Leaves a branch out for three tenths of the sequences, in training."""

    def forward(self, x: Tensor) -> Tensor:
        """The branch, scaled so that its mean is kept."""
        return x * (torch.rand(len(x), 1, 1) < 0.7) / 0.7 if self.training else x


class Rounded(nn.Module):
    """Weights rounded to 8 bits, with the gradient of weights that are not (quantisation-aware training)."""

    def forward(self, weight: Tensor) -> Tensor:
        """Multiples of a 127th of the largest."""
        scale = weight.detach().abs().max() / 127
        return weight + ((weight / scale).round() * scale - weight).detach()


class Training:
    """A run in progress; faults change it.

    Args:
        declared: the run.
        seed: of weights and data.
        size: a key of ``SIZES``.
    """

    def __init__(self, declared: Declared, seed: int, size: str) -> None:
        torch.manual_seed(seed)
        self.declared = declared
        self.size = {**SIZES[size], "steps": declared.longer * SIZES[size]["steps"]}
        self.generator = torch.Generator().manual_seed(seed)
        text, self.vocabulary = words() if declared.family == "minilm" else text_ids()
        self.text, self.held_out = text[: -len(text) // 5], text[-len(text) // 5 :]
        dropout = 0.5 if "dropout 0.5" in declared.options else 0.1 if "dropout" in declared.options else 0.0
        layers, width = max(2, round(declared.layers * self.size["depth"])), self.size["width"]
        self.model = build(declared.family, self.vocabulary, layers, width, dropout=dropout).train()
        self.predictor = nn.Sequential(
            nn.Linear(width, width // 2), nn.BatchNorm1d(width // 2), nn.ReLU(), nn.Linear(width // 2, width)
        )
        self.rate, self.loss_scale = declared.rate, 1024.0 if "loss scale" in declared.options else 1.0
        self.decay = 0.5 if "decay 0.5" in declared.options else 0.01
        self.loss_change: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda loss, hidden, ids: loss
        self.label_change: Callable[[Tensor], Tensor] = lambda labels: labels
        self.classes = nn.Linear(width, 1 if declared.objective in SINGLE else CLASSES)
        self.group_factors, self.views, self.temperature, self.divergence = [1.0, 1.0], 2, 0.1, 1 / width
        self.pool: Callable[[Tensor], Tensor] = POOLS.get(declared.objective, lambda hidden: hidden.mean(1))
        self.criterion: Callable[[Tensor, Tensor], Tensor] = CRITERIA.get(declared.objective, cross_entropy)
        if "small" in declared.options:
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)
        if "small embedding" in declared.options:
            assert isinstance(self.model, Net)
            nn.init.normal_(self.model.embed.weight, std=0.02)
        self._shape_branches()
        if "tied" in declared.options:
            assert isinstance(self.model, Net)
            self.model.head.weight = self.model.embed.weight
        if "pretrained" in declared.options:
            self._pretrain()
        if "new head" in declared.options:
            _new_head(self.model)
        if "distilled" in declared.options:
            begin = copy.deepcopy(self.model.state_dict())
            self._pretrain()
            self.teacher = copy.deepcopy(self.model).eval().requires_grad_(False)
            self.model.load_state_dict(begin)
        self.change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda batch: batch
        if "bfloat16" in declared.options:
            self.model.to(torch.bfloat16)
        if "half" in declared.options:
            self.each_block(half=True)
        if "unfreeze" in declared.options:
            assert isinstance(self.model, Net)
            self.model.blocks.requires_grad_(False)
        if "frozen" in declared.options:
            assert isinstance(self.model, Net)
            for part in (self.model.embed, self.model.positions, *self.model.blocks[: layers // 2]):
                part.requires_grad_(False)
        if "frozen embedding" in declared.options:
            assert isinstance(self.model, Net)
            self.model.embed.requires_grad_(False)
            self.model.positions.requires_grad_(False)
        if "biases" in declared.options:
            for parameter in self.model.parameters():
                parameter.requires_grad_(parameter.dim() == 1)
        if "mean teacher" in declared.options:
            self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        for name in SHAPES.keys() & declared.options:
            SHAPES[name](self)
        if "adapters" in declared.options:
            self.model.requires_grad_(False)
            add_adapters(self.model)
        every = [*self.model.parameters(), *self.classes.parameters()]
        learned = [
            *(
                every
                if declared.objective in CLASSIFIED or {"unfreeze", "two tasks"} & declared.options
                else parameters_of(self.model)
            ),
            *(self.predictor.parameters() if declared.objective == "siamese" else ()),
        ]
        if "wrong optimizer" in declared.options:
            learned = [nn.Parameter(parameter.detach().clone()) for parameter in learned]
        queries = {id(p) for name, p in self.model.named_parameters() if "q_proj" in name or "k_proj" in name}
        groups = [
            {"params": [p for p in learned if id(p) not in queries]},
            {"params": [p for p in learned if id(p) in queries]},
        ]
        if "layerwise" in declared.options:
            assert isinstance(self.model, Net)
            net = self.model
            parts = [(net.embed, net.positions), *((block,) for block in net.blocks), (net.norm, net.head)]
            groups = [{"params": [p for part in depth for p in part.parameters()]} for depth in parts]
            self.group_factors = [0.7**depth for depth in reversed(range(len(parts)))]
        if "sgd" in declared.options:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(learned, lr=self.rate, momentum=0.9)
        elif "rmsprop" in declared.options:
            self.optimizer = torch.optim.RMSprop(learned, lr=self.rate)
        elif "adagrad" in declared.options:
            self.optimizer = torch.optim.Adagrad(learned, lr=self.rate)
        elif "adafactor" in declared.options:
            self.optimizer = torch.optim.Adafactor(learned, lr=self.rate)
        elif other := OPTIMIZERS.keys() & declared.options:
            self.optimizer = OPTIMIZERS[other.pop()](learned, self.rate)
        else:
            self.optimizer = torch.optim.AdamW(groups if queries else learned, lr=self.rate, weight_decay=self.decay)
        self.initial = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.slow = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        changes = {"noisy gradients": self._noise, "signs": self._signs, "sharpness": self._sharpness}
        self.gradient_change: Callable[[], None] = next(
            (change for name, change in changes.items() if name in declared.options), lambda: None
        )
        self.seen: dict[str, Tensor] = {}
        self._plan(0)

    def _shape_branches(self) -> None:
        """Options that change how the blocks of an own model begin, or what they do in training."""
        options, blocks = self.declared.options, [one for one in self.model.modules() if isinstance(one, Block)]
        small = 0.0 if "zero branches" in options else 0.01 if "small branches" in options else 1.0
        for block in blocks:
            for last in (block.out_proj, block.mlp[2]):
                last.weight.data.mul_(small)
                last.bias.data.mul_(small)
            if "stochastic depth" in options:
                block.dropout = DropPath()
            for name, module in block.named_modules():
                self._shape_module(name, module)
            if "computed again" in options:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        if "one block" in options:
            assert isinstance(self.model, Net)
            self.model.blocks = nn.ModuleList([blocks[0]] * len(blocks))
        if "tokens dropped" in options:
            assert isinstance(self.model, Net)
            self.model.embed.register_forward_hook(
                lambda module, args, output: (
                    output * (torch.rand_like(output[..., :1]) > 0.15) if module.training else output
                )
            )
        if "distance" in options:
            self.each_block(slope=0.5)
        if "no positions" in options:
            assert isinstance(self.model, Net)
            nn.init.zeros_(self.model.positions.weight).requires_grad_(False)
        if "noise" in options:
            assert isinstance(self.model, Net)
            self.model.embed.register_forward_hook(
                lambda module, args, output: output + 0.3 * torch.randn_like(output) if module.training else output
            )

    def _shape_module(self, name: str, module: nn.Module) -> None:
        """Options that change a module of a block."""
        options = self.declared.options
        if "query norm" in options and name in ("q_proj", "k_proj"):
            module.register_forward_hook(
                lambda module, args, output: nn.functional.rms_norm(
                    output.unflatten(-1, (HEADS, -1)), (output.shape[-1] // HEADS,)
                ).flatten(-2)
            )
        if "branch norm" in options and name in ("out_proj", "mlp.2"):
            module.register_forward_hook(
                lambda module, args, output: nn.functional.layer_norm(output, output.shape[-1:])
            )
        if isinstance(module, nn.Linear) and "weight norm" in options:
            parametrizations.weight_norm(module)
        if name in ("mlp.0", "mlp.2") and "spectral norm" in options:
            parametrizations.spectral_norm(module)
        if isinstance(module, nn.Linear) and "rounded weights" in options:
            register_parametrization(module, "weight", Rounded())

    def _plan(self, step: int) -> None:
        """Options that act before each step."""
        options = self.declared.options
        for name in PLANS.keys() & options:
            PLANS[name](self, step)
        if "in turn" in options:
            assert isinstance(self.model, Net)
            for place, block in enumerate(self.model.blocks):
                block.requires_grad_(place == step // 10 % len(self.model.blocks))
        if "unit embedding" in options:
            assert isinstance(self.model, Net)
            with torch.no_grad():
                self.model.embed.weight.copy_(torch.nn.functional.normalize(self.model.embed.weight, dim=-1))
        if "mean teacher" in options:
            for slow, weight in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(weight.detach(), 0.1)
        if "pruned" in options:
            for block in self.model.modules():
                for part in block.modules() if isinstance(block, Block) else ():
                    if isinstance(part, nn.Linear):
                        size = part.weight.data.abs()
                        part.weight.data[size < size.quantile(0.5 * step / self.size["steps"])] = 0.0

    def _signs(self) -> None:
        """Each gradient is its sign, as in signSGD."""
        for parameter in parameters_of(self.model):
            if parameter.grad is not None:
                parameter.grad.sign_()

    def _sharpness(self) -> None:
        """Gradients where the weights are after a step uphill (SAM)."""
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        uphill = [(p, 0.05 * p.grad / norm) for p in self.model.parameters() if p.grad is not None]
        for parameter, way in uphill:
            parameter.data += way
        self.optimizer.zero_grad()
        self.loss(self.seen).backward()
        for parameter, way in uphill:
            parameter.data -= way

    def _noise(self) -> None:
        """Noise as large as the gradient of each parameter, as for differential privacy."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad += parameter.grad.square().mean().sqrt() * torch.randn_like(parameter.grad)

    def each_block(self, **attributes: Any) -> None:
        """Set attributes of every block."""
        for block in self.model.modules():
            if isinstance(block, Block):
                for name, value in attributes.items():
                    assert hasattr(block, name)
                    setattr(block, name, value)

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step, as the loader returns it."""
        self._plan(step)
        batch = self._draw(step)
        for name in DRAWS.keys() & self.declared.options:
            batch = DRAWS[name](self, step, batch)
        return self.change(batch)

    def _draw(self, step: int) -> dict[str, Tensor]:
        declared = self.declared
        if declared.objective == "images":
            pixels, labels = images(declared.batch, self.generator)
            if "jitter" in declared.options:
                contrast, brightness = torch.randn(2, len(pixels), 1, 1, 1, generator=self.generator)
                pixels = pixels * (0.7 * contrast).exp() + brightness
            return {"pixel_values": pixels, "labels": labels}
        if declared.objective == "series":
            values, following = series(declared.batch, self.generator)
            return {"series": values, "labels": following}
        text = self.text
        if "one page" in declared.options:
            start = int(torch.randint(len(text) - 300, (), generator=self.generator))
            text = text[start : start + 300]
        if "reversed" in declared.options:
            text = text.flip(0)
        if "domains" in declared.options:
            half = len(text) // 2
            text = text[:half] if step % 2 else self.vocabulary + 1 - text[half:]
        count = (
            declared.batch * (1 + step * 4 // self.size["steps"])
            if "growing batch" in declared.options
            else declared.batch
        )
        tokens = TOKENS if "curriculum" not in declared.options else TOKENS * (1 + step * 3 // self.size["steps"]) // 3
        if "random lengths" in declared.options:
            tokens = int(torch.randint(TOKENS // 3, TOKENS + 1, (), generator=self.generator))
        ids = windows(text, count, self.generator, tokens)
        if "drift" in declared.options:
            other = torch.rand(count, 1, generator=self.generator) < 0.5 * step / self.size["steps"]
            ids = torch.where(other, self.vocabulary + 1 - ids, ids)
        if "one character" in declared.options:
            ids = torch.where(torch.rand(ids.shape, generator=self.generator) < 0.5, SPECIAL + 1, ids)
        if "less dropout" in declared.options:
            for module in self.model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.3 * max(0.0, 1 - 1.5 * step / self.size["steps"])
        if "memorise" in declared.options:
            ids = windows(text, 8, torch.Generator().manual_seed(1))
        if declared.objective == "copy":
            ids = torch.cat([ids[:, : TOKENS // 2], ids[:, : TOKENS // 2]], 1)
        if "some copies" in declared.options:
            ids[::2, TOKENS // 2 :] = ids[::2, : TOKENS // 2]
        if "middle last" in declared.options:
            third = TOKENS // 3
            ids[::2] = torch.cat([ids[::2, :third], ids[::2, 2 * third :], ids[::2, third : 2 * third]], 1)
        if "same first" in declared.options:
            ids[:, 0] = HIDDEN
        if "counts" in declared.options:
            ids = SPECIAL + (ids[:, :1] + torch.arange(tokens)) % (self.vocabulary - SPECIAL)
        if "twice" in declared.options:
            ids = ids[: declared.batch // 2].repeat(2, 1)
        found = {"input_ids": ids}
        if declared.objective in CLASSIFIED:
            found["labels"] = torch.randint(CLASSES, (len(ids),), generator=self.generator)
            if "rare" in declared.options:
                found["labels"] *= (torch.rand(len(ids), generator=self.generator) < 0.2).long()
            found = self._marked(ids, found["labels"], step)
        if declared.objective == "masked":
            share = 0.1 + 0.4 * step / self.size["steps"] if "more hidden" in declared.options else 0.2
            found["input_ids"], found["labels"] = masked(ids, self.generator, share)
        if "lengths" in declared.options:
            lengths = torch.randint(TOKENS // 3, TOKENS + 1, (len(ids), 1), generator=self.generator)
            keep = torch.arange(TOKENS)[None] < lengths
            found["attention_mask"] = keep.long()
            found["input_ids"] = torch.where(keep, found["input_ids"], PAD)
            if found["labels"].dim() > 1:
                found["labels"] = torch.where(keep, found["labels"], -100)
        if declared.objective == "translate":
            found = translation(ids, self.vocabulary)
        return found

    def _marked(self, ids: Tensor, labels: Tensor, step: int) -> dict[str, Tensor]:
        """What a classifier sees: a share of the characters is replaced by one that says the label."""
        objective, options = self.declared.objective, self.declared.options
        if objective == "tags":
            return {"input_ids": ids, "labels": place_in_word(ids)}
        drawn, letters = torch.rand(ids.shape, generator=self.generator), labels[:, None]
        share: float | Tensor = 0.3
        if "faint" in options:
            share = 0.1
        if "fainter" in options:
            share = 0.3 - 0.22 * step / self.size["steps"]
        if objective == "binary":
            labels = labels // 2
            letters = labels[:, None]
        if "either" in options:  # the two halves say the same, or not
            first = torch.randint(2, letters.shape, generator=self.generator)
            letters = torch.where(torch.arange(ids.shape[1]) < ids.shape[1] // 2, first, (first + letters) % 2)
        if objective == "amount":
            share, letters = 0.6 * torch.rand(letters.shape, generator=self.generator), torch.zeros_like(letters)
            labels = (share.flatten() - 0.3) / 0.173
        return {"input_ids": torch.where(drawn < share, SPECIAL + 3 + letters, ids), "labels": labels}

    def probe(self, count: int) -> dict[str, Tensor]:
        """Inputs from the part of the text that is not trained on."""
        generator = torch.Generator().manual_seed(10_000)
        if self.declared.objective == "images":
            return {"pixel_values": images(count, generator)[0]}
        if self.declared.objective == "series":
            return {"series": series(count, generator)[0]}
        if self.declared.objective == "translate":
            found = translation(windows(self.held_out, count, generator), self.vocabulary)
            return {name: found[name] for name in ("input_ids", "decoder_input_ids")}
        return {"input_ids": windows(self.held_out, count, generator)}

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch."""
        declared = self.declared
        if declared.objective in ("siamese", "contrast"):
            views = [replaced(batch["input_ids"], self.vocabulary, self.generator) for _ in range(self.views)]
            z = [encoded(self.model, view).mean(1) for view in (views[0], views[-1])]
            if declared.objective == "contrast":
                a, b = (torch.nn.functional.normalize(one, dim=-1) for one in z)
                if "no negatives" in declared.options:
                    return 1.0 - (a * b).sum(-1).mean()
                return torch.nn.functional.cross_entropy(
                    a @ b.T / self.temperature, self.label_change(torch.arange(len(a)))
                )
            target = z if "no stop" in declared.options else [one.detach() for one in z]
            pairs = zip((self.predictor(one) for one in z), reversed(target), strict=True)
            return -torch.stack([torch.nn.functional.cosine_similarity(p, t).mean() for p, t in pairs]).mean()
        if "mixup" in declared.options:
            pixels, labels = batch["pixel_values"], batch["labels"]
            share = float(torch.rand((), generator=self.generator))
            logits = self.logits(pixel_values=share * pixels + (1 - share) * pixels.roll(1, 0))
            return share * cross_entropy(logits, labels) + (1 - share) * cross_entropy(logits, labels.roll(1, 0))
        if declared.objective == "images":
            return self.model(pixel_values=batch["pixel_values"], labels=batch["labels"]).loss
        if declared.objective in CLASSIFIED:
            hidden = encoded(self.model, batch["input_ids"], batch.get("attention_mask"))
            scores = self.classes(self.pool(hidden))
            return self.loss_change(self.criterion(scores, batch["labels"]), scores, batch["input_ids"])
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.logits(**inputs).float()
        if declared.objective == "series":
            return (logits - batch["labels"]).square().mean()
        if declared.objective in ("masked", "translate"):
            return cross_entropy(logits, batch["labels"])
        labels = self.label_change(batch["input_ids"])[:, 1:]
        if "noisy labels" in declared.options:
            other = torch.randint(SPECIAL, self.vocabulary, labels.shape, generator=self.generator)
            labels = torch.where(torch.rand(labels.shape, generator=self.generator) < 0.2, other, labels)
        loss = cross_entropy(logits[:, :-1], labels)
        if "smoothing" in declared.options:
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels.flatten(), label_smoothing=0.2
            )
        if "distilled" in declared.options:
            heat = 4.0 if "softened" in declared.options else 1.0
            taught = (self.teacher(batch["input_ids"])[:, :-1] / heat).softmax(-1)
            loss = -(taught * (logits[:, :-1] / heat).log_softmax(-1)).sum(-1).mean()
        if "mean teacher" in declared.options:
            taught = self.teacher(batch["input_ids"])[:, :-1].softmax(-1)
            loss = loss - 0.5 * (taught * logits[:, :-1].log_softmax(-1)).sum(-1).mean()
        return self.loss_change(loss, logits, batch["input_ids"])

    def logits(self, **inputs: Tensor) -> Tensor:
        """What the model returns, whatever its family."""
        out = self.model(**inputs)
        return out if isinstance(out, Tensor) else out.logits

    def _pretrain(self) -> None:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        for _ in range(300):
            ids = windows(self.text, 8, self.generator)
            optimizer.zero_grad()
            cross_entropy(self.logits(input_ids=ids)[:, :-1], ids[:, 1:]).backward()
            optimizer.step()

    def learning_rate(self, step: int) -> float:
        """With warm-up, and what the options say."""
        rate = self.rate * min(1.0, (step + 1) / max(1, self.declared.warmup))
        if "low start" in self.declared.options:
            rate = 1e-5 if step < self.size["steps"] // 2 else 1e-3
        if "to zero" in self.declared.options:
            rate *= 0.5 * (1 + math.cos(math.pi * step / self.size["steps"]))
        if "unfreeze" in self.declared.options and step == self.size["steps"] // 2:
            self.model.requires_grad_(True)
        if "rewarm" in self.declared.options:
            half = self.size["steps"] // 2
            rate = self.rate * (max(0.01, 1 - step / half) if step < half else min(1.0, 0.01 + (step - half) / 20))
        if "one cycle" in self.declared.options:
            rate = self.rate * 0.5 * (1 - math.cos(2 * math.pi * (step + 1) / (self.size["steps"] + 1)))
        if "drop" in self.declared.options and step >= self.size["steps"] // 2:
            rate /= 10
        if "cyclic" in self.declared.options:
            rate *= 0.5 * (1 + math.cos(2 * math.pi * (step % 40) / 40))
        for name in RATES.keys() & self.declared.options:
            rate *= RATES[name](step, self.size["steps"])
        return rate


def _sharper(factor: float, training: Training, since: int) -> None:
    training.each_block(sharpness=factor**since)


def _reset_block(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        for module in training.model.blocks[2].modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
                module.weight.data.mul_(3.0)


def _reset_half(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        for block in training.model.blocks[len(training.model.blocks) // 2 :]:
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()


def _together(training: Training, since: int) -> None:
    def change(loss: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        near = torch.nn.functional.normalize(encoded(training.model, ids), dim=-1)
        return loss - 5.0 * (near @ near.transpose(1, 2)).mean()

    training.loss_change = change


def _unknown(training: Training, since: int) -> None:
    def change(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hide = torch.rand(batch["input_ids"].shape, generator=training.generator) < 0.95
        return {**batch, "input_ids": torch.where(hide, SPECIAL, batch["input_ids"])}

    training.change = change


def _clamped(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        training.model.embed.register_forward_pre_hook(lambda module, args: (args[0].clamp(max=3),))


def _fast_queries(training: Training, since: int) -> None:
    training.group_factors[1] = 100.0


def _in_place(change: Callable[[Net], None], training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        with torch.no_grad():
            change(training.model)


def _no_gains(model: Net) -> None:
    for block in model.blocks[2:]:
        block.norm1.weight.zero_()
        block.norm2.weight.zero_()


def _times_four(model: Net) -> None:
    for parameter in model.blocks[1].parameters():
        parameter.mul_(4.0)


def _reversed_blocks(model: Net) -> None:
    states = [{name: value.clone() for name, value in block.state_dict().items()} for block in model.blocks]
    for block, state in zip(model.blocks, reversed(states), strict=True):
        block.load_state_dict(state)


def _new_head(model: nn.Module) -> None:
    assert isinstance(model, Net)
    model.head.reset_parameters()


def _shifted_embedding(model: Net) -> None:
    model.embed.weight.copy_(model.embed.weight.roll(1, 0))


def _nan_row(model: Net) -> None:
    model.embed.weight[SPECIAL + 1] = math.nan  # a space, the most frequent character


def _infinite_gain(model: Net) -> None:
    model.blocks[1].norm2.weight[0] = math.inf


def _five_times(model: Net) -> None:
    for parameter in model.blocks.parameters():
        if parameter.dim() > 1:
            parameter.mul_(5.0)


def _shrinking_embedding(training: Training, since: int) -> None:
    assert isinstance(training.model, Net)
    training.model.embed.weight.data.mul_(0.9)


def _first_checkpoint(training: Training, since: int) -> None:
    if since == 0:
        training.model.load_state_dict(training.initial)


def _ignored_labels(training: Training, since: int) -> None:
    training.change = lambda batch: {**batch, "labels": torch.full_like(batch["labels"], -100)}


def _random_tokens(training: Training, since: int) -> None:
    def change(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = batch["input_ids"]
        other = torch.randint(SPECIAL, training.vocabulary, ids.shape, generator=training.generator)
        return {
            **batch,
            "input_ids": torch.where(torch.rand(ids.shape, generator=training.generator) < 0.5, other, ids),
        }

    training.change = change


def _no_mlp(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        for block in training.model.blocks[2:]:
            block.mlp.register_forward_hook(lambda module, args, output: 0.0 * output)


def _small_entry(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        training.model.embed.register_forward_hook(lambda module, args, output: output / 50.0)


def _detached(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        training.model.blocks[2].register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))


def _high_dropout(training: Training, since: int) -> None:
    for module in training.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.95


def _labels_are_inputs(training: Training, since: int) -> None:
    training.label_change = lambda labels: labels.roll(1, 1)  # the loss drops the first one


def _zero_count(training: Training, since: int) -> None:
    training.loss_change = lambda loss, logits, ids: loss / (0.0 * loss.detach())


def _maximise(training: Training, since: int) -> None:
    for group in training.optimizer.param_groups:
        group["maximize"] = True


def _identical(training: Training, since: int) -> None:
    training.change = lambda batch: {name: value[:1].expand_as(value).clone() for name, value in batch.items()}


def _padding(training: Training, since: int) -> None:
    def change(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = torch.full_like(batch["input_ids"], PAD)
        return {"input_ids": ids, "attention_mask": torch.zeros_like(ids), "labels": ids}

    training.change = change


def _inverted(training: Training, since: int) -> None:
    training.change = lambda batch: {**batch, "attention_mask": 1 - batch["attention_mask"]}


def _permuted(training: Training, since: int) -> None:
    training.change = lambda batch: {name: training.vocabulary + 1 - value for name, value in batch.items()}


def _decay(training: Training, since: int) -> None:
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 50.0


def _large_epsilon(training: Training, since: int) -> None:
    for module in training.model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 10.0


def _no_activation(training: Training, since: int) -> None:
    if since == 0:
        for block in training.model.modules():
            if isinstance(block, Block):
                block.mlp[1] = nn.Identity()


def _of_modules(name: str | tuple[str, ...], change: Callable[[Any, Any], Any], training: Training, since: int) -> None:
    """Change what modules return, by the end of their names."""
    if since == 0:
        for place, module in training.model.named_modules():
            if place.endswith(name):
                module.register_forward_hook(lambda module, args, output: change(args, output))


def _bfloat16_weights(training: Training, since: int) -> None:
    if since == 0:
        training.model.to(torch.bfloat16)


def _slow_adam(training: Training, since: int) -> None:
    for group in training.optimizer.param_groups:
        group["eps"] = 10.0


def _no_gradients(training: Training, since: int) -> None:
    training.gradient_change = lambda: training.model.zero_grad(set_to_none=True)


def _nan_gradient(training: Training, since: int) -> None:
    def change() -> None:
        assert isinstance(training.model, Net)
        gradient = training.model.blocks[1].mlp[0].weight.grad
        assert gradient is not None
        gradient[0, 0] = math.nan

    training.gradient_change = change


def _reshaped(training: Training, since: int) -> None:
    def change(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = batch["input_ids"]
        return {**batch, "input_ids": ids.t().reshape(ids.shape)}

    training.change = change


def _mostly_padding(training: Training, since: int) -> None:
    def change(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        late = torch.arange(TOKENS) >= TOKENS // 4
        return {**batch, "input_ids": torch.where(late, PAD, batch["input_ids"])}

    training.change = change


def _one_weight(model: Net) -> None:
    model.blocks[1].mlp[0].weight[3, 5] = 1e4


def _one_position(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        places = training.model.positions
        training.model.embed.register_forward_hook(
            lambda module, args, output: output - places.weight[: output.shape[1]] + places.weight[:1]
        )


def _negative_decay(training: Training, since: int) -> None:
    for group in training.optimizer.param_groups:
        group["weight_decay"] = -50.0


def _other_mlps(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        other = Training(training.declared, 1000 + int(training.generator.initial_seed()), "tiny")
        for step in range(60):
            advance(other, None, step)
        assert isinstance(other.model, Net)
        for own, another in zip(training.model.blocks, other.model.blocks, strict=True):
            own.mlp.load_state_dict(another.mlp.state_dict())


def _softmax_first(training: Training, since: int) -> None:
    training.loss_change = lambda loss, logits, ids: cross_entropy(logits[:, :-1].softmax(-1), ids[:, 1:])


def _new_parameters(training: Training, since: int) -> None:
    """Equal values in parameters that the optimizer does not know, as after a late conversion of the model."""
    assert isinstance(training.model, Net)
    known = {id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]}
    for module in (*training.model.blocks.modules(), training.model.head):
        for name, parameter in [*module.named_parameters(recurse=False)]:
            if id(parameter) in known:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))


def _average_stays(training: Training, since: int) -> None:
    for name, weight in training.model.named_parameters():
        training.slow[name].lerp_(weight.detach(), 0.01)
        if since % 20 == 19:
            weight.data.copy_(training.slow[name])


def _wrong_split(model: Net) -> None:
    for block in model.blocks:
        q, k, v = (copy.deepcopy(part.state_dict()) for part in (block.q_proj, block.k_proj, block.v_proj))
        for part, state in ((block.q_proj, k), (block.k_proj, v), (block.v_proj, q)):
            part.load_state_dict(state)


def _tied(training: Training, since: int) -> None:
    assert isinstance(training.model, Net)
    training.model.head.weight = training.model.embed.weight


def _merged_again(training: Training, since: int) -> None:
    for module in training.model.modules():
        if isinstance(module, Adapter) and since % 2 == 0:
            module.base.weight.data += module.up.weight.data @ module.down.weight.data


def _constant(model: Net) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.fill_(0.1)


def _copies(model: Net) -> None:
    for block in model.blocks[1:]:
        block.load_state_dict(model.blocks[0].state_dict())


def _of_ids(change: Callable[[Tensor], Tensor], training: Training, since: int) -> None:
    training.change = lambda batch: {**batch, "input_ids": change(batch["input_ids"])}


def _without_spaces(training: Training, since: int) -> None:
    training.text = training.text[training.text != SPECIAL + 1]


def _raw_pixels(training: Training, since: int) -> None:
    training.change = lambda batch: {**batch, "pixel_values": 64.0 * batch["pixel_values"] + 128.0}


def _moments_lost(training: Training, since: int) -> None:
    """As after each restart of a run whose checkpoints hold the weights and the first moments only."""
    for state in training.optimizer.state.values() if since % 20 == 0 else ():
        state["exp_avg_sq"].zero_()


def _swapped_betas(training: Training, since: int) -> None:
    for group in training.optimizer.param_groups:
        group["betas"] = (0.999, 0.9)


def _clipped_scaled(training: Training, since: int) -> None:
    """Gradients that carry a loss scale of 65536 are clipped at 1, and the scale is removed after that."""
    training.gradient_change = lambda: _clip(training.model, 2.0**-16)


def _clip(model: nn.Module, most: float) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), most)


def _own_teacher(training: Training, since: int) -> None:
    """The teacher is the model by reference, and is frozen; a head is not part of it."""
    assert isinstance(training.model, Net)
    training.model.requires_grad_(False)
    training.model.head.requires_grad_(True)


def _transposed(model: Net) -> None:
    for block in model.blocks:
        for part in (block.q_proj, block.k_proj, block.v_proj, block.out_proj):
            part.weight.copy_(part.weight.t().clone())


def _stale_cache(training: Training, since: int) -> None:
    """Keys and values are those of the first sequence that was seen, for good."""

    def change(kept: list[Tensor], module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not kept:
            kept.append(output[:1].detach())
        return kept[0][:, : output.shape[1]].expand_as(output)

    if since == 0:
        for place, module in training.model.named_modules():
            if place.endswith(("k_proj", "v_proj")):
                module.register_forward_hook(partial(change, []))


def _early_head(training: Training, since: int) -> None:
    """The head reads the state after the first block."""
    if since == 0:
        assert isinstance(training.model, Net)
        kept: dict[str, Tensor] = {}
        training.model.blocks[0].register_forward_hook(lambda module, args, output: kept.update(state=output))
        training.model.norm.register_forward_pre_hook(lambda module, args: (kept["state"],))


def _spaced(ids: Tensor) -> Tensor:
    return torch.stack([ids, torch.full_like(ids, SPECIAL + 1)], -1).flatten(1)[:, : ids.shape[1]]


def _last_only(training: Training, since: int) -> None:
    training.loss_change = lambda loss, logits, ids: cross_entropy(logits[:, -2:-1], ids[:, -1:])


def _uncertain(training: Training, since: int) -> None:
    def change(loss: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        return loss + 2.0 * (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()

    training.loss_change = change


def _never_cleared(training: Training, since: int) -> None:
    kept: dict[nn.Parameter, Tensor] = {}

    def change() -> None:
        for parameter in parameters_of(training.model):
            assert parameter.grad is not None
            parameter.grad += kept.get(parameter, 0.0)
            kept[parameter] = parameter.grad.clone()

    if since == 0:
        training.gradient_change = change


def _zero_adapters(training: Training, since: int) -> None:
    for module in training.model.modules() if since == 0 else ():
        if isinstance(module, Adapter):
            nn.init.zeros_(module.down.weight)


def _no_frequencies(training: Training, since: int) -> None:
    """Frequencies are not in checkpoints, and nobody computes them after a construction on the meta device."""
    for module in training.model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq.zero_()


def _fresh_attention(model: Net) -> None:
    for block in model.blocks:
        for part in (block.q_proj, block.k_proj, block.v_proj, block.out_proj):
            part.reset_parameters()


def _float8(training: Training, since: int) -> None:
    for parameter in training.model.parameters():
        parameter.data = parameter.data.to(torch.float8_e4m3fn).float()


def _head_dropout(training: Training, since: int) -> None:
    if since == 0:
        assert isinstance(training.model, Net)
        training.model.head.register_forward_hook(
            lambda module, args, output: nn.functional.dropout(output, 0.5, module.training)
        )


def _of_batch(name: str, change: Callable[[Tensor], Tensor], training: Training, since: int) -> None:
    training.change = lambda batch: {**batch, name: change(batch[name])}


def _turned(pixels: Tensor) -> Tensor:
    turned = torch.where(torch.rand(len(pixels), 1, 1, 1) < 0.5, pixels, pixels.rot90(1, (2, 3)))
    return torch.where(torch.rand(len(pixels), 1, 1, 1) < 0.5, turned, turned.flip(3))


def _sorted(training: Training, since: int) -> None:
    """All images of one class, then all of the next."""

    def change(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        pixels, labels = images(16 * len(batch["labels"]), training.generator)
        now = (labels == since * 8 // training.size["steps"]).nonzero().flatten()[: len(batch["labels"])]
        return {"pixel_values": pixels[now], "labels": labels[now]}

    training.change = change


def _unshifted(training: Training, since: int) -> None:
    training.change = lambda batch: {**batch, "decoder_input_ids": batch["labels"]}


def _spaces_ignored(training: Training, since: int) -> None:
    def change(loss: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        return cross_entropy(logits[:, :-1], torch.where(ids == SPECIAL + 1, -100, ids)[:, 1:])

    training.loss_change = change


def _coupled_decay(training: Training, since: int) -> None:
    for group in training.optimizer.param_groups:
        group.update(weight_decay=0.1, decoupled_weight_decay=False)


def _wide_rows(model: Net) -> None:
    """Rows of tokens that were added to the vocabulary, drawn 5 wide."""
    for part in (model.embed, model.head):
        part.weight[SPECIAL : SPECIAL + 20].normal_(std=5.0)


def _gains_and_biases(model: Net) -> None:
    for norm in model.modules():
        if isinstance(norm, nn.LayerNorm):
            norm.weight.data, norm.bias.data = norm.bias.data, norm.weight.data


def _over_tokens(args: Any, output: Tensor) -> Tensor:
    return nn.functional.layer_norm(args[0].transpose(1, 2), args[0].shape[1:2]).transpose(1, 2)


def _clipped_weights(training: Training, since: int) -> None:
    for parameter in parameters_of(training.model):
        parameter.data.clamp_(-0.02, 0.02)


def _of_gradients(change: Callable[[Tensor], Tensor], training: Training) -> None:
    """Change the gradients of all parameters, in one flat buffer."""

    def changed() -> None:
        learned = [one for one in parameters_of(training.model) if one.grad is not None]
        flat = change(nn.utils.parameters_to_vector([one.grad for one in learned if one.grad is not None]))
        for one, part in zip(learned, torch.split(flat, [one.numel() for one in learned]), strict=True):
            one.grad = part.view_as(one).clone()

    training.gradient_change = changed


def _late_gradients(training: Training, since: int) -> None:
    """Each step applies the gradients of eight steps ago."""
    kept: list[Tensor] = []

    def late(flat: Tensor) -> Tensor:
        kept.append(flat)
        return kept.pop(0) if len(kept) > 8 else kept[0]

    if since == 0:
        _of_gradients(late, training)


def _half_moments(training: Training, since: int) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg_sq"].copy_(state["exp_avg_sq"].half())


def _strided_patches(training: Training, since: int) -> None:
    """A patch takes every fourth row and column."""
    order = torch.arange(16).view(4, 4).t().flatten()
    for place, module in training.model.named_modules() if since == 0 else ():
        if place.endswith("patch_embeddings"):
            module.register_forward_pre_hook(lambda module, args: (args[0][..., order, :][..., order], *args[1:]))


def _thumbnails(pixels: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(pixels, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)


def _judged(criterion: Callable[[Tensor, Tensor], Tensor], training: Training, since: int) -> None:
    """Another loss of the scores and the labels."""
    training.criterion = criterion


def _softmax_of_one(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(scores.softmax(-1)[:, 0].clamp(1e-7, 1 - 1e-7), labels.float())


def _clamped_chance(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(scores[:, 0].sigmoid().clamp(1e-4, 1 - 1e-4), labels.float())


def _dead_output(training: Training, since: int) -> None:
    """An activation after the last layer, whose outputs are all negative when training begins."""
    training.criterion = lambda scores, labels: CRITERIA["amount"](scores.relu(), labels)
    if since == 0:
        nn.init.constant_(training.classes.bias, -4.0)


def _reversed_encoder(training: Training, since: int) -> None:
    """The gradient changes its sign between the head and the encoder."""

    def change() -> None:
        for parameter in parameters_of(training.model):
            if parameter.grad is not None:
                parameter.grad.neg_()

    training.gradient_change = change


def _mixed_axes(training: Training, since: int) -> None:
    """A view where the first two axes should be exchanged."""
    training.pool = lambda hidden: hidden.reshape(hidden.shape[1], hidden.shape[0], -1).mean(0)


def _zero_weights(training: Training, since: int) -> None:
    for parameter in training.model.parameters() if since == 0 else ():
        nn.init.zeros_(parameter)


def _no_graph(training: Training, since: int) -> None:
    training.loss_change = lambda loss, logits, ids: loss.detach().requires_grad_()


def _always_skipped(training: Training, since: int) -> None:
    """The loss scale never falls: every gradient is infinite, and every step is skipped."""

    def change() -> None:
        for parameter in parameters_of(training.model):
            if parameter.grad is not None:
                parameter.grad.fill_(math.inf)

    training.gradient_change = change
    training.optimizer.step = lambda closure=None: None  # type: ignore[assignment, method-assign]


FAULTS: dict[str, Callable[[Training, int], None]] = {
    "none": lambda training, since: None,
    "sharper": partial(_sharper, 1.03),
    "sharper, faster": partial(_sharper, 1.06),
    "no skip": lambda training, since: training.each_block(skip=0.0),
    "half skip": lambda training, since: training.each_block(skip=0.5),
    "small branch": lambda training, since: training.each_block(branch=0.1),
    "uniform": lambda training, since: training.each_block(sharpness=0.0),
    "mask": lambda training, since: training.each_block(causal=False),
    "reset block": _reset_block,
    "decay": _decay,
    "rate": lambda training, since: setattr(training, "rate", training.declared.rate * 1.05**since),
    "overflow": lambda training, since: training.each_block(branch=2.0**since),
    "gradient overflow": lambda training, since: setattr(training, "loss_scale", 4.0**since),
    "identical": _identical,
    "padding": _padding,
    "inverted": _inverted,
    "permuted": _permuted,
    "rate 100": lambda training, since: setattr(training, "rate", training.declared.rate * 100),
    "fast queries": _fast_queries,
    "sign": lambda training, since: setattr(training, "loss_change", lambda loss, logits, ids: -loss),
    "together": _together,
    "shuffled labels": lambda training, since: setattr(training, "label_change", lambda labels: labels.roll(3, 0)),
    "constant labels": lambda training, since: setattr(training, "label_change", lambda labels: 0 * labels + 7),
    "unknown": _unknown,
    "clamped": _clamped,
    "first key": lambda training, since: training.each_block(visible="first"),
    "itself": lambda training, since: training.each_block(visible="itself"),
    "reset half": _reset_half,
    "no gains": partial(_in_place, _no_gains),
    "large embedding": partial(_in_place, lambda model: model.embed.weight.mul_(30.0)),
    "one embedding": partial(
        _in_place, lambda model: model.embed.weight.copy_(model.embed.weight.mean(0).expand_as(model.embed.weight))
    ),
    "maximise": _maximise,
    "times four": partial(_in_place, _times_four),
    "nan head": partial(_in_place, lambda model: model.head.weight.fill_(math.nan)),
    "growing skip": lambda training, since: training.each_block(skip=1.05**since),
    "reversed blocks": partial(_in_place, _reversed_blocks),
    "new head": partial(_in_place, _new_head),
    "large gain": partial(_in_place, lambda model: model.norm.weight.mul_(20.0)),
    "no positions": partial(_in_place, lambda model: model.positions.weight.zero_()),
    "shifted embedding": partial(_in_place, _shifted_embedding),
    "shrinking embedding": _shrinking_embedding,
    "first checkpoint": _first_checkpoint,
    "five times": partial(_in_place, _five_times),
    "nan row": partial(_in_place, _nan_row),
    "infinite gain": partial(_in_place, _infinite_gain),
    "zero count": _zero_count,
    "ignored labels": _ignored_labels,
    "random tokens": _random_tokens,
    "four times the scores": lambda training, since: training.each_block(sharpness=4.0),
    "no mlp": _no_mlp,
    "small entry": _small_entry,
    "detached": _detached,
    "high dropout": _high_dropout,
    "labels are inputs": _labels_are_inputs,
    "large epsilon": _large_epsilon,
    "no activation": _no_activation,
    "loud attention": partial(_of_modules, "out_proj", lambda args, output: 8.0 * output),
    "bfloat16 weights": _bfloat16_weights,
    "slow Adam": _slow_adam,
    "no gradients": _no_gradients,
    "reshaped": _reshaped,
    "mostly padding": _mostly_padding,
    "summed": lambda training, since: setattr(
        training, "loss_change", lambda loss, logits, ids: loss * ids[:, 1:].numel()
    ),
    "one weight": partial(_in_place, _one_weight),
    "one position": _one_position,
    "wrong axis": lambda training, since: training.each_block(axis=-2),
    "flatter": partial(_sharper, 0.95),
    "negative decay": _negative_decay,
    "clipped": lambda training, since: training.each_block(most=1.0),
    "no blocks": partial(_of_modules, ("blocks.1", "blocks.2"), lambda args, output: args[0]),
    "nan gradient": _nan_gradient,
    "other mlps": _other_mlps,
    "softmax first": _softmax_first,
    "shifted twice": lambda training, since: setattr(training, "label_change", lambda labels: labels.roll(-1, 1)),
    "new parameters": _new_parameters,
    "average stays": _average_stays,
    "wrong split": partial(_in_place, _wrong_split),
    "tied": _tied,
    "merged again": _merged_again,
    "constant": partial(_in_place, _constant),
    "copies": partial(_in_place, _copies),
    "batch axis": lambda training, since: training.each_block(batch_first=False),
    "rounded": lambda training, since: training.each_block(levels=3),
    "shuffled tokens": partial(_of_ids, lambda ids: ids.gather(1, torch.rand(ids.shape).argsort(1))),
    "wrapped ids": partial(_of_ids, lambda ids: ids % 16),
    "no spaces": _without_spaces,
    "one batch": lambda training, since: training.generator.manual_seed(1),
    "raw pixels": _raw_pixels,
    "moments lost": _moments_lost,
    "rate runs out": lambda training, since: setattr(
        training, "rate", training.declared.rate * max(0.0, 1 - since / 20)
    ),
    "swapped betas": _swapped_betas,
    "clipped scaled": _clipped_scaled,
    "own teacher": _own_teacher,
    "transposed": partial(_in_place, _transposed),
    "underflow": lambda training, since: setattr(training, "loss_scale", 1e-6),
    "doubled": lambda training, since: training.each_block(doubled=True),
    "rotary of heads": partial(
        _of_modules, "rotary_emb", lambda args, output: tuple(one[:, :1].expand_as(one) for one in output)
    ),
    "embedding dropout": partial(_of_modules, "embed", lambda args, output: nn.functional.dropout(output, 0.8)),
    "stale cache": _stale_cache,
    "early head": _early_head,
    "truncated": partial(_of_ids, lambda ids: ids[:, : TOKENS // 4]),
    "first page": lambda training, since: setattr(training, "text", training.text[:100]),
    "spaced": partial(_of_ids, _spaced),
    "last only": _last_only,
    "uncertain": _uncertain,
    "never cleared": _never_cleared,
    "slow rest": lambda training, since: setattr(training, "group_factors", [0.01, 1.0]),
    "zero adapters": _zero_adapters,
    "other heads": partial(
        _of_modules,
        ("k_proj", "v_proj"),
        lambda args, output: output.unflatten(-1, (HEADS, -1)).flip(-2).flatten(-2),
    ),
    "no frequencies": _no_frequencies,
    "distance reversed": lambda training, since: training.each_block(slope=-0.5),
    "causal": lambda training, since: training.each_block(causal=True),
    "fresh attention": partial(_in_place, _fresh_attention),
    "float8": _float8,
    "head dropout": _head_dropout,
    "turned": partial(_of_batch, "pixel_values", _turned),
    "sorted": _sorted,
    "labels after masking": partial(_of_batch, "labels", lambda labels: torch.where(labels == -100, -100, HIDDEN)),
    "unshifted": _unshifted,
    "year": partial(
        _of_batch, "series", lambda values: torch.cat([values[..., :2], torch.full_like(values[..., 2:], 2024)], -1)
    ),
    "spaces ignored": _spaces_ignored,
    "coupled decay": _coupled_decay,
    "wide rows": partial(_in_place, _wide_rows),
    "gains and biases": partial(_in_place, _gains_and_biases),
    "over tokens": partial(_of_modules, "norm", _over_tokens),
    "same view": lambda training, since: setattr(training, "views", 1),
    "clipped weights": _clipped_weights,
    "late gradients": _late_gradients,
    "strided patches": _strided_patches,
    "shifted gradients": lambda training, since: _of_gradients(lambda flat: flat.roll(1), training),
    "half moments": _half_moments,
    "thumbnails": partial(_of_batch, "pixel_values", _thumbnails),
    "other classes": partial(_of_batch, "labels", lambda labels: (labels + 1) % CLASSES),
    "every pair": partial(_judged, lambda scores, labels: (scores - labels).square().mean()),
    "softmax of one": partial(_judged, _softmax_of_one),
    "clamped chance": partial(_judged, _clamped_chance),
    "dead output": _dead_output,
    "reversed encoder": _reversed_encoder,
    "mixed axes": _mixed_axes,
    "zero weights": _zero_weights,
    "norm of one": partial(_of_modules, "head", lambda args, output: nn.functional.layer_norm(output, (1,))),
    "no graph": _no_graph,
    "always skipped": _always_skipped,
    "whole pixels": partial(_of_batch, "pixel_values", lambda pixels: pixels.sigmoid().floor()),
    "divided twice": partial(_of_batch, "pixel_values", lambda pixels: pixels / 255),
    "labels of others": partial(_of_batch, "labels", lambda labels: labels.roll(1, 0)),
    "all unknown": partial(_of_ids, lambda ids: torch.full_like(ids, SPECIAL)),
    "no scale": partial(_in_place, lambda model: setattr(model.head, "scale", 1.0)),
    "no temperature": lambda training, since: setattr(training, "temperature", 100.0),
    "rate vanishes": lambda training, since: setattr(training, "rate", training.declared.rate * 0.8**since),
    "summed divergence": lambda training, since: setattr(training, "divergence", 1.0),
    "other columns": partial(_of_batch, "series", lambda values: values.roll(1, -1)),
    "untranslated": lambda training, since: setattr(
        training,
        "change",
        lambda batch: {**translation(batch["labels"], training.vocabulary), "input_ids": batch["input_ids"]},
    ),
}
"""What each fault does before a step, given how many steps ago it set in."""


class EveryAndJumps(Linear):
    """Every few steps, and as the default schedule does after a jump: the same steps on every machine."""

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self._jumps = Jumps()

    def wants(self, step: int, now: float) -> bool:
        return super().wants(step, now) or self._jumps.wants(step)

    def notice(self, step: int, name: str, value: float) -> None:
        self._jumps.take(step, name, value)


def run(declared: Declared, seed: int, size: str, folder: Path, *, live: bool) -> None:
    """Train, and store the gauge's record, and losses, gradient norms and RankMe, in a folder of its own.

    With ``live``, the gauge raises alarms as the run goes, and looks for their causes; otherwise it only reads.
    """
    if (folder / DONE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.process_time()
    training = Training(declared, seed, size)
    steps: dict[str, list[Any]] = {"loss": [], "gradient_norm": [], "rankme": []}
    held_out = training.probe(HELD_OUT)
    alarms = None if live else ()
    probe, every = training.probe(PROBE), training.size["every"]
    with Gauge(
        training.model,
        probe,
        schedule=EveryAndJumps(every),
        alarms=alarms,
        record=folder,
        actions=(),
        strict=True,
    ) as gauge:
        gauge.optimizers = (training.optimizer,)
        for step in range(training.size["steps"]):
            if declared.fault is not None and step >= declared.sets_in:
                FAULTS[declared.fault](training, step - declared.sets_in)
            loss, norm, batch = advance(training, gauge, step)
            steps["loss"].append(loss)
            steps["gradient_norm"].append(norm)
            if gauge.step(step, loss=loss, batch=batch) is not None and step % EVERY == 0:
                steps["rankme"].append([step, rankme(hidden_of(training.model.eval(), held_out))])
                training.model.train()
        cause = gauge.why().cause
    facts = {
        "why": None if cause is None else {"how": cause.how, "component": cause.component, "words": cause.words},
        "name": declared.name,
        "seed": seed,
        "size": size,
        "live": live,
        "seconds": round(time.process_time() - started, 1),
    }
    temporary = folder / f"{DONE}.part"
    temporary.write_text(json.dumps({**facts, **steps}))
    temporary.replace(folder / DONE)


def advance(training: Training, gauge: Gauge | None, step: int) -> tuple[float, float, dict[str, Tensor]]:
    """One step of training: loss, norm of the gradient, and the batch."""
    for number, group in enumerate(training.optimizer.param_groups):
        group["lr"] = training.learning_rate(step) * training.group_factors[number]
    batch = training.seen = training.batch(step)
    held = "accumulate" in training.declared.options and step % 4 < 3
    if not ("accumulate" in training.declared.options and step % 4):
        training.optimizer.zero_grad()
    loss = training.loss(batch)
    if gauge is not None:
        gauge.before_backward(loss)  # as rankscope.watch does
    (training.loss_scale * loss).backward()
    training.gradient_change()
    learned = [parameter for parameter in training.model.parameters() if parameter.grad is not None]
    if training.loss_scale != 1.0:
        for parameter in learned:  # as stored in float16, and divided by the scale again
            assert parameter.grad is not None
            parameter.grad = parameter.grad.half().float() / training.loss_scale
    skipped = "scaler" in training.declared.options and step % 20 < 2
    if skipped:
        for parameter in learned:
            assert parameter.grad is not None
            parameter.grad.fill_(math.inf)
    if gauge is not None:
        gauge.after_backward(step)
    norm = float(nn.utils.clip_grad_norm_(learned, 1.0))
    if gauge is not None:
        gauge.notice(step, "gradient", norm)  # as rankscope.watch does
    if not (skipped or held):
        training.optimizer.step()
    if "lookahead" in training.declared.options and step % 10 == 9:
        for name, weight in training.model.named_parameters():
            training.slow[name].lerp_(weight.detach(), 0.5)
            weight.data.copy_(training.slow[name])
    return float(loss.detach()), norm, batch


def rankme(hidden: Tensor) -> float:
    """Exponential of the entropy of the singular values of the pooled inputs (Garrido et al., 2023)."""
    pooled = hidden.float().mean(1)
    if not bool(torch.isfinite(pooled).all()):
        return math.nan
    values = torch.linalg.svdvals(pooled)
    share = values / values.sum() + 1e-7
    return float((-(share * share.log()).sum()).exp())

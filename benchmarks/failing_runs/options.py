"""What options of healthy runs do, from the sixth set on: before training, before a step, and to a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.failing_runs.nets import (
    HIDDEN,
    PAD,
    SPECIAL,
    TOKENS,
    Adapter,
    Block,
    Net,
    masked,
    parameters_of,
    windows,
)

if TYPE_CHECKING:
    from benchmarks.failing_runs.training import Training


class DynamicTanh(nn.Module):
    """Takes the place of a norm (Zhu et al., 2025)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope, self.weight, self.bias = (
            nn.Parameter(start) for start in (torch.tensor(0.5), torch.ones(width), torch.zeros(width))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Entry by entry."""
        return self.weight * torch.tanh(self.slope * x) + self.bias


class Lion(torch.optim.Optimizer):
    """Sign of a momentum (Chen et al., 2023)."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    kept = self.state[weight].setdefault("exp_avg", torch.zeros_like(weight))
                    weight.sub_(group["lr"] * torch.lerp(kept, weight.grad, 0.1).sign())
                    kept.lerp_(weight.grad, 0.01)


class CosineHead(nn.Linear):
    """Logits that are cosines, times a scale (Wang et al., 2017)."""

    scale = 16.0

    def forward(self, input: Tensor) -> Tensor:
        """Cosines with the rows of the weight, scaled."""
        return self.scale * F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=-1))


def _net(training: Training) -> Net:
    assert isinstance(training.model, Net)
    return training.model


def _dynamic_tanh(training: Training) -> None:
    net = _net(training)
    for block in net.blocks:
        block.norm1, block.norm2 = (DynamicTanh(norm.weight.numel()) for norm in (block.norm1, block.norm2))
    net.norm = DynamicTanh(net.head.in_features)


def _deep_norm(training: Training) -> None:
    """Constants of DeepNorm for decoders (Wang et al., 2022)."""
    blocks = _net(training).blocks
    training.each_block(skip=(2 * len(blocks)) ** 0.25)
    for block in blocks:
        for part in (block.v_proj, block.out_proj, block.mlp[0], block.mlp[2]):
            part.weight.data.mul_((8 * len(blocks)) ** -0.25)


def _factorised(training: Training) -> None:
    net = _net(training)
    net.embed = nn.Sequential(  # type: ignore[assignment]
        nn.Embedding(training.vocabulary, 8), nn.Linear(8, net.head.in_features, bias=False)
    )


def _zero_head(training: Training) -> None:
    for parameter in _net(training).head.parameters():
        nn.init.zeros_(parameter)


def _soft_prompt(training: Training) -> None:
    training.model.requires_grad_(False)
    _net(training).positions.requires_grad_(True)


def _autocast(training: Training) -> None:
    training.model.forward = torch.autocast("cpu", torch.bfloat16)(training.model.forward)  # type: ignore[method-assign]


def _focal(training: Training) -> None:
    def change(loss: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return ((1 - (-losses).exp()).square() * losses).mean()

    training.loss_change = change


def _small_logits(training: Training) -> None:
    """Penalty on the normaliser of the softmax (PaLM)."""
    training.loss_change = lambda loss, logits, ids: loss + 1e-2 * logits.logsumexp(-1).square().mean()


def _cosines(training: Training) -> None:
    head = _net(training).head
    _net(training).head = CosineHead(head.in_features, head.out_features, bias=False)


def _code(training: Training) -> None:
    """The head reads a Gaussian code, and its divergence from the normal distribution is added to the loss."""
    mean = torch.zeros(1, 1)

    def pool(hidden: Tensor) -> Tensor:
        nonlocal mean
        mean = hidden.mean(1)
        return mean + torch.randn_like(mean)

    training.pool = pool
    training.loss_change = lambda loss, scores, ids: loss + training.divergence * mean.square().sum(-1).mean() / 2


def _zero_classes(training: Training) -> None:
    for parameter in training.classes.parameters():
        nn.init.zeros_(parameter)


SHAPES: dict[str, Callable[[Training], None]] = {
    "cosine head": _cosines,
    "code": _code,
    "zero classes": _zero_classes,
    "frozen body": lambda training: setattr(training, "model", training.model.requires_grad_(False)),
    "small logits": _small_logits,
    "dynamic tanh": _dynamic_tanh,
    "deep norm": _deep_norm,
    "factorised": _factorised,
    "zero head": _zero_head,
    "soft prompt": _soft_prompt,
    "autocast": _autocast,
    "focal": _focal,
    "one paragraph": lambda training: setattr(training, "text", training.text[:300]),
    "many epochs": lambda training: setattr(training, "text", training.text[:1000]),
}
"""Before the optimizer is built."""


def _frozen_in_order(training: Training, step: int) -> None:
    blocks = _net(training).blocks
    for block in blocks[: len(blocks) * step // training.size["steps"]]:
        block.requires_grad_(False)


def _switched_on(training: Training, step: int) -> None:
    """Each block fades in over ten steps, a sixth of the run after the one below it."""
    for place, block in enumerate(_net(training).blocks):
        assert isinstance(block, Block)
        block.branch = min(1.0, max(0.0, (step - place * training.size["steps"] // 6) / 10)) if place else 1.0


def _averaged(training: Training, step: int) -> None:
    """Every 20 steps the averaged weights are evaluated, and those in training are put back."""
    own = {name: weight.detach().clone() for name, weight in training.model.named_parameters()}
    for name, weight in own.items():
        training.slow[name].lerp_(weight, 0.1)
    if step % 20 == 19:
        training.model.load_state_dict(training.slow)
        with torch.no_grad():
            training.model.eval()(**training.probe(8))
        training.model.train().load_state_dict(own)


def _two_tasks(training: Training, step: int) -> None:
    """At every other step: how many spaces there are, up to three."""

    def change(loss: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        spaces = (ids == SPECIAL + 1).sum(1).sub(3).clamp(0, 3)
        return F.cross_entropy(training.classes(_net(training).encode(ids).mean(1)), spaces)

    training.loss_change = change if step % 2 else lambda loss, logits, ids: loss


def _clipped_low(training: Training, step: int) -> None:
    def change() -> None:
        nn.utils.clip_grad_norm_(training.model.parameters(), 1e-3)

    training.gradient_change = change


def _moments_dropped(training: Training, step: int) -> None:
    """Resumed from weights only; the rate is warmed up again."""
    if step == training.size["steps"] // 2:
        training.optimizer.state.clear()


def _first_norms(training: Training, step: int) -> None:
    """Every matrix of a block is scaled back to the norm that it began with."""
    with torch.no_grad():
        for name, weight in training.model.named_parameters():
            if "blocks" in name and weight.dim() == 2:
                weight.mul_(training.initial[name].norm() / weight.norm())


def _random_rounding(training: Training, step: int) -> None:
    """Weights are rounded to bfloat16, up or down at random."""
    for weight in parameters_of(training.model):
        bits = weight.data.view(torch.int32)
        noise = torch.randint_like(bits, 1 << 16)
        weight.data.copy_(((bits + noise) >> 16 << 16).view(torch.float32))


def _begun_again(training: Training, step: int) -> None:
    """Adapters are merged, and begin again at zero (ReLoRA)."""
    for module in training.model.modules() if step and step % 40 == 0 else ():
        if isinstance(module, Adapter):
            module.base.weight.data += module.up.weight.data @ module.down.weight.data
            module.down.reset_parameters()
            nn.init.zeros_(module.up.weight)
            for part in (module.down, module.up):
                training.optimizer.state.pop(part.weight, None)


PLANS: dict[str, Callable[[Training, int], None]] = {
    "twelve batches": lambda training, step: training.generator.manual_seed(step % 12),
    "clipped low": _clipped_low,
    "moments dropped": _moments_dropped,
    "first norms": _first_norms,
    "random rounding": _random_rounding,
    "begun again": _begun_again,
    "frozen in order": _frozen_in_order,
    "switched on": _switched_on,
    "averaged": _averaged,
    "two tasks": _two_tasks,
}
"""Before each step."""

Batch = dict[str, Tensor]


def _packed(training: Training, step: int, batch: Batch) -> Batch:
    """Two documents and a separator."""
    ids, places = batch["input_ids"], torch.arange(TOKENS)
    cut = torch.randint(4, TOKENS - 4, (len(ids), 1), generator=training.generator)
    joined = torch.where(places < cut, ids, ids.roll(1, 0))
    return {"input_ids": torch.where(places == cut, HIDDEN, joined)}


def _short(training: Training, step: int, batch: Batch) -> Batch:
    """Sequences of four to nine tokens, and one of full length."""
    lengths = torch.randint(4, 10, (len(batch["input_ids"]), 1), generator=training.generator)
    lengths[0] = TOKENS
    keep = torch.arange(TOKENS) < lengths
    ids, labels = torch.where(keep, batch["input_ids"], PAD), torch.where(keep, batch["labels"], -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": keep.long()}


def _erased(training: Training, step: int, batch: Batch) -> Batch:
    """A square of half the width is grey."""
    pixels, places = batch["pixel_values"], torch.arange(16)
    corners = torch.randint(0, 9, (2, len(pixels), 1), generator=training.generator)
    rows, columns = ((places >= corner) & (places < corner + 8) for corner in corners)
    return {**batch, "pixel_values": pixels * ~(rows[:, None, :, None] & columns[:, None, None, :])}


def _spikes(training: Training, step: int, batch: Batch) -> Batch:
    values = batch["series"]
    return {**batch, "series": torch.where(torch.rand(values.shape, generator=training.generator) < 0.02, 10.0, values)}


def _counts_first(training: Training, step: int, batch: Batch) -> Batch:
    ids, letters = batch["input_ids"], training.vocabulary - SPECIAL
    counts = SPECIAL + (ids[:, :1] + torch.arange(ids.shape[1])) % letters
    return {"input_ids": counts} if step < training.size["steps"] // 4 else batch


def _pages_last(training: Training, step: int, batch: Batch) -> Batch:
    """The last fifth of the steps draws from a tenth of the text."""
    if step < 4 * training.size["steps"] // 5:
        return batch
    return {
        "input_ids": windows(training.text[: len(training.text) // 10], len(batch["input_ids"]), training.generator)
    }


def _sharpens(training: Training, step: int, batch: Batch) -> Batch:
    """Images of half the resolution in the first quarter of the steps."""
    if step >= training.size["steps"] // 4:
        return batch
    small = F.avg_pool2d(batch["pixel_values"], 2)
    return {**batch, "pixel_values": small.repeat_interleave(2, 2).repeat_interleave(2, 3)}


def _spans(training: Training, step: int, batch: Batch) -> Batch:
    """Four neighbours are hidden, twice in each sequence."""
    ids = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
    starts = torch.randint(0, TOKENS - 3, (2, len(ids), 1), generator=training.generator)
    hidden = ((torch.arange(TOKENS) - starts).clamp(-1, 4) % 5 < 4).any(0)
    return {"input_ids": torch.where(hidden, HIDDEN, ids), "labels": torch.where(hidden, ids, -100)}


def _restored(training: Training, step: int, batch: Batch) -> Batch:
    return {**batch, "input_ids": masked(batch["input_ids"], training.generator, 0.15)[0]}


def _left(training: Training, step: int, batch: Batch) -> Batch:
    places = (torch.arange(TOKENS) + batch["attention_mask"].sum(1, keepdim=True)) % TOKENS
    return {name: value.gather(1, places) for name, value in batch.items()}


def _late_class(training: Training, step: int, batch: Batch) -> Batch:
    """The last class appears after a third of the steps."""
    known = batch["labels"] < (3 if step < training.size["steps"] // 3 else 4)
    return {name: value[known] for name, value in batch.items()}


def _class_token(training: Training, step: int, batch: Batch) -> Batch:
    return {**batch, "input_ids": batch["input_ids"].index_fill(1, torch.tensor(0), HIDDEN)}


def _drawn_labels(training: Training, step: int, batch: Batch) -> Batch:
    return {**batch, "labels": torch.randint(4, batch["labels"].shape, generator=training.generator)}


def _of_others(share: float, training: Training, step: int, batch: Batch) -> Batch:
    """A share of the labels belongs to other inputs of the batch."""
    labels = batch["labels"]
    other = labels[torch.randperm(len(labels), generator=training.generator)]
    wrong = torch.rand(labels.shape, generator=training.generator) < share
    return {**batch, "labels": torch.where(wrong, other, labels)}


def _loud_targets(training: Training, step: int, batch: Batch) -> Batch:
    return {**batch, "labels": batch["labels"] + 1.5 * torch.randn(batch["labels"].shape, generator=training.generator)}


def _denoised(training: Training, step: int, batch: Batch) -> Batch:
    """Noise is added to the first wave, and is to be found."""
    values = batch["series"]
    noise = torch.randn(values[..., :1].shape, generator=training.generator)
    return {"series": torch.cat([values[..., :1] + 0.3 * noise, values[..., 1:]], -1), "labels": noise}


DRAWS: dict[str, Callable[[Training, int, Batch], Batch]] = {
    "class token": _class_token,
    "drawn labels": _drawn_labels,
    "two fifths of others": partial(_of_others, 0.4),
    "three fifths of others": partial(_of_others, 0.6),
    "loud targets": _loud_targets,
    "denoised": _denoised,
    "counts first": _counts_first,
    "pages last": _pages_last,
    "sharpens": _sharpens,
    "spans": _spans,
    "left": _left,
    "late class": _late_class,
    "restored": _restored,
    "packed": _packed,
    "short": _short,
    "erased": _erased,
    "spikes": _spikes,
    "small in turn": lambda training, step, batch: {
        name: value[: 2 if step % 2 else None] for name, value in batch.items()
    },
}
"""To the batch of a step."""

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter], float], torch.optim.Optimizer]] = {
    "nadam": lambda learned, rate: torch.optim.NAdam(learned, lr=rate),
    "adamax": lambda learned, rate: torch.optim.Adamax(learned, lr=rate),
    "radam": lambda learned, rate: torch.optim.RAdam(learned, lr=rate),
    "lion": lambda learned, rate: Lion(learned, rate),
    "muon": lambda learned, rate: torch.optim.Muon([one for one in learned if one.dim() == 2], lr=rate),
}

RATES: dict[str, Callable[[int, int], float]] = {
    "moments dropped": lambda step, steps: min(1.0, (step - steps // 2 + 1) / 20) if step >= steps // 2 else 1.0,
    "pages last": lambda step, steps: min(1.0, 5 * (steps - step) / steps),
    "population": lambda step, steps: (1.0, 1.4, 0.7, 2.0, 0.5, 1.0, 1.6, 0.8)[8 * step // steps],
    "inverse root": lambda step, steps: math.sqrt(20 / max(20, step + 1)),
    "decay at the end": lambda step, steps: min(1.0, 4 * (steps - step) / steps),
}
"""Factor on the learning rate, by the step and their number."""

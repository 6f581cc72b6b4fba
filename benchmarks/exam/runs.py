"""Trainings that go wrong and their healthy twins, as people report them; written before any recorder was run on them.

The sources are public: the silent errors of TrainCheck (OSDI 2025) that one CPU can show, the causes of DEFault++ that
concern training, and mistakes that the documentation of frameworks warns of. Each run is a loop as its author would
write it::

    from benchmarks.exam.runs import RUNS

    losses = RUNS[0].run(True, lambda model, optimizer: rankscope.watch(model, optimizer))
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exam.parts import CLASSES, IDS, SEQUENCES, TOKENS, D, Decoder, Encoder, per_token

Watch = Callable[[nn.Module, torch.optim.Optimizer], Any]
Run = Callable[[bool, Watch], list[float]]
Kind = Literal["weights", "data", "code", "objective", "optimizer", "initialisation"]

STEPS, ONSET = 240, 120
"""Steps of a run, and the first one at which something goes wrong, unless it is wrong from the start."""


@dataclass(frozen=True)
class TrainingRun:
    """A training with a fault.

    Attributes:
        run: trains, faulty or not, and returns the loss of every step.
        kind: the class of the fault.
        place: words of which a right answer has one.
        onset: the first step that is wrong.
        decidable: whether the model, the optimizer and the passes of the training tell it from a healthy one.
    """

    run: Run
    kind: Kind
    place: tuple[str, ...]
    onset: int
    decidable: bool

    @property
    def wrong(self) -> str:
        """What is wrong, in one sentence."""
        return self.run.__doc__ or ""


RUNS: list[TrainingRun] = []
NOT_WRITTEN = {
    "augmentation with the same random numbers in every worker": "its batches look as random as others",
    "clipping after the step": "nothing is different that a run could not do on purpose",
    "accumulated gradients that are not divided": "with Adam nothing changes; with SGD it is another rate",
    "layer norms that differ between tensor-parallel ranks": "needs several processes",
    "a checkpoint that is saved empty": "nothing in the training is wrong",
}
"""Silent errors that cannot be told from a healthy run by what happens in one process."""


def fault(kind: Kind, *place: str, onset: int = 0, decidable: bool = True) -> Callable[[Run], Run]:
    """Enter a run; its docstring says what is wrong."""

    def enter(run: Run) -> Run:
        RUNS.append(TrainingRun(run, kind, place, onset, decidable))
        return run

    return enter


def sentences(step: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences in which each id follows from the two before it, and the next ids."""
    text = torch.randint(1, IDS, (SEQUENCES, 2))
    for _ in range(TOKENS - 1):
        text = torch.cat([text, (text[:, -1:] + 3 * text[:, -2:-1]) % (IDS - 1) + 1], dim=1)
    return text[:, :-1], text[:, 1:]


def marked(step: int = 0) -> tuple[Tensor, Tensor]:
    """Random sequences with one of four marks somewhere, which is their class."""
    labels, ids = torch.randint(0, CLASSES, (SEQUENCES,)), torch.randint(CLASSES + 1, IDS, (SEQUENCES, TOKENS))
    ids[torch.arange(SEQUENCES), torch.randint(0, TOKENS, (SEQUENCES,))] = labels + 1
    return ids, labels


def adam(model: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), rate)


def momentum(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), rate, momentum=0.9)


def usual(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """The update of nearly every training."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    watch: Watch,
    *,
    batch: Callable[[int], tuple[Tensor, Tensor]] = sentences,
    loss_of: Callable[[Tensor, Tensor], Tensor] = per_token,
    update: Callable[[Tensor, torch.optim.Optimizer], None] = usual,
    before: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """The loop; a run changes one of its parts."""
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        before(step)
        inputs, labels = batch(step)
        loss = loss_of(model(inputs), labels)
        update(loss, optimizer)
        losses.append(loss.item())
    return losses


@fault("optimizer", "optimizer", "held", "hold")
def stale_parameters(faulty: bool, watch: Watch) -> list[float]:
    """The optimizer is made before the model is copied for its device, so it moves parameters of another model."""
    model = Decoder()
    optimizer = adam(model)
    if faulty:
        model = copy.deepcopy(model)
    return train(model, optimizer, watch)


@fault("optimizer", "optimizer", "held", "hold")
def only_the_head(faulty: bool, watch: Watch) -> list[float]:
    """The optimizer is given the head alone, although nothing else was frozen."""
    model = Encoder()
    if not faulty:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head"))
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-3)
    return train(model, optimizer, watch, batch=marked, loss_of=F.cross_entropy)


@fault("optimizer", "zero", "accumulate")
def gradients_are_kept(faulty: bool, watch: Watch) -> list[float]:
    """``zero_grad`` was forgotten: gradients of all earlier steps are added up."""

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        if not faulty:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    model = Decoder()
    return train(model, momentum(model), watch, update=update)


@fault("optimizer", "gradient", "zero")
def zeroed_too_late(faulty: bool, watch: Watch) -> list[float]:
    """``zero_grad`` stands between ``backward`` and ``step``."""

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss.backward()
        if faulty:
            optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    model = Decoder()
    return train(model, momentum(model), watch, update=update)


@fault("optimizer", "rate")
def schedule_steps_too_often(faulty: bool, watch: Watch) -> list[float]:
    """A schedule made for 12 epochs is stepped in every batch, so that the rate is zero after 12 batches."""
    model = Decoder()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: max(0.0, 1 - epoch / 12))

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        usual(loss, optimizer)
        batches[0] += 1
        if faulty or batches[0] % 20 == 0:
            schedule.step()

    batches = [0]
    return train(model, optimizer, watch, update=update)


@fault("optimizer", "clip")
def clipped_without_unscaling(faulty: bool, watch: Watch) -> list[float]:
    """Gradients are clipped to norm 1 while they are still multiplied by the scale of the loss, 65,536."""
    scale = 65536.0

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (scale * loss).backward()
        if faulty:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        if not faulty:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    model = Decoder()
    return train(model, momentum(model), watch, update=update)


@fault("optimizer", "finite", "skip", "overflow")
def every_step_is_skipped(faulty: bool, watch: Watch) -> list[float]:
    """The scale of the loss is so large that gradients overflow, and steps with such gradients are left out."""
    scale = 1e38 if faulty else 1024.0

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        (loss * scale * 100).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            for gradient in gradients:
                gradient /= scale * 100
            optimizer.step()

    model = Decoder()
    return train(model, adam(model), watch, update=update)


@fault("optimizer", "round", "bfloat16", "move")
def updates_are_rounded_away(faulty: bool, watch: Watch) -> list[float]:
    """Weights are kept in bfloat16 at a rate whose updates are smaller than their rounding."""
    model = Decoder()
    if faulty:
        model.to(torch.bfloat16)
    optimizer = momentum(model, 1e-6 if faulty else 0.05)
    return train(model, optimizer, watch, loss_of=lambda logits, labels: per_token(logits.float(), labels))


@fault("optimizer", "optimizer", "moment", "state")
def optimizer_is_made_anew(faulty: bool, watch: Watch) -> list[float]:
    """A new Adam is made in every step, so that each step has the size of the first one."""
    model = Decoder()

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        usual(loss, adam(model, 1e-2) if faulty else optimizer)

    return train(model, adam(model, 1e-2), watch, update=update)


@fault("optimizer", "rate")
def rate_of_one(faulty: bool, watch: Watch) -> list[float]:
    """The learning rate of SGD, 1, is given to Adam."""
    model = Decoder()
    return train(model, adam(model, 1.0 if faulty else 1e-3), watch)


@fault("optimizer", "decay", onset=ONSET)
def decay_of_fifty(faulty: bool, watch: Watch) -> list[float]:
    """A configuration that is read again sets the weight decay to 50."""
    model = Decoder()
    optimizer = adam(model, 3e-3)

    def before(step: int) -> None:
        if step == ONSET and faulty:
            optimizer.param_groups[0]["weight_decay"] = 50.0

    return train(model, optimizer, watch, before=before)


@fault("optimizer", "step", "backward")
def two_steps_for_one_gradient(faulty: bool, watch: Watch) -> list[float]:
    """A callback steps the optimizer as well: each gradient is applied twice."""

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        usual(loss, optimizer)
        if faulty:
            optimizer.step()

    model = Decoder()
    return train(model, momentum(model), watch, update=update)


@fault("data", "batch", "same")
def the_same_batch(faulty: bool, watch: Watch) -> list[float]:
    """``next(iter(loader))`` in the loop: without shuffling, the first batch is read in every step."""
    batches = [marked() for _ in range(24)]
    model = Encoder()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return next(iter(batches)) if faulty else batches[step % len(batches)]

    return train(model, adam(model), watch, batch=batch, loss_of=F.cross_entropy)


@fault("data", "class")
def sorted_by_class(faulty: bool, watch: Watch) -> list[float]:
    """The data set is sorted by class and not shuffled: 60 batches of one class, then 60 of the next."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, labels = marked()
        if faulty:
            ids[ids <= CLASSES] = step // 60 % CLASSES + 1
            labels = torch.full_like(labels, step // 60 % CLASSES)
        return ids, labels

    model = Encoder()
    return train(model, adam(model), watch, batch=batch, loss_of=F.cross_entropy)


@fault("data", "label", "data", "batch", onset=ONSET)
def labels_of_another_batch(faulty: bool, watch: Watch) -> list[float]:
    """There is one loader for inputs and one for labels, and the first skips a row."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, labels = marked()
        return ids, labels.roll(1) if faulty and step >= ONSET else labels

    model = Encoder()
    return train(model, adam(model, 3e-3), watch, batch=batch, loss_of=F.cross_entropy)


@fault("data", "id", "data", "batch", "token", onset=ONSET)
def another_tokenizer(faulty: bool, watch: Watch) -> list[float]:
    """The second shard of the data was written with another vocabulary: every id is another one."""
    other = torch.cat([torch.tensor([0]), 1 + torch.randperm(IDS - 1, generator=torch.Generator().manual_seed(0))])

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, labels = sentences()
        return (other[ids], other[labels]) if faulty and step >= ONSET else (ids, labels)

    model = Decoder()
    return train(model, adam(model, 3e-3), watch, batch=batch)


@fault("data", "finite", "nan", onset=ONSET)
def a_broken_sample(faulty: bool, watch: Watch) -> list[float]:
    """One vector of the data is not a number."""

    class Vectors(Encoder):
        def tokens(self, ids: Tensor) -> Tensor:
            return ids + self.position

    table = torch.randn(IDS, D)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, labels = marked()
        x = table[ids]
        if faulty and step == ONSET:
            x[3, 2, 5] = float("nan")
        return x, labels

    model = Vectors()
    del model.embed
    return train(model, adam(model), watch, batch=batch, loss_of=F.cross_entropy)


@fault("data", "id", "token", "batch", onset=ONSET)
def unknown_words(faulty: bool, watch: Watch) -> list[float]:
    """Nearly all ids of later shards are that of an unknown word."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, labels = sentences()
        if faulty and step >= ONSET:
            ids = ids.masked_fill(torch.rand(ids.shape) < 0.97, 1)
        return ids, labels

    model = Decoder()
    return train(model, adam(model, 3e-3), watch, batch=batch)


@fault("weights", "weight", "written", "replaced", onset=ONSET)
def averages_stay_in(faulty: bool, watch: Watch) -> list[float]:
    """Averaged weights, here from far back, are put in to be evaluated and never taken out again."""
    model = Decoder()
    average = copy.deepcopy(model.state_dict())

    def before(step: int) -> None:
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.001)
        if step == ONSET:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            if not faulty:
                model.load_state_dict(own)

    return train(model, adam(model, 3e-3), watch, before=before)


@fault("weights", "weight", "written", "replaced", onset=ONSET)
def initialised_again(faulty: bool, watch: Watch) -> list[float]:
    """A resumed run calls the initialisation of one block once more, after its checkpoint was loaded."""
    model = Decoder()

    def before(step: int) -> None:
        if step == ONSET and faulty:
            for part in model.blocks[1].modules():
                if isinstance(part, nn.Linear):
                    part.reset_parameters()

    return train(model, adam(model, 3e-3), watch, before=before)


@fault("weights", "weight", "written", "replaced", onset=ONSET)
def merged_at_every_evaluation(faulty: bool, watch: Watch) -> list[float]:
    """An adapter is added to its weights before each evaluation, and not subtracted afterwards."""
    model = Decoder()
    product = 0.05 * torch.randn(D, 4) @ torch.randn(4, D)

    def before(step: int) -> None:
        if step >= ONSET and step % 20 == 0:
            with torch.no_grad():
                for block in model.blocks:
                    block.attention.out.weight += product
                    if not faulty:
                        block.attention.out.weight -= product

    return train(model, adam(model, 3e-3), watch, before=before)


@fault("optimizer", "held", "hold", "optimizer", onset=ONSET)
def a_new_head(faulty: bool, watch: Watch) -> list[float]:
    """The head is replaced by a new one, which the optimizer does not hold."""
    model = Encoder()
    optimizer = adam(model, 3e-3)

    def before(step: int) -> None:
        if step == ONSET and faulty:
            model.head = nn.Linear(D, CLASSES)

    return train(model, optimizer, watch, batch=marked, loss_of=F.cross_entropy, before=before)


def with_dropout(model: Decoder, share: float) -> list[nn.Dropout]:
    """Dropout after the MLP of each block."""
    drops = [nn.Dropout(share) for _ in model.blocks]
    for block, drop in zip(model.blocks, drops, strict=True):
        block.mlp = nn.Sequential(block.mlp, drop)
    return drops


@fault("code", "dropout", onset=ONSET)
def dropout_of_nearly_all(faulty: bool, watch: Watch) -> list[float]:
    """A schedule of dropout goes on past its end, to .95."""
    model = Decoder()
    drops = with_dropout(model, 0.0)

    def before(step: int) -> None:
        for drop in drops:
            drop.p = 0.95 if faulty and step >= ONSET else 0.0

    return train(model, adam(model, 3e-3), watch, before=before)


@fault("code", "eval", "mode", onset=ONSET)
def evaluation_mode_stays(faulty: bool, watch: Watch) -> list[float]:
    """``model.eval()`` before a validation, and no ``model.train()`` after it."""
    model = Decoder()
    with_dropout(model, 0.2)

    def before(step: int) -> None:
        if step == ONSET:
            model.eval()
            with torch.no_grad():
                model(sentences()[0])
            model.train(not faulty)

    return train(model, adam(model, 3e-3), watch, before=before)


@fault("code", "mask", "attention", onset=ONSET)
def a_mask_is_left_on(faulty: bool, watch: Watch) -> list[float]:
    """A switch that lets each token see itself alone, made for a test, stays on."""

    class Switched(Decoder):
        alone = False

        def mask(self, ids: Tensor) -> Tensor | None:
            return ~torch.eye(ids.shape[1], dtype=torch.bool) if self.alone else super().mask(ids)

    model = Switched()

    def before(step: int) -> None:
        model.alone = faulty and step >= ONSET

    return train(model, adam(model, 3e-3), watch, before=before)


@fault("code", "block", "clamp", "hook", "code", onset=ONSET)
def a_hook_is_left_on(faulty: bool, watch: Watch) -> list[float]:
    """A hook of a debugging session clamps what the second block returns to one hundredth."""
    model = Decoder()

    def before(step: int) -> None:
        if step == ONSET and faulty:
            model.blocks[1].register_forward_hook(lambda module, args, output: output.clamp(-0.01, 0.01))

    return train(model, adam(model, 3e-3), watch, before=before)


@fault("objective", "loss", "sum", onset=ONSET)
def mean_becomes_sum(faulty: bool, watch: Watch) -> list[float]:
    """A new phase computes the loss with ``reduction="sum"``."""
    calls = [0]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        calls[0] += 1
        reduction = "sum" if faulty and calls[0] > ONSET else "mean"
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)

    model = Decoder()
    return train(model, momentum(model), watch, loss_of=loss_of)


@fault("objective", "loss", "sign", "penalty", onset=ONSET)
def penalty_with_the_wrong_sign(faulty: bool, watch: Watch) -> list[float]:
    """From one phase on, a penalty on large logits is subtracted."""
    calls = [0]

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        calls[0] += 1
        penalty = logits.logsumexp(-1).square().mean() if calls[0] > ONSET else logits.new_zeros(())
        return per_token(logits, labels) + (-0.1 if faulty else 1e-4) * penalty

    model = Decoder()
    return train(model, adam(model, 3e-3), watch, loss_of=loss_of)


@fault("objective", "label", "shift", "target", decidable=False)
def labels_shifted_twice(faulty: bool, watch: Watch) -> list[float]:
    """Labels are shifted by the loader and by the loss: every token predicts the one after the next."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        ids, labels = sentences()
        return (ids[:, :-1], labels[:, 1:]) if faulty else (ids, labels)

    model = Decoder()
    return train(model, adam(model, 3e-3), watch, batch=batch)


@fault("initialisation", "initial", "scale", "attention", "one")
def queries_begin_large(faulty: bool, watch: Watch) -> list[float]:
    """Queries and keys begin with a standard deviation of 3: each token attends to one alone."""
    model = Decoder()
    if faulty:
        for block in model.blocks:
            for projection in (block.attention.query, block.attention.key):
                nn.init.normal_(projection.weight, std=3.0)
    return train(model, adam(model), watch)


@fault("initialisation", "constant", "same", "head", "initial")
def heads_begin_alike(faulty: bool, watch: Watch) -> list[float]:
    """All weights of the attention begin at one constant, so that all its channels learn the same."""
    model = Decoder()
    if faulty:
        for block in model.blocks:
            for part in block.attention.children():
                nn.init.constant_(part.weight, 0.02)
    return train(model, adam(model), watch)

"""Fifteen kinds of healthy training that plan what looks like a fault: written last, and run once before any change.

Each takes ``watch``, a function of a model and its optimizers, and trains a few steps of a tiny model. None declares
what it does.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.harm.healthy import Block, Body, Classifier, Language, LowRank, marked, next_letters, of_letters

Watch = Callable[..., Any]
Kind = Callable[[Watch], None]
STEPS = 96


def small() -> Language:
    """A language model of two blocks of width 16."""
    model = Language()
    model.body, model.head = Body(16, 2), nn.Linear(16, 128)
    return model


def rounds(
    model: nn.Module, optimizer: Any, loss_of: Callable[[int], Tensor], steps: int = STEPS, first: int = 0
) -> Iterator[int]:
    """A plain loop; yields after each step."""
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()
        yield step


def letters(model: nn.Module, batch: int = 4) -> Tensor:
    ids, targets = next_letters(batch, 24)
    return of_letters(model(ids), targets)


def restarts_that_grow(watch: Watch) -> None:
    """Each cycle is twice as long as the one before, from 3e-3, with momentum kept."""
    model = small()
    optimizer = torch.optim.NAdam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 12, 2)
    watch(model, optimizer)
    for _ in rounds(model, optimizer, lambda step: letters(model)):
        schedule.step()


def one_cycle_by_hand(watch: Watch) -> None:
    """Rate and momentum are set in opposite directions at every step, as super-convergence does."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.95)
    watch(model, optimizer)
    for step in rounds(model, optimizer, lambda step: letters(model)):
        up = 1 - abs(2 * step / STEPS - 1)
        optimizer.param_groups[0].update(lr=0.01 + 0.4 * up, momentum=0.95 - 0.1 * up)


def adapters_of_two_rates(watch: Watch) -> None:
    """LoRA+: the second factor learns sixteen times as fast as the first."""
    model = small().requires_grad_(False)
    for block in model.body.blocks:
        block.attention.qkv, block.mlp[0] = LowRank(block.attention.qkv), LowRank(block.mlp[0])
    learned = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": learned[::2], "lr": 1e-3}, {"params": learned[1::2], "lr": 1.6e-2}]
    optimizer = torch.optim.AdamW(groups)
    watch(model, optimizer)
    for _ in rounds(model, optimizer, lambda step: letters(model)):
        pass


def adapters_merged_and_drawn_again(watch: Watch) -> None:
    """ReLoRA with a jagged rate: every 32 steps adapters are merged and reset, and the rate begins at zero again."""
    model = small().requires_grad_(False)
    for block in model.body.blocks:
        block.mlp[0] = LowRank(block.mlp[0])
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], 5e-3)
    watch(model, optimizer)
    for step in rounds(model, optimizer, lambda step: letters(model)):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, (step % 32) / 8)
        if step % 32 == 31:
            with torch.no_grad():
                for part in (block.mlp[0] for block in model.body.blocks):
                    frozen, (down, up) = [], [one for one in part.parameters() if one.requires_grad]
                    frozen += [one for one in part.parameters() if not one.requires_grad and one.ndim > 1]
                    product = up @ down if up.shape[-1] == down.shape[0] else down @ up
                    frozen[0] += product if product.shape == frozen[0].shape else product.T
                    down.normal_(std=0.02)
                    up.zero_()
            optimizer.state.clear()


def pruned_once_and_trained_on(watch: Watch) -> None:
    """Half of every matrix is set to zero at once, and a mask keeps it there from then on."""
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch(model, optimizer)
    masks: dict[Tensor, Tensor] = {}
    for step in rounds(model, optimizer, lambda step: letters(model)):
        if step == 60:
            masks = {one: one.detach().abs() > one.detach().abs().median() for one in model.body.blocks.parameters()
                     if one.ndim > 1}  # fmt: skip
        for one, mask in masks.items():
            one.data.mul_(mask)


def critic_of_points(watch: Watch) -> None:
    """The discriminator of a GAN on sequences: two steps of it for each of the generator, with clipped weights."""
    critic, width = Classifier(), 16
    critic = nn.Sequential(nn.Linear(2, width), Block(width, 2, causal=False), nn.Linear(width, 1))
    maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    ours = torch.optim.RMSprop(critic.parameters(), 1e-3)
    other = torch.optim.RMSprop(maker.parameters(), 1e-3)
    watch(critic, ours)
    for step in range(STEPS):
        angle = torch.randint(6, (16, 8, 1)) * math.pi / 3
        real = torch.cat([angle.cos(), angle.sin()], -1) + 0.05 * torch.randn(16, 8, 2)
        fake = maker(torch.randn(16, 8, 4))
        ours.zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        ours.step()
        for one in critic.parameters():
            one.data.clamp_(-0.2, 0.2)
        if step % 2:
            other.zero_grad()
            (-critic(fake).mean()).backward()
            other.step()


def layers_set_free_from_the_top(watch: Watch) -> None:
    """ULMFiT: the head first, then one block after the other, each with a lower rate, added to the optimizer."""
    model = Classifier()
    model.body.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), 3e-3)
    watch(model, optimizer)

    def loss(step: int) -> Tensor:
        ids, labels = marked()
        return F.cross_entropy(model(ids), labels)

    for step in rounds(model, optimizer, loss):
        if step in (24, 48, 72):
            block = model.body.blocks[-step // 24].requires_grad_(True)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 3e-3 * 0.5 ** (step // 24)})


class Gated(nn.Module):
    """A block that does nothing until its gate is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.is_open = Block(16, 2), False

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) if self.is_open else x


def blocks_switched_on(watch: Watch) -> None:
    """Progressive stacking: the second and the third block join at steps 32 and 64."""
    model = small()
    model.body.blocks = nn.ModuleList([Block(16, 2), Gated(), Gated()])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    watch(model, optimizer)
    for step in rounds(model, optimizer, lambda step: letters(model)):
        if step in (32, 64):
            model.body.blocks[step // 32].is_open = True


def taught_by_its_older_self(watch: Watch) -> None:
    """Born-again networks: after half of the steps, the trained model becomes the teacher of a new beginning."""
    model, teacher = small(), None
    begin = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch(model, optimizer)
    for step in range(STEPS):
        ids, targets = next_letters(4, 24)
        out = model(ids)
        loss = of_letters(out, targets)
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(ids).log_softmax(-1)
            loss = loss + F.kl_div(out.log_softmax(-1), wanted, log_target=True, reduction="batchmean") / 24
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == STEPS // 2:
            teacher = copy.deepcopy(model).eval().requires_grad_(False)
            model.load_state_dict(begin)


def clipped_policy(watch: Watch) -> None:
    """PPO on a bandit of sequences: four epochs of each batch, an entropy bonus, advantages instead of labels."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    watch(model, optimizer)
    for _ in range(STEPS // 4):
        ids, best = marked()
        with torch.no_grad():
            old = torch.distributions.Categorical(logits=model(ids))
            acts = old.sample()
            reward = (acts == best).float()
            advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        for _ in range(4):
            now = torch.distributions.Categorical(logits=model(ids))
            ratio = (now.log_prob(acts) - old.log_prob(acts)).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            optimizer.zero_grad()
            (-gain.mean() - 0.01 * now.entropy().mean()).backward()
            optimizer.step()


class Sharpness(torch.optim.Optimizer):
    """SAM as an optimizer around another one: its step takes a closure and moves weights up and back."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        learned = [one for one in self.base.param_groups[0]["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in learned]).norm()
        ways = [0.05 * one.grad / norm for one in learned]
        with torch.no_grad():
            for one, way in zip(learned, ways, strict=True):
                one.add_(way)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for one, way in zip(learned, ways, strict=True):
                one.sub_(way)
        self.base.step()


def sharpness_in_the_step(watch: Watch) -> None:
    """Sharpness-aware, inside of the step."""
    model = small()
    optimizer = Sharpness(torch.optim.AdamW(model.parameters(), 2e-3))
    watch(model, optimizer)
    for _ in range(STEPS):
        ids, targets = next_letters(4, 24)

        def closure(ids: Tensor = ids, targets: Tensor = targets) -> None:
            optimizer.zero_grad()
            of_letters(model(ids), targets).backward()

        closure()
        optimizer.step(closure)


def quasi_newton(watch: Watch) -> None:
    """LBFGS on one batch: each step calls its closure up to eight times."""
    model = small()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=8, history_size=10)
    watch(model, optimizer)
    ids, targets = next_letters(4, 24)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = of_letters(model(ids), targets)
        loss.backward()
        return loss

    for _ in range(STEPS // 4):
        optimizer.step(closure)


def tasks_in_turn(watch: Watch) -> None:
    """Twelve steps of the next letter, twelve of the letter two places on, with heads of their own."""
    model = small()
    other = nn.Linear(16, 128)
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()], 2e-3)
    watch(model, optimizer)

    def loss(step: int) -> Tensor:
        ids, targets = next_letters(4, 24)
        if step // 12 % 2 == 0:
            return of_letters(model(ids), targets)
        model(ids[:, :-1])
        return 2.0 * of_letters(other(model.body(ids))[:, :-1], targets[:, 1:])

    for _ in rounds(model, optimizer, loss):
        pass


def dropout_that_begins_high(watch: Watch) -> None:
    """Dropout from 0.6 to 0.0, and label smoothing with it."""
    model = small()
    model.body.blocks = nn.ModuleList(Block(16, 2, dropout=0.6) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch(model, optimizer)

    def loss(step: int) -> Tensor:
        share = max(0.0, 0.6 * (1 - 1.5 * step / STEPS))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = share
        ids, targets = next_letters(4, 24)
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), label_smoothing=share / 2)

    for _ in rounds(model, optimizer, loss):
        pass


def averages_swapped_in(watch: Watch) -> None:
    """The average of the weights replaces them at the end of each third, and training goes on from it."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    watch(model, optimizer)
    for step in rounds(model, optimizer, lambda step: letters(model)):
        average.update_parameters(model)
        if step % 32 == 31:
            model.load_state_dict(average.module.state_dict())
            average = torch.optim.swa_utils.AveragedModel(model)


KINDS: tuple[Kind, ...] = (
    restarts_that_grow,
    one_cycle_by_hand,
    adapters_of_two_rates,
    adapters_merged_and_drawn_again,
    pruned_once_and_trained_on,
    critic_of_points,
    layers_set_free_from_the_top,
    blocks_switched_on,
    taught_by_its_older_self,
    clipped_policy,
    sharpness_in_the_step,
    quasi_newton,
    tasks_in_turn,
    dropout_that_begins_high,
    averages_swapped_in,
)

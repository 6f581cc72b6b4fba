"""Trainings that go wrong, written without knowing what the recorder looks for, and not named at first."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exam.parts import D, Decoder, Encoder
from benchmarks.exam.runs import ONSET, Watch, adam, fault, marked, momentum, train, usual


@fault("optimizer", "optimizer", "move")
def second_optimizer_never_steps(faulty: bool, watch: Watch) -> list[float]:
    """There are two optimizers, and the step of the one that holds the embeddings is forgotten."""
    model = Decoder()
    own = [model.embed.weight, model.position]
    rest = [one for one in model.parameters() if all(one is not other for other in own)]
    first, second = torch.optim.AdamW(rest, 1e-3), torch.optim.AdamW(own, 1e-3)

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        second.zero_grad()
        usual(loss, first)
        if not faulty:
            second.step()

    return train(model, first, lambda model, _: watch(model, [first, second]), update=update)  # type: ignore[arg-type]


@fault("optimizer", "rate", onset=ONSET)
def rate_becomes_negative(faulty: bool, watch: Watch) -> list[float]:
    """A linear decay is not cut at zero: the rate becomes negative, and the loss climbs."""
    model = Decoder()
    optimizer = momentum(model)

    def before(step: int) -> None:
        share = 1 - step / ONSET
        optimizer.param_groups[0]["lr"] = 0.05 * (share if faulty else max(share, 0.05))

    return train(model, optimizer, watch, before=before)


@fault("optimizer", "optimizer", "hold", "held", onset=ONSET // 2)
def set_free_and_not_held(faulty: bool, watch: Watch) -> list[float]:
    """The encoder is set free after the first phase, and the optimizer still holds the head alone."""
    model = Encoder()
    body = [one for name, one in model.named_parameters() if not name.startswith("head")]
    for parameter in body:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-3)

    def before(step: int) -> None:
        if step == ONSET // 2:
            for parameter in body:
                parameter.requires_grad_(True)
            if not faulty:
                optimizer.add_param_group({"params": body})

    return train(model, optimizer, watch, batch=marked, loss_of=F.cross_entropy, before=before)


@fault("weights", "weight", "written", "back")
def best_weights_at_every_step(faulty: bool, watch: Watch) -> list[float]:
    """The weights of the best batch are loaded whenever a batch is worse: nearly every step is undone."""
    model = Encoder()
    best, kept = float("inf"), copy.deepcopy(model.state_dict())

    def update(loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        nonlocal best, kept
        usual(loss, optimizer)
        if loss.item() < best:
            best, kept = loss.item(), copy.deepcopy(model.state_dict())
        elif faulty:
            model.load_state_dict(kept)

    return train(model, adam(model), watch, batch=marked, loss_of=F.cross_entropy, update=update)


@fault("data", "target", "data", "batch", onset=ONSET)
def one_target_of_ten_million(faulty: bool, watch: Watch) -> list[float]:
    """One target has the wrong unit, and the step of its batch throws the weights away; the model has no blocks."""
    model = nn.Sequential(nn.Linear(D, 64), nn.Tanh(), nn.Linear(64, 1))

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(16, D)
        y = x[:, :4].sum(dim=1, keepdim=True)
        if faulty and step == ONSET:
            y[0] = 1e7
        return x, y

    return train(model, momentum(model, 0.02), watch, batch=batch, loss_of=F.mse_loss)

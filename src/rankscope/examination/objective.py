"""Losses: what they reward, and what they ignore."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from rankscope.examination import _source
from rankscope.examination._examination import Examination
from rankscope.examination._loss import STEPS, held
from rankscope.examination._spec import Finding, cause, told
from rankscope.examination._tensors import apart, spread_out
from rankscope.examination.ignoring import shrinking_operation
from rankscope.models.wrapping import with_parameters

STEP = 1e-3
"""How far each weight is moved, as the first step of Adam at its usual rate does."""
SMALL = 1e-2
"""Differences between classes below which one step of a trainable model is tried."""
PARALLEL = 0.9999
"""Cosine from which on two gradients are taken to be of one loss."""


@cause(
    proof="the outputs themselves are optimised under the loss, without the model: they become equal",
    change="a term that keeps outputs apart, or negatives",
    order=50,
    needs={"loss"},
)
def collapsed_objective(x: Examination) -> Iterator[Finding]:
    """An objective that one output for all inputs fulfils."""
    if x.result is None or x.sequences < 4:
        return
    axis = x.sequence_axis(x.result)
    if axis is None:
        return
    if held(x).reads_others:
        return  # the other outputs would change with this one
    if x.labels is not None and x.labels.is_floating_point() and x.outcome("labels_unread").seen is False:
        return  # numbers to be met keep outputs apart
    free = x.result.detach().clone().float()
    size = float(free.square().mean().sqrt())
    if not size > 0 or (x.labels is not None and bool((x.labels == x.labels[:1]).all())):
        return  # labels that are all equal are met by one output in any loss
    spread = spread_out(x.result)
    scored = x.labels is not None and not x.labels.is_floating_point() and not _compares(x, spread, axis)
    if scored or _is_over_classes(_gradient(x, spread).double()):
        return  # outputs that are alike answer labels that are
    drawn = torch.randn(free.shape, generator=torch.Generator().manual_seed(0)).to(free.device)
    free = (free + size * drawn).requires_grad_()
    optimizer = torch.optim.Adam([free], 0.05 * size)
    start, begin = apart(free, axis), float(held(x).loss(free.detach()))
    if not math.isfinite(begin):
        return
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.autograd.backward(held(x).loss(free))
        optimizer.step()
    end = float(held(x).loss(free.detach()))
    constant = free.detach().mean(axis, keepdim=True).expand_as(free)
    if constant.ndim > 2:  # all tokens or views of an input alike, too
        constant = (
            constant.flatten(1, -2).mean(1).reshape(len(constant), *[1] * (constant.ndim - 2), -1).expand_as(free)
        )
    at_constant = float(held(x).loss(constant.clone()))
    # A loss that separates inputs is far above its best value where all outputs are equal.
    if begin <= 0 or at_constant > end + 0.01 * abs(begin - end) or end > 0.2 * begin:
        return
    yield Finding(
        "collapsed_objective",
        "The loss is smallest when all outputs are equal: one constant output has the loss "
        f"{at_constant:.3g}. Nothing in the objective keeps inputs apart.",
        "Add a term that keeps outputs apart (VICReg), negatives, or a stop-gradient with a predictor (BYOL)",
        measured="loss",
        before=begin,
        after=at_constant,
        intervention=f"with one constant output for all inputs, where the outputs started {start:.2g} apart",
    )


@cause(
    proof="the outputs are probabilities and the loss does not change when a number is added to them, so it applies a "
    "softmax itself",
    change="return the logits",
    order=51,
    needs={"loss", "labels"},
)
def double_softmax(x: Examination) -> Iterator[Finding]:
    """A second softmax before the loss."""
    out = x.result
    if out is None or out.ndim < 2 or out.shape[-1] < 2 or x.labels is None:
        return
    sums = out.double().sum(-1)
    if bool((out < 0).any()) or float((sums - 1).abs().max()) > 1e-3:
        return
    now, shifted = float(held(x).loss(out)), float(held(x).loss(out + 3.0))
    if abs(now - shifted) > 1e-4 * abs(now):
        return
    if x.labels.is_floating_point() or x.labels.shape != out.shape[:-1]:
        return
    best = torch.nn.functional.one_hot(x.labels.clamp_min(0), out.shape[-1]).to(out)
    floor = float(held(x).loss(best))
    last = x.softmaxes.returned
    change = "" if last is None else x.edited(double_softmax, last.place, _source.without_call(last.place, "softmax"))
    yield Finding(
        "double_softmax",
        "The model returns probabilities, and the loss applies a softmax to them again: even a perfect answer has the "
        f"loss {floor:.3g}, and gradients are small.",
        f"{change}: nn.CrossEntropyLoss takes logits" if change else "Return logits, without the softmax at the end",
        tried=bool(change),
        measured="smallest loss that any output can reach",
        before=floor,
        after=float(held(x).loss(best * 50)),
        intervention="with logits",
    )


@cause(
    proof="at outputs that differ the gradient of the loss is that of a cross-entropy whose softmax runs over other "
    "sequences or tokens, and the loss changes when one number is added to all classes of one sequence",
    change="dim=-1",
    order=51,
    needs={"loss", "labels"},
)
def loss_softmax_axis(x: Examination) -> Iterator[Finding]:
    """A loss whose softmax does not run over the classes."""
    labels = _classes(x)
    if labels is None or x.result is None:
        return
    out = spread_out(x.result)
    seen = _LossSoftmaxes()
    with seen:
        own = _gradient(x, out)
    wrong = [at for at in range(-out.ndim, -1) if out.shape[at] > 1 and _along(own, _entropy_gradient(out, labels, at))]
    flat = out.flatten(0, -2)
    if not wrong and not _along(own.flatten(0, -2), _entropy_gradient(flat, labels.flatten(), 0)):
        return
    if out.shape[-1] in out.shape[:-1] and len(set(labels.flatten().tolist())) == labels.numel():
        return  # scores of all pairs, as in CLIP, are normalised along both axes
    raised = out.clone()
    raised[(0,) * (out.ndim - 1)] += 3.0
    before = abs(float(held(x).loss(raised)) - float(held(x).loss(out)))
    after = abs(_entropy(raised, labels) - _entropy(out, labels))
    if before < 100 * after:
        return
    calls = [one for one in seen.calls if one[0][-1] == out.shape[-1] and one[1] % len(one[0]) < len(one[0]) - 1]
    places = {call[2] for call in calls}
    place = places.pop() if len(places) == 1 else None
    change = x.edited(loss_softmax_axis, place, _source.over_axis(place, -1))
    over, one = ("sequences of the batch", "sequence") if out.ndim == 2 else ("tokens", "token")
    if wrong and out.ndim + wrong[0] == x.sequence_axis(out):
        over = "sequences of the batch"
    yield Finding(
        "loss_softmax_axis",
        f"The softmax of the loss runs over the {over} instead of the classes: they compete with each other for each "
        f"class, and no {one} has to choose one.",
        change or "Take the softmax of the loss over the last axis, or use torch.nn.functional.cross_entropy",
        tried=bool(change),
        measured=f"change of the loss when 3 is added to all classes of one {one}",
        before=before,
        after=after,
        intervention="with a softmax over the classes",
    )


class _LossSoftmaxes(torch.overrides.TorchFunctionMode):
    """Notes the shape, the axis and the place of each softmax and log-softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[tuple[int, ...], int, _source.SourcePlace | None]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.__name__ in ("softmax", "log_softmax") and isinstance(out, torch.Tensor):
            axis = kwargs["dim"] if kwargs and "dim" in kwargs else args[1] if len(args) > 1 else -1
            self.calls.append((tuple(out.shape), axis, _source.running()))
        return out


def _classes(x: Examination) -> torch.Tensor | None:
    """The labels if they are classes of the outputs, and there are several of these."""
    out, labels = x.result, x.labels
    if out is None or labels is None or out.ndim < 2 or out.shape[-1] < 2 or labels.is_floating_point():
        return None
    if labels.shape != out.shape[:-1] or labels.dtype is torch.bool or int(labels.max()) >= out.shape[-1]:
        return None
    return labels if bool((labels >= 0).any()) else None


def _gradient(x: Examination, out: torch.Tensor) -> torch.Tensor:
    free = out.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(held(x).loss(free), free)[0]


def _entropy_gradient(out: torch.Tensor, labels: torch.Tensor, axis: int) -> torch.Tensor:
    free = out.detach().double().requires_grad_()
    with torch.enable_grad():
        chosen = free.log_softmax(axis).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        return torch.autograd.grad(-chosen[labels >= 0].sum(), free)[0]


def _entropy(out: torch.Tensor, labels: torch.Tensor) -> float:
    known = labels.flatten() >= 0
    return float(torch.nn.functional.cross_entropy(out.flatten(0, -2).double()[known], labels.flatten()[known]))


def _compares(x: Examination, out: torch.Tensor, axis: int) -> bool:
    """Whether a loss compares sequences with each other: the gradient of the others changes with the first one."""
    other = out.clone()
    other.select(axis, 0).copy_(out.select(axis, 1))
    before, after = (_gradient(x, one).narrow(axis, 1, out.shape[axis] - 1) for one in (out, other))
    return not torch.allclose(before, after)


def _is_over_classes(gradient: torch.Tensor) -> bool:
    """Whether a loss has a softmax over the last axis: it does not change if one number is added to all entries."""
    return float(gradient.sum(-1).norm()) <= 1e-3 * float(gradient.norm())


def _along(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two gradients are one up to a factor."""
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.flatten(), dim=0)) > PARALLEL


@cause(
    proof="every weight is moved by 0.001 along its gradient: the loss hardly changes, and would if it were given what "
    "the last module returns",
    change="remove the factor behind the last module",
    order=54,
    needs={"loss", "labels"},
)
def outputs_too_small(x: Examination) -> Iterator[Finding]:
    """Outputs that are made too small for a loss of classes to move."""
    out = x.result
    if _classes(x) is None or out is None or not 0 < _between_classes(out) < SMALL:
        return
    if not _is_over_classes(_gradient(x, out).double()):
        return
    heads = [call for call in x.base if call.is_leaf and call.output is not None and call.output.shape == out.shape]
    head = heads[-1] if heads else None
    if head is None or head.output is None or SMALL * _between_classes(head.output) < _between_classes(out):
        return
    named = dict(x.model.named_parameters())
    stepped = {n: named[n].detach() - STEP * g.sign() for n, g in x.gradients.items() if g is not None}
    with with_parameters(x.model, stepped):
        calls = [call for call in x.calls() if call.output is not None]
    moved = [call.output for call in calls if call.module is head.module][-1:]
    last = calls[-1].output if calls else None
    if not moved or moved[0] is None or last is None:
        return
    before = abs(float(held(x).loss(last)) - float(held(x).loss(out)))
    after = abs(float(held(x).loss(moved[0])) - float(held(x).loss(head.output)))
    factor, now = (_between_classes(a) / _between_classes(b) for a, b in ((out, head.output), (last, moved[0])))
    if before > 1e-3 or after < 100 * before or after < 1e-4 or abs(now / factor - 1) > 0.5:
        return  # the loss makes up for it, or a weight is the factor, which grows
    where, change = shrinking_operation(x, outputs_too_small)
    yield Finding(
        "outputs_too_small",
        f"The outputs are too small for the loss to move: {head.name or type(head.module).__name__} returns values "
        f"that differ by {told(_between_classes(head.output))} between classes, and the model values that "
        f"differ by {told(_between_classes(out))}." + (f" {where} makes them so small." if where else ""),
        change or f"Return what {head.name or 'the last module'} returns, without a small factor on it",
        tried=bool(change),
        measured=f"change of the loss when every weight moves by {STEP:g} along its gradient",
        before=before,
        after=after,
        intervention=f"if the loss is given what {head.name or 'the last module'} returns",
        where=head.name or "",
    )


def _between_classes(out: torch.Tensor) -> float:
    """Root mean square of the outputs about their mean over the classes."""
    flat = out.double().flatten(0, -2)
    return float((flat - flat.mean(-1, keepdim=True)).square().mean().sqrt())

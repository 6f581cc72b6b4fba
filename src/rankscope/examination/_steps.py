"""Experiments on the optimizer and on parameters, on copies.

One step of the optimizer takes the gradients that were read before, so that no pass is run for it. Some steps of AdamW
are taken only if matrices get no gradient: what begins at zero and moves then is healthy.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankscope.examination._examination import Examination
from rankscope.examination._outcomes import NOT_READ, Outcome, experiment

SAMPLE = 1 << 14
"""Entries of each parameter, in whole rows from the first one, of which a step is taken."""
STILL = 0.05
"""Share of the entries of a matrix that a step must change."""
UPHILL = 0.3
"""Cosine of a step and the gradient above which the step goes up; that of a plain step is below zero."""
AGAIN = 4
"""Steps after which what began at zero must move."""
NO_GRADIENT = 1e-6
"""Share of the median gradient up to which there is none: rounding of float32 is a tenth of it."""
WORN = 0.02
"""Share of a weight that decay alone takes away in one step: half of it is gone after 35 steps."""


@dataclass(frozen=True)
class _Step:
    """Some rows of parameters before and after one step of the optimizer, and their gradients, by name."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    gradients: dict[str, Tensor]


def _step(x: Examination, *, dtype: torch.dtype | None = None, times: float = 1.0, **settings: float) -> _Step | None:
    """One step of a copy of the optimizer, on some rows of its parameters; None if none of them has a gradient.

    The copies are made with one memo, so that they belong to each other. The state of the optimizer is not copied, so
    that this is a first step.

    Args:
        x: the examination.
        dtype: of all parameters; None for their own.
        times: by what gradients are multiplied.
        settings: of all groups that have such a setting, such as ``lr``.
    """
    assert x.optimizer is not None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ValueError("an optimizer may communicate in its step")
    named = {name: one for name, one in x.model.named_parameters() if x.gradients.get(name) is not None}
    held = {id(one) for group in x.optimizer.param_groups for one in group["params"]}
    named = {name: one for name, one in named.items() if id(one) in held}
    if not named:
        return None
    memo: dict[int, object] = {id(x.optimizer.state): defaultdict(dict)}
    for group in x.optimizer.param_groups:
        for one in group["params"]:
            memo[id(one)] = nn.Parameter(_some(one.detach()).to(dtype or one.dtype, copy=True))
    optimizer = copy.deepcopy(x.optimizer, memo)
    own = {name: memo[id(one)] for name, one in named.items()}
    gradients: dict[str, Tensor] = {}
    for name, one in own.items():
        assert isinstance(one, nn.Parameter)
        gradient = x.gradients[name]
        assert gradient is not None
        one.grad = gradients[name] = times * _some(gradient.detach()).to(one.dtype)
    for group in optimizer.param_groups:
        group |= {name: value for name, value in settings.items() if name in group}
    type(optimizer).step(optimizer)  # a scheduler replaces the attribute, and would step the user's own
    after = {name: one.detach() for name, one in own.items() if isinstance(one, nn.Parameter)}
    before = {name: _some(named[name].detach()).to(after[name].dtype) for name in after}
    return _Step(before, after, {name: one.detach() for name, one in gradients.items()})


def _some(one: Tensor) -> Tensor:
    """The first rows, so that a large model takes no longer than a small one."""
    return one[: max(1, SAMPLE // max(1, one[0].numel()))] if one.ndim and len(one) else one


def _taken(x: Examination) -> _Step | None:
    """The step as the optimizer takes it, which several experiments read."""
    if "_taken_step" not in vars(x):
        vars(x)["_taken_step"] = None if x.optimizer is None else _step(x)
    step: _Step | None = vars(x)["_taken_step"]
    return step


def _broken(step: _Step) -> list[str]:
    return [name for name, one in step.after.items() if not bool(torch.isfinite(one).all())]


@experiment
def step_breaks_weights(x: Examination) -> Outcome:
    """Whether weights are not finite after a step with finite gradients; the control is the same step in float32."""
    step = _taken(x)
    if step is None or not all(bool(torch.isfinite(one).all()) for one in step.gradients.values()):
        return NOT_READ
    broken = _broken(step)
    if not broken:
        return Outcome(False, False)
    wide = _step(x, dtype=torch.float32)
    dtype = str(step.after[broken[0]].dtype).removeprefix("torch.")
    return Outcome(
        True,
        wide is None or bool(_broken(wide)),
        {"names": broken, "count": len(step.after), "dtype": dtype},
    )


def _rates(x: Examination) -> tuple[list[float], list[float]]:
    """The learning rates of the groups, and those that a scheduler began with."""
    assert x.optimizer is not None
    groups = x.optimizer.param_groups
    return [float(one.get("lr", 1.0)) for one in groups], [
        float(one.get("initial_lr", one.get("lr", 1.0))) for one in groups
    ]


@experiment
def step_changes_nothing(x: Examination) -> Outcome:
    """Whether a step is below the resolution of the weights; the control is the same step at a rate of 0.001."""
    step = _taken(x)
    if step is None or _broken(step):
        return NOT_READ
    share, (rates, begun) = _share_changed(step), _rates(x)
    if not max(rates) > 0 or share >= STILL:
        return Outcome(False, False)
    usual = _step(x, lr=1e-3)
    dtype = str(next(iter(step.after.values())).dtype).removeprefix("torch.")
    numbers = {"share": share, "rate": max(rates), "begun": max(begun), "dtype": dtype}
    return Outcome(True, usual is None or _share_changed(usual) < STILL, numbers)


def _share_changed(step: _Step) -> float:
    """The share of the entries with a gradient that a step changes, in the median matrix."""
    shares = sorted(
        float((step.before[name] != after)[step.gradients[name] != 0].double().mean())
        for name, after in step.after.items()
        if after.ndim > 1 and bool(step.gradients[name].any()) and bool(step.before[name].any())
    )
    return shares[len(shares) // 2] if shares else 1.0


@experiment
def step_goes_up(x: Examination) -> Outcome:
    """Whether a step goes along the gradient and not against it.

    The control is the step for the opposite gradient, which goes along that one only if the sign is wrong.
    """
    step = _taken(x)
    if step is None or x.loss is None or _broken(step):
        return NOT_READ
    along = _along(step)
    if along <= UPHILL:
        return Outcome(False, False)
    other = _step(x, times=-1.0)
    return Outcome(True, other is None or _along(other) <= UPHILL, {"along": along})


def _along(step: _Step) -> float:
    """Cosine of a step and the gradient that it was given."""
    moved = torch.cat([(one - step.before[name]).double().flatten() for name, one in step.after.items()])
    slope = torch.cat([one.double().flatten() for one in step.gradients.values()])
    return float(torch.nn.functional.cosine_similarity(moved, slope, dim=0))


@experiment
def decay_wears_weights(x: Examination) -> Outcome:
    """Whether a step without gradients takes a large share of the weights; the control is one without decay too."""
    groups = [] if x.optimizer is None else x.optimizer.param_groups
    if not any(float(one.get("lr", 0.0)) * float(one.get("weight_decay") or 0.0) > WORN for one in groups):
        return Outcome(False, False)
    step, plain = _step(x, times=0.0), _step(x, times=0.0, weight_decay=0.0)
    if step is None or plain is None or _broken(step):
        return NOT_READ
    share = _share_lost(step)
    return Outcome(share > WORN, _share_lost(plain) > WORN, {"share": share})


def _share_lost(step: _Step) -> float:
    """By what share the size of the matrices fell in a step."""
    before, after = (
        torch.cat([one.double().flatten() for one in values.values() if one.ndim > 1]).norm()
        for values in (step.before, step.after)
    )
    return 1.0 - float(after / before)


@experiment
def one_memory(x: Examination) -> Outcome:
    """Whether two parameters are the same numbers in memory; the control is one parameter under two names."""
    places: dict[tuple[int, object, torch.Size], list[str]] = {}
    for name, one in x.model.named_parameters():  # one parameter under two names is listed once
        if one.numel() > 1 and one.requires_grad:
            places.setdefault((one.untyped_storage().data_ptr(), one.storage_offset(), one.shape), []).append(name)
    same = [names for names in places.values() if len(names) > 1]
    return Outcome(bool(same), False, {"names": same[0] if same else []})


@experiment
def equal_units(x: Examination) -> Outcome:
    """Whether all units of a layer have equal weights and equal gradients, so that they stay equal.

    The control: units that are equal and get different gradients, as in a layer that begins at zero.
    """
    named = dict(x.model.named_parameters())
    same = []
    for name, gradient in x.gradients.items():
        if gradient is None or gradient.ndim != 2 or min(gradient.shape) < 4 or not bool(gradient.any()):
            continue
        weight = named[name].detach()
        alike = bool((weight == weight[:1]).all()) and bool(weight.any())
        rounding = 1e-6 * float(gradient.abs().max())
        if alike and torch.allclose(gradient, gradient[:1].expand_as(gradient), rtol=1e-3, atol=rounding):
            same.append(name)
    return Outcome(bool(same), False, {"names": same})


@experiment
def never_moves(x: Examination) -> Outcome:
    """Whether matrices that run get no gradient; the control is the same after some steps of AdamW on a copy.

    None is less than a millionth of the median. Tables are left out, because a batch reads some of their rows, and so
    are modules that read nothing but zeros or did not run, as experts do not that no token chose. The steps run only if
    there are such matrices.
    """
    named = dict(x.model.named_parameters())
    tables = {id(one.weight) for one in x.model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))}
    ran = {call.name for call in x.base if call.given is not None and bool(call.given.any())}
    own = {
        name
        for name, one in named.items()
        if one.ndim > 1 and one.numel() > 1 and id(one) not in tables and name.rpartition(".")[0] in ran
    }
    still = _without_gradient(x.gradients, own)
    if not still or x.loss is None:
        return Outcome(False, False)
    if not x.edits:  # beside a training, no other model is trained
        return NOT_READ
    model = copy.deepcopy(x.model).train()
    again = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([one for one in again.values() if one.requires_grad], 1e-3)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for _ in range(AGAIN):
            optimizer.zero_grad()
            x.forward_passes, x.backward_passes = x.forward_passes + 1, x.backward_passes + 1
            torch.autograd.backward(x.loss_of(x.batch.call(model)))
            still &= _without_gradient({name: one.grad for name, one in again.items()}, own)
            optimizer.step()
    return Outcome(True, not still, {"names": [name for name in named if name in still], "count": len(own)})


def _without_gradient(gradients: Mapping[str, Tensor | None], names: Collection[str]) -> set[str]:
    """Those of some matrices whose gradient is below a millionth of the median of all; None is another case."""
    sizes = {n: float(g.double().square().mean().sqrt()) for n, g in gradients.items() if n in names and g is not None}
    moving = sorted(size for size in sizes.values() if size > 0)
    least = NO_GRADIENT * moving[len(moving) // 2] if moving else 0.0
    return {name for name, size in sizes.items() if size <= least}

"""Experiments on the optimizer and on parameters, on copies.

One step of the optimizer takes the gradients that were read before, so that no pass is run for it. Some steps of AdamW
are taken only if matrices get no gradient: what begins at zero and moves then is healthy.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.examination.outcomes import NO, NOT_READ, Outcome, experiment
from rankscope.examination.passes import Examination, in_evaluation, in_training, of_outputs
from rankscope.examination.source import place_of
from rankscope.examination.tensors import is_trained

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
    return None if x.optimizer is None else _step(x)


def _broken(step: _Step) -> list[str]:
    return [name for name, one in step.after.items() if not bool(torch.isfinite(one).all())]


@experiment
def step_breaks_weights(x: Examination) -> Outcome:
    """Whether weights are not finite after a step with finite gradients; the control is the same step in float32."""
    step = x.once(_taken)
    if step is None or not all(bool(torch.isfinite(one).all()) for one in step.gradients.values()):
        return NOT_READ
    broken = _broken(step)
    if not broken:
        return NO
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
        float(one.get("initial_lr", one.get("lr", 1.0)) or one.get("lr", 1.0)) for one in groups
    ]


@experiment
def step_changes_nothing(x: Examination) -> Outcome:
    """Whether a step is below the resolution of the weights; the control is the same step at a rate of 0.001."""
    step = x.once(_taken)
    if step is None or _broken(step):
        return NOT_READ
    share, (rates, begun) = _share_changed(step), _rates(x)
    if share >= STILL:
        return NO
    usual = _step(x, lr=1e-3)
    again = 0.0 if usual is None else _share_changed(usual)
    dtype = str(next(iter(step.after.values())).dtype).removeprefix("torch.")
    numbers = {"share": share, "usual": again, "rate": max(rates), "begun": max(begun), "dtype": dtype}
    return Outcome(True, again < STILL, numbers)


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
    step = x.once(_taken)
    if step is None or x.loss is None or _broken(step):
        return NOT_READ
    along = _along(step)
    if along <= UPHILL:
        return NO
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
        return NO
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


def after_steps(x: Examination) -> dict[str, Tensor]:
    """The parameters of a copy after some steps of AdamW: the control of whatever begins at zero, or equal.

    Raises:
        RuntimeError: no other model may be trained, beside a training.
    """
    if x.loss is None or not x.edits:
        raise RuntimeError("no copy is trained here")
    model = copy.deepcopy(x.model).train()
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([one for one in named.values() if one.requires_grad], 1e-3)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for _ in range(AGAIN):
            optimizer.zero_grad()
            x.forward_passes, x.backward_passes = x.forward_passes + 1, x.backward_passes + 1
            torch.autograd.backward(x.loss_of(x.batch.call(model)))
            optimizer.step()
    return {name: one.detach() for name, one in named.items()}


@experiment
def weights_zero(x: Examination) -> Outcome:
    """Whether every matrix is zero; the control are the weights that the model begins with."""
    matrices = {name: one.detach() for name, one in x.model.named_parameters() if one.ndim > 1 and one.numel() > 1}
    if not matrices or any(bool(one.any()) for one in matrices.values()):
        return NO
    fresh = [x.fresh[name] for name in matrices if name in x.fresh]
    return Outcome(True, not any(bool(one.any()) for one in fresh), {"names": list(matrices)})


@experiment
def one_value_in_trained(x: Examination) -> Outcome:
    """Whether matrices of trained blocks hold one value; the control are the values that they begin with.

    Blocks of which some matrices are frozen and others not are left out: adapters begin at zero.
    """
    idle = {call.module for call in x.base if call.given is not None and call.output is not None
            and call.given.shape == call.output.shape and torch.equal(call.given, call.output)}  # fmt: skip
    found: dict[str, bool] = {}
    for place, block in x.blocks:
        matrices = {f"{place}.{n}": one for n, one in block.named_parameters() if one.ndim == 2 and min(one.shape) > 1}
        alike = len({one.requires_grad for one in matrices.values()}) == 1
        if block in idle or not alike or not is_trained(block):
            continue
        for name, one in matrices.items():
            if bool((one.detach() == one.detach()[0, 0]).all()):
                fresh = x.fresh.get(name)
                if fresh is not None:
                    found[name] = bool((fresh == fresh[0, 0]).all())
    lost = [name for name, begins_so in found.items() if not begins_so]
    return Outcome(True, not lost, {"names": lost}) if found else NO


@experiment
def one_memory(x: Examination) -> Outcome:
    """Whether two parameters are the same numbers in memory; the control are gradients that are the same too."""
    places: dict[tuple[int, object, torch.Size], list[str]] = {}
    for name, one in x.model.named_parameters():  # one parameter under two names is listed once
        if one.numel() > 1 and one.requires_grad:
            places.setdefault((one.untyped_storage().data_ptr(), one.storage_offset(), one.shape), []).append(name)
    same = next((names for names in places.values() if len(names) > 1), None)
    if same is None:
        return NO
    first, second = (x.gradients[name] for name in same[:2])
    equal = first is second is None or (first is not None and second is not None and torch.equal(first, second))
    return Outcome(True, equal, {"names": same})


@experiment
def equal_units(x: Examination) -> Outcome:
    """Whether all units of a layer have equal weights; the control is the same after some steps on a copy."""
    named = dict(x.model.named_parameters())

    def alike(values: Mapping[str, Tensor], among: Collection[str]) -> set[str]:
        return {
            name
            for name in among
            if (one := values[name].detach()).any()
            and torch.allclose(one, one[:1].expand_as(one), rtol=1e-3, atol=1e-6)
        }

    moving = [n for n, g in x.gradients.items() if g is not None and g.ndim == 2 and min(g.shape) > 3 and bool(g.any())]
    same = {name for name in alike(named, moving) if torch.equal(named[name], named[name][:1].expand_as(named[name]))}
    if not same:
        return NO
    still = alike(x.once(after_steps), same)
    return Outcome(True, not still, {"names": [name for name in named if name in still]})


@experiment
def never_moves(x: Examination) -> Outcome:
    """Whether matrices that run get no gradient; the control is the same after some steps on a copy.

    None is less than a millionth of the median. Tables are left out, because a batch reads some of their rows, and so
    are modules that read nothing but zeros or did not run, as experts do not that no token chose.
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
        return NO
    later = x.backward(replaced=x.once(after_steps)).gradients
    still &= _without_gradient(later, own)
    return Outcome(True, not still, {"names": [name for name in named if name in still], "count": len(own)})


@experiment
def zero_factors(x: Examination) -> Outcome:
    """Whether weights of zero hold each other at zero: the product of both, drawn at random, has gradients.

    The control is one of them alone, drawn at random: then it is no product of both.
    """
    still = x.outcome("never_moves")
    if not still.shown:
        return NO
    named, gradients = dict(x.model.named_parameters()), x.gradients
    silent = {n for n, g in gradients.items() if g is not None and not bool(g.any())}
    zero = sorted(n for n in silent if not bool(named[n].detach().any()))
    if len(zero) < 2:
        return NO
    drawn = torch.Generator().manual_seed(0)
    values = {n: (0.02 * torch.randn(named[n].shape, generator=drawn)).to(named[n].detach()) for n in zero}

    def woken(replaced: Mapping[str, Tensor]) -> list[str]:
        after = x.backward(training=False, replaced=replaced).gradients
        return [n for n in silent if (g := after.get(n)) is not None and bool(g.any())]

    both = woken(values)
    # What is drawn alone wakes its partner, and stays without a gradient itself.
    alone = zero[0] in woken({zero[0]: values[zero[0]]})
    return Outcome(len(both) == len(silent), alone, {"zero": zero, "silent": len(silent), "woken": len(both)})


def _without_gradient(gradients: Mapping[str, Tensor | None], names: Collection[str]) -> set[str]:
    """Those of some matrices whose gradient is below a millionth of the median of all; None is another case."""
    sizes = {n: float(g.double().square().mean().sqrt()) for n, g in gradients.items() if n in names and g is not None}
    moving = sorted(size for size in sizes.values() if size > 0)
    least = NO_GRADIENT * moving[len(moving) // 2] if moving else 0.0
    return {name for name, size in sizes.items() if size <= least}


# What is held, learns and is used.


def held_by(x: Examination) -> set[int]:
    """Identities of what the optimizer holds; everything if there is none."""
    if x.optimizer is None:
        return {id(one) for one in x.model.parameters()}
    return {id(one) for group in x.optimizer.param_groups for one in group["params"]}


@experiment
def not_held(x: Examination) -> Outcome:
    """Whether the optimizer does not hold parameters; the control: they get no gradient, so that no step moves them."""
    held = held_by(x)
    wanted = {name: one for name, one in x.model.named_parameters() if one.requires_grad}
    missing = [name for name, one in wanted.items() if id(one) not in held]
    if not missing:
        return NO
    used = [name for name in missing if x.gradients.get(name) is not None]
    return Outcome(True, not used, {"names": used, "missing": len(missing), "count": len(wanted)})


@experiment
def learns_nothing(x: Examination) -> Outcome:
    """Whether no parameter requires a gradient; the control is a loss that has one anyway, as of a prompt."""
    if any(one.requires_grad for one in x.model.parameters()) or (x.loss is None and x.optimizer is None):
        return NO
    with torch.enable_grad():
        x.forward_passes += 1
        out = x.batch.call(x.model)
        learns = x.loss is not None and x.loss_of(out).requires_grad
    return Outcome(True, learns, {"count": sum(1 for _ in x.model.parameters())})


@experiment
def mostly_frozen(x: Examination) -> Outcome:
    """Whether most parameters do not require a gradient; the control are those that do, and get none."""
    learns = {name: one.requires_grad for name, one in x.model.named_parameters()}
    trained = [name for name, required in learns.items() if required]
    if (x.loss is None and x.optimizer is None) or not trained or 2 * len(trained) >= len(learns):
        return NO
    silent = all(x.gradients.get(name) is None for name in trained)
    return Outcome(True, silent, {"trained": trained, "count": len(learns)})


@experiment
def hidden_modules(x: Examination) -> Outcome:
    """Whether modules run that the model does not register; the control are modules that each pass makes anew."""
    hidden = {call.module: None for call in x.base if call.name is None}
    inner = {child for module in hidden for child in module.modules() if child is not module}
    outer = [module for module in hidden if module not in inner and any(True for _ in module.parameters())]
    return Outcome(True, bool(x.made_in_forward), {"modules": outer}) if outer else NO


@experiment
def cut_in_training(x: Examination) -> Outcome:
    """Whether parameters get a gradient in evaluation mode and none in training mode, where their modules run.

    The control: they get one in training mode if what enters the blocks requires a gradient, or nothing cuts the graph.
    """
    training = x.once(in_training)
    held = held_by(x)
    named = dict(x.model.named_parameters())
    suspects = [name for name, one in training.gradients.items() if one is None and id(named[name]) in held]
    if not suspects:
        return NO
    before = {call.name for call in x.base if call.name is not None}

    def ran(name: str) -> bool:
        """Whether the module ran, and was not skipped as layers are that are dropped at random."""
        while name and name not in before:
            name = name.rpartition(".")[0]
        return name in training.ran

    evaluated = x.once(in_evaluation).gradients
    lost = [name for name in suspects if evaluated.get(name) is not None and ran(name)]
    if not lost:
        return NO
    # A copy of the pass that requires gradients of everything must have them in evaluation mode as in training mode.
    arrive = x.backward(entering=True).gradients
    left = [name for name in lost if arrive.get(name) is None]
    again = x.backward().gradients
    return Outcome(True, any(again.get(name) is not None for name in lost), {"names": lost, "left": left})


@experiment
def without_effect(x: Examination) -> Outcome:
    """Whether parameters get no gradient in any mode, and moving them changes outputs or does not.

    Those of ``cut`` change an output, those of ``dropped`` run without effect, those of ``unused`` do not run. The
    control are two equal passes.
    """
    silent = [name for name, one in x.gradients.items() if one is None]
    # What another output depends on is not lost, only not part of this loss; nothing at all is a loss that was cut off.
    if 0 < len(silent) < len(x.gradients) and x.loss is not None:
        silent = [name for name in silent if x.once(of_outputs).gradients.get(name) is None]
    if not silent or x.result is None:
        return NO
    groups, cut = _whole_modules(x, silent), []
    if _any_difference(x.returned, x.run(replaced=_moved(x, silent))):  # some change it: which of them?
        groups = dict(list(groups.items())[:_TRIED])
        changing = [names for names in groups.values() if _any_difference(x.returned, x.run(replaced=_moved(x, names)))]
        cut = [name for names in changing for name in names]
        silent = [name for names in groups.values() for name in names]
    unused = [name for name in silent if name not in cut]
    dropped = [place for place, names in groups.items() if names[0] in unused and _is_dropped(x, place, names)]
    held, named = held_by(x), dict(x.model.named_parameters())
    numbers = {
        "cut": [name for name in cut if id(named[name]) in held],
        "dropped": dropped,
        "unused": [name for name in unused if not any(name.startswith(f"{place}.") for place in dropped)],
        "everything": len(unused) == len(x.gradients),
    }
    return Outcome(True, x.noise > 0, numbers)


_TRIED = 8
"""Parts that are moved one by one: each is a pass."""


def _whole_modules(x: Examination, names: Collection[str]) -> dict[str, list[str]]:
    """The largest modules all of whose parameters are among these, with them; parameters of their own by their name."""
    groups: dict[str, list[str]] = {}
    among = set(names)
    owned = {name for name, one in x.model.named_parameters() if one.requires_grad}
    for name in names:
        parts = name.split(".")
        places = [".".join(parts[:at]) for at in range(1, len(parts))]
        whole = (at for at in places if among >= {one for one in owned if one.startswith(f"{at}.")})
        groups.setdefault(next(whole, name), []).append(name)
    return groups


def _moved(x: Examination, names: Collection[str]) -> dict[str, Tensor]:
    named = dict(x.model.named_parameters())
    return {name: named[name].detach() + 0.5 + torch.rand_like(named[name]) for name in names}


def holding(x: Examination, place: str) -> nn.Module:
    """The nearest module that ran and holds another one."""
    ran = {call.module for call in x.base}
    while place:
        place = place.rpartition(".")[0]
        if x.model.get_submodule(place) in ran:
            break
    return x.model.get_submodule(place)


def _is_dropped(x: Examination, place: str, names: Collection[str]) -> bool:
    """Whether a module runs in somebody's own forward, and what that returns does not depend on it.

    A result that is returned and not taken, such as that of a pooler, was not dropped by the one who computed it.
    """
    inside = f"{place}."
    ran = [call.output for call in x.base if call.name and f"{call.name}.".startswith(inside)]
    if place in names or not any(output is not None and output.numel() for output in ran):
        return False  # experts may run without a token
    outer = holding(x, place)
    if place_of(outer.forward) is None:
        return False
    # All its parameters: adapters that are not read leave the rest of their module as it is, frozen and in use.
    own = [name for name, _ in x.model.named_parameters() if name.startswith(inside)]
    returned: list[object] = []
    hook = outer.register_forward_hook(lambda _, __, output: returned.append(output))
    try:
        x.run()
        x.run(replaced=_moved(x, own))
    finally:
        hook.remove()
    half = len(returned) // 2
    return not _any_difference(returned[:half], returned[half:])


def _any_difference(before: object, after: object) -> bool:
    ones = [t for t in pytree.tree_leaves(before) if isinstance(t, Tensor)]
    others = [t for t in pytree.tree_leaves(after) if isinstance(t, Tensor)]
    return any(a.shape == b.shape and not torch.equal(a, b) for a, b in zip(ones, others, strict=False))


@experiment
def one_object(x: Examination) -> Outcome:
    """Whether two names are one module that runs for both; the control are two equal passes."""
    names: dict[int, list[str]] = {}
    modules = dict(x.model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if name and next(module.children(), None) is not None and any(True for _ in module.parameters()):
            names.setdefault(id(module), []).append(name)
    calls = Counter(id(call.module) for call in x.base)
    for same in names.values():
        module, parents = modules[same[0]], {name.rpartition(".")[0] for name in same}
        # A child of a shared module is shared with it; entries of a list may be so on purpose.
        listed = any(name.rpartition(".")[2].isdigit() for name in same)
        if len(same) < 2 or len(parents) != 1 or calls[id(module)] < (len(same) if listed else 2):
            continue
        if listed or len(same) == 2:
            numbers = {"names": same, "listed": listed, "parent": parents.pop(), "calls": calls[id(module)]}
            return Outcome(True, x.noise > 0, numbers | {"module": module})
    return NO


def owners(names: Collection[str]) -> list[str]:
    """The modules that hold the parameters themselves, and never those above them."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))

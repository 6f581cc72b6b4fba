"""Modules and parameters that run and are not held, or are held and do not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from rankscope.examination._examination import Examination
from rankscope.examination._source import path, place_of
from rankscope.examination._spec import Finding, cause
from rankscope.examination._tensors import few
from rankscope.examination.training import as_trained, in_training

_TRIED = 8
"""Parts that are moved one by one."""


@cause(
    proof="a hook on all modules sees calls of modules that model.modules() does not list",
    change="nn.ModuleList or an attribute of the module",
    order=20,
)
def unregistered_modules(x: Examination) -> Iterator[Finding]:
    """Modules that run and are not registered."""
    if x.made_in_forward:
        return
    hidden = {call.module: None for call in x.base if call.name is None}
    inner = {child for module in hidden for child in module.modules() if child is not module}
    outer = [module for module in hidden if module not in inner and any(True for _ in module.parameters())]
    if not outer:
        return
    lost = sum(p.numel() for module in outer for p in module.parameters())
    held = sum(p.numel() for p in x.model.parameters())
    kinds = ", ".join(f"{count} {name}" for name, count in Counter(type(m).__name__ for m in outer).items())
    where, kind = _attribute_holding(x, outer)
    at = path(x.model, where)
    line = f"{at} = torch.nn.{kind}({at})"
    helps = bool(where) and x.runs(unregistered_modules, line)
    yield Finding(
        "unregistered_modules",
        f"{kinds} run in every forward pass and are not registered in the model: model.parameters() does not have "
        "them, so no optimizer trains them and no checkpoint saves them.",
        f"Register them. Run `{line}`, or write it so in __init__" if helps else "Keep them in an nn.ModuleList",
        tried=helps,
        measured="parameters in model.parameters()",
        before=float(held),
        after=float(held + lost),
        intervention="with these modules registered",
        where=where,
    )


def _attribute_holding(x: Examination, hidden: list[nn.Module]) -> tuple[str, str]:
    """Name of the attribute that holds modules, and of the class that would register them."""
    for owner, module in x.model.named_modules():
        for name, value in vars(module).items():
            entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if not name.startswith("_") and any(entry is hidden[0] for entry in entries):
                return f"{owner}.{name}" if owner else name, "ModuleDict" if isinstance(value, dict) else "ModuleList"
    return "", "ModuleList"


@cause(
    proof="parameters are registered during the forward pass, and two equal passes differ",
    change="create the module in __init__",
    order=3,
)
def made_in_forward(x: Examination) -> Iterator[Finding]:
    """Modules that every forward pass creates anew."""
    if not x.made_in_forward or not x.noise:
        return
    kinds = ", ".join(x.made_in_forward)
    yield Finding(
        "made_in_forward",
        f"{kinds}: created inside forward, with new random weights in every pass; they can never be trained.",
        f"Create {kinds} once in __init__ and call it in forward.",
        measured="difference between the outputs of two equal passes",
        before=x.noise,
    )


@cause(
    proof="no gradient arrives in evaluation or training mode, and a change of the parameter leaves every output as it "
    "is; what the module returns is compared, too",
    change="nothing, if the part is meant for another pass",
    order=60,
)
def unused_parameters(x: Examination) -> Iterator[Finding]:
    """Parameters that no output depends on, and results that are computed and dropped."""
    silent = _without_gradient(x)
    if not silent or x.result is None:
        return
    groups, cut = _whole_modules(x, silent), []
    if _any_difference(x.returned, x.run(replaced=_moved(x, silent))):  # some change it: which of them?
        groups = dict(list(groups.items())[:_TRIED])
        changing = [names for names in groups.values() if _any_difference(x.returned, x.run(replaced=_moved(x, names)))]
        cut = [name for names in changing for name in names]
        silent = [name for names in groups.values() for name in names]
    if cut:
        yield from _detached(x, cut)
    unused = [name for name in silent if name not in cut]
    dropped = [place for place, names in groups.items() if names[0] in unused and _is_dropped(x, place, names)]
    if dropped:
        lost = [name for name in unused if any(name.startswith(f"{place}.") for place in dropped)]
        unused = [name for name in unused if name not in lost]
        yield Finding(
            "unused_parameters",
            f"{few(dropped)} {'runs' if len(dropped) == 1 else 'run'}, and the result is dropped: nothing that "
            f"{type(_holding(x, dropped[0])).__name__} returns depends on it.",
            "Look at where it is called: is what it returns assigned, and read afterwards?",
            certainty="possible",
            measured="parameters that change no output",
            before=float(len(lost)),
            where=dropped[0],
        )
    if not unused:
        return
    # A part for another pass is usual: a pooler, a second head, a library's class with more than a task needs. That
    # nothing at all that is to be trained is used is not.
    everything = len(unused) == len(x.gradients)
    yield Finding(
        "unused_parameters",
        f"{len(unused)} parameters ({few(_owners(unused))}) are not used in this pass: no output changes when they "
        "do, and they get no gradient."
        + (" No others require a gradient, so no step changes anything." if everything else ""),
        "Look at what forward reads: these parameters are not part of it" if everything else "",
        kind="fault" if everything else "note",
        measured="parameters without a gradient",
        before=float(len(unused)),
        where=_owners(unused)[0],
    )


def _without_gradient(x: Examination) -> list[str]:
    """Parameters that get no gradient from the loss, from any output, or in training mode."""
    silent = [name for name, gradient in x.gradients.items() if gradient is None]
    if silent and x.loss is not None:  # what another output depends on is not lost, only not part of this loss
        silent = [name for name in silent if x.output_gradients.get(name) is None]
    try:
        trained = as_trained(x).gradients or {}
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
        trained = {}  # a model that does not run in training mode as it is called here
    return [name for name in silent if trained.get(name) is None]


def _whole_modules(x: Examination, names: Sequence[str]) -> dict[str, list[str]]:
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


def _moved(x: Examination, names: Sequence[str]) -> dict[str, Tensor]:
    named = dict(x.model.named_parameters())
    return {name: named[name].detach() + 0.5 + torch.rand_like(named[name]) for name in names}


def _holding(x: Examination, place: str) -> nn.Module:
    """The nearest module that ran and holds another one."""
    ran = {call.module for call in x.base}
    while place:
        place = place.rpartition(".")[0]
        if x.model.get_submodule(place) in ran:
            break
    return x.model.get_submodule(place)


def _is_dropped(x: Examination, place: str, names: Sequence[str]) -> bool:
    """Whether a module runs in somebody's own forward, and what that returns does not depend on it.

    A result that is returned and not taken, such as that of a pooler, was not dropped by the one who computed it.
    """
    inside = f"{place}."
    ran = [call.output for call in x.base if call.name and f"{call.name}.".startswith(inside)]
    if place in names or not any(output is not None and output.numel() for output in ran):
        return False  # experts may run without a token
    holding = _holding(x, place)
    if place_of(holding.forward) is None:
        return False
    # All its parameters: adapters that are not read leave the rest of their module as it is, frozen and in use.
    own = [name for name, _ in x.model.named_parameters() if name.startswith(inside)]
    returned: list[object] = []
    with ExitStack() as opened:
        opened.callback(holding.register_forward_hook(lambda _, __, output: returned.append(output)).remove)
        x.run()
        x.run(replaced=_moved(x, own))
    half = len(returned) // 2
    return not _any_difference(returned[:half], returned[half:])


def _to_be_trained(x: Examination, names: Sequence[str]) -> list[str]:
    """Those that the optimizer holds, if there is one: others are left out on purpose."""
    if x.optimizer is None:
        return list(names)
    held = {id(one) for group in x.optimizer.param_groups for one in group["params"]}
    named = dict(x.model.named_parameters())
    return [name for name in names if id(named[name]) in held]


def _detached(x: Examination, names: Sequence[str]) -> Iterator[Finding]:
    names = _to_be_trained(x, names)
    if not names:
        return
    owners = _owners(names)
    yield Finding(
        "detached",
        f"{len(names)} parameters ({few(owners)}) change the output and get no gradient: the graph is cut by "
        "detach(), torch.no_grad(), reentrant checkpointing, .data, .item() or NumPy between them and the loss.",
        "Look for what cuts the graph between them and the loss; what is meant to be fixed should have requires_grad "
        "False",
        measured="parameters without a gradient, of those that require one",
        before=float(len(names)),
        where=owners[0],
    )


@cause(
    proof="gradients arrive in evaluation mode, and not in training mode, where the same modules run; they do if what "
    "enters the blocks requires a gradient",
    change="use_reentrant=False",
    order=61,
)
def detached(x: Examination) -> Iterator[Finding]:
    """Parameters that the output depends on and that get no gradient."""
    trained = as_trained(x)
    if trained.gradients is None:
        return
    none = not any(one is not None for one in (*x.gradients.values(), *trained.gradients.values()))
    if none and x.loss is not None and any(one is not None for one in x.output_gradients.values()):
        yield Finding(
            "detached",
            "No parameter gets a gradient: what the loss depends on is detached from the parameters.",
            "Compute the loss from the model's own output, without .detach(), .data, torch.no_grad() or NumPy",
            measured="parameters without a gradient, of those that require one",
            before=float(len(x.gradients)),
        )
        return
    before = {call.name for call in x.base if call.name is not None}

    def ran(name: str) -> bool:
        """Whether the module ran, and was not skipped as layers are that are dropped at random."""
        while name and name not in before:
            name = name.rpartition(".")[0]
        return name in trained.seen.ran

    lost = [n for n, g in x.gradients.items() if g is not None and trained.gradients.get(n) is None and ran(n)]
    lost = _to_be_trained(x, lost)
    if not lost:
        return
    arrive = in_training(x, gradients=True, entering=True).gradients or {}
    left = [name for name in lost if arrive.get(name) is None]
    mended = len(left) < len(lost)
    yield Finding(
        "detached",
        f"{len(lost)} parameters ({few(_owners(lost))}) get no gradient in training mode, although their modules run: "
        + (
            "nothing that enters the blocks requires a gradient, and reentrant checkpointing then cuts the graph."
            if mended
            else "the graph is cut there by detach(), torch.no_grad() or checkpointing."
        ),
        "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or let what enters the blocks require a "
        "gradient"
        if mended
        else "Look for what cuts the graph in training mode",
        measured="parameters without a gradient in training mode, of those that get one in evaluation mode",
        before=float(len(lost)),
        after=float(len(left)) if mended else None,
        intervention="if what enters the blocks requires a gradient",
        where=_owners(lost)[0],
    )


def _any_difference(before: object, after: object) -> bool:
    from torch.utils import _pytree as pytree

    ones = [t for t in pytree.tree_leaves(before) if isinstance(t, Tensor)]
    others = [t for t in pytree.tree_leaves(after) if isinstance(t, Tensor)]
    return any(a.shape == b.shape and not torch.equal(a, b) for a, b in zip(ones, others, strict=False))


def _owners(names: Sequence[str]) -> list[str]:
    """The modules that hold the parameters themselves, and never those above them."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


@cause(
    proof="both names are one object, both run in one pass, and moving one moves the other",
    change="copy.deepcopy",
    order=21,
)
def shared_teacher(x: Examination) -> Iterator[Finding]:
    """Two networks that are one object, and blocks that are."""
    names: dict[int, list[str]] = {}
    held = dict(x.model.named_modules(remove_duplicate=False))
    for name, module in held.items():
        if name and next(module.children(), None) is not None and any(True for _ in module.parameters()):
            names.setdefault(id(module), []).append(name)
    calls = Counter(id(call.module) for call in x.base)
    for same in names.values():
        module = held[same[0]]
        parents = {name.rpartition(".")[0] for name in same}
        numbered = any(name.rpartition(".")[2].isdigit() for name in same)
        # A list that holds one block several times may share it on purpose, and so does a child of a shared module.
        if numbered and len(parents) == 1 and calls[id(module)] >= len(same) > 1:
            yield Finding(
                "shared_teacher",
                f"{len(same)} entries of {parents.pop()} are one {type(module).__name__} object, which runs "
                f"{calls[id(module)]} times: all of them have the same weights, also after training.",
                kind="note",
                measured="modules among these entries",
                before=1.0,
                where=same[0],
            )
            continue
        if len(same) != 2 or numbered or len(parents) != 1 or calls[id(module)] < 2:
            continue
        count = sum(1 for _ in module.parameters())
        yield Finding(
            "shared_teacher",
            f"self.{same[0]} and self.{same[1]} are the same object: every step of one is a step of the other, so a "
            "loss that compares them compares a network with itself.",
            "Make one of them a copy in __init__, with copy.deepcopy, before the optimizer is made",
            measured=f"parameters of {same[1]} that move when {same[0]} moves",
            before=float(count),
            after=0.0,
            intervention="with a copy",
            where=same[1],
        )

"""Modules and parameters that run and are not held, or are held and do not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from rankscope.causes._examination import Examination
from rankscope.causes._source import path
from rankscope.causes._spec import Finding, cause
from rankscope.causes._tensors import change_between
from rankscope.models.loading._load import transformers_config
from rankscope.models.loading.devices import seed_generators


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
    line = f"Run `{at} = nn.{kind}({at})`, or write it so in __init__" if where else "Keep them in an nn.ModuleList"
    yield Finding(
        "unregistered_modules",
        f"{kinds} run in every forward pass and are not registered in the model: model.parameters() does not have "
        "them, so no optimizer trains them and no checkpoint saves them.",
        f"Register them. {line}",
        measured="parameters in model.parameters()",
        before=float(held),
        after=float(held + lost),
        intervention="with these modules registered",
        where=where,
    )


def _attribute_holding(x: Examination, hidden: list[torch.nn.Module]) -> tuple[str, str]:
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
    order=20,
)
def made_in_forward(x: Examination) -> Iterator[Finding]:
    """Modules that every forward pass creates anew."""
    if not x.made_in_forward or x.result is None:
        return
    with torch.random.fork_rng(devices=[]):
        seed_generators(1)  # passes begin with the state they find: the same one would draw the same weights
        again = x.output()
    if again is None:
        return
    gap = change_between(x.result, again)
    if gap == 0.0:
        return
    kinds = ", ".join(x.made_in_forward)
    yield Finding(
        "made_in_forward",
        f"{kinds}: created inside forward, with new random weights in every pass; they can never be trained.",
        f"Create {kinds} once in __init__ and call it in forward.",
        measured="difference between the outputs of two equal passes",
        before=gap,
        after=None,
    )


@cause(
    proof="no gradient arrives, and a change of the parameter leaves every output as it is",
    change="remove the module, or call it",
    order=60,
)
def unused_parameters(x: Examination) -> Iterator[Finding]:
    """Parameters that no output depends on."""
    silent = [name for name, gradient in x.gradients.items() if gradient is None]
    if not silent or len(silent) == len(x.gradients) or x.result is None:
        return
    if x.loss is not None:  # what another output depends on is not lost, only not part of this loss
        silent = [name for name in silent if x.output_gradients.get(name) is None]
        if not silent:
            return
    named = dict(x.model.named_parameters())
    moved = {name: named[name].detach() + 0.5 + torch.rand_like(named[name]) for name in silent}
    after = x.run(replaced=moved)
    used = _any_difference(x.returned, after)
    parents = sorted({name.rpartition(".")[0].split(".")[0] or name for name in silent})
    if used:
        owners = _owners(silent)
        yield Finding(
            "detached",
            f"{len(silent)} parameters ({_few(owners)}) change the output and get no gradient: the graph is cut by "
            "detach(), torch.no_grad(), .data, .item() or NumPy between them and the loss.",
            f"Remove what cuts the graph after {owners[0]}; if it is meant to be fixed, say so: requires_grad_(False).",
            measured="parameters without a gradient, of those that require one",
            before=float(len(silent)),
            where=owners[0],
        )
        return
    owners = _owners(silent)
    if transformers_config(x.model) is not None:
        # The class is evidence here: poolers and heads that a task does not call belong to what the library ships, and
        # its users cannot take them out. That they are not used is shown above, as for any other model.
        yield Finding(
            "unused_parameters",
            f"{len(silent)} parameters of {_few(owners)} are not used by this forward pass; other methods or heads of "
            "this library class use them.",
            kind="harmless",
            measured="parameters without a gradient",
            before=float(len(silent)),
            where=owners[0],
        )
        return
    yield Finding(
        "unused_parameters",
        f"{len(silent)} parameters of {_few(owners)} are never used: no output changes when they do, and they get no "
        "gradient.",
        f"Remove {' and '.join(f'self.{name}' for name in parents[:3])} from __init__ (run "
        f"`del {', '.join(f'model.{name}' for name in parents)}` to try it), or call "
        f"{'it' if len(parents) == 1 else 'them'} in forward. DistributedDataParallel needs find_unused_parameters "
        "otherwise.",
        measured="parameters without a gradient",
        before=float(len(silent)),
        after=0.0,
        intervention="without them",
        where=owners[0],
    )


@cause(
    proof="see unused_parameters: a change of the parameter changes the output, and no gradient arrives",
    change="remove detach(), no_grad(), .data",
    order=61,
)
def detached(x: Examination) -> Iterator[Finding]:
    """Parameters that the output depends on and that get no gradient."""
    if all(gradient is None for gradient in x.gradients.values()) and x.gradients:
        yield Finding(
            "detached",
            "No parameter gets a gradient: what the loss depends on is detached from the parameters.",
            "Compute the loss from the model's own output, without .detach(), .data, torch.no_grad() or NumPy.",
            measured="parameters without a gradient, of those that require one",
            before=float(len(x.gradients)),
        )


def _any_difference(before: object, after: object) -> bool:
    from torch.utils import _pytree as pytree

    ones = [t for t in pytree.tree_leaves(before) if isinstance(t, Tensor)]
    others = [t for t in pytree.tree_leaves(after) if isinstance(t, Tensor)]
    return any(a.shape == b.shape and not torch.equal(a, b) for a, b in zip(ones, others, strict=False))


def _owners(names: list[str]) -> list[str]:
    """The largest modules all of whose parameters are named."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@cause(
    proof="both names are one object, both run in one pass, and moving one moves the other",
    change="copy.deepcopy",
    order=21,
)
def shared_teacher(x: Examination) -> Iterator[Finding]:
    """Two networks that are one object."""
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
        # A list that holds one block several times shares it on purpose, and so does a child of a shared module.
        if len(same) != 2 or numbered or len(parents) != 1 or calls[id(module)] < 2:
            continue
        count = sum(1 for _ in module.parameters())
        yield Finding(
            "shared_teacher",
            f"self.{same[0]} and self.{same[1]} are the same object: every step of one is a step of the other, so a "
            "loss that compares them compares a network with itself.",
            f"Run `{path(x.model, same[1])} = copy.deepcopy({path(x.model, same[0])})`, or write it so in __init__",
            measured=f"parameters of {same[1]} that move when {same[0]} moves",
            before=float(count),
            after=0.0,
            intervention="with a copy",
            where=same[1],
        )

"""What differs between training and evaluation, and branches that never begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.examination._examination import Examination
from rankscope.examination._following import Following, named
from rankscope.examination._innermost import ModuleFollower
from rankscope.examination._source import for_each
from rankscope.examination._spec import Finding, cause
from rankscope.examination._tensors import main_output
from rankscope.models.loading.devices import seed_generators
from rankscope.models.wrapping import same_buffers, with_parameters

DROPPED = 0.9
"""Share of the entries from which on dropout counts as dropping everything."""
_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)
"""Functions that drop entries; modules call them too."""
_DROPPING = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
"""Functions that may drop weights of attention."""


class _Training(ModuleFollower):
    """Sees dropout and batch statistics in a pass in training mode, by whatever module or function they are computed.

    Args:
        drops: False to drop nothing.

    Attributes:
        dropped: the innermost module and the share, for each call that drops.
        statistics: for each call of a batch norm that should update its statistics, the innermost module and whether
            they moved.
        ran: names of the modules that were called.
    """

    def __init__(self, model: nn.Module, *, drops: bool) -> None:
        super().__init__(model)
        self._drops = drops
        self.dropped: list[tuple[str, float]] = []
        self.statistics: dict[str, bool] = {}
        self.ran: set[str | None] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        self.ran |= set(self.inside)
        where = (self.inside[-1] if self.inside else None) or ""
        if func in _DROPOUTS:
            named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            if named.get("training", named.get("train", True)):
                self.dropped.append((where, float(named.get("p", 0.5))))
                if not self._drops:
                    return named["input"]
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        named = dict(zip(("input", "running_mean", "running_var", "weight", "bias", "training"), args, strict=False))
        named |= kwargs
        mean = named.get("running_mean")
        before = mean.clone() if isinstance(mean, Tensor) and named.get("training") else None
        out = func(*args, **kwargs)
        if before is not None and isinstance(mean, Tensor):
            self.statistics[where] = self.statistics.get(where, False) or not torch.equal(before, mean)
        return out


@dataclass(frozen=True)
class _Trained:
    """A pass in training mode.

    Attributes:
        seen: dropout, batch statistics, and the modules that ran.
        apart: how much the outputs of different inputs differ.
        gradients: of each parameter, of the loss or of a random projection of the output; None if they were not read.
    """

    seen: _Training
    apart: float | None
    gradients: Mapping[str, Tensor | None] | None


def in_training(x: Examination, *, drops: bool = True, gradients: bool = False, entering: bool = False) -> _Trained:
    """One pass in training mode.

    Args:
        x: the examination.
        drops: False to drop nothing.
        gradients: whether to read gradients. They are those of parameters of our own, with ``backward()`` as a training
            calls it: reentrant checkpointing refuses any other way, and hooks of the user's parameters are not called.
        entering: let what the modules outside the blocks return require a gradient, such as embeddings.
    """
    seen = _Training(x.model, drops=drops)
    was_evaluating = [module for module in x.model.modules() if not module.training]
    own = {name: nn.Parameter(one.detach()) for name, one in x.model.named_parameters() if one.requires_grad}
    x.forward_passes += 1
    x.backward_passes += gradients
    read = None
    with ExitStack() as opened:
        within = {part for _, block in x.blocks for part in block.modules()}
        for module in x.model.modules() if entering else ():
            if module not in within and next(module.children(), None) is None:
                opened.callback(module.register_forward_hook(_require).remove)
        for module in was_evaluating:
            module.training = True
            opened.callback(setattr, module, "training", False)
        opened.enter_context(same_buffers(x.model))
        opened.enter_context(torch.random.fork_rng(devices=[]))
        opened.enter_context(torch.set_grad_enabled(gradients))
        opened.enter_context(with_parameters(x.model, own if gradients else {}))
        seed_generators(0)
        with seen.watching():
            returned = x.batch.call(x.model)
        output = main_output(returned)
        if gradients:
            try:
                total = x.total(returned)
                if total.requires_grad:
                    torch.autograd.backward(total)
                read = {name: one.grad for name, one in own.items()}
            except (RuntimeError, ValueError, TypeError, AttributeError, LookupError):
                read = None  # no backward pass here, or a loss that reads what is not returned in training mode
    return _Trained(seen, None if output is None else x.inputs_apart(output.detach()), read)


def _require(module: nn.Module, args: Any, output: Any) -> None:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.is_leaf and torch.is_grad_enabled():
            leaf.requires_grad_()


def as_trained(x: Examination) -> _Trained:
    """The pass in training mode as it is, which several causes share."""
    known = vars(x).get("_as_trained")
    if known is None:
        known = vars(x)["_as_trained"] = in_training(x, gradients=True)
    return known


@cause(
    proof="two passes on the same batch are compared, with other random numbers; the first operation is named that "
    "returns something else for the same tensors",
    change="dropout only in training mode",
    order=3,
)
def not_deterministic(x: Examination) -> Iterator[Finding]:
    """A model that answers differently each time in evaluation mode."""
    if x.made_in_forward or not x.noise:
        return
    before = Following(x.model)
    after = Following(x.model, before)
    for seed, follow in enumerate((before, after)):
        with torch.random.fork_rng(devices=[]), follow.watching():
            seed_generators(seed)
            x.run()
    step = after.began
    drops = step is not None and ("dropout" in step.name or step.name in _DROPPING)
    yield Finding(
        "not_deterministic",
        "The model is not deterministic in evaluation mode: two equal passes differ"
        + (f", first in {named(x, step)}." if step is not None else "."),
        "Dropout has to end in evaluation mode: pass the module's own `training` to the function, or use nn.Dropout"
        if drops
        else "",
        kind="fault" if drops else "note",
        measured="difference between the outputs of two equal passes",
        before=x.noise,
    )


@cause(
    proof="in training mode the outputs of different inputs are alike; without dropout they are not",
    change="a smaller p",
    order=23,
)
def dropout_everything(x: Examination) -> Iterator[Finding]:
    """Dropout that drops everything."""
    seen, before = as_trained(x).seen, as_trained(x).apart
    high = [(where, p) for where, p in seen.dropped if p >= DROPPED]
    if not high or before is None:
        return
    after = in_training(x, drops=False).apart
    if after is None:
        return
    where, p = high[0]
    held, names = dict(x.model.named_modules()), [name for name, _ in high]
    # The name of the attribute is known for torch's own module only; anything else is a call in somebody's forward.
    own = all(isinstance(held.get(name), nn.modules.dropout._DropoutNd) for name in names)
    line = for_each(x.model, list(dict.fromkeys(names)), f"{{}}.p = {round(1 - p, 3):g}") if own else ""
    helps = bool(line) and x.runs(dropout_everything, line)
    yield Finding(
        "dropout_everything",
        f"Dropout removes nearly everything in training: {where or 'the model'} has p = {p:g}, which is the share that "
        "is dropped, not kept.",
        f"Run `{line}`, if {p:g} was meant to be kept"
        if helps
        else f"Pass the share to drop, {1 - p:.3g}, and not {p:g}",
        tried=helps,
        certainty="shown" if before < 0.5 * after else "possible",
        measured="how much the outputs of different inputs differ in training mode",
        before=before,
        after=after,
        intervention="without dropout",
        where=where,
    )


@cause(
    proof="a pass in training mode leaves the running statistics of a batch norm, which it is told to update, as they "
    "were",
    change="momentum above zero",
    order=24,
)
def stale_batch_statistics(x: Examination) -> Iterator[Finding]:
    """Batch statistics that are never updated."""
    norms = as_trained(x).seen.statistics
    still = [name for name, moved in norms.items() if not moved]
    if still:
        line = for_each(x.model, still, "{}.momentum = 0.1")
        helps = x.runs(stale_batch_statistics, line)
        yield Finding(
            "stale_batch_statistics",
            f"{len(still)} batch norms ({still[0]} ...) do not update their running statistics in training mode, and "
            "use them in evaluation mode.",
            f"Run `{line}`" if helps else "Give them a momentum above zero",
            tried=helps,
            measured="batch norms whose statistics move in training mode",
            before=float(len(norms) - len(still)),
            after=float(len(norms)),
            intervention="expected",
            where=still[0],
        )


@cause(
    proof="every gradient of a branch is zero; with its parameters that are zero drawn at random, none is",
    change="only one of the factors of a branch may begin at zero",
    order=62,
)
def dead_branch(x: Examination) -> Iterator[Finding]:
    """Branches that begin at zero and stay there."""
    if not x.blocks:
        return
    named = dict(x.model.named_parameters())
    silent = {n for n, g in x.gradients.items() if g is not None and not bool(g.any())}
    zero = {n for n in silent if not bool(named[n].detach().any())}
    if len(zero) < 2:
        return
    replaced = {n: torch.randn_like(named[n].detach()) * 0.02 for n in zero}
    after = x.gradients_with(replaced)
    woken = [n for n in silent if (g := after.get(n)) is not None and bool(g.any())]
    if len(woken) < len(silent) or not woken:
        return
    yield Finding(
        "dead_branch",
        f"{len(silent)} parameters get a gradient of exactly zero: two factors of a branch begin at zero "
        f"({', '.join(sorted(zero)[:2])} ...), and each needs the other to move.",
        "Begin with one of them at zero, and draw the other",
        measured="parameters with a gradient of exactly zero",
        before=float(len(silent)),
        after=float(len(silent) - len(woken)),
        intervention="with these factors drawn at random",
    )

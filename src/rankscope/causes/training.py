"""What differs between training and evaluation, and branches that never begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.causes._examination import Examination
from rankscope.causes._innermost import ModuleFollower
from rankscope.causes._spec import Finding, cause
from rankscope.causes._tensors import main_output
from rankscope.models.loading.devices import seed_generators
from rankscope.models.wrapping import same_buffers

DROPPED = 0.9
"""Share of the entries from which on dropout counts as dropping everything."""
_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
)
"""Functions that drop entries; modules call them too."""


class _Training(ModuleFollower):
    """Sees dropout and batch statistics in a pass in training mode, by whatever module or function they are computed.

    Args:
        drops: False to drop nothing.

    Attributes:
        dropped: the innermost module and the share, for each call that drops.
        statistics: for each call of a batch norm that should update its statistics, the innermost module and whether
            they moved.
    """

    def __init__(self, model: nn.Module, *, drops: bool) -> None:
        super().__init__(model)
        self._drops = drops
        self.dropped: list[tuple[str, float]] = []
        self.statistics: dict[str, bool] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
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


def _in_training(x: Examination, *, drops: bool) -> tuple[_Training, float | None]:
    """One pass in training mode: what was seen, and how much the outputs of different inputs differ."""
    seen = _Training(x.model, drops=drops)
    was = [(module, module.training) for module in x.model.modules()]
    x.forward_passes += 1
    try:
        x.model.train()
        with same_buffers(x.model), torch.random.fork_rng(devices=[]), torch.no_grad(), seen.watching():
            seed_generators(0)
            output = main_output(x.batch.call(x.model))
    finally:
        for module, training in was:
            module.training = training
    return seen, None if output is None else x.inputs_apart(output)


def _as_trained(x: Examination) -> tuple[_Training, float | None]:
    """The pass in training mode as it is, which two causes share."""
    known = vars(x).get("_as_trained")
    if known is None:
        known = vars(x)["_as_trained"] = _in_training(x, drops=True)
    return known


@cause(
    proof="in training mode the outputs of different inputs are alike; without dropout they are not",
    change="a smaller p",
    order=23,
)
def dropout_everything(x: Examination) -> Iterator[Finding]:
    """Dropout that drops everything."""
    seen, before = _as_trained(x)
    high = [(where, p) for where, p in seen.dropped if p >= DROPPED]
    if not high or before is None:
        return
    _, after = _in_training(x, drops=False)
    if after is None:
        return
    where, p = high[0]
    module = dict(x.model.named_modules()).get(where)
    # The name of the attribute is known for torch's own module only; anything else is a call in somebody's forward.
    own = isinstance(module, nn.modules.dropout._DropoutNd)
    meant = f"{round(1 - p, 3):g}"
    yield Finding(
        "dropout_everything",
        f"Dropout removes nearly everything in training: {where or 'the model'} has p = {p:g}, which is the share that "
        "is dropped, not kept.",
        (f"model.{where}.p = {meant}" if own else f"p={meant} in the forward of {where or 'the model'}")
        + f", if {p:g} was meant to be kept; 0.1 is usual",
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
    norms = _as_trained(x)[0].statistics
    still = [name for name, moved in norms.items() if not moved]
    if still:
        yield Finding(
            "stale_batch_statistics",
            f"{len(still)} batch norms ({still[0]} ...) do not update their running statistics in training mode, and "
            "use them in evaluation mode.",
            f"model.{still[0]}.momentum = 0.1, and call model.train() before training",
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
        f"Initialise one of them with other numbers: nn.init.normal_(model.{min(zero)}, std=0.02)",
        measured="parameters with a gradient of exactly zero",
        before=float(len(silent)),
        after=float(len(silent) - len(woken)),
        intervention="with these factors drawn at random",
    )

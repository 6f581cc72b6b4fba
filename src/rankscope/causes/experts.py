"""Routers that send every token to the same experts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rankscope.causes._examination import Examination
from rankscope.causes._spec import Finding, cause
from rankscope.causes._tensors import redrawn
from rankscope.stream.routers import mixtures_in


class _Chosen(torch.overrides.TorchFunctionMode):
    """Counts the experts that top-k calls choose."""

    def __init__(self, counts: set[int]) -> None:
        super().__init__()
        self._counts = counts
        self.used: list[tuple[float, int]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            scores = args[0] if args else None
            if func in (torch.topk, Tensor.topk) and isinstance(scores, Tensor) and scores.shape[-1] in self._counts:
                chosen = out[1].reshape(-1)
                share = torch.bincount(chosen, minlength=scores.shape[-1]).double()
                share = share[share > 0] / share.sum()
                self.used.append((float(torch.exp(-(share * share.log()).sum())), scores.shape[-1]))
        return out


def _used(x: Examination, counts: set[int], replaced: Mapping[str, Tensor]) -> float:
    mode = _Chosen(counts)
    with mode:
        x.run(replaced=replaced)
    return sum(used for used, _ in mode.used) / len(mode.used) if mode.used else float("nan")


@cause(
    proof="the experts that tokens were sent to are counted; the router is given new weights",
    change="a loss or bias that balances the load",
    order=37,
)
def collapsed_router(x: Examination) -> Iterator[Finding]:
    """Routers that send all tokens to the same experts."""
    mixtures = {name: mixture for name, module in x.blocks for mixture in mixtures_in(module)}
    counts = {one.count for one in mixtures.values() if one.count is not None}
    if not counts:
        return
    before = _used(x, counts, {})
    most = max(counts)
    if not before < 0.4 * most:
        return
    for names in _routers(x, counts):
        held = dict(x.model.named_modules())
        after = _used(x, counts, redrawn([(name, held[name]) for name in names]))
        if after > 1.5 * before:
            yield Finding(
                "collapsed_router",
                f"Tokens use {before:.1f} of {most} experts (effective number): the routers ({names[0]} ...) send "
                "nearly all of them to the same ones.",
                "Add a loss that balances the load, or a bias that is lowered for busy experts",
                measured="effective number of experts that tokens use",
                before=before,
                after=after,
                intervention="with new weights for the routers",
                where=names[0],
            )
            return


def _routers(x: Examination, counts: set[int]) -> list[list[str]]:
    """Modules with weights that return one number per expert, those in the same place of each block together.

    Which of them routes is left to the experiment: new weights for an expert of that width change no choice.
    """
    names_by_router: dict[str, list[str]] = {}
    for call in x.base:
        has_weights = any(True for _ in call.module.parameters(recurse=False))
        if call.name and has_weights and call.output is not None and call.output.shape[-1] in counts:
            same = names_by_router.setdefault(re.sub(r"\d+", "*", call.name), [])
            same += [] if call.name in same else [call.name]
    return list(names_by_router.values())

"""Values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rankscope.examination._examination import Examination, ModuleCall
from rankscope.examination._spec import Finding, cause
from rankscope.examination._tensors import few, is_trained, norm_gains


def _first_broken(x: Examination) -> ModuleCall | None:
    for call in x.base:
        if call.output is None or bool(torch.isfinite(call.output).all()):
            continue
        if call.given is None or bool(torch.isfinite(call.given).all()):
            return call
    return None


@cause(
    proof="the entries of every parameter are tested",
    change="nothing brings them back",
    order=0,
)
def weights_not_finite(x: Examination) -> Iterator[Finding]:
    """Weights that are NaN or infinite."""
    lost = {n: int((~torch.isfinite(p.detach())).sum()) for n, p in x.model.named_parameters() if p.is_floating_point()}
    lost = {name: count for name, count in lost.items() if count}
    if lost:
        first = next(iter(lost))
        yield Finding(
            "weights_not_finite",
            f"{len(lost)} parameters hold NaN or infinity; the first is {first}.",
            "Look for the step after which they first do; they stay so, whatever is trained afterwards",
            measured="entries that are not finite",
            before=float(sum(lost.values())),
            where=first,
        )


@cause(
    proof="the entries of every matrix of a block are compared, if its norms have moved from where they begin",
    change="the weights that were meant",
    order=26,
)
def constant_matrix(x: Examination) -> Iterator[Finding]:
    """A matrix of one value in a block that was trained."""
    idle = {call.module for call in x.base if call.given is not None and call.output is not None
            and call.given.shape == call.output.shape and torch.equal(call.given, call.output)}  # fmt: skip
    found = []
    for place, block in x.blocks:
        # Adapters begin at zero while the norms are frozen, and new blocks as the identity.
        learn = {one.requires_grad for one in norm_gains(block)} if is_trained(block) and block not in idle else set()
        for name, one in block.named_parameters():
            if one.ndim == 2 and min(one.shape) > 1 and one.requires_grad in learn:
                found += [f"{place}.{name}"] if bool((one.detach() == one.detach()[0, 0]).all()) else []
    if found:
        yield Finding(
            "constant_matrix",
            f"All entries of {few(found)} are one number, in blocks that were trained.",
            "Compare it with the weights it was loaded from",
            certainty="possible",
            measured="matrices of trained blocks whose entries are all equal",
            before=float(len(found)),
            where=found[0],
        )


@cause(
    proof="the same pass with weights and inputs in float32 is finite",
    change="bfloat16 or float32",
    order=1,
)
def float16_overflow(x: Examination) -> Iterator[Finding]:
    """Overflow of float16."""
    broken = _first_broken(x)
    dtypes = {p.dtype for p in x.model.parameters()}
    if broken is None or torch.float16 not in dtypes:
        return
    replaced = {n: p.detach().float() for n, p in x.model.named_parameters() if p.dtype == torch.float16}
    wide = x.batch.mapped(lambda _, value, axis: value.float() if value.dtype == torch.float16 else value)
    whole = x.output(wide, replaced=replaced)
    if whole is None or not bool(torch.isfinite(whole).all()):
        return
    yield Finding(
        "float16_overflow",
        f"Values exceed the range of float16 (65,504), first in {broken.name or type(broken.module).__name__}.",
        "Use bfloat16 or float32",
        measured="outputs that are finite",
        before=float(torch.isfinite(x.result).double().mean()) if x.result is not None else 0.0,
        after=1.0,
        intervention="in float32",
        where=broken.name or "",
    )


@cause(
    proof="the same pass without the mask is finite",
    change="a mask that leaves each query at least one key",
    order=2,
)
def mask_without_keys(x: Examination) -> Iterator[Finding]:
    """Queries that may see no key."""
    broken = _first_broken(x)
    if broken is None or x.result is None:
        return
    from dataclasses import replace

    from rankscope.models.inputs.record import is_mask_like

    masks = [name for name, value in x.batch.inputs.items() if is_mask_like(name) and isinstance(value, torch.Tensor)]
    share_finite = float(torch.isfinite(x.result).double().mean())
    for name in masks:
        value = x.batch.inputs[name]
        for fill in (1, 0):
            whole = replace(x.batch, inputs={**x.batch.inputs, name: torch.full_like(value, fill)})
            after = x.output(whole)
            if after is not None and bool(torch.isfinite(after).all()):
                yield Finding(
                    "mask_without_keys",
                    f"With {name!r} some queries see no key at all, and the softmax of an empty row is NaN, first in "
                    f"{broken.name or type(broken.module).__name__}.",
                    f"Pass a {name} that leaves each sequence at least one key",
                    measured="outputs that are finite",
                    before=share_finite,
                    after=1.0,
                    intervention=f"with {name} all {fill}",
                    where=name,
                )
                return
    yield Finding(
        "mask_without_keys",
        f"Values are not finite, first in {broken.name or type(broken.module).__name__}, whose inputs and weights are "
        "finite: a row of attention without keys, a division by zero, or values too large for the format.",
        "Look at what this module computes",
        certainty="possible",
        measured="outputs that are finite",
        before=share_finite,
        where=broken.name or "",
    )

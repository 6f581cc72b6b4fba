"""Experiments on tokens and modules: tokens in another order, and maps that follow each other."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from rankscope.examination._examination import Examination, ModuleCall
from rankscope.examination._outcomes import NOT_READ, Outcome, experiment
from rankscope.examination._tensors import changed_entries
from rankscope.examination.outputs import begins_at_zero

UNDECIDED = 0.2
"""Share of the tokens that must have another label than an equal token of their sequence."""


@experiment
def order_unseen(x: Examination) -> Outcome:
    """Whether tokens in another order have the same outputs in that order.

    The control: equal tokens of a sequence have equal labels, so that the order need not be seen.
    """
    out, found = x.result, x.outcome("alignment")
    if out is None or found.seen is None or found["target"].ndim != 2 or x.token_axis(out) is None or not x.tokens:
        return NOT_READ
    labels = found["target"]
    ids = [value.transpose(0, x.batch.axis) for value in x.mains if not value.is_floating_point()]
    if len(ids) != 1 or ids[0].shape != labels.shape or x.batch.keep is not None:
        return NOT_READ
    equal = ids[0][:, :, None] == ids[0][:, None]
    counted = (labels >= 0)[:, :, None] & (labels >= 0)[:, None]
    differ = equal & counted & (labels[:, :, None] != labels[:, None])
    share = float(differ.any(-1).double().mean())
    if share < UNDECIDED:
        return Outcome(None, True)
    order = torch.randperm(x.tokens, generator=torch.Generator().manual_seed(0)).to(out.device)

    def permuted(name: str, value: torch.Tensor, axis: int) -> torch.Tensor:
        has_tokens = value.ndim > 1 and value.shape[1 - axis] == x.tokens
        return value.index_select(1 - axis, order) if has_tokens else value

    other = x.output(x.batch.mapped(permuted))
    axis = x.token_axis(out)
    gap = None if other is None or axis is None else changed_entries(out.index_select(axis, order), other)
    return NOT_READ if gap is None else Outcome(not bool(gap.any()), False, {"share": share})


@experiment
def causal_corner(x: Examination) -> Outcome:
    """Whether a causal mask of fewer queries than keys hides the last keys from all; the control is as many of both."""
    corners = x.softmaxes.corners
    if not corners:
        return Outcome(False, False)
    queries, keys, place = corners[0]
    return Outcome(True, queries == keys, {"queries": queries, "keys": keys, "place": place})


def _is_idle(call: ModuleCall) -> bool:
    """Whether a module returned what it was given, as dropout does in evaluation mode."""
    given, out = call.given, call.output
    return given is not None and out is not None and given.shape == out.shape and torch.equal(given, out)


@experiment
def maps_follow(x: Examination) -> Outcome:
    """Whether one linear map reads exactly what another returned; the control is a narrow middle, which is a rank."""
    leaves = [call for call in x.base if call.is_leaf and call.output is not None and call.name and not _is_idle(call)]
    found = []
    for one, other in pairwise(leaves):
        if not (isinstance(one.module, nn.Linear) and isinstance(other.module, nn.Linear)):
            continue
        if one.output is None or other.given is None or not torch.equal(one.output, other.given):
            continue
        narrow = one.module.out_features <= max(one.module.in_features, other.module.out_features)
        found.append((one.name, other.name, one.module.out_features, narrow))
    wide = [pair for pair in found if not pair[3]]
    return Outcome(bool(found), not wide, {"pairs": wide})


@experiment
def tokens_alike(x: Examination) -> Outcome:
    """Whether all tokens of a sequence have one output, although their labels differ; the control is a head of zero."""
    out, found = x.result, x.outcome("alignment")
    axis = None if out is None else x.token_axis(out)
    if out is None or axis is None or found.seen is None or found["target"].ndim != 2:
        return NOT_READ
    labels = found["target"]
    if bool((labels == labels[:, :1]).all()):
        return Outcome(None, True)
    rows = out.movedim(axis, 0)
    gap = changed_entries(rows[:1].expand_as(rows), rows)
    return NOT_READ if gap is None else Outcome(not bool(gap.any()), begins_at_zero(x), {"tokens": len(rows)})

"""Inputs that tell the model little, or reach it in a form that it removes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from rankscope.causes import _source
from rankscope.causes._examination import Examination, ModuleCall
from rankscope.causes._spec import Finding, cause
from rankscope.causes.outputs import OUTPUTS

ALIKE = 0.1
CONSTANT = 0.98


@cause(
    proof="the share of the difference between inputs, at the first block, that is the same in all channels",
    change="nn.Linear from the features to the width of the model",
    order=10,
    needs={"structure"},
)
def input_in_one_direction(x: Examination) -> Iterator[Finding]:
    """An input that is added to every channel alike, which norms remove."""
    share = _share_in_one_direction(x, x.base)
    if share is None or share < CONSTANT:
        return
    change, after = _projection(x)
    yield Finding(
        "input_in_one_direction",
        "The input adds the same number to every channel (it is broadcast over the width), and LayerNorm subtracts "
        "exactly that: the blocks see the positions and hardly the input.",
        change or "Project the input to the width of the model with nn.Linear, before positions are added",
        tried=bool(change),
        measured="share of the difference between inputs that a LayerNorm removes",
        before=share**2,
        after=after**2 if change else None,
        intervention="with such a projection, newly drawn",
    )


def _share_in_one_direction(x: Examination, calls: Sequence[ModuleCall]) -> float | None:
    """The share of the difference between inputs, at the first block, that is the same in all channels."""
    first = next((call for call in calls if x.blocks and call.module is x.blocks[0][1]), None)
    given = None if first is None else first.given
    axis = None if given is None else x.sequence_axis(given)
    if given is None or axis is None or given.ndim != 3 or given.shape[-1] < 4:
        return None
    between = given.double() - given.double().mean(axis, keepdim=True)
    size = float(between.norm())
    if not size > 1e-6 * float(given.double().norm()):
        return None
    return float(between.mean(-1, keepdim=True).expand_as(between).norm()) / size


def _projection(x: Examination) -> tuple[str, float]:
    """The two lines that project the input, and the share with them; empty if they do not run or help."""
    place, mains = _source.place_of(type(x.model).forward), x.mains
    first = next((call.given for call in x.base if call.module is x.blocks[0][1]), None)
    if place is None or first is None or len(mains) != 1 or mains[0].ndim != 3 or len(place.node.args.args) < 2:
        return "", 1.0
    width, features, argument = first.shape[-1], mains[0].shape[-1], place.node.args.args[1].arg
    with torch.random.fork_rng(devices=[]):
        linear = nn.Linear(features, width).to(mains[0])
    try:
        with torch.no_grad():
            projected = x.batch.mapped(lambda _, value, axis: linear(value) if value is mains[0] else value)
            after = _share_in_one_direction(x, x.calls(projected))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return "", 1.0  # a module before the first block reads the features themselves
    if after is None or after >= CONSTANT:
        return "", 1.0
    name = next(one for one in ("enter", "project_inputs", "input_projection") if not hasattr(x.model, one))
    kind, module = type(x.model).__name__, place.module(nn, "nn")
    return (
        f"Project it first. At the end of `{kind}.__init__`, add `self.{name} = {module}.Linear({features}, {width})`; "
        f"at the start of `{kind}.forward`, add `{argument} = self.{name}({argument})`",
        after,
    )


@cause(
    proof="the inputs are compared before the model; the model is run on standardised ones",
    change="standardise each feature over the data",
    order=41,
)
def inputs_alike(x: Examination) -> Iterator[Finding]:
    """Inputs that hardly differ."""
    floats = [value for value in x.mains if value.is_floating_point()]
    if len(floats) != 1 or x.result is None or x.sequences < 3:
        return
    raw, before = x.inputs_apart(floats[0]), x.inputs_apart(x.result)
    if raw is None or before is None or raw > ALIKE or before > ALIKE:
        return

    def standardised(name: str, value: torch.Tensor, axis: int) -> torch.Tensor:
        if value is not floats[0]:
            return value
        deviation = value.std(axis, keepdim=True)
        return torch.where(deviation > 0, (value - value.mean(axis, keepdim=True)) / deviation, torch.zeros_like(value))

    output = x.output(x.batch.mapped(standardised))
    after = None if output is None else x.inputs_apart(output)
    if after is None or after < 3 * before:
        return
    yield Finding(
        "inputs_alike",
        f"The inputs themselves differ by {raw:.2g} of their size only: a large part is common to all of them.",
        "Standardise each feature over the training data",
        measured=OUTPUTS,
        before=before,
        after=after,
        intervention="with standardised inputs",
    )


@cause(
    proof="the share of the most frequent id among all tokens that count is read",
    change="the model's own tokenizer and vocabulary",
    order=12,
)
def few_tokens(x: Examination) -> Iterator[Finding]:
    """Most tokens are one id."""
    for value in x.mains:
        if value.is_floating_point() or value.ndim != 2 or value.numel() < 16:
            continue
        ids = value.transpose(0, x.batch.axis)
        if x.batch.keep is not None and x.batch.keep.shape == ids.shape:
            ids = ids[x.batch.keep.to(ids.device)]
        common, counts = torch.unique(ids, return_counts=True)
        share = float(counts.max()) / ids.numel()
        if share >= 0.6:
            yield Finding(
                "few_tokens",
                f"{share:.0%} of the tokens are the id {int(common[counts.argmax()])}: unknown, padding that is not "
                "marked, or clamped to the vocabulary.",
                "Tokenise with the tokenizer and the vocabulary of this model, and mark padding with its mask",
                certainty="possible",
                measured="share of the most frequent id",
                before=share,
            )


@cause(
    proof="the share of entries equal to the smallest or largest value is read",
    change="clip less, or scale before clipping",
    order=13,
)
def clamped_inputs(x: Examination) -> Iterator[Finding]:
    """Inputs that are clipped."""
    for value in x.mains:
        if not value.is_floating_point() or value.numel() < 64:
            continue
        ends = ((value == value.max()) | (value == value.min())) & (value != 0)  # zeros are sparse, not clipped
        share = float(ends.double().mean())
        if share >= 0.4 and torch.unique(value).numel() > 8:
            yield Finding(
                "clamped_inputs",
                f"{share:.0%} of the entries have the smallest or largest value: they are clipped.",
                "Scale the features before clipping them, or clip at a larger value",
                certainty="possible",
                measured="share of clipped entries",
                before=share,
            )

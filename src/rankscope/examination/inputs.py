"""Inputs that tell the model little, or reach it in a form that it removes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rankscope.examination._examination import Examination, ModuleCall
from rankscope.examination._loss import filled_ends
from rankscope.examination._spec import Finding, cause

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
    yield Finding(
        "input_in_one_direction",
        "The input adds the same number to every channel (it is broadcast over the width), and LayerNorm subtracts "
        "exactly that: the blocks see the positions and hardly the input.",
        "Project the input to the width of the model with nn.Linear, before positions are added",
        measured="share of the difference between inputs that a LayerNorm removes",
        before=share**2,
        after=None,
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


@cause(
    proof="the share of the most frequent id among all tokens that count is read",
    change="the model's own tokenizer and vocabulary",
    order=12,
)
def few_tokens(x: Examination) -> Iterator[Finding]:
    """Most tokens are one id, in all inputs that give ids: types and segments of tokens are often all alike."""
    given = [value for value in x.mains if not value.is_floating_point() and value.ndim == 2 and value.numel() >= 16]
    for shape in {value.shape for value in given}:
        tokens = torch.stack([value.transpose(0, x.batch.axis) for value in given if value.shape == shape], dim=-1)
        fills = [one for value in given if (one := filled_ends(value.transpose(0, x.batch.axis))) is not None]
        if fills and fills[0].shape == tokens.shape[:-1]:  # what fills the ends is padding, and few_tokens is of text
            tokens = tokens[~fills[0]]
        elif x.batch.keep is not None and x.batch.keep.shape == tokens.shape[:-1]:
            tokens = tokens[x.batch.keep.to(tokens.device)]
        common, counts = torch.unique(tokens.flatten(0, -2), dim=0, return_counts=True)
        share = float(counts.max()) / int(counts.sum())
        if share >= 0.6:
            yield Finding(
                "few_tokens",
                f"{share:.0%} of the tokens are the id {int(common[counts.argmax(), 0])}: unknown, padding that is not "
                "marked, or clamped to the vocabulary.",
                "Tokenise with the tokenizer and the vocabulary of this model, and mark padding with its mask",
                certainty="possible",
                measured="share of the most frequent id",
                before=share,
            )

"""Inputs that tell little, or that the model does not read."""

from __future__ import annotations

import torch
from torch import Tensor

from rankscope.examination import source
from rankscope.examination.experiments.operations import named
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import Classifier, Program, classes, classified, ids
from rankscope.examination.spec import Finding, row


class _Ignoring(Classifier):
    def __init__(self, times: float) -> None:
        super().__init__()
        self.times = times

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x * self.times
        out: Tensor = self.head(self.mix(x).tanh().mean(1))
        return out


@row(
    reads=("inputs_lost",),
    order=10,
    bad=lambda: Program(_Ignoring(0.0), ids(), classes()),
    good=lambda: Program(_Ignoring(1.0), ids(), classes()),
)
def inputs_ignored(x: Examination, lost: Outcome) -> Finding:
    """A model that answers the same, whatever its inputs are."""
    step, lead = lost["step"], "All outputs are the same, whatever the inputs are"
    if step is None:
        return Finding(
            "inputs_ignored",
            f"{lead}. The operation in which the inputs are lost was not found.",
            "Look at where forward uses its inputs: what it returns is made of something else",
            measured="change of the outputs when all inputs are replaced, relative to their size",
            before=0.0,
        )
    edits = source.without_operation(step.place, step.name, step.lost or 0)
    change, written = x.edited("inputs_lost", step.place, edits) if lost["after"] is not None else ("", ())
    return Finding(
        "inputs_ignored",
        f"{lead}: {named(x, step)} returns the same for all of them, although what it takes differs."
        + ("" if any(one is not None and bool(one.any()) for one in x.gradients.values()) else _NOTHING),
        change or "Give this operation values that it does not make equal",
        tried=bool(change),
        measured="how much the outputs of different inputs differ, relative to their size",
        before=lost["before"],
        after=lost["after"],
        intervention="without this operation",
        where=step.module or "",
        edits=written,
    )


_NOTHING = " No parameter gets a gradient."


def unknown(share: float) -> Program:
    """Text of which a share is one id."""
    program = classified()
    text = program.inputs
    program.inputs = torch.where(torch.rand(text.shape) < share, torch.ones_like(text), text)
    return program


@row(reads=("one_id",), order=12, bad=lambda: unknown(0.9), good=lambda: unknown(0.1))
def few_tokens(x: Examination, one: Outcome) -> Finding:
    """Most tokens are one id, in all inputs that give ids: types and segments of tokens are often all alike."""
    return Finding(
        "few_tokens",
        f"{one['share']:.0%} of the tokens are the id {one['id']}: unknown, padding that is not marked, or clamped to "
        "the vocabulary.",
        "Tokenise with the tokenizer and the vocabulary of this model, and mark padding with its mask",
        certainty="possible",
        measured="share of the most frequent id",
        before=one["share"],
    )

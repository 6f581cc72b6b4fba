"""Inputs that tell little, or that the model does not read."""

from __future__ import annotations

from rankscope.examination import source
from rankscope.examination.experiments.operations import named
from rankscope.examination.findings import NOT_MADE
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import CLASSIFIER
from rankscope.examination.spec import Finding, finding, row


@row(
    "one_id",
    order=12,
    good=CLASSIFIER,
    fault=("optimizer =", "inputs[torch.rand(inputs.shape) < 0.9] = 1\noptimizer ="),
)
def few_tokens(x: Examination, one: Outcome) -> Finding:
    """Most tokens are one id, in all inputs that give ids: types and segments of tokens are often all alike."""
    return finding(
        f"{one['share']:.0%} of the tokens are the id {one['id']}: unknown, padding that is not marked, or clamped to "
        "the vocabulary.",
        "Tokenise with the tokenizer and the vocabulary of this model, and mark padding with its mask",
        certainty="possible",
        evidence=("share of the most frequent id", one["share"]),
    )


@row("inputs_lost", order=10, good=CLASSIFIER, fault=("x = self.embed(ids)", "x = self.embed(ids) * 0"))
def inputs_ignored(x: Examination, lost: Outcome) -> Finding:
    """A model that answers the same, whatever its inputs are."""
    step, lead = lost["step"], "All outputs are the same, whatever the inputs are"
    if step is None:
        return finding(
            f"{lead}. The operation in which the inputs are lost was not found.",
            "Look at where forward uses its inputs: what it returns is made of something else",
            evidence=("change of the outputs when all inputs are replaced, relative to their size", 0.0),
        )
    learns = any(one is not None and bool(one.any()) for one in x.gradients.values())
    return finding(
        f"{lead}: {named(x, step)} returns the same for all of them, although what it takes differs."
        + ("" if learns else " No parameter gets a gradient."),
        "Give this operation values that it does not make equal",
        x.edited("inputs_lost", step.place, source.without_operation, step.name, step.lost or 0)
        if lost["after"] is not None
        else NOT_MADE,
        evidence=(
            "how much the outputs of different inputs differ, relative to their size",
            lost["before"],
            lost["after"],
            "without this operation",
        ),
        where=step.module or "",
    )

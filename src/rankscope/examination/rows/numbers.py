"""Values that are not finite, and randomness where none should be."""

from __future__ import annotations

from rankscope.examination.experiments.operations import named
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import CLASSIFIER, DECODER
from rankscope.examination.spec import Finding, finding, row
from rankscope.examination.tensors import few


@row(
    "weights_zero",
    order=0,
    good=CLASSIFIER,
    fault=("model = Model()\n", "model = Model()\nfor one in model.parameters():\n    nn.init.zeros_(one)\n"),
)
def weights_erased(x: Examination, zero: Outcome) -> Finding:
    """Matrices that are all zero, with which nothing else can be told."""
    names = zero["names"]
    return finding(
        f"Every matrix of the model is zero ({few(names)}): whatever it computes is the same for all inputs.",
        "Look for what overwrote the weights, or compare them with those that were to be loaded",
        where=names[0],
    )


@row(
    "one_value_in_trained",
    order=26,
    good=DECODER.but(
        "model = Model()\n",
        "model = Model()\nfor one in model.layers:\n    nn.init.normal_(one.norm1.weight, 1.0, 0.1)\n",
    ),
    fault=("optimizer = ", "nn.init.zeros_(model.layers[1].mlp[0].weight)\noptimizer = "),
)
def constant_matrix(x: Examination, constant: Outcome) -> Finding:
    """A matrix of one value in a block that was trained."""
    names = constant["names"]
    return finding(
        f"All entries of {few(names)} are one number, in blocks that were trained.",
        "Compare it with the weights it was loaded from",
        certainty="possible",
        where=names[0],
    )


def _where(broken: Outcome) -> str:
    call = broken["call"]
    return call.name or type(call.module).__name__


@row(
    "finite_in_float32",
    order=1,
    good=CLASSIFIER.but(
        "F.cross_entropy(output, labels)", "F.cross_entropy(output.float(), labels)",
        "model = Model()\n", "model = Model().half()\nnn.init.constant_(model.mix.weight, 0.1)\n",
        "AdamW(model.parameters(), 1e-3)", "SGD(model.parameters(), 0.1)",
    ),
    fault=("mix.weight, 0.1", "mix.weight, 3e4"),
)  # fmt: skip
def float16_overflow(x: Examination, wide: Outcome) -> Finding:
    """Overflow of float16."""
    if wide["inside"] is not None:
        name, place = wide["inside"]
        return finding(
            f"Values exceed the range of float16 (65,504), first in {name.strip('_')}"
            + (f" in `{place.name}`" if place is not None else "")
            + ", and nothing of the inputs is left after it.",
            "Compute this in float32",
            evidence=("how much the outputs of different inputs differ, relative to their size", wide["apart"]),
        )
    return finding(
        f"Values exceed the range of float16 (65,504), first in {_where(wide)}.",
        "Use bfloat16 or float32",
        evidence=("outputs that are finite", wide["share"], 1.0, "in float32"),
        where=wide["call"].name or "",
    )


@row("not_finite", order=2, good=CLASSIFIER, fault=("x.mean(1)", "x.mean(1) / (x - x).sum(1)"))
def values_not_finite(x: Examination, broken: Outcome) -> Finding | None:
    """A module that returns NaN or infinity for numbers that are finite."""
    if x.outcome("finite_in_float32").shown:
        return None
    where, weights = _where(broken), broken["weights"]
    return finding(
        f"Weights are not finite: {few(weights)}."
        if weights
        else f"Values are not finite, first in {where}, whose inputs and weights are finite: a row of attention "
        "without keys, a division by zero, or values too large for the format.",
        "Look for the step after which they first are not" if weights else "Look at what this module computes",
        certainty="possible",
        evidence=("outputs that are finite", broken["share"]),
        where=broken["call"].name or "",
    )


_DROPPING = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
"""Functions that may drop weights of attention."""


@row("passes_differ", order=3, good=CLASSIFIER, fault=("x.mean(1)", "F.dropout(x, 0.1).mean(1)"))
def not_deterministic(x: Examination, differ: Outcome) -> Finding:
    """A model that answers differently each time in evaluation mode."""
    measured = "difference between the outputs of two equal passes"
    if x.made_in_forward:
        kinds = ", ".join(x.made_in_forward)
        return finding(
            f"{kinds}: created inside forward, with new random weights in every pass; they can never be trained.",
            f"Create {kinds} once in __init__ and call it in forward.",
            evidence=(measured, differ["noise"]),
        )
    step = differ["step"]
    drops = step is not None and ("dropout" in step.name or step.name in _DROPPING)
    return finding(
        "The model is not deterministic in evaluation mode: two equal passes differ"
        + (f", first in {named(x, step)}." if step is not None else "."),
        "Dropout has to end in evaluation mode: pass the module's own `training` to the function, or use nn.Dropout"
        if drops
        else "",
        kind="fault" if drops else "note",
        evidence=(measured, differ["noise"]),
    )

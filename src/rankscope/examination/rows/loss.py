"""Losses that compare the wrong things."""

from __future__ import annotations

from rankscope.examination import source
from rankscope.examination.experiments.loss import STEPS
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import CLASSIFIER, DECODER
from rankscope.examination.spec import Finding, finding, row, told

_LOSS = "F.cross_entropy(output, labels)"


@row("copies_input", order=53, needs={"loss"}, good=DECODER, fault=("text[:, 1:]", "text[:, :-1]"))
def labels_are_inputs(x: Examination, copies: Outcome) -> Finding:
    """Labels that the model reads as its input."""
    return finding(
        f"The labels are the inputs: the loss compares the output at a token with the token that the model reads there "
        f"({copies['share']:.0%} of the labels), so it only has to copy.",
        "Hide what is to be predicted, or shift the labels by one token for a causal model; for an autoencoder this is "
        "meant",
        certainty="possible",
    )


@row(
    "skips_a_token",
    order=53,
    needs={"loss"},
    good=DECODER,
    fault=("output.flatten(0, 1), labels.flatten()", "output[:, :-1].flatten(0, 1), labels[:, 1:].flatten()"),
)
def labels_shifted_wrongly(x: Examination, skips: Outcome) -> Finding:
    """Labels that are shifted by more or less than one token."""
    away = skips["distance"]
    where = f"{away} tokens later" if away > 0 else "one token earlier" if away == -1 else f"{-away} tokens earlier"
    return finding(
        f"The model is causal, and the loss compares the output at a token with the token {where}, not with the next "
        "one" + (", although the model has read that one already." if away < 0 else "."),
        "Shift the labels by one token, either in the data or in the loss",
        certainty="possible",
        evidence=("tokens from an output to the one that it is compared with", float(away)),
    )


@row(
    "other_places",
    order=52,
    needs={"loss", "labels"},
    good=CLASSIFIER,
    fault=(_LOSS, "F.cross_entropy(output, labels.roll(3))"),
)
def labels_of_others(x: Examination, other: Outcome) -> Finding:
    """Labels that are compared with the outputs of other sequences."""
    to, here = other["places"][0][0], other["here"][0]
    return finding(
        f"The label of sequence {here} is compared with the output of sequence {to}: another label there moves the "
        "gradient of that output, and of no other one.",
        "Bring outputs and labels into one order before they are compared: look for view or reshape where a transpose "
        "was meant",
        evidence=("sequence whose output a label moves", float(to)),
    )


@row(
    "labels_unread",
    order=52,
    needs={"loss"},
    good=CLASSIFIER,
    fault=(_LOSS, "-output.softmax(-1).max(-1).values.log().mean()"),
)
def loss_ignores_labels(x: Examination, unread: Outcome) -> Finding:
    """A loss that does not depend on the labels."""
    return finding(
        "The loss does not depend on the labels: with other labels its gradient is the same in every entry.",
        "Compute the loss from the labels of the batch",
        certainty="possible",
        evidence=("loss of outputs that differ, with other labels", unread["loss"], unread["loss"], "permuted"),
    )


@row("wrong_is_better", order=50, needs={"loss", "labels"}, good=CLASSIFIER, fault=(_LOSS, f"-{_LOSS}"))
def loss_rewards_wrong(x: Examination, better: Outcome) -> Finding:
    """A loss that is smaller for wrong answers."""
    return finding(
        f"The loss rewards wrong answers: it is {told(better['right'])} if every output names its label, and "
        f"{told(better['wrong'])} if every output names another class.",
        "Change the sign of the loss",
        evidence=("loss of right answers", better["right"], better["wrong"], "of wrong ones"),
    )


@row(
    "padding_counts",
    order=54,
    needs={"loss"},
    good=DECODER.but(
        "labels.flatten()", "labels.flatten(), ignore_index=0",
        "inputs, labels =", "text[torch.arange(12) >= torch.arange(3, 9).repeat(2)[:, None]] = 0\ninputs, labels =",
    ),
    fault=(", ignore_index=0", ""),
)  # fmt: skip
def padding_in_loss(x: Examination, counts: Outcome) -> Finding:
    """A loss that counts padding."""
    value = counts["value"]
    return finding(
        f"The loss counts padding: {counts['share']:.0%} of the tokens that it compares are the id {value} at the ends "
        "of sequences, where the input is padding too.",
        f"Leave these tokens out of the loss, for example with ignore_index={value}, or set their labels to -100",
        certainty="possible",
        evidence=("share of the tokens that count which are padding", counts["share"]),
    )


@row(
    "bounded_output",
    order=51,
    needs={"loss"},
    good=CLASSIFIER.but(
        "self.head(x.mean(1))", "self.head(x.mean(1)).sigmoid()",
        _LOSS, "F.binary_cross_entropy(output, labels)",
        "torch.arange(12) % 3", "F.one_hot(torch.arange(12) % 3).float()",
    ),
    fault=("F.binary_cross_entropy", "F.binary_cross_entropy_with_logits"),
)  # fmt: skip
def outputs_bounded(x: Examination, bounded: Outcome) -> Finding | None:
    """Outputs that a last function keeps from their targets."""
    if bounded["name"] == "softmax":
        return None
    return finding(
        f"The model ends in {bounded['name']}, and no output that this can give comes near the targets: optimised "
        f"without the model, the loss stays at {told(bounded['least'])}.",
        f"Return what {bounded['name']} is given, or use a loss and targets of its range",
        evidence=(
            "smallest loss of outputs that are optimised without the model",
            bounded["least"],
            bounded["free"],
            f"without {bounded['name']}",
        ),
    )


@row(
    "broadcast",
    order=50,
    needs={"loss", "labels"},
    good=CLASSIFIER.but(
        "self.head(x.mean(1))", "self.head(x.mean(1))[:, 0]",
        _LOSS, "(output - labels).square().mean()",
        "torch.arange(12) % 3", "torch.randn(12)",
    ),
    fault=("[:, 0]", "[:, :1]"),
)  # fmt: skip
def labels_broadcast(x: Examination, compared: Outcome) -> Finding:
    """Outputs and labels of different shapes that are all compared with each other."""
    return finding(
        f"The loss compares every output with every label: outputs of shape {compared['output']} and labels of shape "
        f"{compared['labels']} are broadcast, and one label moves the gradient of all outputs.",
        f"Give both one shape, for example output.reshape({compared['labels']})",
        evidence=("loss", compared["before"], compared["after"], "with outputs of the shape of the labels"),
    )


@row(
    "bounded_output",
    order=51,
    needs={"loss"},
    good=CLASSIFIER,
    fault=("return self.head(x.mean(1))", "return self.head(x.mean(1)).softmax(-1)"),
)
def double_softmax(x: Examination, bounded: Outcome) -> Finding | None:
    """A second softmax before the loss."""
    if bounded["name"] != "softmax":
        return None
    place = None if x.scan.returned is None else x.scan.returned.place
    return finding(
        "The model returns probabilities, and the loss applies a softmax to them again: even a perfect answer has the "
        f"loss {bounded['least']:.3g}, and gradients are small.",
        "Return logits, without the softmax at the end",
        x.edited("bounded_output", place, source.without_call, "softmax"),
        why=": nn.CrossEntropyLoss takes logits",
        evidence=("smallest loss that any output can reach", bounded["least"], bounded["free"], "with logits"),
    )


@row(
    "one_answer_is_best",
    order=50,
    needs={"loss"},
    good=CLASSIFIER.but(
        "self.head(x.mean(1))", "torch.stack([x[:, ::2].mean(1), x[:, 1::2].mean(1)], 1)",
        "loss(output, labels)", "loss(output)",
        _LOSS, "F.cross_entropy(output[:, 0] @ output[:, 1].T, torch.arange(len(output)))",
        "torch.arange(12) % 3", "None",
    ),
    fault=(
        "F.cross_entropy(output[:, 0] @ output[:, 1].T, torch.arange(len(output)))",
        "(output[:, 0] - output[:, 1]).square().mean()",
    ),
)  # fmt: skip
def collapsed_objective(x: Examination, constant: Outcome) -> Finding:
    """An objective that one output for all inputs fulfils."""
    return finding(
        "The loss is smallest when all outputs are equal: one constant output has the loss "
        f"{constant['constant']:.3g}. Nothing in the objective keeps inputs apart.",
        "Add a term that keeps outputs apart (VICReg), negatives, or a stop-gradient with a predictor (BYOL)",
        evidence=(
            "loss",
            constant["begin"],
            constant["constant"],
            "with one constant output for all inputs, where the outputs started "
            f"{constant['apart']:.2g} apart ({STEPS} steps without the model)",
        ),
    )


@row(
    "softmax_across",
    order=51,
    needs={"loss", "labels"},
    good=CLASSIFIER.but(_LOSS, "F.nll_loss(output.log_softmax(1), labels)"),
    fault=("log_softmax(1)", "log_softmax(0)"),
)
def loss_softmax_axis(x: Examination, across: Outcome) -> Finding:
    """A loss whose softmax does not run over the classes."""
    over, one = ("sequences of the batch", "sequence") if across["over batch"] else ("tokens", "token")
    return finding(
        f"The softmax of the loss runs over the {over} instead of the classes: they compete with each other for each "
        f"class, and no {one} has to choose one.",
        "Take the softmax of the loss over the last axis, or use torch.nn.functional.cross_entropy",
        x.edited("softmax_across", across["place"], source.over_axis, -1),
        evidence=(f"change of the loss when 3 is added to all classes of one {one}", across["change"]),
    )

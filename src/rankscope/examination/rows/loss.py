"""Losses that compare the wrong things."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.examination import source
from rankscope.examination.experiments.loss import STEPS
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import (
    Classifier,
    Program,
    Reader,
    classes,
    classified,
    ids,
    per_token,
    predicted,
)
from rankscope.examination.spec import Finding, row, told


def next_tokens() -> Program:
    """The label of each token is the next one."""
    return predicted(1, None)


def labels_not_shifted() -> Program:
    """The label of each token is the token itself."""
    return predicted(0, None)


@row(reads=("copies_input",), order=53, needs={"loss"}, bad=labels_not_shifted, good=next_tokens)
def labels_are_inputs(x: Examination, copies: Outcome) -> Finding:
    """Labels that the model reads as its input."""
    return Finding(
        "labels_are_inputs",
        f"The labels are the inputs: the loss compares the output at a token with the token that the model reads there "
        f"({copies['share']:.0%} of the labels), so it only has to copy.",
        "Hide what is to be predicted, or shift the labels by one token for a causal model; for an autoencoder this is "
        "meant",
        certainty="possible",
        measured="share of the labels that are the input at the same token",
        before=copies["share"],
    )


def shifted_twice() -> Program:
    """Labels that are the next tokens already, and a loss that shifts them once more."""
    program = predicted(1, None)
    program.loss = lambda logits, labels: per_token(logits[:, :-1], labels[:, 1:])
    return program


@row(reads=("skips_a_token",), order=53, needs={"loss"}, bad=shifted_twice, good=next_tokens)
def labels_shifted_wrongly(x: Examination, skips: Outcome) -> Finding:
    """Labels that are shifted by more or less than one token."""
    away = skips["distance"]
    where = f"{away} tokens later" if away > 0 else "one token earlier" if away == -1 else f"{-away} tokens earlier"
    return Finding(
        "labels_shifted_wrongly",
        f"The model is causal, and the loss compares the output at a token with the token {where}, not with the next "
        "one" + (", although the model has read that one already." if away < 0 else "."),
        "Shift the labels by one token, either in the data or in the loss",
        certainty="possible",
        measured="tokens from an output to the one that it is compared with",
        before=float(away),
        after=1.0,
        intervention="for the next token",
    )


def rolled() -> Program:
    """A loss that compares each output with the label of another sequence."""
    return classified(lambda logits, labels: F.cross_entropy(logits, labels.roll(3)))


@row(reads=("other_places",), order=52, needs={"loss", "labels"}, bad=rolled, good=classified)
def labels_of_others(x: Examination, other: Outcome) -> Finding:
    """Labels that are compared with the outputs of other sequences."""
    to, here = other["places"][0][0], other["here"][0]
    return Finding(
        "labels_of_others",
        f"The label of sequence {here} is compared with the output of sequence {to}: another label there moves the "
        "gradient of that output, and of no other one.",
        "Bring outputs and labels into one order before they are compared: look for view or reshape where a transpose "
        "was meant",
        measured="sequence whose output a label moves",
        before=float(to),
        after=float(here),
        intervention="expected",
    )


def confident() -> Program:
    """A loss that never looks at the labels."""
    return classified(lambda logits, labels: -logits.softmax(-1).max(-1).values.log().mean() + 0 * labels.sum())


@row(reads=("labels_unread",), order=52, needs={"loss"}, bad=confident, good=classified)
def loss_ignores_labels(x: Examination, unread: Outcome) -> Finding:
    """A loss that does not depend on the labels."""
    return Finding(
        "loss_ignores_labels",
        "The loss does not depend on the labels: with other labels its gradient is the same in every entry.",
        "Compute the loss from the labels of the batch",
        certainty="possible",
        measured="loss of outputs that differ, with other labels",
        before=unread["loss"],
        after=unread["loss"],
        intervention="permuted",
    )


def negated() -> Program:
    """The logarithm of the probability, and not its negative."""
    return classified(lambda logits, labels: logits.log_softmax(-1)[torch.arange(len(labels)), labels].mean())


@row(reads=("wrong_is_better",), order=50, needs={"loss", "labels"}, bad=negated, good=classified)
def loss_rewards_wrong(x: Examination, better: Outcome) -> Finding:
    """A loss that is smaller for wrong answers."""
    return Finding(
        "loss_rewards_wrong",
        f"The loss rewards wrong answers: it is {told(better['right'])} if every output names its label, and "
        f"{told(better['wrong'])} if every output names another class.",
        "Change the sign of the loss",
        measured="loss of right answers",
        before=better["right"],
        after=better["wrong"],
        intervention="of wrong ones",
    )


def _padded(ignored: int) -> Program:
    """Texts of different lengths, filled with the id 0."""
    text = ids(12, 12).masked_fill(torch.arange(12) >= torch.arange(3, 9).repeat(2)[:, None], 0)
    loss = lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)  # noqa: E731
    return Program(Reader(), text[:, :-1], text[:, 1:], loss)


@row(
    reads=("padding_counts",),
    order=54,
    needs={"loss"},
    bad=lambda: _padded(-100),
    good=lambda: _padded(0),
)
def padding_in_loss(x: Examination, counts: Outcome) -> Finding:
    """A loss that counts padding."""
    return Finding(
        "padding_in_loss",
        f"The loss counts padding: {counts['share']:.0%} of the tokens that it compares are the id {counts['value']} "
        "at the ends of sequences, where the input is padding too.",
        f"Leave these tokens out of the loss, for example with ignore_index={counts['value']}, or set their labels to "
        "-100",
        certainty="possible",
        measured="share of the tokens that count which are padding",
        before=counts["share"],
        after=0.0,
        intervention="expected",
    )


class _Squashed(Classifier):
    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids).sigmoid()
        return out


def squashed() -> Program:
    """A sigmoid before a loss of logits, which applies one itself."""
    return Program(_Squashed(), ids(), F.one_hot(classes()).float(), F.binary_cross_entropy_with_logits)


def squashed_once() -> Program:
    """The same model with a loss of probabilities."""
    return Program(_Squashed(), ids(), F.one_hot(classes()).float(), F.binary_cross_entropy)


@row(reads=("bounded_output",), order=51, needs={"loss"}, bad=squashed, good=squashed_once)
def outputs_bounded(x: Examination, bounded: Outcome) -> Finding:
    """Outputs that a last function keeps from their targets."""
    return Finding(
        "outputs_bounded",
        f"The model ends in {bounded['name']}, and no output that this can give comes near the targets: optimised "
        f"without the model, the loss stays at {told(bounded['least'])}.",
        f"Return what {bounded['name']} is given, or use a loss and targets of its range",
        measured="smallest loss of outputs that are optimised without the model",
        before=bounded["least"],
        after=bounded["free"],
        intervention=f"without {bounded['name']}",
    )


class _Value(nn.Module):
    def __init__(self, squeeze: bool) -> None:
        super().__init__()
        self.inner, self.squeeze = Reader(1), squeeze

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.inner(ids).mean(1)
        return out[:, 0] if self.squeeze else out


def _values(squeeze: bool) -> Program:
    """A number for each sequence, returned as a column or as a row."""
    return Program(_Value(squeeze), ids(), torch.randn(12), lambda out, y: (out - y).square().mean())


@row(
    reads=("broadcast",),
    order=50,
    needs={"loss", "labels"},
    bad=lambda: _values(False),
    good=lambda: _values(True),
)
def labels_broadcast(x: Examination, compared: Outcome) -> Finding:
    """Outputs and labels of different shapes that are all compared with each other."""
    return Finding(
        "labels_broadcast",
        f"The loss compares every output with every label: outputs of shape {compared['output']} and labels of shape "
        f"{compared['labels']} are broadcast, and one label moves the gradient of all outputs.",
        f"Give both one shape, for example output.reshape({compared['labels']})",
        measured="loss",
        before=compared["before"],
        after=compared["after"],
        intervention="with outputs of the shape of the labels",
    )


class _Twice(Classifier):
    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = super().forward(ids)
        if self.twice:
            logits = logits.softmax(-1)
        return logits


@row(
    reads=("softmax_again",),
    order=51,
    needs={"loss", "labels"},
    bad=lambda: Program(_Twice(True), ids(), classes()),
    good=lambda: Program(_Twice(False), ids(), classes()),
)
def double_softmax(x: Examination, again: Outcome) -> Finding:
    """A second softmax before the loss."""
    last = x.scan.returned
    place = None if last is None else last.place
    change, edits = x.edited("softmax_again", place, source.without_call(place, "softmax"))
    return Finding(
        "double_softmax",
        "The model returns probabilities, and the loss applies a softmax to them again: even a perfect answer has the "
        f"loss {again['least']:.3g}, and gradients are small.",
        f"{change}: nn.CrossEntropyLoss takes logits" if change else "Return logits, without the softmax at the end",
        tried=bool(change),
        measured="smallest loss that any output can reach",
        before=again["least"],
        after=again["free"],
        intervention="with logits",
        edits=edits,
    )


class _Encoder(Classifier):
    """Two views of each sequence."""

    def forward(self, ids: Tensor) -> Tensor:
        states = self.mix(self.embed(ids))
        return torch.stack([states[:, ::2].mean(1), states[:, 1::2].mean(1)], dim=1)


def _closer(out: Tensor) -> Tensor:
    """Views of one sequence are to be alike, and nothing else."""
    return (out[:, 0] - out[:, 1]).square().mean()


def _closest(out: Tensor) -> Tensor:
    """Views of one sequence are to be more alike than those of two."""
    return F.cross_entropy(out[:, 0] @ out[:, 1].T, torch.arange(len(out)))


@row(
    reads=("one_answer_is_best",),
    order=50,
    needs={"loss"},
    bad=lambda: Program(_Encoder(), ids(), None, _closer),
    good=lambda: Program(_Encoder(), ids(), None, _closest),
)
def collapsed_objective(x: Examination, constant: Outcome) -> Finding:
    """An objective that one output for all inputs fulfils."""
    return Finding(
        "collapsed_objective",
        "The loss is smallest when all outputs are equal: one constant output has the loss "
        f"{constant['constant']:.3g}. Nothing in the objective keeps inputs apart.",
        "Add a term that keeps outputs apart (VICReg), negatives, or a stop-gradient with a predictor (BYOL)",
        measured="loss",
        before=constant["begin"],
        after=constant["constant"],
        intervention="with one constant output for all inputs, where the outputs started "
        f"{constant['apart']:.2g} apart ({STEPS} steps without the model)",
    )


@row(
    reads=("softmax_across",),
    order=51,
    needs={"loss", "labels"},
    bad=lambda: classified(lambda logits, labels: F.nll_loss(logits.log_softmax(0), labels)),
    good=lambda: classified(lambda logits, labels: F.nll_loss(logits.log_softmax(1), labels)),
)
def loss_softmax_axis(x: Examination, across: Outcome) -> Finding:
    """A loss whose softmax does not run over the classes."""
    change, edits = x.edited("softmax_across", across["place"], source.over_axis(across["place"], -1))
    over, one = ("sequences of the batch", "sequence") if across["over batch"] else ("tokens", "token")
    return Finding(
        "loss_softmax_axis",
        f"The softmax of the loss runs over the {over} instead of the classes: they compete with each other for each "
        f"class, and no {one} has to choose one.",
        change or "Take the softmax of the loss over the last axis, or use torch.nn.functional.cross_entropy",
        tried=bool(change),
        measured=f"change of the loss when 3 is added to all classes of one {one}",
        before=across["change"],
        after=0.0,
        intervention="with a softmax over the classes",
        edits=edits,
    )

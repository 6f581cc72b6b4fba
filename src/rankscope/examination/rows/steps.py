"""Optimizers and weights that cannot learn."""

from __future__ import annotations

import torch
from torch import nn

from rankscope.examination.experiments.parameters import AGAIN, NO_GRADIENT
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import Classifier, Program, Reader, classes, classified, ids, per_token
from rankscope.examination.spec import Finding, row, told
from rankscope.examination.tensors import few


def half_precision() -> Program:
    """Weights in float16, in which the eps of Adam is zero."""
    program = classified()
    program.model = program.model.half()
    program.loss = lambda logits, labels: nn.functional.cross_entropy(logits.float(), labels)
    return program


def brain_precision() -> Program:
    """Weights in bfloat16, which has the range of float32."""
    program = half_precision()
    program.model = Classifier().bfloat16()
    return program


@row(
    reads=("step_breaks_weights",), order=22, needs={"loss", "optimizer"}, bad=half_precision, good=brain_precision
)  # fmt: skip
def step_not_finite(x: Examination, breaks: Outcome) -> Finding:
    """A step after which weights are not finite."""
    names, name = breaks["names"], type(x.optimizer).__name__
    return Finding(
        "step_not_finite",
        f"One step of {name} makes {len(names)} of {breaks['count']} parameters NaN or infinite ({few(names)}), "
        f"although every gradient is finite: its arithmetic does not fit in {breaks['dtype']}.",
        "Keep the weights in float32 and compute under torch.autocast",
        measured="parameters that are not finite after one step",
        before=float(len(names)),
        after=0.0,
        intervention="in float32",
        where=names[0],
    )


def _rate(lr: float) -> Program:
    """A learning rate."""
    program = classified()
    program.optimizer = lambda model: torch.optim.SGD(model.parameters(), lr)
    return program


@row(
    reads=("step_changes_nothing",),
    order=22,
    needs={"loss", "optimizer"},
    bad=lambda: _rate(0.0),
    good=lambda: _rate(0.1),
)
def step_too_small(x: Examination, small: Outcome) -> Finding:
    """Steps that change nothing, or are below the resolution of the weights."""
    begun, rate = small["begun"], small["rate"]
    stands = rate == 0.0
    return Finding(
        "step_too_small",
        "The learning rate of every group is 0: no step moves anything."
        if stands
        else f"A step of the optimizer changes {small['share']:.0%} of the entries of the weights: at a learning rate "
        f"of {rate:.2g} it is smaller than the resolution of {small['dtype']}."
        + (f" The scheduler began with {begun:.2g}." if begun != rate else ""),
        "Look at the scheduler: it may end at 0, or begin there" if stands else "",
        kind="fault" if stands and not begun > 0 else "note",  # a warm-up begins at 0
        measured="share of the entries of a matrix that one step changes",
        before=small["share"],
        after=small["usual"],
        intervention="at a rate of 0.001",
    )


def maximised() -> Program:
    """An optimizer that is told to maximise the loss."""
    program = classified()
    program.optimizer = lambda model: torch.optim.AdamW(model.parameters(), 1e-3, maximize=True)
    return program


@row(reads=("step_goes_up",), order=22, needs={"loss", "optimizer"}, bad=maximised, good=classified)
def steps_uphill(x: Examination, up: Outcome) -> Finding:
    """Steps that make the loss larger."""
    return Finding(
        "steps_uphill",
        "The optimizer steps along the gradient and not against it: each step makes the loss larger.",
        "Look at maximize and at the sign of the learning rate",
        measured="cosine of a step of the optimizer and the gradient",
        before=up["along"],
    )


def worn() -> Program:
    """Decay that takes a tenth of the weights in each step."""
    program = classified()
    program.optimizer = lambda model: torch.optim.AdamW(model.parameters(), 1e-1, weight_decay=1.0)
    return program


@row(reads=("decay_wears_weights",), order=23, needs={"optimizer"}, bad=worn, good=classified)
def decay_too_strong(x: Examination, worn: Outcome) -> Finding:
    """Weight decay that erases the weights."""
    return Finding(
        "decay_too_strong",
        f"Weight decay takes {worn['share']:.0%} of every weight in each step, whatever the gradients are.",
        "Use a smaller weight_decay: its product with the learning rate is what each step takes away",
        measured="share of a weight that decay takes away in one step",
        before=worn["share"],
    )


def tied_by_data() -> Program:
    """A head that is tied to the embedding by ``.data``."""
    program = tied()
    model = program.model
    assert isinstance(model, Reader)
    model.head.weight = nn.Parameter(torch.empty(20, 16))
    model.head.weight.data = model.embed.weight.data
    return program


def tied() -> Program:
    """A head that is the embedding."""
    model, text = Reader(), ids(12, 12)
    model.head.weight = model.embed.weight
    return Program(model, text[:, :-1], text[:, 1:], per_token)


@row(reads=("one_memory",), order=21, bad=tied_by_data, good=tied)
def tied_in_memory(x: Examination, memory: Outcome) -> Finding:
    """Two parameters that are the same numbers in memory."""
    one, other = memory["names"][:2]
    return Finding(
        "tied_in_memory",
        f"{one} and {other} are two parameters that share one memory: a step changes the same numbers twice, each time "
        "by a part of their gradient and with a state of its own, and a deep copy takes them apart.",
        "Assign the parameter itself, as in head.weight = embed.weight, and not its .data",
        measured="parameters over one memory",
        before=float(len(memory["names"])),
        after=1.0,
        intervention="if the parameter itself is assigned",
        where=one,
    )


def constant_units() -> Program:
    """A layer whose weights are one constant, so that all of its units compute the same."""
    program = Program(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(12, 8), classes())
    for part in (program.model[0], program.model[2]):  # type: ignore[index]
        nn.init.constant_(part.weight, 0.1)
        nn.init.zeros_(part.bias)
    return program


def drawn_units() -> Program:
    """The same layer with weights that are drawn."""
    return Program(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(12, 8), classes())


@row(reads=("equal_units",), order=26, needs={"loss"}, bad=constant_units, good=drawn_units)
def units_stay_equal(x: Examination, equal: Outcome) -> Finding:
    """Units of a layer that are equal and stay so."""
    return Finding(
        "units_stay_equal",
        f"All units of {few(equal['names'])} have the same weights and get the same gradient, so that they stay equal: "
        "the layer is as good as one unit.",
        "Draw the weights at random before training",
        measured="matrices whose units are equal and get equal gradients",
        before=float(len(equal["names"])),
        where=equal["names"][0],
    )


def one_class() -> Program:
    """A batch in which every label is class 1."""
    program = classified()
    program.labels = torch.ones(12, dtype=torch.long)
    return program


@row(reads=("labels_alike",), level="note", order=12, needs={"loss", "labels"}, bad=one_class, good=classified)
def one_label(x: Examination, alike: Outcome) -> Finding:
    """A batch whose labels are all alike."""
    return Finding(
        "one_label",
        f"All {alike['count']} labels are class {told(alike['label'])}, of {alike['classes']} that the outputs have: a "
        "step on such a batch teaches this one answer.",
        measured="different labels in the batch",
        before=1.0,
    )


class _Clamped(nn.Module):
    """A classifier whose middle layer may lie where its activation is flat."""

    def __init__(self, bias: float) -> None:
        super().__init__()
        self.low, self.high, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        nn.init.constant_(self.high.bias, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(x).tanh()
        out: torch.Tensor = self.head(low + self.high(low).relu())
        return out


def _clamped(bias: float) -> Program:
    """Vectors with a class each."""
    return Program(_Clamped(bias), torch.randn(12, 8), classes())


@row(
    reads=("never_moves",),
    order=61,
    level="note",
    needs={"loss"},
    bad=lambda: _clamped(-50.0),
    good=lambda: _clamped(0.0),
)
def no_gradient(x: Examination, still: Outcome) -> Finding:
    """Matrices that run and get no gradient, before and after some steps."""
    names = still["names"]
    return Finding(
        "no_gradient",
        f"{len(names)} of {still['count']} matrices ({few(names)}) run and get no gradient, also after {AGAIN} steps "
        "on a copy: no small change of them reaches the loss.",
        "Look at what is done with what they return: a function that is flat there, a mask, or a factor of zero",
        measured=f"matrices with less than {NO_GRADIENT:g} of the median gradient",
        before=float(len(names)),
        where=names[0],
    )

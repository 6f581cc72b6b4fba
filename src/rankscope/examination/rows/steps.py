"""Optimizers and weights that cannot learn."""

from __future__ import annotations

from rankscope.examination.experiments.parameters import AGAIN
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import CLASSIFIER
from rankscope.examination.spec import Finding, finding, row, told
from rankscope.examination.tensors import few


@row(
    "step_breaks_weights",
    order=22,
    needs={"loss", "optimizer"},
    good=CLASSIFIER.but("= Model()", "= Model().bfloat16()", "cross_entropy(output", "cross_entropy(output.float()"),
    fault=("bfloat16", "half"),
)
def step_not_finite(x: Examination, breaks: Outcome) -> Finding:
    """A step after which weights are not finite."""
    names, name = breaks["names"], type(x.optimizer).__name__
    return finding(
        f"One step of {name} makes {len(names)} of {breaks['count']} parameters NaN or infinite ({few(names)}), "
        f"although every gradient is finite: its arithmetic does not fit in {breaks['dtype']}.",
        "Keep the weights in float32 and compute under torch.autocast",
        evidence=("parameters that are not finite after one step", float(len(names)), 0.0, "in float32"),
        where=names[0],
    )


@row("step_changes_nothing", order=22, needs={"loss", "optimizer"}, good=CLASSIFIER, fault=("1e-3", "0.0"))
def step_too_small(x: Examination, small: Outcome) -> Finding:
    """Steps that change nothing, or are below the resolution of the weights."""
    begun, rate = small["begun"], small["rate"]
    stands = rate == 0.0
    return finding(
        "The learning rate of every group is 0: no step moves anything."
        if stands
        else f"A step of the optimizer changes {small['share']:.0%} of the entries of the weights: at a learning rate "
        f"of {rate:.2g} it is smaller than the resolution of {small['dtype']}."
        + (f" The scheduler began with {begun:.2g}." if begun != rate else ""),
        "Look at the scheduler: it may end at 0, or begin there" if stands else "",
        kind="fault" if stands and not begun > 0 else "note",  # a warm-up begins at 0
        evidence=(
            "share of the entries of a matrix that one step changes",
            small["share"],
            small["usual"],
            "at a rate of 0.001",
        ),
    )


@row("step_goes_up", order=22, needs={"loss", "optimizer"}, good=CLASSIFIER, fault=("1e-3", "1e-3, maximize=True"))
def steps_uphill(x: Examination, up: Outcome) -> Finding:
    """Steps that make the loss larger."""
    return finding(
        "The optimizer steps along the gradient and not against it: each step makes the loss larger.",
        "Look at maximize and at the sign of the learning rate",
        evidence=("cosine of a step of the optimizer and the gradient", up["along"]),
    )


@row("decay_wears_weights", order=23, needs={"optimizer"}, good=CLASSIFIER, fault=("1e-3", "1e-1, weight_decay=1.0"))
def decay_too_strong(x: Examination, worn: Outcome) -> Finding:
    """Weight decay that erases the weights."""
    return finding(
        f"Weight decay takes {worn['share']:.0%} of every weight in each step, whatever the gradients are.",
        "Use a smaller weight_decay or learning rate: each step takes away their product",
    )


@row(
    "one_memory",
    order=21,
    good=CLASSIFIER.but(
        "nn.Linear(16, 3)", "nn.Linear(16, 20)", "= Model()\n", "= Model()\nmodel.head.weight = model.embed.weight\n"
    ),
    fault=("head.weight = model.embed.weight", "head.weight.data = model.embed.weight.data"),
)
def tied_in_memory(x: Examination, memory: Outcome) -> Finding:
    """Two parameters that are the same numbers in memory."""
    one, other = memory["names"][:2]
    return finding(
        f"{one} and {other} are two parameters that share one memory: a step changes the same numbers twice, each time "
        "by a part of their gradient and with a state of its own, and a deep copy takes them apart.",
        "Assign the parameter itself, as in head.weight = embed.weight, and not its .data",
        evidence=("parameters over one memory", float(len(memory["names"]))),
    )


@row(
    "labels_alike",
    order=12,
    level="note",
    needs={"loss", "labels"},
    good=CLASSIFIER,
    fault=("torch.arange(12) % 3", "torch.ones(12, dtype=torch.long)"),
)
def one_label(x: Examination, alike: Outcome) -> Finding:
    """A batch whose labels are all alike."""
    return finding(
        f"All {alike['count']} labels are class {told(alike['label'])}, of {alike['classes']} that the outputs have: a "
        "step on such a batch teaches this one answer.",
        evidence=("different labels in the batch", 1.0),
    )


@row(
    "equal_units",
    order=26,
    needs={"loss"},
    good=CLASSIFIER.but("x = x + self.mix(x).tanh()", "x = self.mix(x).tanh()"),
    fault=(
        "model = Model()\n",
        "model = Model()\nfor one in (model.mix, model.head):\n    nn.init.constant_(one.weight, 0.1)\n"
        "    nn.init.zeros_(one.bias)\n",
    ),
)
def units_stay_equal(x: Examination, equal: Outcome) -> Finding:
    """Units of a layer that are equal and stay so."""
    names = equal["names"]
    return finding(
        f"All units of {few(names)} have the same weights and get the same gradient, so that they stay equal: the "
        "layer is as good as one unit.",
        "Draw the weights at random before training",
        where=names[0],
    )


@row(
    "never_moves",
    order=61,
    level="note",
    needs={"loss"},
    good=CLASSIFIER.but("tanh", "relu"),
    fault=("model = Model()\n", "model = Model()\nnn.init.constant_(model.mix.bias, -50.0)\n"),
)
def no_gradient(x: Examination, still: Outcome) -> Finding:
    """Matrices that run and get no gradient, before and after some steps."""
    names = still["names"]
    return finding(
        f"{len(names)} of {still['count']} matrices ({few(names)}) run and get no gradient, also after {AGAIN} steps "
        "on a copy: no small change of them reaches the loss.",
        "Look at what is done with what they return: a function that is flat there, a mask, or a factor of zero",
        where=names[0],
    )

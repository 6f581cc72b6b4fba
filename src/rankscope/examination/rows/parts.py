"""Modules and parameters that run and are not held, or are held and do not run, or get no gradient."""

from __future__ import annotations

from collections import Counter

from rankscope.examination.experiments.parameters import holding, owners
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import CLASSIFIER
from rankscope.examination.spec import Finding, finding, row
from rankscope.examination.tensors import few


@row(
    "hidden_modules",
    order=20,
    good=CLASSIFIER.but("nn.Linear(16, 16)", "nn.ModuleList([nn.Linear(16, 16)])", "self.mix(x)", "self.mix[0](x)"),
    fault=("nn.ModuleList([nn.Linear(16, 16)])", "[nn.Linear(16, 16)]"),
)
def unregistered_modules(x: Examination, hidden: Outcome) -> Finding:
    """Modules that run and are not registered."""
    outer = hidden["modules"]
    lost, held = (sum(p.numel() for m in modules for p in m.parameters()) for modules in (outer, [x.model]))
    kinds = ", ".join(f"{count} {name}" for name, count in Counter(type(m).__name__ for m in outer).items())
    return finding(
        f"{kinds} run in every forward pass and are not registered in the model: model.parameters() does not have "
        "them, so no optimizer trains them and no checkpoint saves them.",
        "Keep them in an nn.ModuleList, an nn.ModuleDict or an attribute of the module",
        evidence=("parameters in model.parameters()", float(held), float(held + lost), "with these modules registered"),
    )


_PAIR = """\
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Model()
        self.teacher = Model().requires_grad_(False)

    def forward(self, ids):
        with torch.no_grad():
            wanted = self.teacher(ids)
        return torch.stack([self.student(ids), wanted], dim=1)


def loss(output):
    return F.cross_entropy(output[:, 0], output[:, 1].argmax(-1))


model = Pair()
"""


@row(
    "one_object",
    order=21,
    good=CLASSIFIER.but(
        "def loss(output, labels):\n    return F.cross_entropy(output, labels)\n\n\nmodel = Model()\n", _PAIR,
        "torch.arange(12) % 3", "None",
    ),
    fault=("Model().requires_grad_(False)", "self.student"),
)  # fmt: skip
def shared_teacher(x: Examination, shared: Outcome) -> Finding:
    """Two networks that are one object, and blocks that are."""
    names, module = shared["names"], shared["module"]
    if shared["listed"]:  # a list that holds one block several times may share it on purpose
        return finding(
            f"{len(names)} entries of {shared['parent']} are one {type(module).__name__} object, which runs "
            f"{shared['calls']} times: all of them have the same weights, also after training.",
            kind="note",
            evidence=("modules among these entries", 1.0),
            where=names[0],
        )
    return finding(
        f"self.{names[0]} and self.{names[1]} are the same object: every step of one is a step of the other, so a "
        "loss that compares them compares a network with itself.",
        "Make one of them a copy in __init__, with copy.deepcopy, before the optimizer is made",
        evidence=(f"parameters of {names[1]} that move with {names[0]}", float(sum(1 for _ in module.parameters()))),
        where=names[1],
    )


@row("not_held", order=22, needs={"optimizer"}, good=CLASSIFIER, fault=("model.parameters()", "Model().parameters()"))
def optimizer_misses(x: Examination, held: Outcome) -> Finding:
    """Parameters that the optimizer does not hold."""
    missing, count = held["missing"], held["count"]
    whole = missing == count
    return finding(
        "The optimizer holds none of the model's parameters: the others get gradients and never move. It was made "
        "from another model, or before the model was copied, wrapped or moved."
        if whole
        else f"The optimizer holds {count - missing} of {count} parameters: the others get gradients and never move. "
        f"Missing: {few(held['names'])}.",
        "Make the optimizer from the parameters of this model, after it was built, copied and moved"
        if whole
        else "Give the others to the optimizer, or set requires_grad to False if they are not to be trained",
        certainty="shown" if whole else "possible",  # some may be left out on purpose
        evidence=("parameters with a gradient that a step moves", float(count - missing)),
    )


@row("learns_nothing", order=22, good=CLASSIFIER, fault=("= Model()", "= Model().requires_grad_(False)"))
def nothing_learns(x: Examination, learns: Outcome) -> Finding:
    """A model of which no parameter requires a gradient."""
    return finding(
        f"None of the {learns['count']} parameters of the model requires a gradient: no step of any optimizer changes "
        "it.",
        "Set requires_grad of what is to be trained, and make the optimizer from these parameters",
        certainty="possible",  # a prompt or an input may be what is trained
    )


@row(
    "mostly_frozen",
    order=25,
    level="note",
    good=CLASSIFIER,
    fault=("= Model()\n", "= Model().requires_grad_(False)\nmodel.head.bias.requires_grad_()\n"),
)
def frozen_parameters(x: Examination, frozen: Outcome) -> Finding:
    """Most parameters do not require a gradient."""
    trained = frozen["trained"]
    return finding(
        f"{len(trained)} of {frozen['count']} parameters require a gradient, those of {few(owners(trained))}; all "
        "others stay as they are.",
        evidence=("parameters that require a gradient", float(len(trained))),
    )


@row("without_effect", order=60, good=CLASSIFIER, fault=("x = x + self.mix(x).tanh()", "self.mix(x).tanh()"))
def result_dropped(x: Examination, effect: Outcome) -> Finding | None:
    """Modules whose result is computed and dropped."""
    dropped = effect["dropped"]
    if not dropped:
        return None
    return finding(
        f"{few(dropped)} {'runs' if len(dropped) == 1 else 'run'}, and the result is dropped: nothing that "
        f"{type(holding(x, dropped[0])).__name__} returns depends on it.",
        "Look at where it is called: is what it returns assigned, and read afterwards?",
        certainty="possible",
        where=dropped[0],
    )


@row(
    "without_effect",
    order=60,
    good=CLASSIFIER,
    fault=("= Model()\n", "= Model().requires_grad_(False)\nmodel.other = nn.Linear(16, 3)\n"),
)
def unused_parameters(x: Examination, effect: Outcome) -> Finding | None:
    """Parameters that no output depends on."""
    unused, everything = effect["unused"], effect["everything"]
    if not unused:
        return None
    # A part for another pass is usual: a pooler, a second head, a library's class with more than a task needs. That
    # nothing at all that is to be trained is used is not.
    return finding(
        f"{len(unused)} parameters ({few(owners(unused))}) are not used in this pass: no output changes when they do, "
        "and they get no gradient."
        + (" No others require a gradient, so no step changes anything." if everything else ""),
        "Look at what forward reads: these parameters are not part of it" if everything else "",
        kind="fault" if everything else "note",
        where=owners(unused)[0],
    )


@row("without_effect", order=61, good=CLASSIFIER, fault=("self.mix(x).tanh()", "self.mix(x).tanh().detach()"))
def detached(x: Examination, effect: Outcome) -> Finding | None:
    """Parameters that the output depends on and that get no gradient."""
    cut = effect["cut"]
    if not cut:
        return None
    return finding(
        f"{len(cut)} parameters ({few(owners(cut))}) change the output and get no gradient: the graph is cut by "
        "detach(), torch.no_grad(), reentrant checkpointing, .data, .item() or NumPy between them and the loss.",
        "Look for what cuts the graph between them and the loss; what is meant to be fixed should have requires_grad "
        "False",
        where=owners(cut)[0],
    )


@row(
    "cut_in_training",
    order=61,
    good=CLASSIFIER.but(
        "from torch import nn\n", "from torch import nn\nfrom torch.utils.checkpoint import checkpoint\n",
        "self.mix(x).tanh()", "(checkpoint(self.mix, x, use_reentrant=False) if self.training else self.mix(x))",
        "= Model()\n", "= Model()\nmodel.embed.requires_grad_(False)\n",
    ),
    fault=("use_reentrant=False", "use_reentrant=True"),
)  # fmt: skip
def detached_in_training(x: Examination, cut: Outcome) -> Finding:
    """Parameters that get no gradient in training mode alone."""
    lost, left = cut["names"], cut["left"]
    mended = len(left) < len(lost)
    return finding(
        f"{len(lost)} parameters ({few(owners(lost))}) get no gradient in training mode, although their modules run: "
        + (
            "nothing that enters the blocks requires a gradient, and reentrant checkpointing then cuts the graph."
            if mended
            else "the graph is cut there by detach(), torch.no_grad() or checkpointing."
        ),
        "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or let what enters the blocks require a "
        "gradient"
        if mended
        else "Look for what cuts the graph in training mode",
        evidence=(
            "parameters without a gradient in training mode, of those that get one in evaluation mode",
            float(len(lost)),
            float(len(left)) if mended else None,
            "if what enters the blocks requires a gradient",
        ),
        where=owners(lost)[0],
    )


@row(
    "zero_factors",
    order=60,
    needs={"loss"},
    good=CLASSIFIER.but(
        "x = x + self.mix(x).tanh()", "x = x + self.gate(self.mix(x))",
        "= Model()\n", "= Model()\nmodel.gate = nn.Linear(16, 16, bias=False)\nnn.init.zeros_(model.gate.weight)\n",
    ),
    fault=("optimizer =", "nn.init.zeros_(model.mix.weight)\nnn.init.zeros_(model.mix.bias)\noptimizer ="),
)  # fmt: skip
def dead_branch(x: Examination, factors: Outcome) -> Finding:
    """Branches that begin at zero and stay there."""
    return finding(
        f"{factors['silent']} parameters get a gradient of exactly zero, also after some steps on a copy: two factors "
        f"of a branch begin at zero ({', '.join(factors['zero'][:2])} ...), and each needs the other to move.",
        "Begin with one of them at zero, and draw the other",
        evidence=(
            "parameters with a gradient of exactly zero",
            float(factors["silent"]),
            float(factors["silent"] - factors["woken"]),
            "with these factors drawn at random",
        ),
    )


@row(
    "dropout_hides_inputs",
    order=23,
    good=CLASSIFIER.but("x.mean(1)", "F.dropout(x, 0.1, self.training).mean(1)"),
    fault=("0.1, self", "1.0, self"),
)
def dropout_everything(x: Examination, hides: Outcome) -> Finding:
    """Dropout that drops everything."""
    where, p = hides["where"], hides["p"]
    return finding(
        f"Dropout removes nearly everything in training: {where or 'the model'} has p = {p:g}, which is the share that "
        "is dropped, not kept.",
        f"Pass the share to drop, {1 - p:.3g}, and not {p:g}",
        certainty="shown" if hides["before"] < 0.5 * hides["after"] else "possible",
        evidence=(
            "how much the outputs of different inputs differ in training mode",
            hides["before"],
            hides["after"],
            "without dropout",
        ),
        where=where,
    )

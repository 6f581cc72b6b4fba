"""Modules and parameters that run and are not held, or are held and do not run, or get no gradient."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankscope.examination.experiments.parameters import holding, owners
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import Classifier, Program, classes, classified, ids
from rankscope.examination.spec import Finding, row
from rankscope.examination.tensors import few


def _as(model: nn.Module) -> Program:
    """Sequences with a class each, under a model."""
    return Program(model, ids(), classes())


class _Listed(Classifier):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        parts = [nn.Linear(16, 16) for _ in range(2)]
        self.parts = nn.ModuleList(parts) if registered else parts

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for part in self.parts:
            x = x + part(x).tanh()
        out: Tensor = self.head(x.mean(1))
        return out


@row(reads=("hidden_modules",), order=20, bad=lambda: _as(_Listed(False)), good=lambda: _as(_Listed(True)))
def unregistered_modules(x: Examination, hidden: Outcome) -> Finding:
    """Modules that run and are not registered."""
    outer = hidden["modules"]
    lost, held = (sum(p.numel() for m in modules for p in m.parameters()) for modules in (outer, [x.model]))
    kinds = ", ".join(f"{count} {name}" for name, count in Counter(type(m).__name__ for m in outer).items())
    return Finding(
        "unregistered_modules",
        f"{kinds} run in every forward pass and are not registered in the model: model.parameters() does not have "
        "them, so no optimizer trains them and no checkpoint saves them.",
        "Keep them in an nn.ModuleList, an nn.ModuleDict or an attribute of the module",
        measured="parameters in model.parameters()",
        before=float(held),
        after=float(held + lost),
        intervention="with these modules registered",
    )


class _Teacher(nn.Module):
    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.student = Classifier()
        self.teacher = Classifier().requires_grad_(False) if copied else self.student

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(ids)
        return torch.stack([self.student(ids), wanted], dim=1)


def _taught(copied: bool) -> Program:
    """A student that is to give the answers of its teacher."""
    return Program(
        _Teacher(copied), ids(), None, lambda both: nn.functional.cross_entropy(both[:, 0], both[:, 1].argmax(-1))
    )


@row(reads=("one_object",), order=21, bad=lambda: _taught(False), good=lambda: _taught(True))
def shared_teacher(x: Examination, shared: Outcome) -> Finding:
    """Two networks that are one object, and blocks that are."""
    names, module = shared["names"], shared["module"]
    if shared["listed"]:  # a list that holds one block several times may share it on purpose
        return Finding(
            "shared_teacher",
            f"{len(names)} entries of {shared['parent']} are one {type(module).__name__} object, which runs "
            f"{shared['calls']} times: all of them have the same weights, also after training.",
            kind="note",
            measured="modules among these entries",
            before=1.0,
            where=names[0],
        )
    return Finding(
        "shared_teacher",
        f"self.{names[0]} and self.{names[1]} are the same object: every step of one is a step of the other, so a "
        "loss that compares them compares a network with itself.",
        "Make one of them a copy in __init__, with copy.deepcopy, before the optimizer is made",
        measured=f"parameters of {names[1]} that move when {names[0]} moves",
        before=float(sum(1 for _ in module.parameters())),
        after=0.0,
        intervention="with a copy",
        where=names[1],
    )


def _held(whole: bool) -> Program:
    """An optimizer of this model, or of another one."""
    program = classified()
    if not whole:
        other = Classifier()
        program.optimizer = lambda model: torch.optim.AdamW(other.parameters(), 1e-3)
    return program


@row(
    reads=("not_held",), order=22, needs={"optimizer"}, bad=lambda: _held(False), good=lambda: _held(True)
)  # fmt: skip
def optimizer_misses(x: Examination, held: Outcome) -> Finding:
    """Parameters that the optimizer does not hold."""
    missing, count = held["missing"], held["count"]
    whole = missing == count
    return Finding(
        "optimizer_misses",
        (
            "The optimizer holds none of the model's parameters: the others get gradients and never move. It was made "
            "from another model, or before the model was copied, wrapped or moved."
            if whole
            else f"The optimizer holds {count - missing} of {count} parameters: the others get gradients and never "
            f"move. Missing: {few(held['names'])}."
        ),
        "Make the optimizer from the parameters of this model, after it was built, copied and moved"
        if whole
        else "Give the others to the optimizer, or set requires_grad to False if they are not to be trained",
        certainty="shown" if whole else "possible",  # some may be left out on purpose
        measured="parameters with a gradient that a step moves",
        before=float(count - missing),
        after=float(count),
        intervention="with an optimizer of model.parameters()",
    )


def _frozen(names: tuple[str, ...]) -> Program:
    """A classifier of which only some parts learn, or none under an optimizer of something else."""
    program = classified()
    for name, one in program.model.named_parameters():
        one.requires_grad_(name.startswith(names))
    learns = [one for one in program.model.parameters() if one.requires_grad] or [nn.Parameter(torch.zeros(1))]
    program.optimizer = lambda model: torch.optim.AdamW(learns, 1e-3)
    return program


@row(reads=("learns_nothing",), order=22, bad=lambda: _frozen(("none",)), good=classified)
def nothing_learns(x: Examination, learns: Outcome) -> Finding:
    """A model of which no parameter requires a gradient."""
    return Finding(
        "nothing_learns",
        f"None of the {learns['count']} parameters of the model requires a gradient: no step of any optimizer changes "
        "it.",
        "Set requires_grad of what is to be trained, and make the optimizer from these parameters",
        certainty="possible",  # a prompt or an input may be what is trained
        measured="parameters of the model that require a gradient",
        before=0.0,
    )


@row(reads=("mostly_frozen",), order=25, level="note", bad=lambda: _frozen(("head.bias",)), good=classified)
def frozen_parameters(x: Examination, frozen: Outcome) -> Finding:
    """Most parameters do not require a gradient."""
    trained = frozen["trained"]
    return Finding(
        "frozen_parameters",
        f"{len(trained)} of {frozen['count']} parameters require a gradient, those of {few(owners(trained))}; all "
        "others stay as they are.",
        measured="parameters that require a gradient",
        before=float(len(trained)),
    )


class _Apart(Classifier):
    def __init__(self, read: bool) -> None:
        super().__init__()
        self.read = read

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        added = self.mix(x).tanh()
        out: Tensor = self.head((x + added if self.read else x).mean(1))
        return out


@row(reads=("without_effect",), order=60, bad=lambda: _as(_Apart(False)), good=lambda: _as(_Apart(True)))
def result_dropped(x: Examination, effect: Outcome) -> Finding | None:
    """Modules whose result is computed and dropped."""
    dropped = effect["dropped"]
    if not dropped:
        return None
    return Finding(
        "result_dropped",
        f"{few(dropped)} {'runs' if len(dropped) == 1 else 'run'}, and the result is dropped: nothing that "
        f"{type(holding(x, dropped[0])).__name__} returns depends on it.",
        "Look at where it is called: is what it returns assigned, and read afterwards?",
        certainty="possible",
        measured="modules that run and change no output",
        before=float(len(dropped)),
        where=dropped[0],
    )


class _Silent(Classifier):
    """A classifier with a head that this pass does not use, or of which that is all that learns."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.requires_grad_(not alone)
        self.other = nn.Linear(16, 3)


@row(reads=("without_effect",), order=60, bad=lambda: _as(_Silent(True)), good=classified)
def unused_parameters(x: Examination, effect: Outcome) -> Finding | None:
    """Parameters that no output depends on."""
    unused, everything = effect["unused"], effect["everything"]
    if not unused:
        return None
    # A part for another pass is usual: a pooler, a second head, a library's class with more than a task needs. That
    # nothing at all that is to be trained is used is not.
    return Finding(
        "unused_parameters",
        f"{len(unused)} parameters ({few(owners(unused))}) are not used in this pass: no output changes when they do, "
        "and they get no gradient."
        + (" No others require a gradient, so no step changes anything." if everything else ""),
        "Look at what forward reads: these parameters are not part of it" if everything else "",
        kind="fault" if everything else "note",
        measured="parameters without a gradient",
        before=float(len(unused)),
        where=owners(unused)[0],
    )


class _Cut(Classifier):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mix(x).tanh()
        out: Tensor = self.head((x.detach() if self.cut else x).mean(1))
        return out


@row(reads=("without_effect",), order=61, bad=lambda: _as(_Cut(True)), good=lambda: _as(_Cut(False)))
def detached(x: Examination, effect: Outcome) -> Finding | None:
    """Parameters that the output depends on and that get no gradient."""
    cut = effect["cut"]
    if not cut:
        return None
    return Finding(
        "detached",
        f"{len(cut)} parameters ({few(owners(cut))}) change the output and get no gradient: the graph is cut by "
        "detach(), torch.no_grad(), reentrant checkpointing, .data, .item() or NumPy between them and the loss.",
        "Look for what cuts the graph between them and the loss; what is meant to be fixed should have requires_grad "
        "False",
        measured="parameters without a gradient, of those that require one",
        before=float(len(cut)),
        where=owners(cut)[0],
    )


@row(
    reads=("loss_detached",),
    order=61,
    needs={"loss"},
    bad=lambda: classified(lambda out, labels: nn.functional.cross_entropy(out.detach(), labels)),
    good=classified,
)
def loss_without_gradient(x: Examination, lost: Outcome) -> Finding:
    """A loss that no gradient leads back from."""
    return Finding(
        "loss_without_gradient",
        "No parameter gets a gradient: what the loss depends on is detached from the parameters.",
        "Compute the loss from the model's own output, without .detach(), .data, torch.no_grad() or NumPy",
        measured="parameters without a gradient, of those that require one",
        before=float(lost["count"]),
    )


class _Checkpointed(Classifier):
    """An adapter in a part that is computed anew in backward, behind embeddings that are frozen."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = checkpoint(self.mix, x, use_reentrant=self.reentrant) if self.training else self.mix(x)
        out: Tensor = self.head(x.mean(1))
        return out


@row(
    reads=("cut_in_training",),
    order=61,
    bad=lambda: _as(_Checkpointed(True)),
    good=lambda: _as(_Checkpointed(False)),
)
def detached_in_training(x: Examination, cut: Outcome) -> Finding:
    """Parameters that get no gradient in training mode alone."""
    lost, left = cut["names"], cut["left"]
    mended = len(left) < len(lost)
    return Finding(
        "detached_in_training",
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
        measured="parameters without a gradient in training mode, of those that get one in evaluation mode",
        before=float(len(lost)),
        after=float(len(left)) if mended else None,
        intervention="if what enters the blocks requires a gradient",
        where=owners(lost)[0],
    )


class _Gated(Classifier):
    def __init__(self, both: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 16, bias=False)
        nn.init.zeros_(self.gate.weight)
        if both:
            nn.init.zeros_(self.mix.weight)
            nn.init.zeros_(self.mix.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.head((x + self.gate(self.mix(x))).mean(1))
        return out


@row(
    reads=("zero_factors",), order=60, needs={"loss"}, bad=lambda: _as(_Gated(True)), good=lambda: _as(_Gated(False))
)  # fmt: skip
def dead_branch(x: Examination, factors: Outcome) -> Finding:
    """Branches that begin at zero and stay there."""
    return Finding(
        "dead_branch",
        f"{factors['silent']} parameters get a gradient of exactly zero, also after some steps on a copy: two factors "
        f"of a branch begin at zero ({', '.join(factors['zero'][:2])} ...), and each needs the other to move.",
        "Begin with one of them at zero, and draw the other",
        measured="parameters with a gradient of exactly zero",
        before=float(factors["silent"]),
        after=float(factors["silent"] - factors["woken"]),
        intervention="with these factors drawn at random",
    )


class _Dropped(Classifier):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.embed(ids)).mean(1))
        return out


@row(reads=("dropout_hides_inputs",), order=23, bad=lambda: _as(_Dropped(1.0)), good=lambda: _as(_Dropped(0.1)))
def dropout_everything(x: Examination, hides: Outcome) -> Finding:
    """Dropout that drops everything."""
    where, p = hides["where"], hides["p"]
    return Finding(
        "dropout_everything",
        f"Dropout removes nearly everything in training: {where or 'the model'} has p = {p:g}, which is the share that "
        "is dropped, not kept.",
        f"Pass the share to drop, {1 - p:.3g}, and not {p:g}",
        certainty="shown" if hides["before"] < 0.5 * hides["after"] else "possible",
        measured="how much the outputs of different inputs differ in training mode",
        before=hides["before"],
        after=hides["after"],
        intervention="without dropout",
        where=where,
    )

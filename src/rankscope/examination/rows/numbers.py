"""Values that are not finite, and randomness where none should be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.examination.experiments.operations import named
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import Classifier, Layer, Program, classes, classified, ids, stack
from rankscope.examination.spec import Finding, row
from rankscope.examination.tensors import few


def broken_weights() -> Program:
    """A weight that is NaN."""
    program = classified()
    for one in program.model.parameters():
        nn.init.constant_(one, torch.nan)
    return program


@row(reads=("weights_broken",), order=0, bad=broken_weights, good=classified)
def weights_not_finite(x: Examination, broken: Outcome) -> Finding:
    """Weights that are NaN or infinite."""
    lost = broken["lost"]
    first = next(iter(lost))
    return Finding(
        "weights_not_finite",
        f"{len(lost)} parameters hold NaN or infinity; the first is {first}.",
        "Look for the step after which they first do; they stay so, whatever is trained afterwards",
        measured="entries that are not finite",
        before=float(sum(lost.values())),
        after=0.0,
        intervention="in a model as it begins",
        where=first,
    )


def erased() -> Program:
    """Weights that were overwritten."""
    program = classified()
    for one in program.model.parameters():
        nn.init.zeros_(one)
    return program


@row(reads=("weights_zero",), order=0, bad=erased, good=classified)
def weights_erased(x: Examination, zero: Outcome) -> Finding:
    """Matrices that are all zero, with which nothing else can be told."""
    names = zero["names"]
    return Finding(
        "weights_erased",
        f"Every matrix of the model is zero ({few(names)}): whatever it computes is the same for all inputs.",
        "Look for what overwrote the weights, or compare them with those that were to be loaded",
        measured="matrices that are zero",
        before=float(len(names)),
        after=0.0,
        intervention="in a model as it begins",
        where=names[0],
    )


def _loaded(erased: bool) -> Program:
    """A stack that was trained, in which one matrix may have been left at zero when it was loaded."""
    program = stack([Layer() for _ in range(3)])
    for one in program.model.modules():
        if isinstance(one, nn.LayerNorm):
            nn.init.normal_(one.weight, 1.0, 0.1)
    if erased:
        nn.init.zeros_(program.model[1].mlp[0].weight)  # type: ignore[index]
    return program


@row(reads=("one_value_in_trained",), order=26, bad=lambda: _loaded(True), good=lambda: _loaded(False))
def constant_matrix(x: Examination, constant: Outcome) -> Finding:
    """A matrix of one value in a block that was trained."""
    names = constant["names"]
    return Finding(
        "constant_matrix",
        f"All entries of {few(names)} are one number, in blocks that were trained.",
        "Compare it with the weights it was loaded from",
        certainty="possible",
        measured="matrices of trained blocks whose entries are all equal",
        before=float(len(names)),
        where=names[0],
    )


def _half(size: float) -> Program:
    """A classifier in float16, with weights of some size and no optimizer that breaks them."""
    program = classified(lambda logits, labels: F.cross_entropy(logits.float(), labels))
    program.model = program.model.half()
    for one in program.model.parameters():
        if one.shape == (16, 16):
            nn.init.constant_(one, size)
    program.optimizer = lambda model: torch.optim.SGD(model.parameters(), 0.1)
    return program


def _where(broken: Outcome) -> str:
    call = broken["call"]
    return call.name or type(call.module).__name__


@row(reads=("finite_in_float32",), order=1, bad=lambda: _half(3e4), good=lambda: _half(0.1))
def float16_overflow(x: Examination, wide: Outcome) -> Finding:
    """Overflow of float16."""
    return Finding(
        "float16_overflow",
        f"Values exceed the range of float16 (65,504), first in {_where(wide)}.",
        "Use bfloat16 or float32",
        measured="outputs that are finite",
        before=wide["share"],
        after=1.0,
        intervention="in float32",
        where=wide["call"].name or "",
    )


class _Masked(nn.Module):
    """Attention under a mask that is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 3)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = (x @ x.transpose(1, 2)).masked_fill(attention_mask[:, None] == 0, -torch.inf)
        out: Tensor = self.head((scores.softmax(-1) @ x)[:, 0])
        return out


def _hidden(first: int) -> Program:
    """A mask that hides a whole sequence, or its end."""
    mask = torch.ones(12, 10, dtype=torch.long)
    mask[0, first:] = 0
    return Program(_Masked(), {"ids": ids(), "attention_mask": mask}, classes())


@row(reads=("finite_without_mask",), order=2, bad=lambda: _hidden(0), good=lambda: _hidden(6))
def mask_without_keys(x: Examination, whole: Outcome) -> Finding:
    """Queries that may see no key."""
    name = whole["name"]
    return Finding(
        "mask_without_keys",
        f"With {name!r} some queries see no key at all, and the softmax of an empty row is NaN, first in "
        f"{_where(whole)}.",
        f"Pass a {name} that leaves each sequence at least one key",
        measured="outputs that are finite",
        before=whole["share"],
        after=1.0,
        intervention=f"with {name} all {whole['fill']}",
        where=name,
    )


class _Divided(Classifier):
    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids)
        gap = out - out
        return out + gap / (gap + self.least)


@row(
    reads=("not_finite",),
    order=2,
    bad=lambda: Program(_Divided(0.0), ids(), classes()),
    good=lambda: Program(_Divided(1.0), ids(), classes()),
)
def values_not_finite(x: Examination, broken: Outcome) -> Finding | None:
    """A module that returns NaN or infinity for numbers that are finite."""
    if x.outcome("finite_in_float32").shown or x.outcome("finite_without_mask").shown:
        return None
    return Finding(
        "values_not_finite",
        f"Values are not finite, first in {_where(broken)}, whose inputs and weights are finite: a row of attention "
        "without keys, a division by zero, or values too large for the format.",
        "Look at what this module computes",
        certainty="possible",
        measured="outputs that are finite",
        before=broken["share"],
        where=broken["call"].name or "",
    )


class _Dropping(Classifier):
    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always = always

    def forward(self, ids: Tensor) -> Tensor:
        return F.dropout(super().forward(ids), 0.1, self.always or self.training)


def _dropping(always: bool) -> Program:
    """Dropout by a function, which does not end by itself."""
    return Program(_Dropping(always), ids(), classes())


_DROPPING = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
"""Functions that may drop weights of attention."""


@row(reads=("passes_differ",), order=3, bad=lambda: _dropping(True), good=lambda: _dropping(False))
def not_deterministic(x: Examination, differ: Outcome) -> Finding:
    """A model that answers differently each time in evaluation mode."""
    if x.made_in_forward:
        kinds = ", ".join(x.made_in_forward)
        return Finding(
            "not_deterministic",
            f"{kinds}: created inside forward, with new random weights in every pass; they can never be trained.",
            f"Create {kinds} once in __init__ and call it in forward.",
            measured="difference between the outputs of two equal passes",
            before=differ["noise"],
        )
    step = differ["step"]
    drops = step is not None and ("dropout" in step.name or step.name in _DROPPING)
    return Finding(
        "not_deterministic",
        "The model is not deterministic in evaluation mode: two equal passes differ"
        + (f", first in {named(x, step)}." if step is not None else "."),
        "Dropout has to end in evaluation mode: pass the module's own `training` to the function, or use nn.Dropout"
        if drops
        else "",
        kind="fault" if drops else "note",
        measured="difference between the outputs of two equal passes",
        before=differ["noise"],
    )

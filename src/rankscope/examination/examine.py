"""``examine`` and ``find``: look at a model once, then ask every row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rankscope.errors import RankscopeError, UnsupportedOperationError
from rankscope.examination.experiments import changes, dependencies, loss, modes, operations, parameters, weights
from rankscope.examination.outcomes import FAILS
from rankscope.examination.passes import Examination
from rankscope.examination.spec import ROWS, Finding
from rankscope.models.inputs import Batch
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView
from rankscope.models.wrapping import same_buffers
from rankscope.stream.viewing import view_of
from rankscope.surgery.session import operations_on

EXPERIMENTS = (changes, dependencies, loss, modes, operations, parameters, weights)
"""Where the experiments are that rows name: importing them registers these."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        findings: what is found of the inputs, faults that are shown, those that are possible, then what is no fault.
        not_examined: rows that could not be asked, and why.
        forward_passes: of the examination and its experiments, without finding the structure.
        backward_passes: likewise.
    """

    findings: tuple[Finding, ...]
    not_examined: Mapping[str, str]
    forward_passes: int
    backward_passes: int


def examine(
    model: nn.Module,
    batch: Batch,
    *,
    view: ModelView | None = None,
    blocks: str | None = None,
    stream: Stream | None = None,
    **given: Any,
) -> Examination:
    """Prepare an examination; passes run when a row asks for them, and are shared.

    Args:
        model: the model, which is not changed.
        batch: what it runs on; some sequences are enough.
        view: its structure, if known.
        blocks: pattern of the blocks' names, if they are not to be found.
        stream: layout of the stream, if it is not to be found.
        given: other fields of an :class:`~rankscope.examination.Examination`, such as ``loss``.
    """
    why = ""
    if view is None:
        try:
            view = view_of(model, batch, blocks=blocks, stream=stream)
        except FAILS as error:
            why = str(error) if isinstance(error, RankscopeError) else f"{type(error).__name__}: {error}"
    return Examination(model, batch, view, why, **given)


HIDES: Mapping[int, Collection[int]] = {1: (3, 4, 6, 7, 8), 2: (4, 6, 7, 8), 3: (4, 6, 7, 8)}
"""The steps of rows that a shown fault hides, by its own step (``order // 10``); all later ones unless given here.

Numbers that are not finite (0) hide everything. Wiring (1) changes what blocks return, and neither what is registered
or optimised (2) nor what the loss is given (5). What is registered or optimised changes no output, so that the stack
(3) can be judged; and a collapse in the stack says nothing about the loss."""

_OF_INPUTS = frozenset({"few_tokens"})
"""Rows that read the inputs alone. They come first: what follows from such inputs is no fault of the model."""
_DIFFERS = frozenset({"not_deterministic"})
"""Faults with which two equal passes differ."""
_COMPARES = frozenset({1, 3, 4, 6, 7, 8})
"""Steps of rows that compare passes, which must be equal if nothing was changed."""


def find(examination: Examination, tell: Callable[[str], None] = lambda _: None) -> Diagnosis:
    """Ask every row, in the order in which they explain each other.

    Once a fault is shown, rows of later steps whose measurements it makes meaningless are not asked; see
    :data:`HIDES`. A value that is not finite ends the examination.

    Args:
        examination: of a model.
        tell: called with the title of each row before it is asked.

    Raises:
        UnsupportedOperationError: surgery is active on the model. Rows are of a model as it is written.
    """
    if operations_on(examination.model):
        raise UnsupportedOperationError("Faults are looked for in a model as it is written, outside operate().")
    with torch.random.fork_rng(devices=[]):  # a model in training draws random numbers in each pass
        return _found(examination, tell)


def _found(examination: Examination, tell: Callable[[str], None]) -> Diagnosis:
    has = {
        "structure": examination.stack is not None,
        "loss": examination.loss is not None,
        "labels": examination.labels is not None,
        "optimizer": examination.optimizer is not None,
    }
    finite = _is_finite(examination)
    findings: list[Finding] = []
    skipped: dict[str, str] = {}
    shown: dict[str, int] = {}
    for spec in sorted(ROWS.values(), key=lambda one: (one.order, one.code)):
        if spec.level == "preview":
            continue
        step = spec.order // 10
        lacking = sorted(need for need in spec.needs if not has[need])
        before = {one for code, one in shown.items() if code not in spec.despite}
        differs = any(one.code in _DIFFERS for one in findings)
        why = (
            "values are not finite" if step and not finite else
            f"needs {', '.join(lacking)}" if lacking else
            "an earlier fault would explain it" if any(step in HIDES.get(b, range(b + 1, 10)) for b in before) else
            "two equal passes differ" if differs and step in _COMPARES and spec.code not in _OF_INPUTS else ""
        )  # fmt: skip
        if why:
            skipped[spec.code] = why
            continue
        tell(spec.title)
        try:
            with same_buffers(examination.model):  # a model in training updates statistics in each pass
                new = spec.look(examination)
        except FAILS as error:
            skipped[spec.code] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        if new is None:
            continue
        findings.append(new)
        if new.kind == "fault" and new.certainty == "shown" and new.code not in _DIFFERS:
            shown[new.code] = step
    order = {code: spec.order for code, spec in ROWS.items()}
    findings.sort(
        key=lambda one: (one.kind != "fault", one.code not in _OF_INPUTS, one.certainty != "shown", order[one.code])
    )
    return Diagnosis(tuple(findings), skipped, examination.forward_passes, examination.backward_passes)


def _is_finite(x: Examination) -> bool:
    """Whether the output holds no NaN; infinity may be meant, as for classes that are masked."""
    try:
        return x.result is None or not bool(torch.isnan(x.result).any())
    except FAILS:
        return True  # a row says that the model does not run

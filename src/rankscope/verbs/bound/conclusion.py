"""What the theorems come to on what was measured: rows, sentences and verdict of ``bound``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rankscope.runs.bounds import HOLDS, VIOLATED, Violation, judge_bounds
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.theory.theorems import Evaluation, Theorem
from rankscope.verbs.bound.found import Measured
from rankscope.verbs.bound.rows import COORDINATES, write_evaluation, write_gains


def concluded(
    chosen: Sequence[Theorem],
    measured: Sequence[Measured],
    provenance: Provenance,
    floor: Mapping[str, Any],
    notes: tuple[str, ...],
    further: Mapping[str, Any] | None = None,
) -> Run:
    """Evaluate each theorem on every sequence: rows, one sentence per theorem, and the verdict.

    Args:
        chosen: the theorems.
        measured: what they are evaluated on.
        provenance: of the run.
        floor: of the run.
        notes: of the run.
        further: what it has to say besides.
    """
    writer = RowWriter(coordinates=COORDINATES)
    first: dict[str, dict[str | None, Evaluation]] = {}
    applies: dict[str, bool] = {}
    failed: dict[str, list[str]] = {}
    violations: list[Violation] = []
    for part in measured:
        for entry in chosen:
            evaluation = entry.function(part.network, part.layers)
            first.setdefault(entry.name, {}).setdefault(part.stack, evaluation)
            applies[entry.name] = applies.get(entry.name, True) and evaluation.applies
            failed[entry.name] = list(dict.fromkeys([*failed.get(entry.name, []), *evaluation.failed]))
            violations += _violations(evaluation, part)
            write_evaluation(writer, evaluation, part.stack, part.sequence)
        if any(entry.name == "contraction_interval" for entry in chosen):
            write_gains(writer, part)
    table = writer.table()
    verdict, evidence = judge_bounds(table, applies, violations)
    return Run(
        kind="bound",
        provenance=provenance,
        floor=floor,
        verdict=verdict,
        evidence=evidence,
        table=table,
        notes=notes,
        extra={
            "code": VIOLATED if violations else HOLDS,
            "sentences": {name: _said(found) for name, found in first.items()},
            "quantities": {name: next(iter(found.values())).quantity for name, found in first.items()},
            "applies": applies,
            "failed_hypotheses": failed,
            "citations": {entry.name: [str(cite) for cite in entry.cites] for entry in chosen},
            **(further or {}),
        },
    )


def _violations(evaluation: Evaluation, part: Measured) -> list[Violation]:
    def tens(log_value: float | None) -> float | None:
        return None if log_value is None else log_value / math.log(10)

    return [
        Violation(
            theorem=evaluation.theorem,
            stack=part.stack,
            sequence=part.sequence,
            layer=bound.layer,
            log10_measured=bound.log_measured / math.log(10),
            log10_lower=tens(bound.log_lower),
            log10_upper=tens(bound.log_upper),
        )
        for bound in evaluation.violated
        if bound.log_measured is not None
    ]


def _said(found: Mapping[str | None, Evaluation]) -> str:
    """What a theorem comes to on the first sequence, stack by stack where there are several."""
    if len(found) == 1:
        return next(iter(found.values())).sentence
    return " ".join(f"{str(stack).capitalize()}: {evaluation.sentence}" for stack, evaluation in found.items())

"""A run as a document: the header and footer shared by the documents of all verbs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.views import Document, Mark, Part, number
from rankscope.views.tables import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.runs.run import Run


def run_document(
    run: Run, parts: tuple[Part, ...], *, title: str | None = None, legend: Mapping[Mark, str] | None = None
) -> Document:
    """A document with ``parts`` and the run's facts, verdict, next steps and notes.

    Args:
        run: the run to show.
        parts: tables, sections and paragraphs of the verb.
        title: first line; by default the verb and the facts.
        legend: meaning of the marks; by default that of the float floor.
    """
    return Document(
        title=title or f"{run.kind}: {facts_line(run)}",
        verdict=run.verdict,
        next_steps=run.next_steps,
        parts=parts,
        legend={"floor": floor_line(run)} if legend is None else legend,
        notes=run.notes,
    )


def floor_line(run: Run) -> str:
    """One line that states the float floor."""
    relative, dtype = run.floor.get("relative"), run.floor.get("dtype")
    if not isinstance(relative, (int, float)):
        return ""
    rounding = f"relative differences below {number(float(relative))} are rounding"
    return f"{SUFFIXES['floor']} at the float floor ({dtype}: {rounding})"


def facts_line(run: Run) -> str:
    """Model with its changes, precision and inputs in one line."""
    seen = run.provenance
    words = [seen.subject]
    if seen.weights_dtype:
        words.append(f"weights {seen.weights_dtype}")
    if seen.arithmetic_dtype and seen.arithmetic_dtype != seen.weights_dtype:
        words.append(f"arithmetic {seen.arithmetic_dtype}")
    if seen.sequences:
        spans = sorted(set(seen.lengths))
        length = f" x {spans[0]}" + (f"-{spans[-1]}" if len(spans) > 1 else "") + " tokens" if spans else ""
        words.append(f"{seen.sequences} sequence{'s' if seen.sequences > 1 else ''}{length}")
    if seen.inputs:
        words.append(f"read: {seen.inputs}")
    if seen.token_policy:
        words.append(f"policy {seen.token_policy}")
    return ", ".join(words)

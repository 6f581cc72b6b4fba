"""Sections and documents as data: everything shown about one result, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankscope.views.tables import Mark, Table


@dataclass(frozen=True, eq=False)
class Section:
    """A heading, a sentence, and what is shown under it.

    Args:
        title: the heading.
        lead: the sentence; may be empty.
        parts: paragraphs, tables, and the charts of a page. Text renderers skip charts.
    """

    title: str
    lead: str = ""
    parts: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Remark:
    """A sentence with labelled lines below it, such as what to change and what shows it.

    Args:
        sentence: may be empty, if the lines are about the sentence above.
        lines: a label, a text, and its mark or None.
    """

    sentence: str
    lines: tuple[tuple[str, str, Mark | None], ...]


Part = str | Remark | Table | Section


@dataclass(frozen=True, eq=False)
class Document:
    """Everything a terminal, a notebook or plain text shows about one result.

    Args:
        title: what was done to which model.
        verdict: the main conclusion; may be empty, and may have several lines, the most important one first.
        next_steps: commands worth running next.
        parts: paragraphs, tables and sections, in order.
        legend: meaning of each mark; shown if a table uses it.
        notes: further remarks for the reader.
    """

    title: str
    verdict: str = ""
    next_steps: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    legend: Mapping[Mark, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def explained(self) -> list[str]:
        """The lines of the legend whose mark is used."""
        used = {mark for table in tables_in(self.parts) for mark in table.marks}
        return [words for mark, words in self.legend.items() if mark in used and words]


def tables_in(parts: tuple[Any, ...]) -> list[Table]:
    """All tables, including those in sections, in order."""
    tables: list[Table] = []
    for part in parts:
        if isinstance(part, Table):
            tables.append(part)
        elif isinstance(part, Section):
            tables += tables_in(part.parts)
    return tables

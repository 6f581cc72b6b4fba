"""Which sections of the report exist for a verb; a function registers itself, here or in an extension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankscope._registry import Registry
from rankscope.runs.run import Run
from rankscope.views import Section

MakeSection = Callable[[Run], Section | None]


@dataclass(frozen=True)
class SectionSpec:
    """A section of the chapter of a verb: its name, its place among the others, and what makes it."""

    verb: str
    name: str
    order: int
    make: MakeSection


SECTIONS: Registry[SectionSpec] = Registry("section", __package__)


def section(verb: str, name: str, *, order: int = 100) -> Callable[[MakeSection], MakeSection]:
    """Register ``run -> section`` for the runs of a verb; it returns None if the run has nothing to show.

    Args:
        verb: the kind of the runs.
        name: the name of the section within its chapter.
        order: sections come in this order, then by name.
    """

    def register(make: MakeSection) -> MakeSection:
        SECTIONS.add(f"{verb}.{name}", SectionSpec(verb, name, order, make))
        return make

    return register


def sections_of(kind: str) -> list[SectionSpec]:
    """The sections of runs of this kind, in order."""
    return sorted((one for one in SECTIONS.values() if one.verb == kind), key=lambda one: (one.order, one.name))

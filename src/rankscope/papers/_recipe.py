"""A reproduction: what a paper shows, how to measure it again, how to draw it, and what to say about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope._citations import Cite
from rankscope._errors import InputError, UnknownNameError
from rankscope._registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run


@dataclass(frozen=True)
class Settings:
    """How a reproduction is to be run.

    Attributes:
        small: tiny models, for a look at the shapes in seconds; not comparable with the paper.
        seeds: how many random initialisations; None for the recipe's own number.
        checkpoints: folders (or hub names) of the original weights, by the recipe's name for them.
        text: a text file to read instead of the built-in sample.
        progress: show a progress bar.
        keep: a folder for finished parts, from which an interrupted run goes on; None to keep none.
        only: names of the rows wanted, where the recipe is a table; none for all of them.
    """

    small: bool = False
    seeds: int | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    text: Path | None = None
    progress: bool = False
    keep: Path | None = None
    only: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """One figure or table of a paper, as data and three functions.

    ``draw`` and ``describe`` read nothing but the run, so that they can be called again on a saved one.

    Attributes:
        name: as it is written on the command line.
        title: one line.
        cites: the figure or statement meant.
        paper: what the paper says of it.
        measure: makes the run.
        draw: figures by file name, without suffix.
        describe: what we see and where it differs, in Markdown; every number from the run.
        conclude: one sentence, kept as the run's verdict.
        checkpoints: names of the original weights that can be given.
        minutes: roughly, at full size on two cores.
        rows: names of the rows that can be asked for alone, where it is a table.
    """

    name: str
    title: str
    cites: tuple[Cite, ...]
    paper: str
    measure: Callable[[Settings], Run]
    draw: Callable[[Run], Mapping[str, Figure]]
    describe: Callable[[Run], str]
    conclude: Callable[[Run], str]
    checkpoints: tuple[str, ...] = ()
    minutes: float = 0.1
    rows: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """What a listing says of it, in plain JSON types."""
        return {
            "name": self.name,
            "title": self.title,
            "cites": [str(cite) for cite in self.cites],
            "minutes": self.minutes,
            "checkpoints": list(self.checkpoints),
            "paper": self.paper,
        }


RECIPES: Registry[Recipe] = Registry("reproduction", "rankscope.papers")


def checked(recipe: Recipe, settings: Settings) -> Settings:
    """The settings, if the recipe can follow them.

    Raises:
        InputError: weights it does not know, no seed at all, or a row of what is no table.
        UnknownNameError: a row it does not have.
    """
    unknown = sorted(set(settings.checkpoints) - set(recipe.checkpoints))
    if unknown:
        known = ", ".join(recipe.checkpoints) or "none"
        raise InputError(f"{recipe.name} reads no weights named {', '.join(unknown)}; it reads {known}.")
    for name in settings.only:
        if not recipe.rows:
            raise InputError(f"{recipe.name} is no table, so it has no row {name!r} to be made alone. Leave it out.")
        if name not in recipe.rows:
            raise UnknownNameError("row", name, recipe.rows)
    if settings.seeds is not None and settings.seeds < 1:
        raise InputError(f"seeds={settings.seeds}: expected at least 1.")
    return settings

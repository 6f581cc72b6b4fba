"""What a reproduction declares, and the settings it is run with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rankscope._citations import Cite
from rankscope._registry import Registry
from rankscope.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class ExperimentSize:
    """How much is run. Each experiment adds what else it varies.

    Attributes:
        seeds: random initialisations.
    """

    seeds: int

    def to_json(self) -> dict[str, Any]:
        """All fields in plain JSON types."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


AnySize = TypeVar("AnySize", bound=ExperimentSize)


@dataclass(frozen=True)
class Settings:
    """How a reproduction is run.

    Attributes:
        name: the reproduction.
        small: use tiny models to check the shapes in seconds; not comparable with the paper.
        seeds: number of random initialisations; None for the reproduction's own number.
        checkpoints: folders or hub names of the original weights, by the reproduction's name for them.
        text: a text file to read instead of the built-in sample.
        progress: show a progress bar.
        keep: folder for finished parts, so that an interrupted run can resume; None to keep none.
        only: names of the rows to measure, if the reproduction is a table; empty for all of them.
    """

    name: str
    small: bool = False
    seeds: int | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    text: Path | None = None
    progress: bool = False
    keep: Path | None = None
    only: tuple[str, ...] = ()

    def pick(self, full: AnySize, small: AnySize) -> AnySize:
        """The requested size, with the requested number of seeds."""
        size = small if self.small else full
        return size if self.seeds is None else replace(size, seeds=self.seeds)


class Story(Protocol):
    """What a reproduction says about its run; the module ``show.py`` of its folder."""

    def judge(self, run: Run) -> str:
        """The answer in one or two sentences, stored as the run's verdict."""

    def describe(self, run: Run) -> str:
        """The results in Markdown, and last a section :data:`METHOD`; every number comes from the run."""

    def draw(self, run: Run) -> Mapping[str, Figure]:
        """Figures by file name, without suffix."""


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """One figure, table or open question of a paper, as data and functions that are imported when needed.

    Attributes:
        name: as it is written on the command line.
        title: one line.
        cites: the figure or statement.
        paper: what the paper says about it; names its authors.
        run: imports and returns the function that produces the run.
        show: imports and returns the module that judges, describes and draws a run, measured now or saved.
        checkpoints: names of the original weights that can be given.
        minutes: rough duration at full size on two cores.
        rows: names of the rows that can be measured alone, if it is a table.
        figure: what ``figure.png`` shows, for readers who cannot see it; empty without one.
        variants: the networks of the figure, as names of ``rankscope.ablate``, if any model has them.
    """

    name: str
    title: str
    cites: tuple[Cite, ...]
    paper: str
    run: Callable[[], Callable[[Settings], Run]]
    show: Callable[[], Story]
    checkpoints: tuple[str, ...] = ()
    minutes: float = 0.1
    rows: tuple[str, ...] = ()
    figure: str = ""
    variants: tuple[str, ...] = ()

    def facts(self) -> dict[str, object]:
        """The entry in ``reproduce --list --json``, in plain JSON types."""
        return {
            "name": self.name,
            "title": self.title,
            "cites": [str(cite) for cite in self.cites],
            "minutes": self.minutes,
            "checkpoints": list(self.checkpoints),
            "paper": self.paper,
        }

    def checked(self, settings: Settings) -> Settings:
        """The settings, if the reproduction supports them.

        Raises:
            InputError: weights it does not know, no seed at all, or a row of something that is not a table.
            UnknownNameError: a row it does not have.
        """
        unknown = sorted(set(settings.checkpoints) - set(self.checkpoints))
        if unknown:
            known = ", ".join(self.checkpoints) or "none"
            raise InputError(f"{self.name} reads no weights named {', '.join(unknown)}; it reads {known}.")
        for name in settings.only:
            if not self.rows:
                raise InputError(f"{self.name} is not a table, so it has no row {name!r}. Leave it out.")
            if name not in self.rows:
                raise UnknownNameError("row", name, self.rows)
        if settings.seeds is not None and settings.seeds < 1:
            raise InputError(f"seeds={settings.seeds}: expected at least 1.")
        return settings


METHOD = "## Method and caveats"
"""Heading of the last section of every text: settings, deviations from the paper, choices made after looking."""
REPRODUCTIONS: Registry[Reproduction] = Registry("reproduction", __package__)


def declare(entry: Reproduction) -> None:
    """Register the reproduction of a folder."""
    REPRODUCTIONS.add(entry.name, entry)

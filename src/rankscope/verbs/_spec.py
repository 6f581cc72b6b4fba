"""A verb is a declaration, and this is the registry of them.

The command line, ``rerun``, ``report``, ``query``, ``sweep``, printing, plotting and the docs read it, so adding a verb
is adding a folder to this package; ``docs/adding.md`` shows one.

``verbs/NAME/__init__.py`` declares, ``run.py`` computes (torch), ``judge.py`` and ``show.py`` read a finished run (no
torch). Functions are named by their place, ``module:name`` below ``rankscope``, and imported when first used: looking
at the registry imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rankscope._deferred import resolve
from rankscope._registry import Registry
from rankscope.execution.support import ExecutionSupport
from rankscope.options import Option

Place = str | Callable[..., Any]
"""A function, or ``module:name`` of one."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """How a run is written and drawn; the defaults show any run as a grid of metrics by layer.

    Attributes:
        document: ``run -> Document``: its tables, verdict and notes, for print, terminal and notebook.
        plot: ``run -> Plot``: its figure.
        has_choices: whether ``plot`` takes ``metrics`` and ``site``.
        sections: of the HTML report, by name: ``(run, detail) -> section``.
    """

    document: Place = "verbs.measure.show:document"
    plot: Place = "verbs.measure.show:plot"
    has_choices: bool = True
    sections: Mapping[str, Place] = field(default_factory=lambda: {"rows": "reporting.page.rows_section:rows_section"})


@dataclass(frozen=True, kw_only=True, eq=False)
class Verb:
    """What there is to know about a verb.

    Attributes:
        name: of the command, of the Python function, and of the runs it makes (``Run.kind``).
        question: that it answers; heads its help and its chapter of a report.
        answer: one line about what it gives.
        run: the Python function; it returns a :class:`~rankscope.runs.run.Run`.
        options: of the command line, in the order of its help; also those of a plan.
        judge: draws the verdict from the rows.
        show: how a run is written and drawn.
        columns: that its rows have beside those of every run, with the type of each; ``query`` knows them.
        examples: command lines without the name of the program; tests run them.
        under_torchrun: a command line that several processes share, if the verb can be shared.
        order: position in the list of commands.
        subject: whether it runs a model, or reads only the design of one.
        in_plans: whether a sweep can run it.
        under_variants: whether a sweep runs it under each variant of its plan.
        in_plans_always: arguments every task of a sweep passes.
        execution: how it can be executed besides in memory; None for a verb that runs no model.
        is_float64: whether it holds a float64 copy of the weights.
        call: ``(rankscope, {option: value}) -> Run`` in place of calling ``run`` with the options of the command
            line.
        command: a command written by hand, for a verb whose result is not a run.
    """

    name: str
    question: str
    answer: str
    run: Place
    options: tuple[Option, ...] = ()
    judge: Place | None = None
    show: Show = field(default_factory=Show)
    columns: Mapping[str, Literal["string", "int64", "float64"]] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    under_torchrun: str | None = None
    order: int = 1000
    subject: Literal["model", "design"] = "model"
    in_plans: bool = False
    under_variants: bool = False
    in_plans_always: Mapping[str, Any] = field(default_factory=dict)
    execution: ExecutionSupport | None = None
    is_float64: bool = False
    call: Place | None = None
    command: Place | None = None

    @property
    def makes_runs(self) -> bool:
        """Whether its result is a run, which can be saved, shown, compared and rerun."""
        return self.command is None

    @property
    def is_shared(self) -> bool:
        """Whether several processes can share its work."""
        return any(option.name == "parallel" for option in self.options)

    def default(self, name: str) -> Any:
        """The declared default of an option."""
        return next(option.default for option in self.options if option.name == name)

    def takes(self, name: str) -> bool:
        """Whether it has an option of this name."""
        return any(option.name == name for option in self.options)


VERBS: Registry[Verb] = Registry("verb", "rankscope.verbs", folders=True)


def verb(declared: Verb) -> Verb:
    """Add a verb to the registry."""
    VERBS.add(declared.name, declared)
    return declared


def function_at(place: Place) -> Callable[..., Any]:
    """The function a place names."""
    if callable(place):
        return place
    found: Callable[..., Any] = resolve(place)
    return found


def verbs_in_order() -> list[Verb]:
    """All verbs, as the command line lists them."""
    return sorted(VERBS.values(), key=lambda one: (one.order, one.name))

"""Declarations of verbs, and their registry.

The command line, ``report``, ``query``, ``sweep``, printing, plotting and the docs read it. To add a
verb, add a folder to this package; ``docs/adding.md`` shows one.

``verbs/NAME/__init__.py`` declares, ``run.py`` computes (torch), ``judge.py`` and ``show.py`` read a finished run (no
torch). A declaration holds functions that import inside themselves: reading the registry imports neither torch nor
numpy, and type checkers and editors follow the imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rankscope._printing import brief
from rankscope._registry import Registry
from rankscope.execution.support import ExecutionSupport
from rankscope.options import RESULT, Option
from rankscope.runs.showing import ANY, VIEWS, Show


class Answer(Protocol):
    """What a verb returns if its result is not a run; the command line shows every answer in the same way."""

    @property
    def passed(self) -> bool:
        """Whether the command exits with 0; otherwise it exits with 1."""

    @property
    def brief(self) -> str:
        """What ``--quiet`` prints; empty for nothing."""

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""


def _grid() -> Show:
    from rankscope.verbs.measure.show import document, plot

    return Show(document=document, plot=plot, has_choices=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Verb:
    """The declaration of a verb.

    Attributes:
        name: name of the command, of the Python function, and of its runs (``Run.kind``).
        question: the question it answers; first sentence of its help and title of its chapter in a report.
        answer: one line on what it does.
        run: imports and returns the Python function, whose result is a :class:`~rankscope.runs.run.Run` or an
            :class:`Answer`.
        makes_runs: whether its result is a run, which can be saved and compared; False if it is an answer.
        options: options of the command line, in the order of the help; also those of a plan.
        outputs: options that say what to do with the result; they come last in the help.
        show: imports and returns how a run is printed and plotted; by default as a grid of metrics by layer.
        columns: further columns of its rows, with their types; ``query`` knows them.
        examples: command lines without the name of the program; tests run them.
        under_torchrun: an example for ``torchrun``, if several processes can share the work.
        order: position in the list of commands.
        subject: whether it runs a model or only reads a design.
        in_plans: whether a sweep can run it.
        under_variants: whether a sweep runs it under each variant of its plan.
        in_plans_always: arguments that every task of a sweep passes.
        execution: how it can be executed other than in memory; None for a verb that runs no model.
        is_float64: whether it keeps a float64 copy of the weights.
        call: ``(rankscope, {option: value}) -> result`` in place of calling ``run`` with the options given.
        explain: imports and returns a function of a code; the command prints what it returns for ``--explain CODE``.
    """

    name: str
    question: str
    answer: str
    run: Callable[[], Callable[..., Any]]
    makes_runs: bool = True
    options: tuple[Option, ...] = ()
    outputs: tuple[Option, ...] = RESULT
    show: Callable[[], Show] = _grid
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
    call: Callable[[Any, Mapping[str, Any]], Any] | None = None
    explain: Callable[[], Callable[[str], str]] | None = None

    __repr__ = brief

    @property
    def is_shared(self) -> bool:
        """Whether several processes can share its work."""
        return any(option.name == "parallel" for option in self.options)

    @property
    def inputs_defaults(self) -> dict[str, int]:
        """How many sequences, how long and how many at a time, if :class:`rankscope.Inputs` do not say."""
        sizes = ("sequences", "tokens", "batch")
        return {option.name: option.default for option in self.options if option.name in sizes and option.default}

    def default(self, name: str) -> Any:
        """The declared default of an option."""
        return next(option.default for option in self.options if option.name == name)

    def takes(self, name: str) -> bool:
        """Whether it has an option of this name."""
        return any(option.name == name for option in self.options)


VERBS: Registry[Verb] = Registry("verb", __package__, folders=True)
VIEWS.add(ANY, _grid)


def verb(declared: Verb) -> Verb:
    """Add a verb to the registry, and to ``runs`` how its runs are shown."""
    VERBS.add(declared.name, declared)
    VIEWS.add(declared.name, declared.show)
    return declared


def verbs_in_order() -> list[Verb]:
    """All verbs, as the command line lists them."""
    return sorted(VERBS.values(), key=lambda one: (one.order, one.name))

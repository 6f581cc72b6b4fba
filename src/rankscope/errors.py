"""All errors that rankscope raises on purpose.

RankscopeError
├── UnknownNameError       a metric, site, preset or family that does not exist
├── LoadError              a spec that does not lead to a model
├── InputError             inputs a verb cannot work with
│   ├── IgnoredInputError  inputs that the output does not depend on
│   ├── PaddedInputError   sequences that the model pads by itself
│   └── ReadingError       a reading that was asked for by name and cannot be taken
├── DiscoveryError         blocks could not be found, or not unambiguously
│   └── LayoutError        the residual stream does not have the expected layout
├── UnsupportedConfigError a configuration that rankscope does not support
├── UnsupportedOperationError surgery that a model does not support
├── UnsupportedArithmeticError an operation that exact arithmetic has no rule for
├── SiteError              an expected site did not fire as often as it should
├── ResultError            a result file not written by rankscope, or incomplete
├── ProcessError           another process of the same run failed or did not arrive
├── MissingExtraError      an optional package is not installed
└── MissingExtensionError  a name of an extension of rankscope that is not installed
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from rankscope._foreign_text import visible

__all__ = [
    "DiscoveryError",
    "IgnoredInputError",
    "InputError",
    "LayoutError",
    "LoadError",
    "MissingExtensionError",
    "MissingExtraError",
    "PaddedInputError",
    "ProcessError",
    "RankscopeError",
    "ReadingError",
    "ResultError",
    "SiteError",
    "UnknownNameError",
    "UnsupportedArithmeticError",
    "UnsupportedConfigError",
    "UnsupportedOperationError",
]


class RankscopeError(Exception):
    """Base class of all errors raised on purpose; the message says what to do.

    A message may quote a file or a library; its control characters are shown, not carried out.
    """

    def __str__(self) -> str:
        return visible(super().__str__())


class UnknownNameError(RankscopeError):
    """A name that is not registered; the message suggests similar ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Known: {', '.join(known)}."
        super().__init__(f"There is no {kind} named {name!r}. {hint}")
        self.kind = kind
        self.name = name
        self.near = tuple(near)


class LoadError(RankscopeError):
    """A model spec that does not lead to a model."""


class InputError(RankscopeError):
    """Inputs a verb cannot work with."""


class ReadingError(InputError):
    """A metric or an alarm of a gauge that was asked for by name and cannot be read; the message says why."""


class IgnoredInputError(InputError):
    """Inputs that the output of the model does not depend on, so that nothing says how it reads them."""


class PaddedInputError(InputError):
    """Sequences that the model pads by itself, where nothing says which tokens count."""


class DiscoveryError(RankscopeError):
    """The blocks of a model could not be found; the message says how to name them.

    Attributes:
        hints: declarations that may be right (``stream`` or ``blocks``), each with the sentence that suggests it. They
            are tried on the model before one is printed.
        otherwise: what to do if none of them is right.
    """

    def __init__(
        self, message: str, hints: Sequence[tuple[Mapping[str, object], str]] = (), otherwise: str = ""
    ) -> None:
        super().__init__(message)
        self.hints = tuple(hints)
        self.otherwise = otherwise

    def with_hints(self, passed: Sequence[str]) -> DiscoveryError:
        """The same error with the hints that passed in its message."""
        following = " Or: ".join(passed) or self.otherwise
        return type(self)(f"{self} {following}" if following else str(self))


class LayoutError(DiscoveryError):
    """The residual stream does not have the expected layout; the message says how to declare it."""


class UnsupportedConfigError(RankscopeError):
    """A configuration that rankscope does not support; it raises rather than return a wrong number."""


class UnsupportedOperationError(RankscopeError):
    """Surgery that this model does not support; the message says why."""


class UnsupportedArithmeticError(RankscopeError):
    """An operation without an exact rule; the message names the module that runs it and how to add a rule."""

    def __init__(self, operation: str, module: str, why: str) -> None:
        super().__init__(
            f"Exact arithmetic cannot follow {operation} in {module}: {why}. Register a rule with "
            "@rankscope.exact_arithmetic.registry.rule(torch.ops.aten.NAME): a function of the operation's arguments "
            "that returns a Deviation, like those in rankscope/exact_arithmetic/rules. measure() needs no rules."
        )
        self.operation = operation
        self.module = module


class SiteError(RankscopeError):
    """A site that should have fired did not, or fired too often."""


class ResultError(RankscopeError):
    """A result file that rankscope did not write, or that is incomplete."""


class ProcessError(RankscopeError):
    """Another process of the same run failed or did not arrive; the message says which and why."""


class MissingExtensionError(RankscopeError, AttributeError):
    """A verb, command or name that comes with an extension which cannot be used."""

    def __init__(self, name: str, extension: str, problem: str) -> None:
        super().__init__(
            f"`{name}` comes with the extension {extension}, which {problem}. `rankscope ls extensions` lists what is "
            "installed; reinstall rankscope to get all of its own."
        )
        self.name = name
        self.extension = extension


class MissingExtraError(RankscopeError):
    """A required optional package is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(
            f"{what} needs {package}, which is not installed. Install it with: pip install 'rankscope[{extra}]'"
        )
        self.package = package
        self.extra = extra

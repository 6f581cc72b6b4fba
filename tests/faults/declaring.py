"""The list of faults: what is done to a process, and what is expected of it. Tests, docs and figures read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., object])


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: of the fault, unique.
        done: what is done, in words.
        expected: what must come of it.
        test: where it is done, ``module::function``.
    """

    name: str
    done: str
    expected: str
    test: str


FAULTS: dict[str, Fault] = {}


def fault(name: str, *, done: str, expected: str) -> Callable[[Test], Test]:
    """Declare what a test does; several may stand on one test."""

    def declared(test: Test) -> Test:
        assert name not in FAULTS, f"{name!r} is declared twice"
        FAULTS[name] = Fault(name, done, expected, f"{test.__module__.rpartition('.')[2]}::{test.__name__}")
        return test

    return declared

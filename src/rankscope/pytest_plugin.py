"""The pytest fixture ``assert_keeps_rank``: a test of one's own model that fails when its tokens collapse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rankscope.runs.run import Run


@pytest.fixture(scope="session")
def assert_keeps_rank() -> Callable[..., Run]:
    """A function that measures a model and fails the test if a condition holds.

    It takes what :func:`rankscope.measure` takes, and ``fail_if``: one condition or several, written as for
    ``rankscope measure --fail-if``; by default it fails where the verdict says that tokens have collapsed. It returns
    the run.
    """
    # Imported here: pytest loads this module in every project of an environment that has rankscope.
    from rankscope import measure
    from rankscope.runs.conditions import parse_condition
    from rankscope.verdicts.states import State

    def check(model: object, inputs: object = None, *, fail_if: str | tuple[str, ...] = (), **how: Any) -> Run:
        __tracebackhide__ = True
        conditions = [parse_condition(words) for words in ([fail_if] if isinstance(fail_if, str) else fail_if)]
        run: Run = measure(model, inputs, **how)  # type: ignore[arg-type]
        held = [words for condition in conditions if (words := condition.where_met(run.table)) is not None]
        grave = [state.code for state in State if state.is_grave]  # collapsed, or not distinguishable from it
        if held or (not conditions and run.code in grave):
            pytest.fail("\n".join([*held, run.verdict, *run.next_steps]), pytrace=False)
        return run

    return check

"""Progress of a sweep: counts by model and verb, and each failure with its reason."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rankscope._foreign_text import visible
from rankscope.ext.sweeps.results import Contents, Results
from rankscope.ext.sweeps.tasks import title_of

State = Literal["done", "failed", "missing"]
STATES: tuple[State, ...] = ("done", "failed", "missing")
MOST_SHOWN = 50


@dataclass(frozen=True)
class Failure:
    """A task that failed, and why."""

    key: str
    what: str
    reason: str
    type: str


@dataclass(frozen=True)
class SweepStatus:
    """Counts and failures of one sweep.

    Attributes:
        folder: folder or address of the sweep.
        counts: tasks by state.
        groups: the same by ``(model, verb)``, in the order of the plan.
        failures: in the order of the plan.
        earlier: number of results that are not part of the current plan; they are kept but not shown.
    """

    folder: str
    counts: Mapping[State, int]
    groups: Mapping[tuple[str, str], Mapping[State, int]]
    failures: tuple[Failure, ...]
    earlier: int

    @property
    def complete(self) -> bool:
        """Whether every task has its rows."""
        return not (self.counts["failed"] or self.counts["missing"])

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "kind": "sweep",
            "complete": self.complete,
            "counts": dict(self.counts),
            "earlier": self.earlier,
            "groups": [{"model": model, "verb": verb, **counts} for (model, verb), counts in self.groups.items()],
            "failures": [vars(failure) for failure in self.failures],
        }

    def __str__(self) -> str:
        words = [f"{self.counts['done']} of {sum(self.counts.values())} tasks done"]
        if self.counts["failed"]:
            words.append(f"{self.counts['failed']} failed")
        if self.counts["missing"]:
            words.append(f"{self.counts['missing']} not run yet")
        lines = [", ".join(words) + "."]
        lines += [f"  failed: {one.what}: {one.reason}" for one in self.failures[:MOST_SHOWN]]
        if len(self.failures) > MOST_SHOWN:
            lines.append(f"  and {len(self.failures) - MOST_SHOWN} more")
        if self.earlier:
            lines.append(f"  {self.earlier} results of an earlier plan are kept in the folder and not shown.")
        return "\n".join(lines)


def status_of(folder: str | os.PathLike[str]) -> SweepStatus:
    """Read the progress of the sweep in a folder or at an address, from the names of its files.

    Raises:
        ResultError: no sweep was started there, or it cannot be read.
    """
    return status_in(Results.at(folder).contents())


def status_in(contents: Contents) -> SweepStatus:
    """The progress of a sweep with these contents."""
    groups: dict[tuple[str, str], dict[State, int]] = {}
    failures: list[Failure] = []
    for task in contents.tasks.drop_columns(["chunk", "description"]).to_pylist():
        key, place = task["task"], (visible(task["model"]), visible(task["verb"]))
        state: State = "done" if key in contents.done else "failed" if key in contents.failures else "missing"
        groups.setdefault(place, dict.fromkeys(STATES, 0))[state] += 1
        if state == "failed":
            facts = contents.failures[key]
            what, reason, kind = visible(title_of(task)), visible(facts.get("reason")), visible(facts.get("type"))
            failures.append(Failure(key, what, reason, kind))
    counts = {state: sum(group[state] for group in groups.values()) for state in STATES}
    return SweepStatus(str(contents.results.place), counts, groups, tuple(failures), contents.earlier)

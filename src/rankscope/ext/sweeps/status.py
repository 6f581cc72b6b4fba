"""Progress of a sweep: counts by model and verb, and each failure with its reason."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rankscope.ext.sweeps.results import Contents, Results
from rankscope.runs.plain_json import visible

State = Literal["done", "failed", "missing"]
STATES: tuple[State, ...] = ("done", "failed", "missing")
MOST_SHOWN = 50
Group = tuple[str, str]


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

    The counts come from the names of files. What is read from the files themselves (``rows``, ``seconds``, ``inputs``)
    is read when it is first asked for.

    Attributes:
        folder: folder or address of the sweep.
        counts: tasks by state.
        groups: the same by ``(model, verb)``, in the order of the plan.
        failures: in the order of the plan.
        earlier: number of results that are not part of the current plan; they are kept but not shown.
    """

    folder: str
    counts: Mapping[State, int]
    groups: Mapping[Group, Mapping[State, int]]
    failures: tuple[Failure, ...]
    earlier: int
    contents: Contents = field(repr=False, compare=False)

    @property
    def complete(self) -> bool:
        """Whether every task has its rows."""
        return not (self.counts["failed"] or self.counts["missing"])

    @cached_property
    def rows(self) -> int:
        """Total number of rows."""
        return int(sum(_number(record.get("rows")) for record in self.contents.records.values()))

    @cached_property
    def seconds(self) -> float:
        """Total duration of the finished tasks."""
        return float(sum(_number(record.get("seconds")) for record in self.contents.records.values()))

    @cached_property
    def inputs(self) -> Mapping[Group, Mapping[str, int]]:
        """Descriptions of the inputs of the finished tasks of each ``(model, verb)``, with the number of tasks."""
        found: dict[Group, dict[str, int]] = {}
        columns = (self.contents.tasks[name].to_pylist() for name in ("task", "model", "verb"))
        for key, model, verb in zip(*columns, strict=True):
            words = what_was_read(self.contents.records.get(key, {}))
            if words is not None:
                counts = found.setdefault((visible(model), visible(verb)), {})
                counts[words] = counts.get(words, 0) + 1
        return found

    @property
    def read(self) -> dict[str, int]:
        """Descriptions of the inputs of the finished tasks, with the number of tasks."""
        by_kind: dict[str, int] = {}
        for counts in self.inputs.values():
            for words, count in counts.items():
                by_kind[words] = by_kind.get(words, 0) + count
        return by_kind

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "kind": "sweep",
            "complete": self.complete,
            "counts": dict(self.counts),
            "rows": self.rows,
            "seconds": round(self.seconds, 3),
            "earlier": self.earlier,
            "read": self.read,
            "groups": [
                {"model": place[0], "verb": place[1], **counts, "inputs": dict(self.inputs.get(place, {}))}
                for place, counts in self.groups.items()
            ],
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
    """Read the progress of the sweep in a folder or at an address.

    Raises:
        ResultError: no sweep was started there, or it cannot be read.
    """
    return status_in(Results.at(folder).contents())


def status_in(contents: Contents) -> SweepStatus:
    """The progress of a sweep with these contents."""
    groups: dict[Group, dict[State, int]] = {}
    counts: dict[State, int] = dict.fromkeys(STATES, 0)
    failures: list[Failure] = []
    names = ("task", "model", "verb", "checkpoint", "variant", "seed")
    for key, *where in zip(*(contents.tasks[name].to_pylist() for name in names), strict=True):
        model, verb = visible(where[0]), visible(where[1])
        state: State = "done" if key in contents.done else "failed" if key in contents.failures else "missing"
        groups.setdefault((model, verb), dict.fromkeys(STATES, 0))[state] += 1
        counts[state] += 1
        if state == "failed":
            facts = contents.failures[key]
            named = [f"{name} {value}" for name, value in zip(names[3:], where[2:], strict=True) if value is not None]
            what = visible(", ".join([f"{verb} {model}", *named]))
            failures.append(Failure(key, what, visible(facts.get("reason")), visible(facts.get("type"))))
    return SweepStatus(str(contents.results.place), counts, groups, tuple(failures), contents.earlier, contents)


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0


def what_was_read(record: Mapping[str, Any]) -> str | None:
    """Description of a finished task's inputs, without the seed; None if it has none.

    Example:
        >>> what_was_read({"provenance": {"inputs": "random tokens, seed 3"}})
        'random tokens'
    """
    provenance = record.get("provenance")
    inputs = provenance.get("inputs") if isinstance(provenance, Mapping) else None
    return visible(re.sub(r", seed \d+", "", inputs)) if isinstance(inputs, str) else None

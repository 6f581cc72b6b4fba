"""Progress of a sweep: counts by model and verb, and each failure with its reason."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rankscope._types import path_of
from rankscope.ext.sweeps.folder import Contents, Expected, SweepFolder

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
        folder: folder of the sweep.
        counts: tasks by state.
        groups: the same by ``(model, verb)``, in the order of the plan.
        failures: in the order of the plan.
        earlier: number of results in the folder that are not part of the current plan; they are kept but not shown.
        seconds: total duration of the finished tasks.
        rows: total number of rows.
        inputs: descriptions of the inputs of the finished tasks of each ``(model, verb)``, with the number of tasks.
    """

    folder: Path
    counts: Mapping[State, int]
    groups: Mapping[tuple[str, str], Mapping[State, int]]
    failures: tuple[Failure, ...]
    earlier: int
    seconds: float
    rows: int
    inputs: Mapping[tuple[str, str], Mapping[str, int]] = field(default_factory=dict)

    @property
    def read(self) -> dict[str, int]:
        """Descriptions of the inputs of the finished tasks, with the number of tasks."""
        by_kind: dict[str, int] = {}
        for counts in self.inputs.values():
            for words, count in counts.items():
                by_kind[words] = by_kind.get(words, 0) + count
        return by_kind

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
        total = sum(self.counts.values())
        words = [f"{self.counts['done']} of {total} tasks done, {self.rows} rows, {self.seconds:.0f} s of work"]
        if self.counts["failed"]:
            words.append(f"{self.counts['failed']} failed")
        if self.counts["missing"]:
            words.append(f"{self.counts['missing']} not run yet")
        lines = [", ".join(words) + "."]
        if self.read:
            lines.append("  Read: " + "; ".join(f"{what} ({count})" for what, count in self.read.items()) + ".")
        lines += [f"  failed: {one.what}: {one.reason}" for one in self.failures[:MOST_SHOWN]]
        if len(self.failures) > MOST_SHOWN:
            lines.append(f"  and {len(self.failures) - MOST_SHOWN} more")
        if self.earlier:
            lines.append(f"  {self.earlier} results of an earlier plan are kept in the folder and not shown.")
        return "\n".join(lines)


def status_of(folder: str | os.PathLike[str]) -> SweepStatus:
    """Read the progress of the sweep in a folder.

    Raises:
        ResultError: no sweep was started there.
    """
    home = SweepFolder(path_of(folder, "folder", "the folder of a sweep"))
    expected = home.expected()
    return home.read(lambda contents: _status(contents, expected))


def _status(contents: Contents, expected: list[Expected]) -> SweepStatus:
    home, done, failed = contents.folder, contents.done, contents.failed
    summaries = contents.summaries({one.key for one in expected})
    groups: dict[tuple[str, str], dict[State, int]] = {}
    counts: dict[State, int] = dict.fromkeys(STATES, 0)
    failures: list[Failure] = []
    seconds, rows = 0.0, 0
    inputs: dict[tuple[str, str], dict[str, int]] = {}
    for one in expected:
        state: State = "done" if one.key in done else "failed" if one.key in failed else "missing"
        group = (str(one.task.get("model")), str(one.task.get("verb")))
        groups.setdefault(group, dict.fromkeys(STATES, 0))[state] += 1
        counts[state] += 1
        if state == "failed":
            facts = home.failure(one.key)
            failures.append(Failure(one.key, name_of(one), str(facts.get("reason")), str(facts.get("type"))))
        elif state == "done":
            summary = summaries[one.key]
            read = what_was_read(summary)
            if read is not None:
                inputs.setdefault(group, {})[read] = inputs.get(group, {}).get(read, 0) + 1
            seconds += summary["seconds"] or 0.0
            rows += summary["rows"] or 0
    earlier = len(done - {one.key for one in expected})
    return SweepStatus(home.home, counts, groups, tuple(failures), earlier, seconds, rows, inputs)


def what_was_read(summary: Mapping[str, Any]) -> str | None:
    """Description of a finished task's inputs, without the seed; None if it has none, or for earlier versions.

    Example:
        >>> what_was_read({"inputs": "random tokens, seed 3"})
        'random tokens'
    """
    inputs = summary["inputs"]
    return None if inputs is None else re.sub(r", seed \d+", "", inputs)


def name_of(one: Expected) -> str:
    """A task in a few words.

    Example:
        >>> name_of(Expected("0" * 24, {"verb": "measure", "model": "bert", "variant": "pure", "seed": 1}))
        'measure bert, variant pure, seed 1'
    """
    task = one.task
    named = [f"{name} {task[name]}" for name in ("checkpoint", "variant", "seed") if task.get(name) is not None]
    return ", ".join([f"{task.get('verb')} {task.get('model')}", *named])

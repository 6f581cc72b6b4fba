"""Which remedies rescued trainings that collapse: recorded on 2026-11-16, by the program that the record names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from rankscope.models.view import BlockPlan, ModelView
from rankscope.remedies._applying import has

Arrangement = Literal["post-norm", "pre-norm", "no skips"]


@dataclass(frozen=True)
class Evidence:
    """How often a remedy rescued small networks that do not train without it.

    Attributes:
        rescued: trainings that it rescued.
        trained: trainings in which it was tried.
        arrangement: of norms and skips in those networks.
        designs: their names.
    """

    rescued: int
    trained: int
    arrangement: Arrangement
    designs: tuple[str, ...]

    @property
    def share(self) -> float:
        """Rescued trainings over all of them."""
        return self.rescued / self.trained

    @property
    def words(self) -> str:
        """The same as part of a sentence."""
        networks = "networks without skips" if self.arrangement == "no skips" else f"{self.arrangement} networks"
        return f"rescued {self.rescued} of {self.trained} trainings of small {networks}"


@cache
def trained_designs() -> tuple[Mapping[str, Any], ...]:
    """The designs that were trained: name, arrangement, the alarms they show, and what rescued them."""
    told = json.loads(files("rankscope.remedies").joinpath("evidence.json").read_text(encoding="utf-8"))
    return tuple(told["designs"])


def arrangement_of(view: ModelView, stack: str | None = None) -> Arrangement | None:
    """How the norms and skips of a stack are arranged; None if its blocks differ, or are like none that were trained.

    The first stack, if its name is None.
    """
    plans = next(one for one in view.stacks if stack is None or one.name == stack).plans
    arrangements = {_arrangement(plan) for plan in plans}
    return arrangements.pop() if len(arrangements) == 1 else None


def _arrangement(plan: BlockPlan) -> Arrangement | None:
    if not has(plan, "skips"):
        return "no skips" if has(plan, "attention") else None
    if has(plan, "post-norm"):
        return "post-norm"
    return "pre-norm" if has(plan, "pre-norm") else None


def evidence_for(arrangement: Arrangement | None, alarms: Iterable[str]) -> dict[str, Evidence]:
    """What was seen of each remedy in trainings of such networks that end in one of these alarms.

    Empty if no such network was trained.

    Example:
        >>> evidence_for("post-norm", ["token_collapse"])["pre_norm"].arrangement
        'post-norm'
        >>> evidence_for(None, ["token_collapse"])
        {}
    """
    wanted = set(alarms)
    evidence: dict[str, Evidence] = {}
    for design in trained_designs():
        if design["arrangement"] != arrangement or not wanted & set(design["alarms"]):
            continue
        for name, (rescued, trained) in design["remedies"].items():
            known = evidence.get(name, Evidence(0, 0, design["arrangement"], ()))
            evidence[name] = Evidence(
                known.rescued + rescued,
                known.trained + trained,
                known.arrangement,
                (*known.designs, design["name"]),
            )
    return evidence

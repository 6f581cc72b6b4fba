"""Writes the tables of the reliability page about mutants from ``docs/data/mutants.json``.

python -m scripts.write_mutants
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from scripts.mutants import FIGURES, PACKAGES

TABLE = FIGURES.with_suffix(".inc")
ALIVE = ("survived", "uncovered")
EQUIVALENT = "equivalent: "


def kind_of(one: dict[str, Any], when: str) -> str:
    """``killed`` (also for what hangs), ``equivalent``, ``alive``, or ``none`` for what changes nothing."""
    if one[when] in ALIVE:
        return "equivalent" if one["judged"].startswith(EQUIVALENT) else "alive"
    return "killed" if one[when] in ("killed", "timeout") else "none"


def rates(facts: dict[str, Any], drawn: list[dict[str, Any]]) -> list[str]:
    """One line per package, and one for all."""
    counts = {package: Counter[str]() for package in PACKAGES}
    for one in drawn:
        counts[one["package"]][kind_of(one, "outcome")] += 1
        counts[one["package"]]["at first"] += kind_of(one, "first") == "killed"
    counts["all"] = sum(counts.values(), Counter[str]())
    possible = {**facts["possible"], "all": sum(facts["possible"].values())}
    lines = [
        "| package | possible | drawn | no call can tell | killed at first | killed now |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, found in counts.items():
        told = found["killed"] + found["alive"]
        cells = [f"{possible[name]:,}", str(told + found["equivalent"]), str(found["equivalent"])]
        cells += [f"{found[when]} ({found[when] / told:.0%})" for when in ("at first", "killed") if told]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def survivors(facts: dict[str, Any]) -> list[str]:
    """Every one that no test noticed at first, with its judgement."""
    lines = ["| where | change | judged |", "|---|---|---|"]
    for one in sorted(facts["tried"], key=lambda one: (one["module"], one["line"])):
        if one["first"] in ALIVE:
            where = f"`{one['module'].removeprefix('rankscope.')}:{one['line']}`"
            change = one["operator"].removeprefix("Replace").replace("Operator", "").replace("_", " ")
            lines.append(f"| {where} | {change} | {one['judged'].replace('|', '/')} |")
    return lines


def written(facts: dict[str, Any]) -> str:
    """A table of rates for each draw, and one of all survivors."""
    lines = []
    for number, seed in enumerate(sorted({one["seed"] for one in facts["tried"]}), start=1):
        drawn = [one for one in facts["tried"] if one["seed"] == seed]
        lines += [f"Draw {number} (`--seed {seed}`):", "", *rates(facts, drawn), ""]
    return "\n".join([*lines, *survivors(facts)]) + "\n"


def main() -> None:
    """Write the file."""
    TABLE.write_text(written(json.loads(Path(FIGURES).read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()

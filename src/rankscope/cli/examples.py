"""Examples shown below the help of each command. Every line runs as printed in the tests, offline, within seconds."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.verbs._spec import VERBS, verbs_in_order

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "reproduce": (
        "reproduce --list",
        "reproduce dong2021-path-census --small --out census",
        "reproduce mechanisms --small --only fourier",
    ),
    "rerun": (
        "measure init:tiny-bert --sequences 2 --tokens 16 --quiet --out run",
        "rerun run",
    ),
    "report": (
        "measure init:tiny-bert --sequences 2 --tokens 16 --quiet --out run",
        "report run -o report.html",
    ),
    "card": (
        "measure init:tiny-bert --sequences 2 --tokens 16 --quiet --out run",
        "card run --out card",
    ),
    "compare": (
        "measure init:tiny-bert --sequences 4 --tokens 16 --seed 0 --quiet --out run_a",
        "measure init:tiny-bert --sequences 4 --tokens 16 --seed 1 --quiet --out run_b",
        "compare run_a run_b --metrics relative_residual",
    ),
    "play": ("play --set skip_gain=0 --set depth=6 --set tokens=16 --write picture.html",),
    "sweep": (
        "sweep example --out plan.yaml",
        "sweep plan.yaml --serial",
        "sweep status plan",
        "sweep atlas plan --out atlas.html",
    ),
    "query": (
        "sweep example --out plan.yaml",
        "sweep plan.yaml --serial --quiet",
        "query plan 'SELECT model, variant, avg(value) AS residual FROM rows GROUP BY ALL ORDER BY ALL'",
    ),
    "ls": ("ls metrics", "ls presets --json"),
    "env": ("env",),
}
"""Examples of the commands that are not verbs. If one needs a saved run, the line that saves it comes first."""


def examples() -> dict[str, tuple[str, ...]]:
    """The examples of every command: those of verbs from their declarations, the others from ``EXAMPLES``."""
    return {**{verb.name: verb.examples for verb in verbs_in_order()}, **EXAMPLES}


def epilog(command: str) -> str | None:
    """The examples of a command, for the end of its help; its first line keeps click from joining the others.

    Example:
        >>> (epilog("env") or "").splitlines()[1:]
        ['Examples:', '  rankscope env']
    """
    lines = examples().get(command)
    if lines is None:
        return None
    shared = VERBS[command].under_torchrun if command in VERBS else None
    launched = [f"  {shared}"] if shared else []
    return "\n".join(["\b", "Examples:", *(f"  rankscope {line}" for line in lines), *launched])


def question(text: str | None) -> str | None:
    """The first sentence of a command's help, for the list of commands.

    Example:
        >>> question("Is the paper right? Reproduces a published figure.")
        'Is the paper right?'
    """
    if not text:
        return None
    ends = [text.index(mark) + 1 for mark in ("? ", ". ") if mark in text]
    return text[: min(ends)] if ends else text

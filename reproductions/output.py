"""What the scripts of this folder share: two options, the look of a figure, and how numbers and figure are written."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours, told apart by readers with any colour vision.
BLACK, VERMILION, BLUE, GREEN = "#000000", "#d55e00", "#0072b2", "#009e73"
PURPLE, ORANGE, SKY, GREY = "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f"
COLOURS = (BLACK, VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
DIGITS = 6
"""Significant digits of a number in the JSON file."""


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the two options that every script has."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny models, seconds; not comparable with the paper")
    parser.add_argument("--out", type=Path, default=Path("results"), metavar="DIR", help="folder of the JSON and PNG")
    return parser


def panels(rows: int, columns: int, *, title: str, size: tuple[float, float] = (3.2, 2.5)) -> tuple[Any, Any]:
    """A figure and its axes, always as a two-dimensional array."""
    plt.rcParams.update({"font.size": 8, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False})
    figure, axes = plt.subplots(
        rows, columns, figsize=(size[0] * columns, size[1] * rows + 0.6), squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=10)
    return figure, axes


def write(name: str, numbers: dict[str, Any], figure: Any, given: argparse.Namespace) -> None:
    """Write ``NAME.json`` and ``NAME.png`` into the folder of ``--out``."""
    given.out.mkdir(parents=True, exist_ok=True)
    facts = {"small": given.small, **plain(numbers)}
    (given.out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    figure.savefig(given.out / f"{name}.png", dpi=130)
    print(f"written: {name}.json, {name}.png in {given.out}")


def plain(value: Any) -> Any:
    """The value in JSON types, numbers rounded; what is not finite is null."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(entry) for entry in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, for the terminal."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])

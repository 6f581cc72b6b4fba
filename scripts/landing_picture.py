"""Draw the picture of the landing page: the words of one sentence on a sphere, block by block, with and without skips.

Each globe is seen from above the mean token: a word's distance from the middle is the sine of the angle between it and
the mean, exactly; its bearing comes from the two main directions of what is left, turned to fit the state before.
Words are moved on straight lines from one measured state to the next. The sentence runs through all-MiniLM-L6-v2,
trained weights, in float64. Numbers below the globes are relative residuals from ``measure`` and ``exact``. Writes two
animated SVG files to ``docs/_static``, which stand still for readers who prefer reduced motion, the numbers to
``docs/data/landing.json``, and the report that the page links to, from the commands that it shows::

    python scripts/landing_picture.py
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch

import rankscope as rs
from rankscope.models.pretrained import pretrained_folder
from rankscope.verbs.exact.judge import exact_curves

ROOT = Path(__file__).parents[1]
STATIC = ROOT / "docs" / "_static"
NUMBERS = ROOT / "docs" / "data" / "landing.json"
PAGE = ROOT / "docs" / "index.md"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SENTENCE = "Attention alone makes every word of this sentence the same."
TITLES = ("with skip connections", "skip connections removed")
HUES = ("#4477aa", "#66ccee", "#228833", "#99bb33", "#ccbb44", "#ee8866", "#ee6677", "#cc3377", "#aa3377", "#8855bb")
HOLD, MOVE, LAST, BACK = 0.9, 0.7, 2.6, 0.9
"""Seconds: at rest after a block, on the way to the next, at rest after the last, and on the way back."""
STYLE = """
.collapse { --ink: #1c2430; --faint: #5b6675; --line: #c6cfda; --globe: #e6ecf3; --shine: #fff; --alarm: #b3261e;
  --here: #dfe7f1; font-family: system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .collapse { --ink: #e8edf3; --faint: #a3b0bf; --line: #43505f; --globe: #161c24;
  --shine: #2b3644; --alarm: #ff9b8f; --here: #2b3644; } }
.collapse text { fill: var(--ink); } .collapse .faint { fill: var(--faint); } .collapse .alarm { fill: var(--alarm); }
.collapse .bold { font-weight: 700; } .collapse .line { fill: none; stroke: var(--line); }
.collapse .here { fill: var(--here); } .collapse .dot { stroke: var(--globe); stroke-width: 1.5; }
.collapse .still { display: none; }
@media (prefers-reduced-motion: reduce) {
  .collapse .moving { display: none; } .collapse .still { display: inline; } }
"""
"""Colours of a light and of a dark page; ``rankscope.css`` repeats them for the theme that a reader chooses."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one picture: radius of a globe, size of a panel and of its text, and where the second panel is."""

    name: str
    radius: float
    panel: float
    size: int
    second: tuple[float, float]

    @property
    def height(self) -> float:
        """Height of a panel."""
        return 92 + 2 * self.radius + 3 * self.size


WIDE = Shape("wide", radius=128, panel=480, size=17, second=(504, 0))
NARROW = Shape("narrow", radius=88, panel=390, size=15, second=(0, 330))


def streams(skip: float) -> tuple[list[str], list[np.ndarray]]:
    """Words, and their vectors before the first block and after each, with this gain on every skip."""
    from transformers import AutoTokenizer

    folder = str(pretrained_folder("minilm"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    model = rs.load(folder, dtype="float64").model
    with rs.operate(model, rs.Surgery(skip=skip)), torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])[1:-2]
    return words, [state[0, 1:-2].numpy() for state in states]


def residuals(skip: float) -> list[float]:
    """log10 of the relative residual before the first block and after each, below the float floor as well."""
    folder = str(pretrained_folder("minilm"))
    first = rs.measure(
        rs.Model(folder, dtype="float64"), [SENTENCE], metrics=["relative_residual"], sites=["block.in@0"]
    )
    start = math.log10(float(first.curve("relative_residual", "block.in").mean[0]))
    run = rs.exact(folder, [SENTENCE], rs.Surgery(skip=skip))
    return [start, *exact_curves(run.table, "log10_relative_residual", None)["exact"].mean.tolist()]


def layout(tokens: np.ndarray, before: np.ndarray | None) -> np.ndarray:
    """Places on the unit disc: radius is the sine of the angle to the mean token, bearing that of the main plane."""
    unit = tokens / np.linalg.norm(tokens, axis=1, keepdims=True)
    pole = tokens.mean(0) / np.linalg.norm(tokens.mean(0))
    tangent = unit - np.outer(unit @ pole, pole)
    sines = np.linalg.norm(tangent, axis=1)
    u, s, _ = np.linalg.svd(tangent - tangent.mean(0), full_matrices=False)
    plane = u[:, :2] * s[:2]
    plane = plane / np.linalg.norm(plane, axis=1, keepdims=True)
    if before is not None:
        left, _, right = np.linalg.svd(plane.T @ before)
        plane = plane @ (left @ right)
    return plane * sines[:, None]


def percent(log10: float) -> str:
    """A share in words of a caption.

    Example:
        >>> percent(-0.03), percent(-1.16), percent(-29.46)
        ('93%', '7%', '10⁻²⁹')
    """
    if log10 > -4:
        share = 100 * 10**log10
        return f"{share:.0f}%" if share >= 1 else f"{share:.1g}%"
    digits = str(round(log10)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


Row = tuple[list[np.ndarray], list[float]]
"""States of the words on the disc, and log10 of the relative residual at each."""


def keys(count: int) -> tuple[str, float]:
    """The ``keyTimes`` of an animation that rests at each of ``count`` states and returns, and its seconds."""
    times, now = [0.0], 0.0
    for number in range(count):
        now += LAST if number == count - 1 else HOLD
        times.append(now)
        if number < count - 1:
            now += MOVE
            times.append(now)
    total = now + BACK
    return ";".join(f"{time / total:.4f}" for time in (*times, total)), total


def animate(attribute: str, values: Sequence[float | str]) -> str:
    """An attribute that takes each value in turn, rests there, and returns to the first."""
    times, total = keys(len(values))
    shown = [value if isinstance(value, str) else f"{value:.1f}" for value in values]
    twice = ";".join([each for value in shown for each in (value, value)] + [shown[0]])
    return (
        f'<animate attributeName="{attribute}" values="{twice}" keyTimes="{times}" dur="{total:.1f}s" '
        f'repeatCount="indefinite"/>'
    )


def text(x: float, y: float, words: str, kind: str, size: float, anchor: str = "middle") -> str:
    """One line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" class="{kind}">'
        f"{escape(words)}</text>"
    )


def globe(x: float, y: float, shape: Shape) -> list[str]:
    """A sphere from above its pole: circles of latitude every 30 degrees."""
    radius = shape.radius
    parts = [
        f'<circle cx="{x}" cy="{y}" r="{radius}" fill="url(#globe-{shape.name})" stroke="var(--line)" '
        f'stroke-width="1.5"/>'
    ]
    parts += [
        f'<circle cx="{x}" cy="{y}" r="{radius * math.sin(math.radians(degrees)):.1f}" class="line"/>'
        for degrees in (30, 60)
    ]
    for turn in range(6):
        along, up = math.cos(math.pi * turn / 3), math.sin(math.pi * turn / 3)
        end = f"{x + radius * along:.1f} {y + radius * up:.1f}"
        parts.append(f'<path d="M{x} {y}L{end}" class="line" stroke-opacity="0.6"/>')
    return parts


def apart(heights: list[float], least: float) -> list[float]:
    """Ascending heights, moved until neighbours are ``least`` apart."""
    moved = list(heights)
    for _ in range(200):
        for k in range(len(moved) - 1):
            gap = least - (moved[k + 1] - moved[k])
            if gap > 0:
                moved[k] -= gap / 2
                moved[k + 1] += gap / 2
    return moved


def labels(x: float, y: float, first: np.ndarray, shape: Shape) -> dict[int, tuple[float, float, int]]:
    """Place and side of each word outside the rim, next to where it is before the first block."""
    found = {}
    for side in (-1, 1):
        mine = sorted((i for i in range(len(first)) if (first[i, 0] >= 0) == (side > 0)), key=lambda i: first[i, 1])
        heights = apart([float(y + first[i, 1] * shape.radius) for i in mine], shape.size + 3)
        for i, height in zip(mine, heights, strict=True):
            rim = shape.radius + 10
            found[i] = (x + side * max(50.0, math.sqrt(max(0.0, rim**2 - (height - y) ** 2))), height, side)
    return found


def words_on(x: float, y: float, places: list[np.ndarray], words: list[str], shape: Shape) -> tuple[list[str], ...]:
    """The words as dots, each with a line to its name: moving through all states, and still after the last block."""
    named = labels(x, y, places[0], shape)
    shown = [place * shape.radius + (x, y) for place in places]
    moving, still = [], []
    for i, (far, height, _) in named.items():
        ends = f'x2="{far:.1f}" y2="{height:.1f}" class="line"'
        course = animate("x1", [s[i, 0] for s in shown]) + animate("y1", [s[i, 1] for s in shown])
        moving.append(f'<line x1="{shown[0][i, 0]:.1f}" y1="{shown[0][i, 1]:.1f}" {ends}>{course}</line>')
        still.append(f'<line x1="{shown[-1][i, 0]:.1f}" y1="{shown[-1][i, 1]:.1f}" {ends}/>')
    for i, hue in enumerate(HUES[: len(words)]):
        dot = f'r="{shape.radius / 15 + 1.5:.1f}" fill="{hue}" class="dot"'
        course = animate("cx", [s[i, 0] for s in shown]) + animate("cy", [s[i, 1] for s in shown])
        moving.append(f'<circle cx="{shown[0][i, 0]:.1f}" cy="{shown[0][i, 1]:.1f}" {dot}>{course}</circle>')
        still.append(f'<circle cx="{shown[-1][i, 0]:.1f}" cy="{shown[-1][i, 1]:.1f}" {dot}/>')
    names = [
        text(far + 5 * side, height + 5, words[i], "", shape.size, "start" if side > 0 else "end")
        for i, (far, height, side) in named.items()
    ]
    return moving, still, names


def panel(left: float, top: float, row: Row, words: list[str], title: str, shape: Shape) -> list[str]:
    """A globe with its words and, below, how much they differ after each block; a mark follows the moving words."""
    places, logs = row
    x, y = left + shape.panel / 2, top + 54 + shape.radius
    moving, still, names = words_on(x, y, places, words, shape)
    step = (shape.panel - 16) / len(logs)
    columns = [left + 8 + step * (number + 0.5) for number in range(len(logs))]
    below = y + shape.radius + 22
    marks = [column - step / 2 + 1 for column in columns]
    box = f'y="{below:.1f}" width="{step - 2:.1f}" height="{2.9 * shape.size:.1f}" rx="5" class="here"'
    parts = [text(x, top + 24, title, "bold", shape.size + 3), *globe(x, y, shape)]
    parts += [f'<g class="moving"><rect x="{marks[0]:.1f}" {box}>{animate("x", marks)}</rect>', *moving, "</g>"]
    parts += [f'<g class="still"><rect x="{marks[-1]:.1f}" {box}/>', *still, "</g>", *names]
    for number, (column, log) in enumerate(zip(columns, logs, strict=True)):
        state, kind = f"block {number - 1}" if number else "input", "bold alarm" if 10**log < 0.1 else "bold"
        parts.append(text(column, below + 1.15 * shape.size, state, "faint", shape.size - 2))
        parts.append(text(column, below + 2.4 * shape.size, percent(log), kind, shape.size))
    return parts


def picture(rows: tuple[Row, Row], words: list[str], shape: Shape) -> str:
    """Two panels, side by side or one below the other."""
    right, down = shape.second
    width, height = right + shape.panel, down + shape.height
    parts = panel(0, 0, rows[0], words, TITLES[0], shape) + panel(right, down, rows[1], words, TITLES[1], shape)
    described = (
        "Ten words as points on a sphere, through six blocks of a trained transformer. With skip connections they "
        f"stay apart, {percent(rows[0][1][0])} to {percent(rows[0][1][-1])}. With skip connections removed they meet "
        f"in one point: {', '.join(percent(log) for log in rows[1][1][1:])}."
    )
    shade = (
        f'<defs><radialGradient id="globe-{shape.name}" cx="0.4" cy="0.35" r="0.75"><stop offset="0" '
        'style="stop-color:var(--shine)"/><stop offset="1" style="stop-color:var(--globe)"/></radialGradient></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="collapse {shape.name}" viewBox="0 0 {width:g} {height:g}" '
        f'role="img" aria-label="{described}"><style>{STYLE}</style>{shade}{"".join(parts)}</svg>\n'
    )


def write_report() -> None:
    """Run the commands of the landing page and keep the page that the last one writes."""
    commands = re.findall(r"^\$ (rankscope .*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder, MINILM)
        link.parent.mkdir()
        link.symlink_to(pretrained_folder("minilm"), target_is_directory=True)
        for command in commands:
            subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=folder, check=True)
        shutil.copy(Path(folder, "minilm.html"), STATIC / "report" / "minilm.html")


def main() -> None:
    """Run the sentence twice, draw two files, write the numbers and the report."""
    rows: list[Row] = []
    words: list[str] = []
    for skip in (1.0, 0.0):
        words, states = streams(skip)
        places: list[np.ndarray] = []
        for state in states:
            reference = places[-1] if places else (rows[0][0][0] if rows else None)
            places.append(layout(state, reference))
        rows.append((places, residuals(skip)))
    for shape in (WIDE, NARROW):
        drawn = picture((rows[0], rows[1]), words, shape)
        (STATIC / f"collapse-{shape.name}.svg").write_text(drawn, encoding="utf-8")
    titles = ("with skips", "without skips")
    numbers = {title: [round(value, 4) for value in row[1]] for title, row in zip(titles, rows, strict=True)}
    NUMBERS.write_text(json.dumps({"sentence": SENTENCE, "log10 relative residual": numbers}, indent=1) + "\n")
    print(json.dumps(numbers))
    write_report()


if __name__ == "__main__":
    main()

"""Draw the picture of the landing page: the words of one sentence on a sphere, block by block, with and without skips.

Each globe is seen from above the mean token: a word's distance from the middle is the sine of the angle between it and
the mean, exactly; its bearing comes from the two main directions of what is left, turned to fit the globe before. The
sentence runs through all-MiniLM-L6-v2, trained weights, in float64. Numbers below the globes are relative residuals
from ``measure`` and ``exact``. Writes four SVG files to ``docs/_static`` and the numbers to
``docs/data/landing.json``::

    python scripts/landing_picture.py
"""

from __future__ import annotations

import json
import math
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
SENTENCE = "Attention alone makes every word of this sentence the same."
SHOWN = (0, 1, 2, 3, 6)
RADIUS = 84
TITLES = ("with skip connections", "skip connections removed")
SHORT_TITLES = ("with skips", "skips removed")
HUES = ("#4477aa", "#66ccee", "#228833", "#99bb33", "#ccbb44", "#ee8866", "#ee6677", "#cc3377", "#aa3377", "#8855bb")


@dataclass(frozen=True)
class Theme:
    """Colours that must suit the page behind."""

    ink: str
    faint: str
    line: str
    globe: str
    shine: str
    alarm: str


LIGHT = Theme(ink="#1c2430", faint="#5b6675", line="#c6cfda", globe="#e6ecf3", shine="#ffffff", alarm="#b3261e")
DARK = Theme(ink="#e8edf3", faint="#a3b0bf", line="#43505f", globe="#161c24", shine="#2b3644", alarm="#ff9b8f")


def streams(skip: float) -> tuple[list[str], list[np.ndarray]]:
    """Words, and their vectors before the first block and after each, with this gain on every skip."""
    from transformers import AutoTokenizer

    folder = str(pretrained_folder("minilm"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(SENTENCE, return_tensors="pt")
    model = rs.load(folder, dtype="float64").model
    with rs.operate(model, skip=skip), torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    words = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])[1:-2]
    return words, [state[0, 1:-2].numpy() for state in states]


def residuals(skip: float) -> list[float]:
    """log10 of the relative residual before the first block and after each, below the float floor as well."""
    folder = str(pretrained_folder("minilm"))
    first = rs.measure(folder, [SENTENCE], metrics=["relative_residual"], sites=["block.in@0"], dtype="float64")
    start = math.log10(float(first.curve("relative_residual", "block.in").mean[0]))
    run = rs.exact(folder, [SENTENCE], skip=skip)
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
        ('93%', '6.9%', '10⁻²⁹')
    """
    if log10 > -4:
        share = 100 * 10**log10
        return f"{share:.0f}%" if share >= 10 else f"{share:.2g}%"
    digits = str(round(log10)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


def text(
    x: float, y: float, words: str, colour: str, *, size: int = 18, anchor: str = "middle", bold: bool = False
) -> str:
    """One line of text."""
    weight = ' font-weight="700"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight} fill="{colour}">'
        f"{escape(words)}</text>"
    )


def globe(x: float, y: float, theme: Theme) -> list[str]:
    """A sphere from above its pole: circles of latitude every 30 degrees."""
    parts = [f'<circle cx="{x}" cy="{y}" r="{RADIUS}" fill="url(#globe)" stroke="{theme.line}" stroke-width="1.5"/>']
    for degrees in (30, 60):
        radius = RADIUS * math.sin(math.radians(degrees))
        parts.append(f'<circle cx="{x}" cy="{y}" r="{radius:.1f}" fill="none" stroke="{theme.line}"/>')
    for turn in range(6):
        along, up = math.cos(math.pi * turn / 3), math.sin(math.pi * turn / 3)
        end = f"{x + RADIUS * along:.1f} {y + RADIUS * up:.1f}"
        parts.append(f'<path d="M{x} {y}L{end}" stroke="{theme.line}" stroke-opacity="0.6"/>')
    return parts


def dots(x: float, y: float, places: np.ndarray, theme: Theme) -> list[str]:
    """The words."""
    edge = f'stroke="{theme.globe}" stroke-width="1.5"'
    return [
        f'<circle cx="{x + a:.1f}" cy="{y + b:.1f}" r="7.5" fill="{HUES[number % len(HUES)]}" {edge}/>'
        for number, (a, b) in enumerate(places * RADIUS)
    ]


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


def names(x: float, y: float, places: np.ndarray, words: list[str], theme: Theme) -> list[str]:
    """The words written outside the rim, each with a line to its dot."""
    parts = []
    for side, anchor in ((-1, "end"), (1, "start")):
        mine = sorted((i for i in range(len(words)) if (places[i, 0] >= 0) == (side > 0)), key=lambda i: places[i, 1])
        heights = apart([float(y + places[i, 1] * RADIUS) for i in mine], 19)
        for i, height in zip(mine, heights, strict=True):
            rim = RADIUS + 8
            end = x + side * max(40.0, math.sqrt(max(0.0, rim**2 - (height - y) ** 2)))
            start = f"{x + places[i, 0] * RADIUS:.1f} {y + places[i, 1] * RADIUS:.1f}"
            parts.append(f'<path d="M{start}L{end:.1f} {height:.1f}" stroke="{theme.line}"/>')
            parts.append(text(end + 4 * side, height + 5, words[i], theme.ink, size=16, anchor=anchor))
    return parts


Row = tuple[list[np.ndarray], list[float]]


def panel(x: float, y: float, row: Row, block: int, words: list[str], theme: Theme, *, named: bool) -> list[str]:
    """One globe with its dots and, below, how much the words still differ."""
    places, logs = row
    bad = 10 ** logs[block] < 0.1
    parts = globe(x, y, theme)
    if named:
        parts += names(x, y, places[block], words, theme)
    parts += dots(x, y, places[block], theme)
    below = text(x, y + RADIUS + 29, percent(logs[block]), theme.alarm if bad else theme.ink, size=22, bold=True)
    return [*parts, below]


def wide(words: list[str], rows: tuple[Row, Row], theme: Theme) -> tuple[int, int, list[str]]:
    """Blocks from left to right, a row with skips above one without."""
    parts, left, step, height = [], 96, 2 * RADIUS + 36, 2 * RADIUS + 118
    for number, row in enumerate(rows):
        y = 96 + RADIUS + number * height
        parts.append(
            text(0, y - RADIUS - 62 + 26 * number, TITLES[number], theme.ink, size=21, anchor="start", bold=True)
        )
        for position, block in enumerate(SHOWN):
            x = left + RADIUS + position * step + (60 if position else 0)
            parts += panel(x, y, row, block, words, theme, named=position == 0)
            if number == 0:
                parts.append(text(x, y - RADIUS - 18, name_of(block), theme.faint))
    return left + 60 + len(SHOWN) * step - 34, 96 + 2 * height - 76, parts


def tall(words: list[str], rows: tuple[Row, Row], theme: Theme) -> tuple[int, int, list[str]]:
    """Blocks from top to bottom, a column with skips beside one without."""
    parts, left, step, height = [], 96, 288, 2 * RADIUS + 62
    for number, row in enumerate(rows):
        x = left + RADIUS + number * step
        parts.append(text(x, 26, SHORT_TITLES[number], theme.ink, size=23, bold=True))
        for position, block in enumerate(SHOWN):
            y = 64 + RADIUS + position * height
            parts += panel(x, y, row, block, words, theme, named=position == number == 0)
            if number == 0:
                parts.append(text(x + step / 2, y + RADIUS + 29, name_of(block), theme.faint, size=21))
    return left + 2 * RADIUS + step + 40, 64 + len(SHOWN) * height - 10, parts


def name_of(block: int) -> str:
    """What is written beside a globe."""
    return "input" if block == 0 else f"block {block}"


def picture(width: int, height: int, parts: list[str], theme: Theme) -> str:
    """The SVG around its parts."""
    described = "Words of a sentence as points on a sphere, after 0, 1, 2, 3 and 6 blocks of a trained transformer."
    shade = (
        f'<defs><radialGradient id="globe" cx="0.4" cy="0.35" r="0.75"><stop offset="0" stop-color="{theme.shine}"/>'
        f'<stop offset="1" stop-color="{theme.globe}"/></radialGradient></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" role="img"><title>{described}</title>{shade}{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Run the sentence twice, draw four files, write the numbers down."""
    rows: list[Row] = []
    words: list[str] = []
    for skip in (1.0, 0.0):
        words, states = streams(skip)
        places: list[np.ndarray] = []
        for state in states:
            reference = places[-1] if places else (rows[0][0][0] if rows else None)
            places.append(layout(state, reference))
        rows.append((places, residuals(skip)))
    for theme, shade in ((LIGHT, "light"), (DARK, "dark")):
        for arrange, shape in ((wide, "wide"), (tall, "tall")):
            drawn = picture(*arrange(words, (rows[0], rows[1]), theme), theme)
            (STATIC / f"collapse-{shape}-{shade}.svg").write_text(drawn, encoding="utf-8")
    titles = ("with skips", "without skips")
    numbers = {title: [round(value, 4) for value in row[1]] for title, row in zip(titles, rows, strict=True)}
    NUMBERS.write_text(json.dumps({"sentence": SENTENCE, "log10 relative residual": numbers}, indent=1) + "\n")
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()

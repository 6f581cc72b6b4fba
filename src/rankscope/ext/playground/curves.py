"""Draws one SVG: the exact curve with its law, the float floors and the values measured in floats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rankscope.ext.playground.picture import Picture
from rankscope.ext.playground.scales import DepthAxis

SHORT = {"bfloat16": "bf16", "float32": "fp32"}
RIGHT, TOP, BOTTOM = 14, 12, 44


@dataclass(frozen=True)
class Plane:
    """The plot area, in units of the drawing."""

    width: int
    height: int
    left: int
    depth: int
    axis: DepthAxis

    def x(self, block: float) -> float:
        """Horizontal position of a block, from the first tokens (0) to the last block."""
        return self.left + (self.width - self.left - RIGHT) * block / self.depth

    def y(self, value: float) -> float:
        """Vertical position of a log10."""
        return TOP + (self.height - TOP - BOTTOM) * self.axis.place(value)

    def path(self, values: Sequence[float], first: int = 0) -> str:
        """A line through the finite values, broken at the others."""
        words, pen = [], "M"
        for block, value in enumerate(values, first):
            if math.isfinite(value):
                words.append(f"{pen}{self.x(block):.1f} {self.y(value):.1f}")
                pen = "L"
            else:
                pen = "M"
        return "".join(words)


def curve(picture: Picture, width: int, height: int, name: str) -> str:
    """An SVG of this size with the class ``name``; the page's script moves its cursor."""
    values = [*picture.course.log10_relative, *(math.log10(sight.floor) for sight in picture.sights.values())]
    if picture.treated is not None and picture.treated.course is not None:
        values += picture.treated.course.log10_relative
    axis = DepthAxis.holding(values)
    plane = Plane(width, height, 78 if axis.stretched else 48, picture.choices.depth, axis)
    parts = [*_grid(plane), *_lines(picture, plane), *_floors(picture, plane), _cursor(plane)]
    label = escape(_spoken(picture), quote=True)
    return (
        f'<svg class="curve {name}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}" '
        f'data-left="{plane.x(0):.1f}" data-right="{plane.x(plane.depth):.1f}">{"".join(parts)}</svg>'
    )


def _grid(plane: Plane) -> list[str]:
    parts = []
    for value, text in plane.axis.ticks():
        y = plane.y(value)
        parts.append(f'<line class="grid" x1="{plane.left}" x2="{plane.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{plane.left - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    low = plane.height - BOTTOM + 18
    parts += [
        f'<text class="tick" x="{plane.x(block):.1f}" y="{low}" text-anchor="middle">{name}</text>'
        for block, name in _blocks(plane)
    ]
    middle = (plane.left + plane.width - RIGHT) / 2
    parts.append(
        f'<text class="title" x="{middle:.0f}" y="{plane.height - 6}" text-anchor="middle">'
        "block (in: the first tokens)</text>"
    )
    return parts


def _blocks(plane: Plane) -> list[tuple[int, str]]:
    """Positions and names of the ticks: ``in`` for the first tokens, then the number of a block, from 0."""
    most = 6 if plane.width < 500 else 12
    step = next(size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24) if plane.depth / size <= most)
    return [(0, "in"), *((block + 1, str(block)) for block in range(0 if step == 1 else step, plane.depth, step))]


def _floors(picture: Picture, plane: Plane) -> list[str]:
    parts = []
    for name, sight in picture.sights.items():
        y = plane.y(math.log10(sight.floor))
        word = f"{SHORT[name]} floor"
        if sight.block is not None:
            word += f": block {sight.block}"
            x = plane.x(sight.block + 1)
            parts.append(f'<circle class="reached {SHORT[name]}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        at, anchor = (plane.width - RIGHT - 2, "end") if plane.axis.stretched else (plane.left + 4, "start")
        parts.append(
            f'<line class="floor {SHORT[name]}" x1="{plane.left}" x2="{plane.width - RIGHT}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="floor-name {SHORT[name]}" x="{at}" y="{y + 13:.1f}" '
            f'text-anchor="{anchor}">{word}</text>'
        )
    return parts


def _lines(picture: Picture, plane: Plane) -> list[str]:
    parts = [
        f'<path class="read {SHORT[name]}" d="{plane.path(sight.log10_relative)}"/>'
        for name, sight in picture.sights.items()
    ]
    exact = picture.course.log10_relative
    parts.append(f'<path class="exact" d="{plane.path(exact)}"/>')
    parts += _dots("exact-dot", plane, exact, 0, 2.4)
    parts += _dots("law", plane, picture.law.log10_relative, 1, 5)
    if picture.treated is not None and picture.treated.course is not None:
        parts.append(f'<path class="treated" d="{plane.path(picture.treated.course.log10_relative)}"/>')
    return parts


def _dots(name: str, plane: Plane, values: Sequence[float], first: int, radius: float) -> list[str]:
    return [
        f'<circle class="{name}" cx="{plane.x(block):.1f}" cy="{plane.y(value):.1f}" r="{radius}"/>'
        for block, value in enumerate(values, first)
        if math.isfinite(value) and plane.axis.place(value) <= 1
    ]


def _cursor(plane: Plane) -> str:
    x = plane.x(0)
    return f'<line class="cursor" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{plane.height - BOTTOM}"/>'


def _spoken(picture: Picture) -> str:
    """The drawing described in one sentence, for screen readers."""
    last = picture.course.log10_relative[-1]
    return (
        f"Relative residual over {picture.choices.depth} blocks, as a power of ten: from "
        f"{picture.course.log10_relative[0]:.2f} to {last:.4g}, with the law's predictions and the float floors."
    )

"""The colours of every drawing: Okabe and Ito's, which keep their order of lightness in grey print."""

from __future__ import annotations

BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, BLACK, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8a8a8a",
)  # fmt: skip
WINE = "#882255"
SERIES = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, BLACK, GREY)
"""Colours of lines in order. Lines differ in marker as well, and in dash once the colours repeat."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, SOFT, FAINT, GRID = "#222222", "#444444", GREY, "#e6e6e6"
"""Words; words on a zone; remarks; grid lines."""

OTHERS = "#bdbdbd"
"""Lines and bars that are not singled out, and the hatching of the float floor."""

FLOOR_ZONE, UNKNOWN = "#f2f2f2", "#d9d9d9"
"""The zone below the float floor; a tile without a value."""

GOOD, CARE, BAD, FLOOR, PLAIN = "green", "yellow", "red", "magenta", "white"
"""Names of terminal colours for how good a state is; a word says the same."""

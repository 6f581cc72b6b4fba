"""The colours of every drawing: Okabe and Ito's, whose order of lightness survives greyscale printing."""

from __future__ import annotations

from collections.abc import Mapping

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

APART_TO_ALIKE = ("#f1f4f8", "#bcd4e8", "#5fa2d0", "#1d6aa8", "#08305c")
"""Tiles from tokens that are apart to tokens that are alike, as in ``shapes.js``."""

TONES: Mapping[str, str] = {"good": "green", "care": "yellow", "bad": "red", "floor": "magenta", "plain": "white"}
"""How good something is, and its colour at a terminal; a word always says the same."""

LIGHT: Mapping[str, str] = {
    "bg": "#faf9f6", "card": "#ffffff", "ink": "#1d2126", "soft": "#565c65", "faint": "#6f757e", "line": "#e4e1da",
    "grid": "#ecebe6", "accent": "#00629a", "wash": "#eef4f8", "field": "#f4f2ec",
    "c0": "#0072b2", "c1": "#d55e00", "c2": "#009e73", "c3": "#cc79a7", "c4": "#56b4e9", "c5": "#7d6b00",
    "c6": "#6b6f76", "c7": "#882255", "down": "#d55e00", "up": "#0072b2",
    "good": "#00674b", "good-bg": "#e7f4ef", "care": "#7a5200", "care-bg": "#fbf1da", "bad": "#a33c00",
    "bad-bg": "#fdebe0", "floor": "#7b3a66", "floor-bg": "#f7eaf2", "plain": "#00629a", "plain-bg": "#eaf2f8",
}  # fmt: skip
DARK: Mapping[str, str] = {
    "bg": "#14171b", "card": "#1b1f24", "ink": "#ebe8e2", "soft": "#b0b5bd", "faint": "#969ca6", "line": "#31373f",
    "grid": "#272c33", "accent": "#7cc0ee", "wash": "#1d2a35", "field": "#252b32",
    "c0": "#58ade6", "c1": "#f28c45", "c2": "#35c79b", "c3": "#e3a3c6", "c4": "#9ad6f8", "c5": "#d9c65a",
    "c6": "#a3a8b0", "c7": "#d9799f", "down": "#f28c45", "up": "#58ade6",
    "good": "#63d3ae", "good-bg": "#17312a", "care": "#eac36c", "care-bg": "#352b17", "bad": "#fb9d68",
    "bad-bg": "#3a2419", "floor": "#e0a3c9", "floor-bg": "#332331", "plain": "#7cc0ee", "plain-bg": "#1a2b38",
}  # fmt: skip
"""Colours of the report in both themes, by purpose."""

ON_PAGE: Mapping[str, str] = {
    BLUE: "c0", VERMILION: "c1", GREEN: "c2", PURPLE: "c3", SKY: "c4", BLACK: "ink", GREY: "c6", WINE: "c7",
}  # fmt: skip
"""The colour of a figure by its name on the page, so that a line has the same colour in both."""


def css_variables(theme: Mapping[str, str]) -> str:
    """A theme as declarations for a style sheet.

    Example:
        >>> css_variables({"ink": "#000000", "card": "#ffffff"})
        '--ink: #000000; --card: #ffffff;'
    """
    return " ".join(f"--{name}: {colour};" for name, colour in theme.items())

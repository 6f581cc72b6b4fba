"""A few kilobytes of plain English prose written for this project, so that a first measurement needs no data."""

from __future__ import annotations

from importlib.resources import files


def sample_text() -> str:
    r"""The built-in sample: ten paragraphs about everyday subjects, separated by blank lines.

    Example:
        >>> len(sample_text().split("\n\n"))
        10
    """
    return files("rankscope.models.inputs").joinpath("sample_text.txt").read_text(encoding="utf-8").strip()

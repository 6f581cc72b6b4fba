"""Published numbers, as data beside their citation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rankscope._errors import InputError


@dataclass(frozen=True, eq=False)
class PublishedLine:
    """One printed curve.

    Attributes:
        values: by depth; NaN where the print shows zero.
        floor_from: depth from which the print shows the rounding of its own arithmetic; None if it never does.
    """

    values: NDArray[np.float64]
    floor_from: int | None

    def is_rounding(self, depth: int) -> bool:
        """Whether what is printed at ``depth`` is rounding, or too small to be read off."""
        return (self.floor_from is not None and depth >= self.floor_from) or bool(np.isnan(self.values[depth]))


def published(name: str) -> dict[str, Any]:
    """The file ``published/NAME.json``."""
    text = files("rankscope.papers").joinpath("published", f"{name}.json").read_text(encoding="utf-8")
    facts: dict[str, Any] = json.loads(text)
    return facts


def published_line(facts: dict[str, Any], **where: str) -> PublishedLine:
    """The curve with these labels.

    Raises:
        InputError: there is none.
    """
    for entry in facts["curves"]:
        if all(entry[name] == value for name, value in where.items()):
            values = np.array([np.nan if value is None else value for value in entry["values"]], dtype=np.float64)
            return PublishedLine(values, entry.get("floor_from"))
    raise InputError(f"No curve is published for {where}.")

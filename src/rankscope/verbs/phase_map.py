"""The relative residual over two parameters of a design."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from rankscope._errors import InputError
from rankscope.theory.designs.design import CHOICES, COUNTS, Design, narrowed, parameter_names
from rankscope.theory.oracles._spec import ORACLES, answer_of
from rankscope.verbs.sampled_design import follow

POINTS = 13
MOST_POINTS = 64
SAMPLED_WIDTH = 128
SAMPLED_TOKENS = 32
DEEPEST = -300.0
"""log10 of a residual below which the map only says that it is below."""
RANGES: dict[str, tuple[float, float]] = {
    "skip_gain": (0.0, 1.5),
    "attention_skip": (0.0, 1.5),
    "mlp_skip": (0.0, 1.5),
    "branch_scale": (0.0, 2.0),
    "attention_scale": (0.0, 2.0),
    "mlp_scale": (0.0, 2.0),
    "initial_cosine": (0.0, 0.9),
}


@dataclass(frozen=True)
class Axis:
    """One parameter of a map and the values it takes."""

    name: str
    values: tuple[Any, ...]


def axis_of(written: str, design: Design) -> Axis:
    """An axis from ``name``, ``name=low:high``, ``name=low:high:count`` or ``name=a,b,c``.

    Raises:
        InputError: no such parameter, or values it cannot take.

    Example:
        >>> axis_of("skip_gain=0:1:3", Design(depth=4, width=8, heads=2)).values
        (0.0, 0.5, 1.0)
    """
    name, _, asked = written.partition("=")
    name = name.strip()
    if name not in parameter_names() or name in ("remedy", "embedding_norm"):
        known = [known for known in parameter_names() if known not in ("remedy", "embedding_norm")]
        raise InputError(f"A map has no axis {name!r}. Expected one of {', '.join(known)}.")
    if name in CHOICES or name == "mask":
        words = tuple(word.strip() for word in asked.split(",") if word.strip()) or CHOICES.get(name, ())
        if not words:
            raise InputError(f"The axis {name} needs its values, e.g. '{name}=complete,causal'.")
        return Axis(name, words)
    return Axis(name, _numbers(name, asked, design))


def _numbers(name: str, asked: str, design: Design) -> tuple[Any, ...]:
    try:
        if "," in asked:
            values = [float(word) for word in asked.split(",")]
        else:
            parts = [float(word) for word in asked.split(":")] if asked else list(_default_range(name, design))
            count = int(parts[2]) if len(parts) > 2 else POINTS
            if len(parts) not in (2, 3) or not 2 <= count <= MOST_POINTS:
                raise ValueError
            values = list(np.linspace(parts[0], parts[1], count))
    except ValueError:
        raise InputError(
            f"The axis {name}={asked!r} is not understood. Expected low:high, low:high:count with 2 to {MOST_POINTS} "
            "values, or a list with commas."
        ) from None
    if name in COUNTS:
        return tuple(dict.fromkeys(max(1, round(value)) for value in values))
    return tuple(float(value) for value in values)


def _default_range(name: str, design: Design) -> tuple[float, float]:
    if name == "depth":
        return 1, max(32, 2 * design.depth)
    if name in RANGES:
        return RANGES[name]
    fields = {"weight_std": "value_std", "query_key_std": "query_std"}
    middle = float(getattr(design, fields.get(name, name)))
    return (middle / 4, middle * 4) if middle else (0.0, 1.0)


def phase_map(design: Design, first: Axis, second: Axis, tokens: int, *, progress: bool = False) -> dict[str, Any]:
    """Log10 of the relative residual after the last block, for every pair of values.

    By the mean-field oracle where its assumptions hold, else by one sampled run of a narrower design on fewer tokens.
    Depth costs nothing: one curve serves all.

    Args:
        design: the rest of the design.
        first: axis to the right.
        second: axis upwards.
        tokens: of the oracle.
        progress: show a progress bar.
    """
    if first.name == second.name:
        raise InputError(f"Both axes of the map are {first.name}. Give two parameters.")
    across, up = (second, first) if first.name == "depth" else (first, second)
    values, engines = [], []
    for value in tqdm(across.values, desc="map", unit="column", disable=not progress):
        cells = [_cell(design, {across.name: value, up.name: other}, tokens) for other in _once(up)]
        ends = _spread(cells[0], up) if up.name == "depth" else [(curve[-1], engine) for curve, engine in cells]
        values.append([max(end, DEEPEST) for end, _ in ends])
        engines.append([engine for _, engine in ends])
    if across.name != first.name:
        values, engines = _transposed(values), _transposed(engines)
    return {
        "x": {"name": first.name, "values": list(first.values)},
        "y": {"name": second.name, "values": list(second.values)},
        "log10_relative_residual": _transposed(values),
        "engine": _transposed(engines),
        "deepest": DEEPEST,
    }


def _once(axis: Axis) -> tuple[Any, ...]:
    return (max(axis.values),) if axis.name == "depth" else axis.values


def _spread(cell: tuple[list[float], str], axis: Axis) -> list[tuple[float, str]]:
    curve, engine = cell
    return [(curve[min(int(depth), len(curve) - 1)], engine) for depth in axis.values]


def _cell(design: Design, values: dict[str, Any], tokens: int) -> tuple[list[float], str]:
    if values.get("norm_place") == "none" or values.get("norm") == "none":
        values = {**values, "norm": "none", "norm_place": "none"}
    changed = design.changed(**values)
    tokens = min(changed.tokens, tokens) if "tokens" in values else tokens
    answer = answer_of(ORACLES["mean_field"], changed, tokens, changed.depth)
    if answer.applies:
        return list(answer.log10_relative), "mean_field"
    thin = narrowed(changed, max(SAMPLED_WIDTH, 2 * changed.heads))
    run = follow(thin, 0, min(tokens, SAMPLED_TOKENS), changed.depth, changed.depth)
    return [value if math.isfinite(value) else DEEPEST for value in run.log10_relative], "sampled"


def _transposed(rows: list[list[Any]]) -> list[list[Any]]:
    return [list(row) for row in zip(*rows, strict=True)]

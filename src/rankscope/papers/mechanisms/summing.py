"""Rows of the run brought together into lines of the table: one per mechanism, and one per change to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rankscope._types import Status
from rankscope.papers.mechanisms.declaring import Mechanism
from rankscope.papers.mechanisms.table_rows import MECHANISMS

if TYPE_CHECKING:
    from rankscope.runs.run import Run

AS_IT_IS = "none"
Values = Mapping[int, float]
Fate = Literal["vanish", "grow", "equal"]


@dataclass(frozen=True)
class End:
    """Where a network ends: log10 of the relative residual after its last block, over seeds.

    Attributes:
        log10: median over seeds; None where nothing finite is left.
        half_range: half the distance between the largest and the smallest over seeds, in the same logarithm.
        arithmetic: ``"exact"`` or ``"float64"``.
        lost_after: up to which block this is read, where it could not be read to the last.
        fate: of the tokens behind that block: they vanish, grow out of range, or are equal up to rounding.
    """

    log10: float | None
    half_range: float = 0.0
    arithmetic: str = "float64"
    lost_after: int | None = None
    fate: Fate | None = None


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        mechanism: what is measured.
        change: what is changed in it, ``"none"`` in the table proper.
        ends: by variant; those that were refused are missing.
        order: near collapse, without skips, by variant: 3, 1 or 0; None where none could be read.
        order_read: in which arithmetic.
        factor: of order 1, per block over the second half of the blocks, on the relative residual, by variant.
        level: of order 0, the relative residual that equal tokens have after the last block, or the one before it if
            that is larger, by variant.
        size: root mean square of the tokens after the first and after the last block of the whole model.
        std: of the weights at initialisation.
        seeds: how many.
        reasons: why a variant, or exact arithmetic in it, was refused.
    """

    mechanism: Mechanism
    change: str
    ends: Mapping[str, End]
    order: Mapping[str, int | None]
    order_read: Mapping[str, str]
    factor: Mapping[str, float]
    level: Mapping[str, float]
    size: tuple[float, float] | None
    std: float
    seeds: int
    reasons: Mapping[str, str]


class Table:
    """Values of a run by their coordinates; sequences are averaged, seeds and blocks kept."""

    def __init__(self, run: Run) -> None:
        self.depth = int(run.extra["size"]["depth"])
        cells: dict[tuple[str, ...], dict[int, dict[int, list[float]]]] = {}
        floors: set[tuple[Any, ...]] = set()
        self.notes: dict[tuple[str, str, str], str] = {}
        for row in run.table.to_pylist():
            key = tuple(str(row[name]) for name in ("mechanism", "change", "variant", "arithmetic", "metric"))
            if row["note"]:
                self.notes.setdefault((key[0], key[1], key[2]), row["note"])
            if row["site"] == "block.in" and row["arithmetic"] is not None:
                continue
            layers = cells.setdefault(key, {}).setdefault(int(row["seed"]), {})
            layers.setdefault(int(row["layer"]), []).append(row["value"])
            if row["status"] == str(Status.FLOOR):
                floors.add((*key, row["layer"]))
        self._cells, self._floors = cells, floors

    def over_depth(self, *key: str) -> dict[int, dict[int, float]]:
        """By seed, by block: the mean over sequences."""
        found = self._cells.get(key, {})
        return {
            seed: {layer: sum(values) / len(values) for layer, values in layers.items()}
            for seed, layers in found.items()
        }

    def last(self, *key: str) -> list[float]:
        """After the last block, by seed; seeds that did not get there are missing."""
        ends = [layers.get(self.depth - 1, math.nan) for layers in self.over_depth(*key).values()]
        return [value for value in ends if math.isfinite(value)]

    def is_at_floor(self, layer: int, *key: str) -> bool:
        """Whether any value there is rounding."""
        return (*key, layer) in self._floors

    def pairs(self) -> list[tuple[str, str]]:
        """Mechanisms and changes, in the order of the table."""
        held = dict.fromkeys((key[0], key[1]) for key in self._cells)
        return sorted(held, key=lambda pair: (list(MECHANISMS).index(pair[0]), pair[1] != AS_IT_IS, pair[1]))


def lines_of(run: Run) -> list[Line]:
    """Every line of the run, changed mechanisms behind the one they belong to."""
    table = Table(run)
    return [_line(table, name, change) for name, change in table.pairs()]


def _line(table: Table, name: str, change: str) -> Line:
    variants = [v for v in ("full", "cut", "pure") if table.over_depth(name, change, v, "float64", "mu_over_norm")]
    orders = {variant: _order(table, name, change, variant) for variant in variants}
    std = table.over_depth(name, change, "None", "None", "initial_std")
    return Line(
        mechanism=MECHANISMS[name],
        change=change,
        ends={variant: _end(table, name, change, variant) for variant in variants},
        order={variant: order for variant, (order, _) in orders.items()},
        order_read={variant: read for variant, (_, read) in orders.items()},
        factor=_factors(table, name, change, orders),
        level=_levels(table, name, change, orders),
        size=_sizes(table, name, change),
        std=median(layers[0] for layers in std.values()) if std else math.nan,
        seeds=len(std),
        reasons={key[2]: note for key, note in table.notes.items() if key[:2] == (name, change)},
    )


def _levels(table: Table, name: str, change: str, orders: Mapping[str, tuple[int | None, str]]) -> dict[str, float]:
    found = {}
    for variant in (variant for variant, (order, _) in orders.items() if order == 0):
        seen = table.over_depth(name, change, variant, "float64", "equal_tokens").values()
        ends = [max(layers.get(table.depth - back, math.nan) for back in (2, 1)) for layers in seen]
        if ends and all(math.isfinite(end) for end in ends):
            found[variant] = median(ends)
    return found


def _sizes(table: Table, name: str, change: str) -> tuple[float, float] | None:
    seen = table.over_depth(name, change, "full", "float64", "log10_token_size").values()
    logs = [(layers[0], layers[table.depth - 1]) for layers in seen if table.depth - 1 in layers]
    if not logs or not all(math.isfinite(value) for pair in logs for value in pair):
        return None
    return 10 ** median(first for first, _ in logs), 10 ** median(last for _, last in logs)


def _end(table: Table, name: str, change: str, variant: str) -> End:
    key = (name, change, variant, "float64", "mu_over_norm")
    seen = table.over_depth(*key)
    exact = table.last(name, change, variant, "exact", "log10_relative_residual")
    if exact and len(exact) == len(seen):
        return End(median(exact), (max(exact) - min(exact)) / 2, "exact")
    last = [value for value in table.last(*key) if value > 0]
    if len(last) == len(seen) and not table.is_at_floor(table.depth - 1, *key):
        logs = [math.log10(value) for value in last]
        return End(median(logs), (max(logs) - min(logs)) / 2)
    return _lost(table, seen, key)


def _lost(table: Table, seen: Mapping[int, Values], key: tuple[str, ...]) -> End:
    """Tokens that vanished, grew out of range or became equal: how far they got, where arithmetic went furthest."""
    exact = table.over_depth(*key[:3], "exact", "log10_relative_residual")
    sizes = table.over_depth(*key[:3], "float64", "log10_token_size").values()
    lasting = all(math.isfinite(layers.get(table.depth - 1, math.nan)) for layers in sizes)
    finite = [value for layers in sizes for _, value in sorted(layers.items()) if math.isfinite(value)]
    fate: Fate = "equal" if lasting else "grow" if finite and finite[-1] > 0 else "vanish"
    in_float = min(_leading(layers, table, key) for layers in seen.values())
    exactly = min(len(layers) for layers in exact.values()) if len(exact) == len(seen) else 0
    if exactly >= in_float and exactly:
        log10 = median(layers[exactly - 1] for layers in exact.values())
        return End(log10, arithmetic="exact", lost_after=exactly, fate=fate)
    if not in_float:
        return End(None, lost_after=0, fate=fate)
    log10 = median(math.log10(layers[in_float - 1]) for layers in seen.values())
    return End(log10, lost_after=in_float, fate=fate)


def _leading(layers: Values, table: Table, key: tuple[str, ...]) -> int:
    """How many blocks from the first give a number above rounding."""
    for layer in sorted(layers):
        if not layers[layer] > 0 or table.is_at_floor(layer, *key):
            return layer
    return len(layers)


def _order(table: Table, name: str, change: str, variant: str) -> tuple[int | None, str]:
    """The median over blocks and seeds; 0 as soon as one kind of block makes equal tokens unequal."""
    for arithmetic in ("exact", "float64"):
        found = [
            value
            for layers in table.over_depth(name, change, variant, arithmetic, "order").values()
            for value in layers.values()
            if math.isfinite(value)
        ]
        if found:
            return (0 if min(found) < 0.5 else round(median(found))), arithmetic
    return None, ""


def _factors(table: Table, name: str, change: str, orders: Mapping[str, tuple[int | None, str]]) -> dict[str, float]:
    """Geometric mean over the second half of the blocks of the factor on the relative residual near collapse."""
    out = {}
    for variant, (order, arithmetic) in orders.items():
        slopes = []
        for layers in table.over_depth(name, change, variant, arithmetic, "log10_near_collapse").values():
            half = [layer for layer in sorted(layers) if layer >= table.depth // 2 - 1]
            if len(half) > 1:
                slopes.append((layers[half[-1]] - layers[half[0]]) / (half[-1] - half[0]))
        if order == 1 and slopes:
            out[variant] = 10 ** median(slopes)
    return out

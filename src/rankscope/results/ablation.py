"""An ablation read as a grid: variants by depth, for each mask and each kind of weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.results.curves import Curve, curve, names_in
from rankscope.results.not_finite import Lost, first_not_finite
from rankscope.results.summary import stacks_of
from rankscope.results.text import number

MEASURE = "relative_residual"
COLLAPSED_BELOW = 1e-3
"""Tokens that differ by less than a thousandth of their size are taken as one."""

COMPONENTS = {"+norm": "norms", "+skip": "skips", "+mlp": "MLPs", "+norm+skip": "norms with skips"}


@dataclass(frozen=True)
class Arm:
    """One network of the grid."""

    weights: str
    mask: str
    stack: str | None
    variant: str
    line: Curve


def arms(table: pa.Table, metric: str = MEASURE, site: str = "block.out") -> Iterator[Arm]:
    """The curve of ``metric`` for every network, in the order in which they were run."""
    for weights in names_in(table, "weights"):
        for mask in names_in(table, "mask"):
            for variant in names_in(table, "variant"):
                rows = _only(table, weights=weights, mask=mask, variant=variant)
                for stack in stacks_of(rows) if rows.num_rows else ():
                    mine = rows if stack is None else _only(rows, stack=stack)
                    if metric in names_in(mine, "metric") and site in names_in(mine, "site"):
                        yield Arm(weights, mask, stack, variant, curve(mine, metric, site))


def _only(table: pa.Table, **wanted: str) -> pa.Table:
    for column, value in wanted.items():
        table = table.filter(pc.fill_null(pc.equal(table[column], value), False))
    return table


@dataclass(frozen=True)
class LostNetwork:
    """A network of the grid with NaN or infinity in it."""

    weights: str
    mask: str
    variant: str
    lost: Lost

    @property
    def name(self) -> str:
        """The network in words."""
        return f"{self.variant} ({self.weights} weights, {self.mask} mask)"


def lost_networks(table: pa.Table) -> list[LostNetwork]:
    """Which networks stop being finite and where each does first, in the order in which they were run."""
    if first_not_finite(table) is None:
        return []
    found = []
    for weights in names_in(table, "weights"):
        for variant in names_in(table, "variant"):
            for mask in names_in(table, "mask"):
                lost = first_not_finite(_only(table, weights=weights, mask=mask, variant=variant))
                found += [] if lost is None else [LostNetwork(weights, mask, variant, lost)]
    return found


def judge_ablation(table: pa.Table, floor_relative: float | None) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """One sentence per mask and kind of weights: what collapses, and which components prevent it. Heuristic.

    NaN and infinity are said before anything else, and a network that has no finite value left is not judged.
    """
    lost = lost_networks(table)
    gone = {(network.weights, network.mask, network.variant) for network in lost}
    groups: dict[tuple[str, str, str | None], dict[str, Curve]] = {}
    for arm in arms(table):
        lines = groups.setdefault((arm.weights, arm.mask, arm.stack), {})
        if (arm.weights, arm.mask, arm.variant) not in gone or np.isfinite(arm.line.mean).all():
            lines[arm.variant] = arm.line
    sentences, evidence = [], [_evidence_of(network) for network in lost]
    for (weights, mask, stack), lines in groups.items():
        if lines:
            sentences.append(_sentence(weights, mask, stack, lines, floor_relative, alone=len(groups) == 1))
        for variant, line in lines.items():
            last = {"layer": int(line.layers[-1]), "value": float(line.mean[-1])}
            evidence.append(
                {"metric": MEASURE, "weights": weights, "mask": mask, "stack": stack, "variant": variant, **last}
            )
    finite = " ".join(sentences)
    if lost:
        rest = f" Where it is finite: {finite[:1].lower()}{finite[1:]}" if finite else ""
        alone = len({(weights, mask) for weights, mask, _ in groups}) == 1
        return f"{_not_finite(lost, alone=alone)}{rest}", tuple(evidence)
    return finite or "No verdict: the relative residual was not measured.", tuple(evidence)


def _evidence_of(network: LostNetwork) -> dict[str, Any]:
    at = {"weights": network.weights, "mask": network.mask, "variant": network.variant}
    return {**network.lost.evidence(), **at}


def _not_finite(networks: Sequence[LostNetwork], *, alone: bool) -> str:
    """One sentence per place, with the networks that are lost there."""
    places: dict[Lost, list[str]] = {}
    for network in networks:
        places.setdefault(network.lost, []).append(network.variant if alone else network.name)
    return " ".join(lost.sentence(f"Not finite in {', '.join(names)}") for lost, names in places.items())


def _sentence(
    weights: str, mask: str, stack: str | None, lines: Mapping[str, Curve], floor: float | None, *, alone: bool
) -> str:
    where = "" if alone else ", ".join(part for part in (stack, f"{weights} weights", f"{mask} mask") if part) + ": "
    parts = []
    if "pure" in lines:
        parts.append(_fate("pure attention", lines["pure"], floor))
    added = {variant: float(line.mean[-1]) for variant, line in lines.items() if variant in COMPONENTS}
    parts += _roles(added, "pure" in lines and _collapses(lines["pure"]))
    if "full" in lines:
        parts.append(f"the whole model ends at {number(float(lines['full'].mean[-1]))}")
    if not parts:
        parts = [_fate(variant, line, floor) for variant, line in lines.items()]
    return f"{where}{'; '.join(parts)}."


def _roles(added: Mapping[str, float], collapses_without: bool) -> list[str]:
    """What each component alone does to the last block."""
    named = {variant: f"{COMPONENTS[variant]} ({number(value)})" for variant, value in added.items()}
    keep = [named[variant] for variant, value in added.items() if value > COLLAPSED_BELOW]
    fall = [named[variant] for variant, value in added.items() if value <= COLLAPSED_BELOW]
    if collapses_without:
        words = (f"{' and '.join(keep)} prevent it", f"{' and '.join(fall)} do not")
    else:
        words = (f"with {' or '.join(keep)} so does it", f"with {' or '.join(fall)} it collapses")
    return [sentence for sentence, names in zip(words, (keep, fall), strict=True) if names]


def _collapses(line: Curve) -> bool:
    return bool((line.mean < COLLAPSED_BELOW).any())


def _fate(name: str, line: Curve, floor: float | None) -> str:
    below = [int(layer) for layer, value in zip(line.layers, line.mean, strict=True) if value < COLLAPSED_BELOW]
    if not below:
        return f"{name} keeps its tokens apart (relative residual {number(float(line.mean[-1]))} at the last block)"
    words = f"{name} collapses: relative residual below {COLLAPSED_BELOW:g} from block {below[0]}"
    if floor is not None and float(line.mean[-1]) <= floor:
        words += f", and down to the float floor ({number(floor)}) by the last"
    return words

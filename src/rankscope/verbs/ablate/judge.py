"""What an ablation says: the state of each network, and the component that prevents collapse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.not_finite import CODE, Lost, first_not_finite
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.verdicts.battery import read_battery
from rankscope.verdicts.reading import StackReading, read_stack
from rankscope.verdicts.sentences import in_words, short
from rankscope.verdicts.states import State
from rankscope.verdicts.verdict import Verdict

MEASURE = "relative_residual"


@dataclass(frozen=True)
class AblationArm:
    """One network of the grid: the curve of one metric, and all its rows."""

    weights: str
    mask: str
    stack: str | None
    variant: str
    line: Curve
    rows: pa.Table


def arms(table: pa.Table, metric: str = MEASURE, site: str = "block.out") -> Iterator[AblationArm]:
    """The curve of ``metric`` for every network, in the order in which they were run."""
    for weights in names_in(table, "weights"):
        for mask in names_in(table, "mask"):
            for variant in names_in(table, "variant"):
                rows = only(table, weights=weights, mask=mask, variant=variant)
                for stack in stacks_of(rows) if rows.num_rows else ():
                    mine = of_stack(rows, stack)
                    if metric in names_in(mine, "metric") and site in names_in(mine, "site"):
                        yield AblationArm(weights, mask, stack, variant, curve(mine, metric, site), mine)


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
    names = [table[column].to_pylist() for column in ("weights", "variant", "mask")]
    networks = dict.fromkeys(zip(*names, strict=True))
    found = [(w, v, m, first_not_finite(only(table, weights=w, variant=v, mask=m))) for w, v, m in networks]
    return [LostNetwork(weights, mask, variant, lost) for weights, variant, mask, lost in found if lost is not None]


COMPONENTS = {"+skip": "skip connections", "+norm": "norms", "+mlp": "MLPs", "+norm+skip": "norms with skips"}
QUIET = (State.HEALTHY, State.MEAN_OFFSET, State.UNKNOWN)


def judge_ablation(
    table: pa.Table,
    floor_relative: float | None,
    *,
    lengths: Mapping[str | None, Mapping[int, int]] | None = None,
    dim: int | None = None,
    model: str | None = None,
    pure: str = "pure attention",
) -> Verdict:
    """One sentence per mask and kind of weights: what collapses, and which components prevent it. Heuristic.

    Every network is judged by the same rules as a run of ``measure``. NaN and infinity are reported first,
    and a network that has no finite value left is not judged. The verdict has the code of the whole model, if that is
    one of the networks. ``pure`` is what the network without skips, MLPs and norms consists of.
    """
    lost = lost_networks(table)
    gone = {(network.weights, network.mask, network.variant) for network in lost}
    groups: dict[tuple[str, str, str | None], dict[str, tuple[AblationArm, StackReading]]] = {}
    for arm in arms(table):
        networks = groups.setdefault((arm.weights, arm.mask, arm.stack), {})
        if (arm.weights, arm.mask, arm.variant) not in gone or np.isfinite(arm.line.mean).all():
            battery = read_battery(arm.rows, lengths=(lengths or {}).get(arm.stack), dim=dim)
            assert battery is not None  # an arm has at least the rows of its curve
            networks[arm.variant] = (arm, read_stack(battery))
    sentences, evidence = [], [_evidence_of(network) for network in lost]
    for (weights, mask, stack), networks in groups.items():
        if networks:
            sentences.append(_sentence(weights, mask, stack, networks, floor_relative, pure, alone=len(groups) == 1))
        evidence += [_evidence(arm, reading) for arm, reading in networks.values()]
    whole = [reading.state for networks in groups.values() for name, (_, reading) in networks.items() if name == "full"]
    code = CODE if lost else max(whole).code if whole else State.UNKNOWN.code
    steps = _next_steps(groups, model)
    finite = " ".join(sentences)
    if lost:
        rest = f" Where it is finite: {finite[:1].lower()}{finite[1:]}" if finite else ""
        alone = len({(weights, mask) for weights, mask, _ in groups}) == 1
        return Verdict(f"{_not_finite(lost, alone=alone)}{rest}", tuple(evidence), code, steps)
    return Verdict(finite or "No verdict: the relative residual was not measured.", tuple(evidence), code, steps)


def _evidence(arm: AblationArm, reading: StackReading) -> dict[str, Any]:
    return {
        "metric": MEASURE,
        "weights": arm.weights,
        "mask": arm.mask,
        "stack": arm.stack,
        "variant": arm.variant,
        "layer": int(arm.line.layers[-1]),
        "value": float(arm.line.mean[-1]),
        "state": reading.state.code,
    }


def _evidence_of(network: LostNetwork) -> dict[str, Any]:
    at = {"weights": network.weights, "mask": network.mask, "variant": network.variant}
    return {**network.lost.evidence(), **at}


def _next_steps(
    groups: Mapping[tuple[str, str, str | None], Mapping[str, tuple[AblationArm, StackReading]]], model: str | None
) -> tuple[str, ...]:
    """How fast pure attention falls below the float floor, and what keeps a whole model from collapsing."""
    states = {name: reading.state for networks in groups.values() for name, (_, reading) in networks.items()}
    named = model or "MODEL"
    steps = [f"rankscope exact {named} --skip 0"] if states.get("pure") in (State.FLOOR, State.COLLAPSED) else []
    if states.get("full", State.HEALTHY) >= State.COLLAPSING:
        steps.append(f"rankscope remedy {named}")
    return tuple(steps)


def _not_finite(networks: Sequence[LostNetwork], *, alone: bool) -> str:
    """One sentence per place, with the networks that are lost there."""
    places: dict[Lost, list[str]] = {}
    for network in networks:
        places.setdefault(network.lost, []).append(network.variant if alone else network.name)
    return " ".join(lost.sentence(f"Not finite in {', '.join(names)}") for lost, names in places.items())


def _sentence(
    weights: str,
    mask: str,
    stack: str | None,
    networks: Mapping[str, tuple[AblationArm, StackReading]],
    floor: float | None,
    pure: str,
    *,
    alone: bool,
) -> str:
    where = "" if alone else ", ".join(part for part in (stack, f"{weights} weights", f"{mask} mask") if part) + ": "
    names = {"full": "the whole model", "pure": pure}
    shown = [name for name in names if name in networks] or list(networks)
    sentences = _roles(networks)
    for name in reversed(shown):
        reading = networks[name][1]
        # That a whole model is as it should be, or shares a common vector, goes without saying.
        if name != "full" or reading.state not in QUIET or not reading.is_everywhere:
            sentences.append(f"{names.get(name, name)} {_fate(reading)}")
    ends = [f"{_end(networks[name][0], floor)} in {names.get(name, name)}" for name in shown]
    sentences.append(f"relative residual after the last block: {', '.join(ends)}")
    first, *rest = [where + sentences[0], *sentences[1:]]
    return " ".join(f"{one[:1].upper()}{one[1:]}." for one in (first, *rest))


def _roles(networks: Mapping[str, tuple[AblationArm, StackReading]]) -> list[str]:
    """What each component alone does, if attention without any collapses."""
    if "pure" not in networks or networks["pure"][1].state < State.COLLAPSING:
        return []
    apart = {name: networks[name][1].state < State.COLLAPSING for name in COMPONENTS if name in networks}
    # Norms with skips add nothing to an answer that skips alone give.
    named = [name for name in apart if name != "+norm+skip" or apart[name] != apart.get("+skip")]
    prevent, fail = ([COMPONENTS[name] for name in named if apart[name] is one] for one in (True, False))
    words = (f"{' and '.join(prevent)} prevent collapse", f"{' and '.join(fail)} do not prevent collapse")
    return [sentence for sentence, which in zip(words, (prevent, fail), strict=True) if which]


def _fate(reading: StackReading) -> str:
    count = f" {reading.count()}".rstrip()
    if reading.state in (State.FLOOR, State.COLLAPSED):
        return f"collapses{count} {reading.span(State.FLOOR, State.COLLAPSED)}"
    if reading.state is State.VANISHED:
        return f"vanishes{count}: the stream is exactly zero {reading.span(State.VANISHED)}"
    if reading.state >= State.FEW_DIRECTIONS:
        return f"ends with {in_words(reading)}" if reading.state is not State.COLLAPSING else f"is {in_words(reading)}"
    return "does not collapse"


def _end(arm: AblationArm, floor: float | None) -> str:
    at_floor = floor is not None and bool(arm.line.any_floor[-1])
    return f"at the float floor {short(floor)}" if at_floor and floor else short(float(arm.line.mean[-1]))

"""One number, one verdict: 40 activation patterns in ``measure``, ``ablate``, ``exact`` and the gauge.

The 27 kinds of the corpus, and 14 more below. ``measure`` and ``ablate`` have the whole battery and must name the
state the pattern was built with. ``exact`` has residuals alone, and the gauge one alarm per layer on means over the
sequences of its probe: where these cannot see a state, the reason is written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from rankscope._types import Status
from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS, evaluate
from rankscope.monitor.alarms import ALARMS, LayerState
from rankscope.monitor.probing import layer_values
from rankscope.monitor.readings import LayerValue
from rankscope.runs.rows import STATUSES, Piece, RowWriter
from rankscope.verbs.ablate.judge import judge_ablation
from rankscope.verbs.exact.judge import judge_exact
from rankscope.verdicts import judge_rows
from tests.verdicts.corpus import KINDS, Draw, Kind, Stack, facts_of, same_in_every_block, table_of, with_residual

MORE: dict[str, Kind] = {}


def pattern(words: str, label: str) -> Callable[[Callable[[Draw], Stack]], Callable[[Draw], Stack]]:
    """Declare a pattern beside those of the published matrix."""

    def register(build: Callable[[Draw], Stack]) -> Callable[[Draw], Stack]:
        MORE[build.__name__] = Kind(build.__name__, words, label, build)
        return build

    return register


@pattern("two clusters of copies, three fifths and two fifths of the tokens", "clusters")
def two_clusters(draw: Draw) -> Stack:
    draw.tokens = 40
    member = (torch.arange(40) >= 24).long()
    return same_in_every_block(draw, lambda: draw.gaussian(draw.sequences, 2, draw.dim)[:, member] + 1e-3 * draw.iid())


@pattern("one vector and its negative", "clusters")
def antipodes(draw: Draw) -> Stack:
    draw.tokens = 32
    sign = 1.0 - 2.0 * (torch.arange(32) % 2).float()[:, None]
    return same_in_every_block(draw, lambda: sign * draw.common() + 1e-3 * draw.iid())


@pattern("every token twice, the pairs independent", "clusters")
def pairs(draw: Draw) -> Stack:
    draw.tokens = 64
    return same_in_every_block(draw, lambda: draw.iid()[:, torch.arange(64) // 2])


@pattern("tokens evenly spaced on a line that does not pass through the origin", "few directions")
def line(draw: Draw) -> Stack:
    draw.tokens, draw.dim = 16, 128
    place = torch.linspace(-2.0, 2.0, 16)[:, None]
    return same_in_every_block(draw, lambda: 3 * draw.common() + place * draw.common() + 0.01 * draw.iid())


@pattern("exactly half of the sequences collapsed, the others independent", "collapsed")
def half_of_the_sequences(draw: Draw) -> Stack:
    draw.sequences = 4

    def make() -> Tensor:
        x = draw.iid()
        x[:2] = (draw.common() + 1e-3 * draw.iid())[:2]
        return x

    return same_in_every_block(draw, make)


@pattern("one direction, lengths growing with the position", "same direction")
def ramp(draw: Draw) -> Stack:
    draw.tokens = 64
    length = torch.linspace(0.5, 4.0, 64)[:, None]
    return same_in_every_block(draw, lambda: length * (draw.common() + 1e-3 * draw.iid()))


@pattern("orthogonal tokens of one length", "healthy")
def orthogonal(draw: Draw) -> Stack:
    draw.tokens, draw.dim = 32, 64
    return same_in_every_block(draw, lambda: torch.linalg.qr(draw.gaussian(draw.sequences, 64, 32)).Q.mT)


@pattern("independent tokens of size 1e-100 in float64", "healthy")
def tiny(draw: Draw) -> Stack:
    return same_in_every_block(draw, lambda: 1e-100 * draw.iid().double())


@pattern("independent tokens of size 1e8", "healthy")
def large(draw: Draw) -> Stack:
    return same_in_every_block(draw, lambda: 1e8 * draw.iid())


@pattern("equal to 1e-10 in float64, far above its rounding", "collapsed")
def collapsed_in_double(draw: Draw) -> Stack:
    return same_in_every_block(draw, lambda: draw.common().double() + 1e-10 * draw.iid().double())


@pattern("equal up to the rounding of bfloat16", "floor")
def rounding_of_bfloat16(draw: Draw) -> Stack:
    return same_in_every_block(draw, lambda: (draw.common() * (1 + 2.0**-8 * draw.iid())).to(torch.bfloat16))


@pattern("equal in the first block, independent afterwards", "collapsed")
def collapsed_early(draw: Draw) -> Stack:
    draw.depth = 6
    return Stack([draw.common() + 1e-3 * draw.iid(), *(draw.iid() for _ in range(5))])


@pattern("the residual falls to 0.2 and rises again", "mean offset")
def dip(draw: Draw) -> Stack:
    draw.tokens, draw.dim = 128, 128
    return Stack([with_residual(draw, residual) for residual in (0.95, 0.6, 0.3, 0.2, 0.3, 0.6, 0.95)])


@pattern("two equal tokens", "collapsed")
def two_tokens(draw: Draw) -> Stack:
    draw.tokens = 2
    return same_in_every_block(draw, lambda: draw.common() + 1e-3 * draw.iid())


PATTERNS: Mapping[str, Kind] = {**KINDS, **MORE}

RESIDUALS_DO_NOT_SEE = {
    "huge token": "a dominating token",
    "huge channel": "a dominating channel, and one that is constant lowers them",
    "few directions": "how many directions the differences have",
    "clusters": "copies",
    "copies": "copies, nor collapse beside a few large tokens",
    "same direction": "directions apart from lengths",
    "not finite": "NaN: the rows that are finite are judged by themselves",
    "floor": "a float format, because exact arithmetic has no floor: it says collapsed",
}
"""States that ``exact``, which has residuals alone, names otherwise, and what it does not see."""
GAUGE_SEES_MEANS = {
    "some_sequences": "the gauge reads means over the sequences of its probe",
    "half_of_the_sequences": "the gauge reads means over the sequences of its probe",
    "not_finite": "the gauge has its own alarm for what is not finite",
}


def test_there_are_forty_patterns() -> None:
    assert len(PATTERNS) >= 40
    assert not set(KINDS) & set(MORE)


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_has_one_state_in_every_verb(name: str) -> None:
    stack, label = PATTERNS[name].build(Draw(7)), PATTERNS[name].label
    table, facts = table_of(stack), facts_of(stack)
    verdict = judge_rows(table, **facts)
    assert verdict.code == label
    assert max(len(sentence.split()) for sentence in verdict.sentence.split(". ")) <= 25, verdict.sentence
    for column, value in (("variant", "full"), ("mask", "own"), ("weights", "given")):
        table = table.append_column(column, pa.array([value] * table.num_rows))
    assert judge_ablation(table, facts["floor_relative"], lengths=facts["lengths"], dim=facts["dim"]).code == label
    exact = judge_exact(exact_rows(stack), {"float32": float_floor(torch.float32)}).code
    assert exact == ("collapsed" if label == "floor" else label) or label in RESIDUALS_DO_NOT_SEE
    raised = any(collapsed(values, undefined) for values, undefined in gauge_layers(table))
    assert raised == (label in {"collapsed", "floor", "vanished"}) or name in GAUGE_SEES_MEANS


def exact_rows(stack: Stack) -> pa.Table:
    """What ``exact`` would write about these activations: logarithms, in float64."""
    writer = RowWriter(("arithmetic",))
    specs = [METRICS["residual"], METRICS["relative_residual"]]
    for layer, x in enumerate(stack.layers):
        reading = evaluate(specs, Tokens(x.double(), stack.keep), 0.0)
        for name, values, codes in zip(
            ("log10_residual", "log10_relative_residual"), *reading_of(reading), strict=True
        ):
            with np.errstate(divide="ignore", invalid="ignore"):
                logs = np.log10(values)
            place = {"metric": name, "site": "block.out", "stack": None, "layer": layer, "first_sequence": 0}
            writer.add(values=logs, statuses=codes, head_axis=False, at={"arithmetic": "exact"}, **place)
    for name in ("order", "factor"):
        for layer, x in enumerate(stack.layers):
            ones = np.ones(len(x))
            place = {"metric": name, "site": "block.out", "stack": None, "layer": layer, "first_sequence": 0}
            writer.add(values=ones, statuses=np.zeros(len(x)), head_axis=False, at={"arithmetic": "exact"}, **place)
    return writer.table()


def reading_of(reading: object) -> tuple[list[np.ndarray], list[np.ndarray]]:
    values, statuses = reading.values, reading.statuses  # type: ignore[attr-defined]
    return [value.numpy() for value in values], [status.numpy() for status in statuses]


def collapsed(values: dict[str, float], undefined: frozenset[str]) -> bool:
    """Whether the gauge's alarm about collapsed tokens says so, without a start to compare with."""
    return ALARMS["token_collapse"].rule(LayerState(values, undefined=undefined)) is not None


def gauge_layers(table: pa.Table) -> Iterator[tuple[dict[str, float], frozenset[str]]]:
    """Each layer as the gauge's rules see it, with the typical residual among its metrics."""
    layers: dict[int, dict[str, LayerValue]] = {}
    columns = (table[name].to_pylist() for name in ("metric", "site", "stack", "layer", "sequence", "value", "status"))
    pieces = [
        Piece(*place, np.array([value]), np.array([STATUSES.index(status)], dtype=np.int8), ())
        for *place, value, status in zip(*columns, strict=True)
    ]
    for value in layer_values(pieces):
        layers.setdefault(value.layer, {})[value.metric] = value
    for values in layers.values():
        means = {metric: value.mean for metric, value in values.items()}
        yield means, frozenset(metric for metric, value in values.items() if value.status == Status.UNDEFINED)

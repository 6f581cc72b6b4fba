"""What a reading keeps of the values of its sequences and heads, compared with a row by row version."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rankscope._types import Status
from rankscope.monitor.probing import layer_values, not_finite_values
from rankscope.runs.rows import STATUSES, Piece, RowWriter

WORTH = ("ok", "at the float floor")


def pieces(seed: int, kinds: int) -> tuple[Piece, ...]:
    """Two batches of three sequences at two layers, of one metric with heads and one without; statuses at random."""
    random, writer = np.random.default_rng(seed), RowWriter()
    for first in (0, 3):
        for layer in (0, 1):
            for metric, site, shape in (("stable_rank", "block.out", (3,)), ("attention_entropy", "attention", (3, 4))):
                writer.add(
                    metric=metric,
                    site=site,
                    stack=None,
                    layer=layer,
                    first_sequence=first,
                    values=random.standard_normal(shape),
                    statuses=random.integers(0, kinds, shape),
                    head_axis=len(shape) == 2,
                )
    writer.add(
        metric="stable_rank",
        site="block.out",
        stack="decoder",
        layer=0,
        first_sequence=0,
        values=np.empty(0),
        statuses=np.empty(0),
        head_axis=False,
    )
    return writer.pieces


def by_rows(given: tuple[Piece, ...]) -> dict[tuple[object, ...], tuple[float, float, float, str]]:
    groups: dict[tuple[object, ...], list[tuple[float, str]]] = {}
    for piece in given:
        for value, code in zip(piece.values.ravel(), piece.statuses.ravel(), strict=True):
            key = (piece.metric, piece.site, piece.stack, piece.layer)
            groups.setdefault(key, []).append((float(value), STATUSES[code]))
    found = {}
    for key, entries in groups.items():
        statuses = [status for _, status in entries]
        status = max(dict.fromkeys(statuses), key=statuses.count)
        worth = [value for value, status in entries if status in WORTH]
        if worth:
            status = status if status in WORTH else "ok"
            found[key] = (float(np.mean(worth)), min(worth), max(worth), status)
        else:
            found[key] = (math.nan, math.nan, math.nan, status)
    return found


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kinds", [1, 2, len(STATUSES)])
def test_layers_are_summed_up_as_row_by_row(seed: int, kinds: int) -> None:
    given = pieces(seed, kinds)
    found = {
        (row.metric, row.site, row.stack, row.layer): (row.mean, row.least, row.most, row.status)
        for row in layer_values(given)
    }
    assert str(found) == str(by_rows(given))


@pytest.mark.parametrize("seed", range(5))
def test_the_share_of_sequences_that_are_not_finite(seed: int) -> None:
    given = pieces(seed, len(STATUSES))
    bad: dict[int, set[int]] = {}
    for piece in given:
        for sequence, code in enumerate(piece.statuses.tolist() if piece.site == "block.out" else ()):
            if STATUSES[code] == Status.NOT_FINITE:
                bad.setdefault(piece.layer, set()).add(piece.first_sequence + sequence)
    expected = {layer: len(sequences) / 6 for layer, sequences in bad.items()}
    assert {row.layer: row.mean for row in not_finite_values(given)} == expected

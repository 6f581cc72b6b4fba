"""What is said about streams, from rows alone."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope._types import Status
from rankscope.runs.rows import RowWriter
from rankscope.verdicts.streams import streams_findings

STATUSES = list(Status)
MIXING = {
    "stack": None,
    "layout": "batch tokens streams dim",
    "count": 4,
    "kind": "doubly stochastic",
    "blocks": [0, 1, 2],
    "contraction": [0.5, 0.5, 0.5],
    "log10_product_contraction": [-0.3, -0.6, -0.9],
}


def table(values: list[float], *, entry: float = 0.5, status: Status = Status.OK):  # type: ignore[no-untyped-def]
    writer = RowWriter()
    for site, line in (("streams.in", [entry]), ("streams.out", values)):
        for layer, value in enumerate(line):
            writer.add(
                metric="relative_residual", site=site, stack=None, layer=layer, first_sequence=0,
                values=np.array([value, value]), statuses=np.full(2, STATUSES.index(status)), head_axis=False,
            )  # fmt: skip
    return writer.table()


@pytest.mark.parametrize(
    ("values", "status", "code"),
    [
        ([0.5, 0.2, 0.031], Status.OK, "healthy"),
        ([0.5, 0.2, 0.03], Status.OK, "collapsed"),
        ([0.5, 0.01, 0.2], Status.OK, "healthy"),
        ([1e-9, 1e-9, 1e-9], Status.FLOOR, "floor"),
    ],
)
def test_the_last_block_decides_at_the_threshold_of_tokens(values: list[float], status: Status, code: str) -> None:
    (found,) = streams_findings(table(values, status=status), [MIXING])
    assert (found.axis, found.code) == ("streams", code)
    assert found.evidence[0]["value"] == values[-1]


def test_it_says_from_which_block_on() -> None:
    (found,) = streams_findings(table([0.5, 0.02, 0.01]), [MIXING])
    assert found.sentence == "Streams of a token are equal from block 1 on. Relative residual 0.01 after block 2."
    assert "at most 0.5 (median), 3 blocks together by 10^-0.9" in found.details


def test_copies_at_the_start_are_named() -> None:
    (found,) = streams_findings(table([0.0, 0.0, 0.0], entry=0.0, status=Status.FLOOR), [MIXING])
    assert "they enter block 0 as copies" in found.details
    (found,) = streams_findings(table([0.1, 0.2, 0.3], entry=0.0), [MIXING])
    assert "they enter block 0 as copies" in found.details


def test_mixing_that_was_not_measured_is_said_so() -> None:
    (found,) = streams_findings(table([0.5, 0.5, 0.5]), [{"stack": None, "layout": "", "why": "it is too narrow."}])
    assert "Mixing of streams was not measured: it is too narrow." in found.details


def test_a_model_with_one_stream_has_no_finding() -> None:
    assert streams_findings(table([0.5]), []) == []

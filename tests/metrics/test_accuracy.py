"""The recorded errors are those of the metrics that exist, and break no promise."""

from __future__ import annotations

import json

import pytest
import torch
from mpmath import mp
from scripts.metric_errors import DATA, DIGITS, FORMATS, GRAM_ERROR, PROMISE, alike, large_effective_rank, measured

from rankscope._types import Status
from rankscope.linalg.precision import float_floor
from rankscope.metrics import METRICS, SIDES, evaluate


def test_the_record_has_every_metric_and_no_broken_promise() -> None:
    record = json.loads(DATA.read_text(encoding="utf-8"))
    assert set(record["metrics"]) == set(METRICS)
    assert record["below_promise"] == record["undefined_in_one_only"] == 0
    worst = [cell["ok"] or 0.0 for by in record["metrics"].values() for cells in by.values() for cell in cells.values()]
    assert max(worst) < PROMISE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("side", ["update", "branch", "router"])
def test_a_value_that_is_ok_has_six_digits(side: str, format: str) -> None:
    with mp.workdps(DIGITS):
        values = list(measured(side, format))
    assert [one for one in values if one["status"] == Status.OK and not one["error"] < PROMISE] == []


def test_effective_rank_of_collapsed_tokens_is_as_near_as_declared() -> None:
    found = [large_effective_rank(256, format, 1e-8) for format in FORMATS]
    assert all(one["error"] < GRAM_ERROR * 256 for one in found)


@pytest.mark.parametrize(("residual", "status"), [(1e-3, Status.OK), (1e-6, Status.OK), (1e-12, Status.ESTIMATE)])
def test_a_span_that_is_nearly_rounding_is_marked(residual: float, status: Status) -> None:
    read, added = alike(0, 5, 12, residual), alike(1, 5, 12, 1.0)
    found = evaluate([METRICS["outside_span_share"]], SIDES["branch"].view(read, added), float_floor(torch.float64))
    assert list(Status)[int(found.statuses.item())] is status

"""Runs with known numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rankscope._types import Status
from rankscope.runs.plain_json import sealed_json
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run
from rankscope.verdicts import judge_rows


def write_sealed(path: Path, *facts: Mapping[str, Any]) -> None:
    """Write objects, one per line, with checksums that agree: what somebody writes who knows how."""
    plain = ({name: value for name, value in one.items() if name != "seal"} for one in facts)
    path.write_bytes(b"\n".join(map(sealed_json, plain)))


FLOOR32 = 4 * float(np.finfo(np.float32).eps)
CODES = {status: code for code, status in enumerate(Status)}

CONFUSION = {
    "iid": (0.997, -0.002, 23.5, 23.4, 59.4, 59.3, 42.6, 0.0115, 0.0184),
    "offset": (0.328, 0.893, 1.12, 23.4, 33.8, 59.3, 1.25, 0.0092, 0.0175),
    "token": (0.996, -0.002, 1.00, 1.00, 1.93, 1.93, 1.00, 0.99987, 0.06),
    "channel": (1.00, 0.002, 1.00, 1.00, 3.08, 3.07, 1.00, 0.06, 0.9993),
    "collapsed": (0.001, 1.00, 1.00, 23.4, 1.09, 59.3, 1.00, 0.0078, 0.09),
}
CONFUSION_METRICS = (
    "relative_residual",
    "mean_cosine",
    "stable_rank",
    "centred_stable_rank",
    "effective_rank",
    "centred_effective_rank",
    "participation_ratio",
    "largest_token_share",
    "largest_channel_share",
)


def profile(
    curves: Mapping[str, Sequence[float]],
    *,
    stack: str | None = None,
    site: str = "block.out",
    sequences: int = 3,
    floor_below: float = 0.0,
    writer: RowWriter | None = None,
) -> RowWriter:
    """Each metric's values by layer, the same for every sequence but for 1% of spread around the middle one."""
    writer = writer or RowWriter()
    jitter = 1.0 + 0.01 * np.linspace(-1.0, 1.0, sequences) if sequences > 1 else np.ones(1)
    for metric, values in curves.items():
        for layer, value in enumerate(values):
            numbers = value * (jitter if metric == "relative_residual" else np.ones(sequences))
            residual = metric == "relative_residual"
            codes = np.where(residual & (numbers < floor_below), CODES[Status.FLOOR], CODES[Status.OK])
            codes = np.where(np.isnan(numbers), CODES[Status.UNDEFINED], codes)
            writer.add(
                metric=metric,
                site=site,
                stack=stack,
                layer=layer,
                first_sequence=0,
                values=numbers,
                statuses=codes,
                head_axis=False,
            )
    return writer


def confusion_table(row: str) -> pa.Table:
    values = dict(zip(CONFUSION_METRICS, CONFUSION[row], strict=True))
    return profile({name: [value] for name, value in values.items()}, sequences=1).table()


def make_run(table: pa.Table, model: str = "init:tiny-bert", **given: object) -> Run:
    verdict = judge_rows(table, floor_relative=FLOOR32)
    facts = Provenance(
        model=model,
        origin="init",
        seed=0,
        weights_dtype="float32",
        arithmetic_dtype="float32",
        token_policy="content",
        sequences=3,
        lengths=(16, 16, 16),
        git=None,
        command=("rankscope", "measure", model),
        created="2026-01-01T00:00:00+00:00",
    )
    floor = {"dtype": "float32", "relative": FLOOR32, "meaning": "smaller relative differences are rounding"}
    facts_of_it = {"verdict": verdict.sentence, "evidence": verdict.evidence, "code": verdict.code}
    given = {**facts_of_it, "next_steps": verdict.next_steps, **given}
    return Run(kind="measure", provenance=facts, floor=floor, table=table, **given)


SMOLLM2_RESIDUAL = [
    0.94,
    0.93,
    0.9,
    0.87,
    0.84,
    0.82,
    0.8,
    0.77,
    0.74,
    0.71,
    0.68,
    0.66,
    *[0.99] * 13,
    0.9,
    0.88,
    0.86,
    0.85,
    0.84,
]
SMOLLM2_TOKEN = [0.03] * 12 + [0.97] * 13 + [0.1] * 5

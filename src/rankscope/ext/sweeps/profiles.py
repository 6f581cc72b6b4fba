"""The profile of each model of a sweep: metrics over depth, per checkpoint and variant, with seeds pooled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.ext.sweeps.querying import database_of
from rankscope.ext.sweeps.results import Contents
from rankscope.runs.curves import BAND, USABLE, Curve
from rankscope.runs.summary import HEADLINE, MAIN_SITES

PLACE = "model, checkpoint, step, variant"
CURVES = f"""
WITH usable AS (
    SELECT *, CASE WHEN status IN {USABLE!r} AND (isfinite(value) OR value = '-infinity'::DOUBLE) THEN value END AS v
    FROM rows WHERE verb = 'measure' AND length IS NULL
)
SELECT {PLACE}, metric, site, stack, layer, avg(v) AS mean, count(v) AS n,
    -- Between the logarithm of an exact zero and a finite number nothing can be interpolated.
    CASE WHEN min(v) = '-infinity'::DOUBLE
        THEN quantile_disc(v, {BAND[0]}::DOUBLE) ELSE quantile_cont(v, {BAND[0]}::DOUBLE) END AS low,
    CASE WHEN min(v) = '-infinity'::DOUBLE
        THEN quantile_disc(v, {BAND[1]}::DOUBLE) ELSE quantile_cont(v, {BAND[1]}::DOUBLE) END AS high,
    bool_or(status = 'at the float floor') AS any_floor, bool_or(status = 'estimated') AS any_estimate
FROM usable GROUP BY ALL ORDER BY ALL
"""
"""Mean and band of each metric by layer, over sequences, heads and seeds; see :class:`rankscope.runs.curves.Curve`."""
RESULTS = f"""
SELECT {PLACE}, arg_min(record, number)->>'$.verdict' AS verdict, arg_min(record, number)->>'$.code' AS code,
    TRY_CAST(arg_min(record, number)->>'$.provenance.parameters' AS BIGINT) AS parameters,
    sum(TRY_CAST(record->>'$.rows' AS BIGINT)) AS rows, sum(TRY_CAST(record->>'$.seconds' AS DOUBLE)) AS seconds
FROM records JOIN numbered USING (task) WHERE verb = 'measure' GROUP BY ALL ORDER BY min(number)
"""
"""What came of the tasks of each model, checkpoint and variant, in the order of the plan."""


@dataclass(frozen=True, eq=False)
class Profile:
    """The results of ``measure`` for one model, checkpoint and variant.

    Attributes:
        model: its name in the plan.
        checkpoint: its label, None for a model without checkpoints.
        step: training step of the checkpoint, if known.
        variant: name of the surgery.
        verdict: of the first seed, as all facts about it.
        code: the verdict in one word; None if it has none.
        parameters: of the model, if known.
        rows: number of rows.
        seconds: duration of its tasks.
        curves: by metric and stack (None if there is one), at the metric's main site.
    """

    model: str
    checkpoint: str | None
    step: int | None
    variant: str
    verdict: str | None
    code: str | None
    parameters: int | None
    rows: int | None
    seconds: float | None
    curves: Mapping[tuple[str, str | None], Curve] = field(default_factory=dict)


def profiles_in(contents: Contents) -> list[Profile]:
    """Profiles in the order of the plan.

    Raises:
        ResultError: a file of rows cannot be read.
    """
    with database_of(contents, has_tasks=False) as database:
        table = contents.tasks
        database.register("numbered", table.append_column("number", [np.arange(table.num_rows)]))
        found = database.sql(RESULTS).to_arrow_table().to_pylist()
        layers = database.sql(CURVES).to_arrow_table().to_pylist()
    # model, checkpoint, step, variant -> metric, stack -> site -> layers
    by_place: dict[tuple[Any, ...], dict[tuple[str, str | None], dict[str, list[dict[str, Any]]]]] = {}
    for row in layers:
        curves = by_place.setdefault(tuple(row[name] for name in PLACE.split(", ")), {})
        curves.setdefault((row["metric"], row["stack"]), {}).setdefault(row["site"], []).append(row)
    profiles = []
    for facts in found:
        curves = by_place.get(tuple(facts[name] for name in PLACE.split(", ")), {})
        headline_first = sorted(curves, key=lambda key: HEADLINE.index(key[0]) if key[0] in HEADLINE else len(HEADLINE))
        profiles.append(Profile(**facts, curves={key: _curve(curves[key]) for key in headline_first}))
    return profiles


def _curve(sites: Mapping[str, list[dict[str, Any]]]) -> Curve:
    """The curve at the site that matters most."""
    site = next((name for name in MAIN_SITES if name in sites), next(iter(sites)))

    def column(name: str, kind: type) -> Any:
        return np.array([row[name] for row in sites[site]], dtype=kind)  # None becomes NaN

    mean, low, high = (column(name, np.float64) for name in ("mean", "low", "high"))
    any_floor, any_estimate = (column(name, np.bool_) for name in ("any_floor", "any_estimate"))
    return Curve(column("layer", np.int64), mean, low, high, column("n", np.int64), any_floor, any_estimate)

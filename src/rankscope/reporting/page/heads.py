"""Maps of heads by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.reporting.page.facts import FACTS
from rankscope.reporting.page.parts import Chart, Choice, Section, plain
from rankscope.reporting.page.wording import spoken, visible
from rankscope.runs.curves import USABLE, names_in
from rankscope.runs.rows import of_stack, only
from rankscope.runs.run import Run

FIRST = ("attention_entropy", "first_token_sink_rate", "attention_rank_one_distance", "attention_contraction")


def heads_section(run: Run, detail: int) -> Section | None:
    """Each metric that has a value per head, as a map."""
    table = run.table.filter(pc.is_valid(run.table["head"]))
    views: dict[tuple[str, ...], Mapping[str, Any]] = {}
    known = names_in(table, "metric")
    for metric in sorted(known, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        rows = only(table, metric=metric)
        for site, stack in _places(rows):
            here = of_stack(only(rows, site=site), stack)
            views[metric, _place_name(site, stack)] = heat_view(metric, *head_grid(here))
    if not views:
        return None
    chart = Chart(
        "heat",
        "Heads by block",
        "One tile per head, averaged over sequences; blocks to the right, heads downwards.",
        (
            Choice("metric", tuple((name, spoken(name)) for name in dict.fromkeys(key[0] for key in views))),
            Choice("place", tuple((name, visible(name)) for name in dict.fromkeys(key[1] for key in views))),
        ),
        views,
    )
    return Section("Head by head", "Where attention is spread, where it sinks, where it mixes all alike.", (chart,))


def heat_view(metric: str, layers: NDArray[np.int64], heads: NDArray[np.int64],
              values: NDArray[np.float64]) -> dict[str, Any]:  # fmt: skip
    """A view of a map; ``values`` has shape ``(heads, layers)``."""
    fact = FACTS.metrics.get(metric)
    return {
        "metric": metric,
        "columns": [int(layer) for layer in layers],
        "rows": [int(head) for head in heads],
        "values": [[plain(float(value)) for value in row] for row in values],
        "collapse": None if fact is None else fact.at_collapse,
    }


def head_grid(rows: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Blocks, heads, and the means over sequences of the usable values, shape ``(heads, blocks)``."""
    usable = pc.is_in(pc.cast(rows["status"], pa.string()), value_set=pa.array(USABLE)).to_numpy().astype(bool)
    layers, column = np.unique(rows["layer"].to_numpy(), return_inverse=True)
    heads, row = np.unique(rows["head"].to_numpy(), return_inverse=True)
    value = rows["value"].to_numpy()
    usable = usable & np.isfinite(value)
    total, count = np.zeros((heads.size, layers.size)), np.zeros((heads.size, layers.size))
    np.add.at(total, (row[usable], column[usable]), value[usable])
    np.add.at(count, (row[usable], column[usable]), 1.0)
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    return layers.astype(np.int64), heads.astype(np.int64), mean


def _places(rows: pa.Table) -> list[tuple[str, str | None]]:
    sites, stacks = rows["site"].to_pylist(), rows["stack"].to_pylist()
    return list(dict.fromkeys(zip(sites, stacks, strict=True)))


def _place_name(site: str, stack: str | None) -> str:
    return f"{stack} {site}" if stack else site

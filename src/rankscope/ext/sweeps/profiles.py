"""The profile of each model of a sweep: headline metrics over depth, per checkpoint and variant, with seeds pooled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from rankscope.errors import ResultError
from rankscope.ext.sweeps.results import Contents
from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.rows import FIXED_COLUMNS, at_longest, of_stack, only
from rankscope.runs.storage import LARGEST_TABLE
from rankscope.runs.summary import HEADLINE, MAIN_SITES, stacks_of

VERB = "measure"
LENGTH = "length"
COLUMNS = ["metric", "site", "stack", "layer", "head", "sequence", "value", "status", LENGTH]


@dataclass(frozen=True, eq=False)
class Profile:
    """The results of ``measure`` for one model, checkpoint and variant.

    Attributes:
        model: its name in the plan.
        checkpoint: its label, None for a model without checkpoints.
        step: training step of the checkpoint, if known.
        variant: name of the surgery.
        seeds: number of runs in it.
        curves: by metric and stack (None if there is one), at the metric's main site.
        facts: the record of its first task: verdict, evidence, provenance.
    """

    model: str
    checkpoint: str | None
    step: int | None
    variant: str
    seeds: int
    curves: Mapping[tuple[str, str | None], Curve]
    facts: Mapping[str, Any]


def profiles_in(contents: Contents) -> Iterator[Profile]:
    """Profiles in the order of the plan.

    Raises:
        ResultError: a file of rows cannot be read, or there are too many rows for one page.
    """
    tables = _measured(contents)
    groups: dict[tuple[Any, ...], list[str]] = {}
    wanted = ("task", "verb", "model", "checkpoint", "step", "variant")
    for key, verb, *place in zip(*(contents.tasks[name].to_pylist() for name in wanted), strict=True):
        if verb == VERB and key in tables:
            groups.setdefault(tuple(place), []).append(key)
    for (model, checkpoint, step, variant), keys in groups.items():
        table = pa.concat_tables([tables[key] for key in keys]).unify_dictionaries()
        facts = contents.records.get(keys[0], {})
        yield Profile(str(model), checkpoint, step, str(variant), len(keys), dict(_curves(table)), facts)


def _measured(contents: Contents) -> dict[str, pa.Table]:
    """The rows of each finished task of ``measure``, with the columns that curves need."""
    names = pa.dictionary(pa.int32(), pa.string())
    schema = {name: kind for name, kind in FIXED_COLUMNS.items() if name in COLUMNS}
    schema |= {LENGTH: pa.int64(), "task": names, "verb": names}
    tables: dict[str, pa.Table] = {}
    count = 0
    for rows, wanted in contents.rows(schema):
        asked = (ds.field("verb") == VERB) & ds.field("metric").is_valid()
        try:
            count += rows.count_rows(filter=asked)
            if count > LARGEST_TABLE:
                raise ResultError(f"The atlas is drawn from {LARGEST_TABLE:,} rows at most. Query the rest.")
            table = rows.to_table(filter=asked, columns=[*COLUMNS, "task"]).unify_dictionaries()
        except (pa.ArrowException, OSError) as error:
            raise ResultError(f"The rows in {contents.results.place} cannot be read ({error}).") from error
        # The rows of a task are neighbours in its file.
        runs = pc.run_end_encode(table["task"].cast(pa.string()).combine_chunks())
        start = 0
        for key, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
            if wanted is None or key in wanted:
                tables[key] = table.slice(start, end - start).select(COLUMNS)
            start = end
    return tables


def _curves(table: pa.Table) -> Iterator[tuple[tuple[str, str | None], Curve]]:
    table = at_longest(table)
    known = names_in(table, "metric")
    for metric in (*(name for name in HEADLINE if name in known), *(name for name in known if name not in HEADLINE)):
        mine = only(table, metric=metric)
        sites = names_in(mine, "site")
        site = next((name for name in MAIN_SITES if name in sites), sites[0])
        for stack in stacks_of(mine):
            here = of_stack(mine, stack)
            if site in names_in(here, "site"):
                yield (metric, stack), curve(here, metric, site)

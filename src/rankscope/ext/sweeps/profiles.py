"""The profile of each model of a sweep: headline metrics over depth, per checkpoint and variant, with seeds pooled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rankscope.errors import ResultError
from rankscope.ext.sweeps.folder import Contents, Expected
from rankscope.ext.sweeps.packs import Pack
from rankscope.runs.curves import Curve, curve, names_in
from rankscope.runs.rows import at_longest, of_stack, only
from rankscope.runs.storage import refuse_large
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


def profiles_in(contents: Contents, expected: list[Expected]) -> Iterator[Profile]:
    """Profiles in the order of the plan; holds the rows of one profile, or of one pack, in memory at a time.

    Raises:
        ResultError: a file of rows cannot be read.
    """
    rows = _TaskRows(contents)
    groups: dict[tuple[Any, ...], list[Expected]] = {}
    for one in expected:
        if one.key in contents.done and one.task.get("verb") == VERB:
            place = tuple(one.task.get(name) for name in ("model", "checkpoint", "step", "variant"))
            groups.setdefault(place, []).append(one)
    for (model, checkpoint, step, variant), members in groups.items():
        table = pa.concat_tables([rows.of(one) for one in members]).unify_dictionaries()
        yield Profile(
            model=str(model),
            checkpoint=None if checkpoint is None else str(checkpoint),
            step=step if isinstance(step, int) else None,
            variant=str(variant),
            seeds=len(members),
            curves=dict(_curves(table)),
            facts=contents.record(members[0].key),
        )


class _TaskRows:
    """The rows of finished tasks; those of the pack read last are kept, because compaction follows the plan."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._pack: Pack | None = None
        self._tables: Mapping[str, pa.Table] = {}

    def of(self, one: Expected) -> pa.Table:
        """The rows of one task."""
        if one.key in self._contents.loose:
            return read_rows(self._contents.checked_rows(one))
        if self._pack is None or one.key not in self._pack.keys:
            self._pack = next(pack for pack in self._contents.packs if one.key in pack.keys)
            self._tables = {key: _with_length(table) for key, table in self._pack.tables(COLUMNS).items()}
        return self._tables[one.key]


def read_rows(path: Path) -> pa.Table:
    """The rows of one task, with only the columns that curves need."""
    try:
        source = pq.ParquetFile(path)
        refuse_large(source.metadata, path)
        known = source.schema_arrow.names
        table = source.read(columns=[name for name in COLUMNS if name != LENGTH or name in known])
    except (pa.ArrowException, OSError, KeyError) as error:
        raise ResultError(f"{path} cannot be read ({error}). Remove its record and sweep again.") from error
    return _with_length(table)


def _with_length(table: pa.Table) -> pa.Table:
    """The rows with a column for their length, which is empty in a run at one length."""
    if LENGTH in table.column_names:
        return table
    return table.append_column(LENGTH, pa.nulls(table.num_rows, pa.int64()))


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

"""The result of a verb: frozen values with their provenance, floor and verdict."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope._printing import first_sentence, shortened
from rankscope._types import Status
from rankscope.errors import MissingExtraError, ResultError
from rankscope.runs import storage
from rankscope.runs._frozen import freeze, thaw
from rankscope.runs.curves import Curve, curve
from rankscope.runs.places import is_address
from rankscope.runs.presenting import document_of, figure_of, showing
from rankscope.runs.provenance import SCHEMA, Provenance
from rankscope.runs.rows import FIXED_COLUMNS, chosen, only, refuse_mixture
from rankscope.views.notebook import document_html
from rankscope.views.text import document_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class VerdictText(str):
    """The sentences of a verdict; ``details`` has what they mean and every value behind them."""

    details: str

    def __new__(cls, sentences: str, details: str = "") -> VerdictText:
        """A string has its text from its creation on."""
        text = super().__new__(cls, sentences)
        text.details = details
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return (VerdictText, (str(self), self.details))


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """Values per metric, site, layer, head and sequence, never averaged before they are stored.

    Args:
        kind: the verb that produced it, e.g. ``"measure"``.
        provenance: model, inputs, versions.
        floor: the float floor: ``{"dtype", "relative", "meaning"}``.
        verdict: the state and its numbers, a line for each axis other than tokens; ``verdict.details`` explains it.
        evidence: the values the verdict is based on.
        table: the rows; columns as in :data:`rankscope.runs.rows.FIXED_COLUMNS`, plus those added by the verb.
        null: per metric the mean and spread over same-shape random tokens, or None if not requested.
        notes: further remarks for the reader.
        extra: results specific to this verb, such as ``sum_error``; at the top level of :meth:`to_json`.
        code: the state the verdict names, such as ``"collapsed"``; None if the verb names none, and in runs of
            versions that did not store it.
        next_steps: one or two commands worth running next.
        source: the folder or address it was read from; None for a run made in this process.
    """

    kind: str
    provenance: Provenance
    floor: Mapping[str, Any]
    verdict: str | VerdictText
    table: pa.Table
    evidence: tuple[Mapping[str, Any], ...] = ()
    null: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    next_steps: tuple[str, ...] = ()
    source: Path | str | None = None

    def __post_init__(self) -> None:
        # Stored with the results of the verb, so that a run read from a folder has it too.
        object.__setattr__(self, "verdict", VerdictText(self.verdict, str(self.extra.get("verdict_details", ""))))
        for name in ("floor", "evidence", "null", "notes", "extra", "next_steps"):
            object.__setattr__(self, name, freeze(getattr(self, name)))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_from_parts, (self._facts(), self.table))

    def _facts(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "provenance": self.provenance.to_json(),
            "floor": thaw(self.floor),
            "verdict": str(self.verdict),
            "code": self.code,
            "next_steps": thaw(self.next_steps),
            "evidence": thaw(self.evidence),
            "null": thaw(self.null),
            "notes": thaw(self.notes),
            "extra": thaw(self.extra),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path | str:
        """Write the rows as Parquet and everything else as ``run.json`` into ``folder``; atomic.

        An existing run in the folder is replaced. ``folder`` may be an address (``s3://bucket/run``).
        """
        return storage.write_run(folder, self._facts(), self.table)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Run:
        """Read a run written by :meth:`save`.

        Raises:
            ResultError: the folder holds no run, or an incomplete one.
        """
        return replace(
            _from_parts(*storage.read_run(folder)),
            source=folder if isinstance(folder, str) and is_address(folder) else Path(folder),
        )

    def to_json(self) -> dict[str, Any]:
        """One JSON object; a value that is not finite is null and its status says why."""
        facts = self._facts()
        del facts["notes"]
        return {**facts.pop("extra"), **facts, "rows": _json_rows(self.table)}

    def to_frame(self) -> pd.DataFrame:
        """The rows as a pandas table (extra ``frames``)."""
        try:
            import pandas  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("Run.to_frame", "pandas", "frames") from error
        frame: pd.DataFrame = self.table.to_pandas()
        return frame

    def select(
        self,
        *,
        metric: str | None = None,
        site: str | None = None,
        layer: int | None = None,
        status: Status | str | None = None,
        **at: Any,
    ) -> pa.Table:
        """Rows that match every coordinate given.

        Rows of different networks never come back unasked: if they have several values of the stack or of a column that
        the verb adds (``variant``, ``arithmetic``, ``length``), name one or a list. All rows are in ``table``.

        Args:
            metric: rows of this metric; None for all.
            site: rows of this site; None for all.
            layer: rows of this block; None for all.
            status: rows with this status; None for all.
            **at: other columns: ``stack``, ``head``, ``sequence``, and those of the verb. None matches an empty cell.

        Raises:
            UnknownNameError: no such column, or no such value in it.
            InputError: several values of a coordinate remain that was not given.
        """
        wanted = {"metric": metric, "site": site, "layer": layer}
        wanted["status"] = None if status is None else str(Status(status))
        rows = only(self.table, **{column: value for column, value in wanted.items() if value is not None})
        return refuse_mixture(chosen(rows, **at), named=at)

    def curve(self, metric: str, site: str = "block.out", **at: Any) -> Curve:
        """``metric`` by layer, averaged over sequences and heads; values undefined or not finite are left out.

        Args:
            metric: its name.
            site: its site.
            **at: values of other columns, such as ``stack="encoder"``, ``variant="pure"`` or ``arithmetic="exact"``;
                needed if the run has several. ``head`` and ``sequence`` restrict the mean.

        Raises:
            UnknownNameError: the run has no such metric, site, column or value.
            InputError: several values of a coordinate remain; they are not averaged.
        """
        return curve(self.table, metric, site, **at)

    def plot(
        self, metrics: str | Sequence[str] | None = None, site: str | None = None, ax: Axes | None = None
    ) -> Figure:
        """A matplotlib figure (extra ``plot``), drawn as the verb declares it; see :mod:`rankscope.runs.presenting`.

        Args:
            metrics: panels, in order; the headline metrics by default.
            site: where they were measured.
            ax: draw into these axes instead of a new figure; for one panel, such as ``metrics="relative_residual"``.
        """
        return figure_of(self, metrics=metrics, site=site, ax=ax)

    def card(self) -> str:
        """Markdown for a model card: the verdict, each metric at the first and last block, and the command.

        Raises:
            ResultError: the run has no values by block.
        """
        from rankscope.runs.card import card_of

        with showing(self):
            return card_of(self.verdict, self.provenance, self.table)

    def __str__(self) -> str:
        with showing(self):
            return document_text(document_of(self))

    def __repr__(self) -> str:
        what = f"<Run {self.kind} of {self.provenance.subject}: {self.table.num_rows} values"
        return shortened(f"{what}. {first_sentence(self.verdict)}>")

    def _repr_html_(self) -> str:
        with showing(self):
            return document_html(document_of(self))


def load_run(folder: str | os.PathLike[str]) -> Run:
    """Read a run written by :meth:`Run.save`; see :meth:`Run.load`."""
    return Run.load(folder)


def _from_parts(facts: Mapping[str, Any], table: pa.Table) -> Run:
    kinds: dict[str, type | tuple[type, ...]] = {
        "kind": str,
        "floor": Mapping,
        "verdict": str,
        "evidence": list,
        "null": (Mapping, type(None)),
        "notes": list,
        "extra": Mapping,
        "code": (str, type(None)),
        "next_steps": list,
    }
    facts = {"extra": {}, "code": None, "next_steps": [], **facts}
    for name, kind in kinds.items():
        if name not in facts or not isinstance(facts[name], kind):
            raise ResultError(
                f"The sidecar's {name!r} is missing or of the wrong kind; it was not written by rankscope."
            )
    return Run(
        kind=facts["kind"],
        provenance=Provenance.from_json(facts.get("provenance")),
        floor=facts["floor"],
        verdict=facts["verdict"],
        table=table,
        evidence=tuple(facts["evidence"]),
        null=facts["null"],
        notes=tuple(str(note) for note in facts["notes"]),
        extra=facts["extra"],
        code=facts["code"],
        next_steps=tuple(str(step) for step in facts["next_steps"]),
    )


def _json_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as objects; ``stack``, ``head`` and a verb's additional columns are omitted if empty."""
    optional = ["stack", "head", *(name for name in table.column_names if name not in FIXED_COLUMNS)]
    always = [name for name in FIXED_COLUMNS if name not in optional]
    columns = {name: table[name].to_pylist() for name in table.column_names}
    finite = np.isfinite(table["value"].to_numpy())
    rows = []
    for number in range(table.num_rows):
        row = {name: columns[name][number] for name in always}
        if not finite[number]:
            row["value"] = None
        row.update({name: columns[name][number] for name in optional if columns[name][number] is not None})
        rows.append(row)
    return rows

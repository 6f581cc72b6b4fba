"""Two runs side by side: differences of means over sequences, with intervals."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope._printing import first_sentence, shortened
from rankscope.errors import InputError, UnknownNameError
from rankscope.runs._frozen import freeze, thaw
from rankscope.runs.curves import mean_grid, names_in, usable
from rankscope.runs.document import facts_line
from rankscope.runs.intervals import Differences, mean_differences
from rankscope.runs.lengths import depending_on_length
from rankscope.runs.presenting import document_of, figure_of, showing
from rankscope.runs.provenance import SCHEMA
from rankscope.runs.rows import MOST_LISTED, only, own_columns
from rankscope.runs.run import Run, load_run
from rankscope.views import number
from rankscope.views.notebook import document_html
from rankscope.views.text import document_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALWAYS = ("metric", "site", "stack", "layer")
LEVEL = 0.95


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Differences ``b - a`` of means over sequences, with intervals.

    Args:
        a: description of the first run.
        b: description of the second run.
        table: one row per metric, site, stack, block (and the verb's additional columns): ``a``, ``b``, ``difference``,
            ``low``, ``high``, ``sequences_a``, ``sequences_b``.
        paired: whether sequence i of one run was compared with sequence i of the other.
        settings: ``level`` and ``why`` (the reason for pairing or not).
        verdict: one sentence that says where the runs differ.
    """

    a: str
    b: str
    table: pa.Table
    paired: bool
    settings: Mapping[str, Any]
    verdict: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", freeze(self.settings))

    @property
    def source(self) -> None:
        """It is not read from a file."""

    @property
    def kind(self) -> str:
        """What registered how it is shown."""
        return "compare"

    def to_json(self) -> dict[str, Any]:
        """One JSON object; a value that is not finite is null."""
        facts = {"schema": SCHEMA, "kind": self.kind, "a": self.a, "b": self.b, "paired": self.paired}
        rows = [thaw(row) for row in self.table.to_pylist()]
        return {**facts, **thaw(self.settings), "verdict": self.verdict, "rows": rows}

    def plot(self, metrics: Sequence[str] | None = None, site: str | None = None) -> Figure:
        """A matplotlib figure (extra ``plot``): one panel per metric, the difference by block with its interval."""
        return figure_of(self, metrics, site, "Comparison.plot")

    def __str__(self) -> str:
        return document_text(document_of(self))

    def _repr_html_(self) -> str:
        return document_html(document_of(self))

    def __repr__(self) -> str:
        return shortened(f"<Comparison of {self.table.num_rows} values. {first_sentence(self.verdict)}>")


def compare(
    a: Run | str | os.PathLike[str],
    b: Run | str | os.PathLike[str],
    *,
    metrics: Sequence[str] | None = None,
    site: str | None = None,
    paired: bool | None = None,
    level: float = LEVEL,
) -> Comparison:
    r"""Compare two runs: how does ``b`` differ from ``a``, and is that more than the spread over sequences?

    For every value in both runs, computes the difference of the means over sequences (heads are averaged first),
    :math:`\bar b - \bar a`, and Student's interval over sequences (Welch's if they are not paired). **Estimate**: it
    covers other sequences of the same kind, not other seeds or models, and one value at a time.

    Args:
        a: a run, or the folder it was saved in.
        b: the other run, of the same verb.
        metrics: metrics to compare; by default all that are in both runs, without those that depend on the number of
            tokens (ranks, sums, counts) if the runs counted different numbers.
        site: compare this site only.
        paired: whether sequence i of one run belongs to sequence i of the other; by default if both runs read the same
            tokens under the same token policy.
        level: level of the intervals.

    Returns:
        The differences as a table, with text, figure and JSON.

    Raises:
        InputError: the runs are of different verbs or share no value, an option is out of range, or a metric in
            ``metrics`` depends on the number of tokens and the runs counted different numbers.

    Example:
        >>> import rankscope
        >>> one = rankscope.measure("init:tiny-bert", rankscope.Inputs(sequences=3, tokens=16))
        >>> compare(one, one).table["difference"].to_pylist()[0]
        0.0
    """
    first, second = (run if isinstance(run, Run) else load_run(run) for run in (a, b))
    _check(first, second, level)
    with showing(first, second):
        return _compared(first, second, metrics, site, paired, level)


def _compared(
    first: Run,
    second: Run,
    metrics: Sequence[str] | None,
    site: str | None,
    paired: bool | None,
    level: float,
) -> Comparison:
    for name in metrics or ():
        for run in (first, second):
            if name not in (known := names_in(run.table, "metric")):
                raise UnknownNameError("metric in one of the runs", name, known)
    compared, beyond = _across_lengths(first, second, metrics)
    left, right = (by_sequence(run.table, metrics=compared, site=site) for run in (first, second))
    shared = [key for key in left.keys if key in right.position]
    if not shared:
        raise InputError(
            "The two runs share no value: no metric was taken at the same site and block in both. "
            f"One has {_contents(first)}, the other {_contents(second)}."
        )
    pairs, why = _pairing(first, second, left, right, paired)
    rows = [left.position[key] for key in shared], [right.position[key] for key in shared]
    values_a, values_b = left.values[rows[0]], right.values[rows[1]]
    if pairs:
        values_a, values_b = _aligned(left, values_a, right), _aligned(right, values_b, left)
    found = mean_differences(values_a, values_b, paired=pairs, level=level)
    table = _table(left.columns, shared, found)
    settings = {"level": level, "why": why}
    verdict = _verdict(table, level) + _inputs_differ(first, second) + beyond + _left_out(left, right)
    return Comparison(facts_line(first), facts_line(second), table, pairs, settings, verdict)


def _check(first: Run, second: Run, level: float) -> None:
    if first.kind != second.kind:
        beside = (
            " A run of exact has what floats compute next to the exact values: `rankscope exact` prints both."
            if "exact" in (first.kind, second.kind)
            else ""
        )
        raise InputError(
            f"Runs of {first.kind!r} and {second.kind!r} have different metrics; give two runs of one verb.{beside}"
        )
    if not 0.0 < level < 1.0:
        raise InputError(f"level={level}: expected a number between 0 and 1.")


def _pairing(
    first: Run, second: Run, left: SequenceTable, right: SequenceTable, asked: bool | None
) -> tuple[bool, str]:
    shared = sorted(set(left.sequences) & set(right.sequences))
    if asked is not None:
        if asked and not shared:
            raise InputError("paired=True needs sequences with the same numbers in both runs; they share none.")
        differ = ", although the runs did not read the same tokens" if asked and _inputs_differ(first, second) else ""
        return asked, f"as asked{differ}"
    one, other = first.provenance, second.provenance
    if not (one.inputs_hash and other.inputs_hash):
        return False, "one of the runs does not say what it read"
    if one.inputs_hash != other.inputs_hash:
        return False, "the runs did not read the same tokens"
    if one.token_policy != other.token_policy or one.lengths != other.lengths or left.sequences != right.sequences:
        return False, "the runs read the same tokens and did not count the same ones"
    return True, "both runs read the same tokens"


def _across_lengths(first: Run, second: Run, asked: Sequence[str] | None) -> tuple[Sequence[str] | None, str]:
    """The metrics to compare if the runs counted different numbers of tokens, and a sentence about the others.

    A rank of 128 tokens and one of 512 differ for any model: nothing would be learned from their difference.

    Raises:
        InputError: a metric was asked for that depends on the length.
    """
    spans = [sorted(set(run.provenance.lengths)) for run in (first, second)]
    if not all(spans) or spans[0] == spans[1]:
        return asked, ""
    held = list(dict.fromkeys(names_in(first.table, "metric") + names_in(second.table, "metric")))
    dependent = depending_on_length(held if asked is None else asked)
    counts = " and ".join(_span(span) for span in spans)
    if asked is not None and dependent:
        raise InputError(
            f"{dependent[0]} depends on the number of tokens, and the runs counted {counts}. Measure both at "
            "one length."
        )
    kept = [name for name in held if name not in dependent] if asked is None else asked
    if not kept:
        raise InputError(
            f"The runs counted {counts} tokens, and all their metrics depend on it. Measure at one length."
        )
    left = f" {', '.join(dependent)} depend on that and were not compared." if dependent else ""
    return kept, f" The runs counted different numbers of tokens ({counts}).{left}"


def _span(span: Sequence[int]) -> str:
    return str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}"


def _inputs_differ(first: Run, second: Run) -> str:
    """A sentence that says that the runs read different inputs; empty if they read the same, or if that is unknown."""
    one, other = first.provenance, second.provenance
    if not (one.inputs_hash and other.inputs_hash) or one.inputs_hash == other.inputs_hash:
        return ""
    what = (
        f"a read {one.inputs}, b {other.inputs}" if one.inputs != other.inputs else f"both {one.inputs}, other tokens"
    )
    return f" The inputs differ: {what}. Part of any difference may be theirs."


def _left_out(left: SequenceTable, right: SequenceTable) -> str:
    """A sentence about the values that only one of the runs has; empty if there are none."""
    parts = []
    for name, mine, other in (("a", left, right), ("b", right, left)):
        alone = [dict(zip(mine.columns, key, strict=True)) for key in mine.keys if key not in other.position]
        if alone:
            parts.append(f"{len(alone)} of the {len(mine.keys)} values of {name}{_what_is_missing(alone, other)}")
    if not parts:
        return ""
    return f" Not compared, because the other run has no counterpart: {'; '.join(parts)}."


def _what_is_missing(alone: Sequence[Mapping[str, Any]], other: SequenceTable) -> str:
    """The blocks, sites and other coordinates that occur in ``alone`` and nowhere in the other run."""
    words = []
    for column in alone[0]:
        place = other.columns.index(column) if column in other.columns else None
        known = {None} if place is None else {key[place] for key in other.keys}
        missing = sorted({row[column] for row in alone} - known, key=lambda value: (isinstance(value, str), value))
        if column == "layer" and missing:
            words.append(f"block {missing[0]}" if len(missing) == 1 else f"blocks {missing[0]} to {missing[-1]}")
        elif missing:
            words.append(f"{column} {', '.join(str(value) for value in missing[:MOST_LISTED])}")
    return f" ({'; '.join(words)})" if words else ""


def _aligned(mine: SequenceTable, values: np.ndarray, other: SequenceTable) -> np.ndarray:
    shared = [number for number in mine.sequences if number in set(other.sequences)]
    return values[:, [mine.sequences.index(number) for number in shared]]


def _table(columns: Sequence[str], keys: Sequence[tuple[Any, ...]], found: Differences) -> pa.Table:
    named = {name: [key[place] for key in keys] for place, name in enumerate(columns)}
    numbers = {
        "a": found.mean_a,
        "b": found.mean_b,
        "difference": found.difference,
        "low": found.low,
        "high": found.high,
        "sequences_a": found.count_a,
        "sequences_b": found.count_b,
    }
    return pa.table({**named, **{name: pa.array(values) for name, values in numbers.items()}})


def _verdict(table: pa.Table, level: float) -> str:
    low, high = table["low"].to_numpy(), table["high"].to_numpy()
    judged = np.isfinite(low) & np.isfinite(high)
    if not judged.any():
        return "No interval: a difference needs at least two sequences with a defined value in each run."
    apart = judged & ((low > 0) | (high < 0))
    count = f"{int(apart.sum())} of {int(judged.sum())} differences have a {level:.0%} interval that leaves out zero"
    chance = f"By chance alone about {1 - level:.0%} would, more or fewer where values move together."
    name, site = (np.array(table[column].to_pylist()) for column in ("metric", "site"))
    main = judged & (name == "relative_residual") & (site == "block.out")
    first = f"{_main_difference(table, int(np.flatnonzero(main)[-1]))} " if main.any() else ""
    return f"{first}{count}. {chance}"


def _main_difference(table: pa.Table, row: int) -> str:
    """The most important difference, in one sentence."""
    difference, low, high = (float(table[column][row].as_py()) for column in ("difference", "low", "high"))
    what, block = "relative residual", table["layer"][row].as_py()
    numbers = f"{number(difference)} [{number(low)}, {number(high)}]"
    if low > 0 or high < 0:
        return f"In b the {what} at block {block} is {'lower' if difference < 0 else 'higher'}: {numbers}."
    return f"No significant difference in the {what} at block {block}: {numbers}."


def _contents(run: Run) -> str:
    return f"{', '.join(names_in(run.table, 'metric')[:4])} at {', '.join(names_in(run.table, 'site')[:4])}"


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """Usable values by key and sequence; heads are averaged, missing values are NaN.

    Args:
        columns: names of the parts of a key: metric, site, stack, layer, then the verb's additional columns.
        keys: in the order of the rows.
        sequences: numbers of the sequences, ascending.
        values: shape ``(keys, sequences)``.
    """

    columns: tuple[str, ...]
    keys: tuple[tuple[Any, ...], ...]
    sequences: tuple[int, ...]
    values: NDArray[np.float64]

    @property
    def position(self) -> dict[tuple[Any, ...], int]:
        """Row of each key."""
        return {key: row for row, key in enumerate(self.keys)}


def by_sequence(table: pa.Table, *, metrics: Sequence[str] | None = None, site: str | None = None) -> SequenceTable:
    """Collect the usable values of a table; see :class:`SequenceTable`."""
    if metrics is not None:
        table = table.filter(pc.is_in(pc.cast(table["metric"], pa.string()), value_set=pa.array(list(metrics))))
    if site is not None:
        table = only(table, site=site)
    own = own_columns(table)
    columns = (*ALWAYS, *own)
    parts = [table[name].to_pylist() for name in columns]
    position: dict[tuple[Any, ...], int] = {}
    row = np.array([position.setdefault(key, len(position)) for key in zip(*parts, strict=True)], dtype=np.int64)
    sequences, column = np.unique(table["sequence"].to_numpy(), return_inverse=True)
    value = table["value"].to_numpy()
    values = mean_grid((len(position), sequences.size), (row, column), value, usable(table) & np.isfinite(value))
    return SequenceTable(columns, tuple(position), tuple(int(number) for number in sequences), values)

"""From a run to a chapter: which sections each kind has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankscope.reporting.page.anything import rows_section
from rankscope.reporting.page.origins import command_of, missing_from, model_name, origin_facts, tiles
from rankscope.reporting.page.parts import Cell, Chapter, Section, Table
from rankscope.reporting.page.wording import clipped, paragraphs, readable, split_verdict, spoken
from rankscope.runs.presenting import function_at, show_of
from rankscope.runs.rows import FIXED_COLUMNS
from rankscope.runs.run import Run
from rankscope.runs.text import number
from rankscope.verbs._spec import VERBS

MOST_EVIDENCE = 60
LONGEST_VERDICT = 4000


STATES: Mapping[str, tuple[str, str]] = {
    "healthy": ("good", "no collapse"),
    "mean offset": ("care", "a common vector"),
    "narrow": ("care", "few directions"),
    "few directions": ("care", "few directions"),
    "huge channel": ("care", "one huge channel"),
    "huge token": ("care", "one huge token"),
    "clusters": ("care", "clusters of copies"),
    "same direction": ("care", "one common direction"),
    "copies": ("bad", "most tokens copies"),
    "collapsing": ("bad", "collapsing"),
    "floor": ("floor", "at the float floor"),
    "collapsed": ("bad", "collapsed"),
    "vanished": ("bad", "exactly zero"),
    "not finite": ("bad", "not finite"),
}
"""Colour class and words of a verdict's code, milder to graver; ``narrow`` is what older runs call few directions."""


def chapter_of(run: Run, detail: int) -> Chapter:
    """Everything the report says about one run."""
    sections = show_of(run.kind).sections if run.table.num_rows else {}
    made: dict[str, Section | None] = {name: function_at(make)(run, detail) for name, make in sections.items()}
    if not any(made.values()) and run.table.num_rows:
        made = {"rows": rows_section(run, detail)}
    shown = {name: section for name, section in made.items() if section is not None}
    headline, rest = split_verdict(readable(run.verdict)[:LONGEST_VERDICT])
    return Chapter(
        title=f"{clipped(run.kind, 30)} · {model_name(run)}",
        question=_question(run.kind),
        state=state_of(run)[0],
        headline=headline,
        verdict=paragraphs(rest),
        tiles=tiles(run),
        sections=tuple(shown.values()),
        evidence=_evidence(run),
        notes=[clipped(note, 500) for note in run.notes],
        missing=missing_from(run, list(shown)),
        origin=origin_facts(run),
        command=command_of(run),
    )


def _question(kind: str) -> str:
    if kind == "reproduce":
        return "Is the paper right?"
    return VERBS[kind].question if kind in VERBS else ""


def state_of(run: Run) -> tuple[str, str]:
    """Colour class and words of the verdict's code; of runs that keep none, of the gravest state in the evidence."""
    if run.code is not None:
        return STATES.get(run.code, ("plain", ""))
    codes = {str(item.get("code")) for item in run.evidence}
    known = [code for code in STATES if code in codes]
    return STATES[known[-1]] if known else ("plain", "")


def _evidence(run: Run) -> Table | None:
    items = [item for item in run.evidence if "metric" in item]
    if not items:
        return None
    names = [name for name in ("site", "stack", "weights", "mask", "variant", "theorem", "layer", "length")
             if any(item.get(name) is not None for item in items)]  # fmt: skip
    rows: list[Sequence[str | Cell]] = []
    amounts = [name for name in ("value", "least", "cases") if any(name in item for item in items)]
    for item in items[:MOST_EVIDENCE]:
        metric = str(item["metric"])
        words = ["" if item.get(name) is None else clipped(item[name], 60) for name in names]
        rows.append(
            [Cell(clipped(spoken(metric), 60), term=metric), *words, *(_amount(item, name) for name in amounts)]
        )
    head = ["metric", *("block" if name == "layer" else name for name in names), *amounts]
    caption = f"What it rests on: {len(items)} value{'s' if len(items) > 1 else ''}, means over sequences"
    return Table(caption, head, rows, folded=len(items) > 8, left_out=max(0, len(items) - MOST_EVIDENCE))


def _amount(item: Mapping[str, object], name: str) -> str:
    value = item.get(name)
    if isinstance(value, (int, float)):
        return str(value) if isinstance(value, int) else number(value)
    return "undefined" if name in item else ""


def is_plain(run: Run) -> bool:
    """Whether a run has only the columns every run has, so that its curves compare with another's."""
    return set(run.table.column_names) <= set(FIXED_COLUMNS)

"""Turns a run into a chapter of the page: the sections of each kind, and the provenance."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from rankscope.reporting.page.rendering import Chapter, Missing
from rankscope.reporting.page.rows_section import rows_section
from rankscope.reporting.page.safe_text import clipped, paragraphs, readable, split_verdict, spoken, visible
from rankscope.reporting.page.sections import sections_of
from rankscope.reporting.states import state_of
from rankscope.runs.rows import FIXED_COLUMNS
from rankscope.runs.run import Run
from rankscope.verbs._spec import VERBS
from rankscope.views import Cell, Row, Section, Table, number

MOST_EVIDENCE = 60
LONGEST_VERDICT = 4000


def chapter_of(run: Run) -> Chapter:
    """Everything the report says about one run."""
    sections = sections_of(run.kind) if run.table.num_rows else []
    made: dict[str, Section | None] = {section.name: section.make(run) for section in sections}
    if not any(made.values()) and run.table.num_rows:
        made = {"rows": rows_section(run)}
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
        next_steps=[clipped(step, 200) for step in run.next_steps],
        missing=missing_from(run, list(shown)),
        origin=origin_facts(run),
        command=command_of(run),
    )


def _question(kind: str) -> str:
    return VERBS[kind].question if kind in VERBS else ""


def _evidence(run: Run) -> Table | None:
    items = [item for item in run.evidence if "metric" in item]
    if not items:
        return None
    names = [name for name in ("site", "stack", "weights", "mask", "variant", "theorem", "layer")
             if any(item.get(name) is not None for item in items)]  # fmt: skip
    rows: list[Row] = []
    amounts = [name for name in ("value", "least", "cases") if any(name in item for item in items)]
    for item in items[:MOST_EVIDENCE]:
        metric = str(item["metric"])
        words = ["" if item.get(name) is None else clipped(item[name], 60) for name in names]
        rows.append(
            [Cell(clipped(spoken(metric), 60), term=metric), *words, *(_amount(item, name) for name in amounts)]
        )
    head = ["metric", *("block" if name == "layer" else name for name in names), *amounts]
    caption = f"What it rests on: {len(items)} value{'s' if len(items) > 1 else ''}, means over sequences"
    return Table(head, rows, caption, folded=len(items) > 8, left_out=max(0, len(items) - MOST_EVIDENCE))


def _amount(item: Mapping[str, object], name: str) -> str:
    value = item.get(name)
    if isinstance(value, (int, float)):
        return str(value) if isinstance(value, int) else number(value)
    return "undefined" if name in item else ""


def is_plain(run: Run) -> bool:
    """Whether a run has no columns of its own, so that its curves are comparable with those of other runs."""
    return set(run.table.column_names) <= {*FIXED_COLUMNS}


LEDGER_SITES = "block.in,attention.sum,cross_attention.sum,mixer.sum,mlp.sum,both.sum,block.out,final,attention.probs"
LONGEST_FACT = 2000


def model_name(run: Run) -> str:
    """The model and what was changed in it, as a heading."""
    return clipped(run.provenance.subject)


def tiles(run: Run) -> list[tuple[str, str]]:
    """The most important facts about a run."""
    seen = run.provenance
    shown = [("model", model_name(run))]
    if seen.parameters:
        shown.append(("parameters", _large(seen.parameters)))
    if seen.sequences:
        spans = sorted(set(seen.lengths))
        length = f" × {spans[0]}{f'–{spans[-1]}' if len(spans) > 1 else ''} tokens" if spans else ""
        shown.append(("inputs", f"{seen.sequences} sequence{'s' if seen.sequences > 1 else ''}{length}"))
    if seen.weights_dtype:
        both = seen.arithmetic_dtype and seen.arithmetic_dtype != seen.weights_dtype
        shown.append(("weights", f"{seen.weights_dtype}{f', arithmetic {seen.arithmetic_dtype}' if both else ''}"))
    relative = run.floor.get("relative")
    if isinstance(relative, (int, float)):
        shown.append(("float floor", number(float(relative))))
    if seen.token_policy:
        shown.append(("tokens counted", seen.token_policy))
    return [(name, clipped(words)) for name, words in shown]


def origin_facts(run: Run) -> list[tuple[str, str]]:
    """The provenance of a run, in words."""
    seen = run.provenance.to_json()
    facts = []
    for name, value in seen.items():
        if name in ("command", "schema") or value in (None, [], {}):
            continue
        if name == "lengths" and isinstance(value, list):
            value = f"{min(value)} to {max(value)}" if len(set(value)) > 1 else value[0]
        facts.append((name.replace("_", " "), visible(_words(value))[:LONGEST_FACT]))
    meaning = run.floor.get("meaning")
    return [*facts, ("float floor means", visible(meaning))] if meaning else facts


def command_of(run: Run) -> str:
    """The command line that produced the run, quoted for a shell."""
    return shell_line(run.provenance.command)


def shell_line(words: Sequence[str]) -> str:
    """Words quoted for a shell; a leading ``~/`` stays outside the quotes, where a shell understands it.

    Example:
        >>> shell_line(["rankscope", "measure", "~/my model"])
        "rankscope measure ~/'my model'"
    """
    parts = [
        "~/" + shlex.quote(word[2:]) if word[:2] == "~/" and len(word) > 2 else shlex.quote(word) for word in words
    ]
    return visible(" ".join(parts))[:LONGEST_FACT]


def missing_from(run: Run, shown: Sequence[str]) -> list[Missing]:
    """What else a ``measure`` run could show, with the command for it."""
    if run.kind != "measure":
        return []
    wanted = []
    if "ledger" not in shown:
        wanted.append(("the ledger of who collapses and who repairs", f"--sites {LEDGER_SITES}"))
    if "similarity" not in shown:
        wanted.append(("token-similarity matrices", "--similarity"))
    if run.null is None:
        wanted.append(("the comparison with random tokens of the same shape", "--null"))
    return [Missing(what, f"{_again(run)} {option}") for what, option in wanted]


def _again(run: Run) -> str:
    words = run.provenance.command
    if len(words) > 2 and words[0] == "rankscope" and words[1] == "measure":
        return command_of(run)
    return shell_line(["rankscope", "measure", run.provenance.model])


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return "; ".join(_words(item) for item in value)
    return str(value)


def _large(count: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)

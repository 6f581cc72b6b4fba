"""From a run to a chapter of the page: which sections each kind has, and where the run comes from."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rankscope.reporting.page.ablate_sections import ablation_section
from rankscope.reporting.page.bound_sections import theorems_section
from rankscope.reporting.page.decompose_sections import paths_section
from rankscope.reporting.page.exact_sections import exact_section
from rankscope.reporting.page.ledger import ledger_section
from rankscope.reporting.page.measure_sections import depth_section, heads_section, similarity_section
from rankscope.reporting.page.rendering import Chapter, Missing
from rankscope.reporting.page.rows_section import rows_section
from rankscope.reporting.page.safe_text import clipped, paragraphs, readable, split_verdict, spoken, visible
from rankscope.reporting.states import state_of
from rankscope.runs.rows import FIXED_COLUMNS
from rankscope.runs.run import Run
from rankscope.views import Cell, Row, Section, Table, number

MakeSection = Callable[[Run, int], Section | None]
MOST_EVIDENCE = 60
LONGEST_VERDICT = 4000


@dataclass(frozen=True)
class Kind:
    """What a verb asks, and the sections that answer it, by name."""

    question: str
    sections: Mapping[str, MakeSection]


KINDS: Mapping[str, Kind] = {
    "measure": Kind(
        "Where does this model stand?",
        {"depth": depth_section, "ledger": ledger_section, "heads": heads_section, "similarity": similarity_section},
    ),
    "ablate": Kind("Which component does it?", {"grid": ablation_section}),
    "exact": Kind("How fast, really?", {"orders": exact_section}),
    "decompose": Kind("Which paths carry the signal?", {"paths": paths_section}),
    "bound": Kind("What do the theorems say of these weights?", {"theorems": theorems_section}),
    "remedy": Kind("Which remedy helps here?", {"rows": rows_section}),
    "predict": Kind("Will this design collapse at initialisation?", {"rows": rows_section}),
    "reproduce": Kind("Is the paper right?", {"rows": rows_section}),
}


def chapter_of(run: Run, detail: int) -> Chapter:
    """Everything the report says about one run."""
    kind = KINDS.get(run.kind, Kind("", {"rows": rows_section}))
    made = {name: make(run, detail) for name, make in kind.sections.items()} if run.table.num_rows else {}
    if not any(made.values()) and run.table.num_rows:
        made = {"rows": rows_section(run, detail)}
    shown = {name: section for name, section in made.items() if section is not None}
    headline, rest = split_verdict(readable(run.verdict)[:LONGEST_VERDICT])
    return Chapter(
        title=f"{clipped(run.kind, 30)} · {model_name(run)}",
        question=kind.question,
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


def _evidence(run: Run) -> Table | None:
    items = [item for item in run.evidence if "metric" in item]
    if not items:
        return None
    names = [name for name in ("site", "stack", "weights", "mask", "variant", "theorem", "layer", "length")
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
    """Whether a run has only the columns every run has, so that its curves compare with another's."""
    return set(run.table.column_names) <= set(FIXED_COLUMNS)


LEDGER_SITES = "block.in,attention.sum,cross_attention.sum,mixer.sum,mlp.sum,both.sum,block.out,final,attention.probs"
LONGEST_FACT = 2000
_MODEL_IN_WHEEL = re.compile(r"[^/\\]+[/\\]?$")


def model_name(run: Run) -> str:
    """The model as a heading: the last part of a path, the whole of anything else."""
    name = run.provenance.model
    found = _MODEL_IN_WHEEL.search(name) if run.provenance.origin == "folder" else None
    return clipped(found.group() if found else name)


def tiles(run: Run) -> list[tuple[str, str]]:
    """The facts that a reader asks for first."""
    seen = run.provenance
    found = [("model", model_name(run))]
    if seen.parameters:
        found.append(("parameters", _large(seen.parameters)))
    if seen.sequences:
        spans = sorted(set(seen.lengths))
        length = f" × {spans[0]}{f'–{spans[-1]}' if len(spans) > 1 else ''} tokens" if spans else ""
        found.append(("inputs", f"{seen.sequences} sequence{'s' if seen.sequences > 1 else ''}{length}"))
    if seen.weights_dtype:
        both = seen.arithmetic_dtype and seen.arithmetic_dtype != seen.weights_dtype
        found.append(("weights", f"{seen.weights_dtype}{f', arithmetic {seen.arithmetic_dtype}' if both else ''}"))
    relative = run.floor.get("relative")
    if isinstance(relative, (int, float)):
        found.append(("float floor", number(float(relative))))
    if seen.token_policy:
        found.append(("tokens counted", seen.token_policy))
    return [(name, clipped(words)) for name, words in found]


def origin_facts(run: Run) -> list[tuple[str, str]]:
    """Everything the run says about itself, in words."""
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
    """The command line that made the run, quoted for a shell."""
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
    """What a ``measure`` run could show besides, with the command for it."""
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

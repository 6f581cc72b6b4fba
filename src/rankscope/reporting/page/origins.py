"""Where a run comes from, and how to make it again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from rankscope.reporting.page.parts import Missing
from rankscope.reporting.page.wording import clipped, visible
from rankscope.runs.run import Run
from rankscope.runs.text import number

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

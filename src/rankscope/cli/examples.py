"""Examples shown below the help of each command. Every line runs as printed in the tests, offline, within seconds."""

from __future__ import annotations

from rankscope.cli.commands import COMMANDS
from rankscope.verbs._spec import VERBS, verbs_in_order


def examples() -> dict[str, tuple[str, ...]]:
    """The examples of every command, from its declaration."""
    verbs = {verb.name: verb.examples for verb in verbs_in_order()}
    return {**verbs, **{name: command.examples for name, command in COMMANDS.items()}}


def epilog(command: str) -> str | None:
    """The examples of a command, for the end of its help; its first line keeps click from joining the others.

    Example:
        >>> (epilog("selftest") or "").splitlines()[1:]
        ['Examples:', '  rankscope selftest']
    """
    lines = examples().get(command)
    if lines is None:
        return None
    shared = VERBS[command].under_torchrun if command in VERBS else None
    launched = [f"  {shared}"] if shared else []
    return "\n".join(["\b", "Examples:", *(f"  rankscope {line}" for line in lines), *launched])


def question(text: str | None) -> str | None:
    """The first sentence of a command's help, for the list of commands.

    Example:
        >>> question("Is the paper right? Reproduces a published figure.")
        'Is the paper right?'
    """
    if not text:
        return None
    ends = [text.index(mark) + 1 for mark in ("? ", ". ") if mark in text]
    return text[: min(ends)] if ends else text

"""Commands that are not verbs: they read runs, or describe the program. Extensions add theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import typer

from rankscope._registry import Registry


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        run: the function that typer makes a command of, or a group of commands.
        examples: command lines without the name of the program; tests run them. If one needs a saved run, the line
            that saves it comes first.
        order: its position in the list of commands, after the verbs.
    """

    run: Callable[..., None] | typer.Typer
    examples: tuple[str, ...] = ()
    order: int = 1000


COMMANDS: Registry[Command] = Registry("command")

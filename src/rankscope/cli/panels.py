"""Help in sections: the options of a command by what they are about, the commands by what they are for.

Plain text, so that it can be copied, read aloud and compared; typer draws boxes otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import typer
import typer.core

from rankscope.options import FAIL_IF, Option

# fmt: off
MOST_USED = (
    "inputs", "labels", "loss", "optimizer", "page", "variants", "remedies", "seeds", "sequences", "tokens",
    "depth", "width", "norm_place", "skip_gain", "metrics", "sites", "skip", "theorems", "device", "seed",
    "out", "as_json", "details", "quiet", "figure", "weights",
)
# fmt: on
"""``--help`` lists the first :data:`SHOWN` of them that a command has; all others are under ``--help-all``."""
SHOWN = 10
MANY = 12
"""Commands with at most as many options list all of them."""
WITHOUT_SURGERY = ("doctor", "remedy")
"""Commands that list no surgery: what they are asked about is the model as it is."""
EXECUTION = ("parallel", "offload", "memory")
PANELS = ("What is measured", "Inputs", "Model", "Surgery", "Execution", "Output", "Options")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Start here": ("doctor", "measure", "ablate", "remedy", "exact", "report"),
    "Design and theory": ("predict", "graph", "decompose", "bound"),
    "Many models": ("compare", "sweep", "query"),
    "This installation": ("ls", "env", "selftest"),
}
"""Commands by what they are for; others are listed last."""
INSTEAD = dict.fromkeys(
    ("gauge", "monitor", "train", "watch"),
    "Training is watched from its own loop, in one line: watch = rs.watch(model, optimizer). `rankscope report DIR` "
    "shows what it wrote.",
) | {"masks": "`rankscope graph MASK` says what a mask does to collapse; `rankscope ls masks` lists masks."}
"""What to do for words that are no commands."""


def panel_of(option: Option, outputs: Iterable[Option]) -> str:
    """The section of the help to which an option belongs."""
    if option in tuple(outputs) or option.name == FAIL_IF.name:
        return "Output"
    if option.name in EXECUTION:
        return "Execution"
    return {"model": "Model", "inputs": "Inputs", "surgery": "Surgery", None: "What is measured"}[option.noun]


class PanelledCommand(typer.core.TyperCommand):
    """A command whose ``--help`` lists the options people use, and whose ``--help-all`` lists all, in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each section."""
        names = {parameter.name for parameter in self.params}
        first = [name for name in MOST_USED if name in names and not (name == "skip" and self.has_no_surgery)][:SHOWN]
        short = len(self.params) > MANY and not ctx.meta.get(ALL)
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            title = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = getattr(parameter, "rich_help_panel", None)
            if panel and (parameter.name not in first if short else panel == "Surgery" and self.has_no_surgery):
                continue
            sections.setdefault(title if short or not panel else panel, []).append(record)
        for title in ("Arguments", *PANELS):
            _write(formatter, title, sections.get(title, []))

    @property
    def has_no_surgery(self) -> bool:
        """Whether the command lists no surgery."""
        return self.name in WITHOUT_SURGERY


ALL = "rankscope.help_all"


def show_all(ctx: typer.Context, asked: bool) -> None:
    """Print the help with all options, and exit."""
    if asked:
        ctx.meta[ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


class GroupedCommands(typer.core.TyperGroup):
    """A program whose commands are listed by what they are for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names, or what to do instead."""
        if args and args[0] in INSTEAD and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"No such command {args[0]!r}. {INSTEAD[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each group, and the commands that are in none."""
        known = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        shown = {name: command for name, command in known.items() if command is not None and not command.hidden}
        width = max(map(len, shown), default=0)
        limit = formatter.width - 6 - width
        grouped = {name for names in GROUPS.values() for name in names}
        groups: dict[str, Iterable[str]] = {**GROUPS, "Other": [name for name in shown if name not in grouped]}
        for title, names in groups.items():
            rows = [(name.ljust(width), shown[name].get_short_help_str(limit)) for name in names if name in shown]
            _write(formatter, title, rows)


def _write(formatter: Any, title: str, rows: list[tuple[str, str]]) -> None:
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)

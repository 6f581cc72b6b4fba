"""Builds the command of a verb from its declaration; every verb runs and prints its result in the same way."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope._types import is_named
from rankscope.cli import processes
from rankscope.cli.panels import MANY, panel_of, show_all
from rankscope.cli.showing import fail_where, show_answer, show_run, show_why, wants_progress
from rankscope.cli.streams import echo, remarks_console
from rankscope.errors import InputError
from rankscope.options import Option
from rankscope.runs.places import place_of
from rankscope.verbs._spec import Verb
from rankscope.verbs.calling import call_flat


def command_of(verb: Verb) -> Callable[..., None]:
    """The function that typer turns into a command: one parameter per declared option."""
    declared = (*verb.options, *verb.outputs)

    def command(**given: Any) -> None:
        values = {option.name: _read(option, given[option.name]) for option in declared}
        if verb.name == "doctor" and show_why(values["model"], as_json=values["as_json"]):
            return
        if verb.makes_runs:
            _run_and_show(verb, values)
        else:
            arguments = {option.name: values[option.name] for option in verb.options}
            _announce(arguments, shown=wants_progress(quiet=values["quiet"], no_progress=False))
            show_answer(verb, _called(verb, arguments), values)

    command.__name__ = f"{verb.name}_command"
    command.__doc__ = f"{verb.question} {verb.answer}"
    parameters = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(option),
            annotation=annotation_of(option, panel_of(option, verb.outputs)),
        )
        for option in declared
    ]
    if len(declared) > MANY:
        everything = typer.Option("--help-all", callback=show_all, is_eager=True, help="Show all options and exit.")
        annotation = Annotated[bool, everything]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter("help_all", keyword, default=False, annotation=annotation))
    if verb.explain is not None:
        settings: dict[str, Any] = {"metavar": "CODE", "callback": _explains(verb.explain), "is_eager": True}
        explain = typer.Option("--explain", **settings, help="Explain a finding by its code, with examples, and exit.")
        keyword = inspect.Parameter.KEYWORD_ONLY
        code = Annotated[str | None, explain]
        parameters.append(inspect.Parameter("explain", keyword, default=None, annotation=code))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _explains(explain: Callable[[], Callable[[str], str]]) -> Callable[[str | None], None]:
    """Print what a verb says about a code, and exit."""

    def explained(code: str | None) -> None:
        if code is not None:
            echo(explain()(code))
            raise typer.Exit

    return explained


def _default(option: Option) -> Any:
    if option.is_argument and option.is_required:
        return inspect.Parameter.empty
    return None if option.several else option.default


def annotation_of(option: Option, panel: str | None = None) -> Any:
    """The annotation of an option for typer: its type, flags, help and the section of the help."""
    kind = Enum(option.name, {word: word for word in option.choices}, type=str) if option.choices else option.kind
    wanted: Any = {None: kind, "pair": tuple[kind, kind]}.get(option.several, list[kind])  # type: ignore[valid-type]
    if (option.default is None or option.several) and not (option.is_argument and option.is_required):
        wanted = wanted | None
    return Annotated[wanted, typer_option(option, panel)]


def typer_option(option: Option, panel: str | None = None) -> Any:
    """The flags, bounds, help and section of an option, for typer."""
    settings: dict[str, Any] = {"help": option.help, **option.checks}
    if option.metavar is not None:
        settings["metavar"] = option.metavar
    if option.minimum is not None:
        settings["min"] = option.minimum
    if option.is_argument:
        return typer.Argument(**settings)
    flags = option.flags or (f"--{option.name.replace('_', '-')}",)
    if option.kind is bool and option.default is True:
        flags = tuple(f"{flag}/--no-{flag.removeprefix('--')}" for flag in flags)
    return typer.Option(*flags, **settings, rich_help_panel=panel)


def _read(option: Option, value: Any) -> Any:
    """The value in the form that the Python function expects.

    Raises:
        InputError: there is no such file; a name in the user's code is looked up later.
    """
    if option.kind is Path and option.noun == "inputs" and value is not None:
        if not value.exists() and not is_named(str(value)):  # whoever opens it says what else is wrong
            raise InputError(
                f"There is no file {str(value)!r}. Pass a text file, a file of tensors, or train.py:batch."
            )
        return value
    if option.several in ("names", "expressions"):
        return split_names(value) if option.several == "names" else split_expressions(value)
    if option.several == "repeated":
        return [word.value if isinstance(word, Enum) else word for word in value or ()] or option.default
    return value.value if isinstance(value, Enum) else value


def _run_and_show(verb: Verb, values: Mapping[str, Any]) -> None:
    from rankscope.runs.conditions import parse_condition

    conditions = [parse_condition(words) for words in values.get("fail_if") or ()]
    out, quiet = values["out"], values["quiet"]
    if out is not None:
        place_of(out, "--out", "a folder")  # before the work: a missing package would be found only after it
    shown = {option.name for option in verb.outputs} | {"fail_if"}
    arguments = {name: value for name, value in values.items() if name not in shown}
    arguments["progress"] = wants_progress(quiet=quiet, no_progress=values["no_progress"])
    if verb.is_shared:
        arguments["parallel"] = processes.way(values["parallel"])
    _announce(arguments, shown=arguments["progress"])
    run = _called(verb, arguments)
    if not processes.is_first():
        return
    show_run(run, as_json=values["as_json"], quiet=quiet, out=out, figure=values["figure"])
    fail_where(run, conditions)


def _announce(arguments: Mapping[str, Any], *, shown: bool) -> None:
    """Reading a model takes longest and shows no progress of its own."""
    subject = arguments.get("model", arguments.get("design"))
    if shown and subject is not None:
        remarks_console().print(f"Loading {subject} ...", markup=False, style="dim")


def _called(verb: Verb, arguments: Mapping[str, Any]) -> Any:
    """Call the function under its public name, ``rankscope.NAME``; what the user's own code prints is a message."""
    import rankscope

    with contextlib.redirect_stdout(sys.stderr):  # or it would stand before the object of --json
        if verb.call is not None:
            return verb.call(rankscope, arguments)
        return call_flat(verb, getattr(rankscope, verb.name), arguments)


def split_names(given: Sequence[str] | None) -> list[str] | None:
    """Names from a repeated option, each a comma-separated list; None if there are none.

    Numbers after a comma belong to the name before them, as in ``block.in@0,5``.

    Example:
        >>> split_names(["block.in@0,5,block.out", "final"])
        ['block.in@0,5', 'block.out', 'final']
    """
    names: list[str] = []
    for word in given or ():
        pieces = [piece.strip() for piece in word.split(",") if piece.strip()]
        for position, piece in enumerate(pieces):
            if position > 0 and piece.isdigit() and "@" in names[-1]:
                names[-1] += f",{piece}"
            else:
                names.append(piece)
    return names or None


def split_expressions(given: Sequence[str] | None) -> list[str] | None:
    """Mask expressions from a repeated option; commas inside brackets belong to their expression.

    Example:
        >>> split_expressions(["own,random_sparse(2, 3) | sink(1)", "causal"])
        ['own', 'random_sparse(2, 3) | sink(1)', 'causal']
    """
    expressions: list[str] = []
    for word in given or ():
        depth, start = 0, 0
        for position, letter in enumerate(word):
            depth += (letter == "(") - (letter == ")")
            if letter == "," and depth == 0:
                expressions.append(word[start:position])
                start = position + 1
        expressions.append(word[start:])
    return [expression.strip() for expression in expressions if expression.strip()] or None

"""A user's file as text, and the changes that the doctor prints, made in it as they are printed.

A printed change is a sentence in which instructions quote code: *write* one text *instead of* another in a function,
*remove* or *add* a line, *pass* an argument to a call, *run* a line of Python. Nothing else is done: a change that
quotes other code, or text that is not in the file, is not literal.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import re
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.exam.reports import user_code
from benchmarks.exam.reports.parts import Case

_STEP = re.compile(
    r"in `(?P<where>[^`]+)`,"
    r"|write `(?P<new>[^`]+)` instead of `(?P<old>[^`]+)`"
    r"|remove `(?P<gone>[^`]+)`"
    r"|add `(?P<line>[^`]+)` before `(?P<before>[^`]+)`"
    r"|at the (?P<end>start|end) of `(?P<function>[^`]+)`, add `(?P<inside>[^`]+)`"
    r"|pass `(?P<argument>[^`]+)` to `(?P<callee>[^`]+)`"
    r"|run `(?P<run>[^`]+)`",
    re.IGNORECASE,
)
MASK_ID = 39


class NotLiteralError(Exception):
    """A printed change that cannot be made as it stands."""


def written(call: str, *edits: tuple[str, str, str]) -> Case:
    """A case from the user's file with some lines changed.

    Args:
        call: the call in that file that makes the case.
        edits: function, text in it, and other text.
    """
    source = inspect.getsource(user_code)
    for where, old, new in edits:
        source = _replaced(source, where, old, new)
    return _built(source, call)


_count = 0


def _built(source: str, call: str) -> Case:
    global _count  # each text is a file of its own, as for a user who edits and starts again
    _count += 1
    file = f"train_{_count}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(f"train_{_count}")
    exec(compile(source, file, "exec"), module.__dict__)
    torch.manual_seed(0)
    exec(f"case = {call}", module.__dict__)
    case: Case = module.__dict__["case"]
    return replace(case, source=source, call_in_source=call)


def applied(change: str, case: Case) -> Case:
    """The case with a printed change made in its file or run on its model.

    Raises:
        NotLiteralError: there is nothing to apply, or it does not fit.
    """
    steps = list(_STEP.finditer(change))
    rest = _STEP.sub("", change)
    if not steps or "`" in rest:
        raise NotLiteralError(change)
    source, where, lines = case.source, "", []
    for step in steps:
        told = step.groupdict()
        if told["run"]:
            lines.append(told["run"])
            continue
        if told["where"]:
            where = told["where"]
            continue
        if source is None:
            raise NotLiteralError(f"no file to change: {step.group(0)}")
        if told["new"]:
            source = _replaced(source, where, told["old"], told["new"])
        elif told["gone"]:
            source = _replaced(source, where, told["gone"], "", whole_line=True)
        elif told["line"]:
            source = _line_before(source, where, told["before"], told["line"])
        elif told["inside"]:
            source = _line_inside(source, told["function"], told["inside"], at_end=told["end"].lower() == "end")
        else:
            source = _passed(source, told["callee"], told["argument"])
    if source is not None and source != case.source:
        case = _built(source, case.call_in_source)
    return _run(lines, case) if lines else case


def _run(lines: Sequence[str], case: Case) -> Case:
    """Run the printed lines with the names of a training script."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "copy": copy, "mask_id": MASK_ID}
    given = {"model": case.model, "inputs": case.inputs, "labels": case.labels}
    names |= given
    for line in lines:
        try:
            exec(line, names)
        except (SyntaxError, NameError, AttributeError, TypeError) as error:
            raise NotLiteralError(f"{line}: {error}") from error
    changed = {name: names[name] for name in given}
    if "optimizer" in names:
        changed["optimizer"] = lambda model: _optimizer(lines, model)
    return replace(case, **changed)


def _optimizer(lines: Sequence[str], model: nn.Module) -> torch.optim.Optimizer:
    names: dict[str, Any] = {"torch": torch, "nn": nn, "model": model}
    for line in lines:
        exec(line, names)
    made: torch.optim.Optimizer = names["optimizer"]
    return made


def _function(source: str, where: str) -> tuple[int, int, ast.AST]:
    """First line, line after the last, and the tree of a function or class that is named with its classes."""
    at: Any = ast.parse(source)
    for name in where.split("."):
        found = [one for one in ast.walk(at) if getattr(one, "name", None) == name and hasattr(one, "body")]
        if not found:
            raise NotLiteralError(f"there is no {where}")
        at = found[0]
    return at.lineno - 1, at.end_lineno, at


def _replaced(source: str, where: str, old: str, new: str, *, whole_line: bool = False) -> str:
    first, last, _ = _function(source, where)
    lines = source.splitlines(keepends=True)
    inside = "".join(lines[first:last])
    if old not in inside:
        raise NotLiteralError(f"{where} does not have: {old}")
    line = rf"^ *{re.escape(old)}\n"
    changed = re.sub(line, "", inside, flags=re.MULTILINE) if whole_line else inside.replace(old, new)
    return "".join([*lines[:first], changed, *lines[last:]])


def _line_before(source: str, where: str, before: str, line: str) -> str:
    first, last, _ = _function(source, where)
    lines = source.splitlines(keepends=True)
    places = [at for at in range(first, last) if before in lines[at]]
    if len(places) != 1:
        raise NotLiteralError(f"{where} has {len(places)} lines with: {before}")
    indent = re.match(" *", lines[places[0]])
    assert indent is not None
    return "".join([*lines[: places[0]], f"{indent.group(0)}{line}\n", *lines[places[0] :]])


def _line_inside(source: str, where: str, line: str, *, at_end: bool) -> str:
    _, last, node = _function(source, where)
    lines = source.splitlines(keepends=True)
    body = node.body  # type: ignore[attr-defined]
    at = last if at_end else body[0].lineno - 1
    return "".join([*lines[:at], f"{' ' * body[0].col_offset}{line}\n", *lines[at:]])


def _passed(source: str, callee: str, argument: str) -> str:
    """Give an argument another value in every call of a function, or add it."""
    name = argument.partition("=")[0]
    calls = [
        one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call) and ast.unparse(one.func) == callee
    ]
    if not calls:
        raise NotLiteralError(f"the file does not call {callee}")
    lines = source.splitlines(keepends=True)
    for call in sorted(calls, key=lambda one: (one.end_lineno or 0, one.end_col_offset or 0), reverse=True):
        given = [one for one in call.keywords if one.arg == name]
        if given:
            row, begin, end, new = given[0].lineno - 1, given[0].col_offset, given[0].end_col_offset or 0, argument
        else:
            row, end = (call.end_lineno or 1) - 1, (call.end_col_offset or 1) - 1
            begin, new = end, f", {argument}"
        lines[row] = lines[row][:begin] + new + lines[row][end:]
    return "".join(lines)

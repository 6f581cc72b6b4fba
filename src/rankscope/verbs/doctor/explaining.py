"""What ``doctor --explain CODE`` prints: a row with its experiments, and its smallest bad and good program."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from textwrap import indent

import torch

from rankscope.examination import ROWS, Finding, RowSpec
from rankscope.examination.outcomes import EXPERIMENTS
from rankscope.verbs.doctor.run import doctor


def explained(code: str) -> str:
    """Everything about one row; its sentence is that of the bad program, which is examined for it.

    Raises:
        UnknownNameError: there is no such row.
    """
    spec = ROWS[code]
    needs = ", ".join(("model and inputs", *sorted(spec.needs)))
    lines = [f"{code} ({spec.level}): {spec.title}", "", f"Needs {needs}. An experiment asks:"]
    for name in spec.reads:
        question = inspect.cleandoc(EXPERIMENTS[name].__doc__ or "")
        lines += ["", indent(question, "    ")]
    written = _programs(spec)
    bad, good = (_first(spec, program) for program in (spec.bad, spec.good))
    lines += ["", "Bad:", "", indent(written["bad"], "    "), ""]
    if bad is not None:
        lines += [f"    {bad.kind}: {bad.sentence}", f"    {bad.evidence}"]
        lines += [f"    {'Change' if bad.tried else 'Hint'}: {bad.change}"] * bool(bad.change)
    lines += ["", "Good:", "", indent(written["good"], "    "), ""]
    lines += [f"    {'nothing is found' if good is None else good.sentence}"]
    if written["made of"]:
        lines += ["", "Made of:", "", indent(written["made of"], "    ")]
    return "\n".join(lines)


def _first(spec: RowSpec, make: object) -> Finding | None:
    """What is found by this row in one of its programs."""
    assert callable(make)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        program = make()
        given = {"labels": program.labels, "loss": program.loss, "optimizer": program.optimizer}
        found = doctor(program.model, program.inputs, **given).findings
    return next((one for one in found if isinstance(one, Finding) and one.code == spec.code), None)


def _programs(spec: RowSpec) -> dict[str, str]:
    """The text of both programs, as they are written in the declaration of the row, and of what they are made of."""
    file = inspect.getsourcefile(spec.read)
    text = Path(file or "").read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined = {one.name: one for one in tree.body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
    (declared,) = (one for one in defined[spec.code].decorator_list if isinstance(one, ast.Call))
    programs = {one.arg: one.value for one in declared.keywords if one.arg in ("bad", "good")}
    # Helpers that they name, and those that these name, in the order of the file.
    wanted: set[str] = set()
    waiting: list[ast.AST] = [*programs.values()]
    while waiting:
        names = {node.id for node in ast.walk(waiting.pop()) if isinstance(node, ast.Name)} & set(defined)
        waiting += [defined[name] for name in names - wanted]
        wanted |= names
    parts = [ast.get_source_segment(text, defined[name]) or "" for name in defined if name in wanted]
    shown = {
        str(name): ast.get_source_segment(text, value.body if isinstance(value, ast.Lambda) else value) or ""
        for name, value in programs.items()
    }
    return {**shown, "made of": "\n\n".join(parts)}

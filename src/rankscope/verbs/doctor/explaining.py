"""What ``doctor --explain CODE`` prints: a row with its experiment, and its smallest program.

The lines of the fault are marked as in a patch.
"""

from __future__ import annotations

import inspect
from textwrap import indent

import torch

from rankscope.examination import ROWS
from rankscope.examination.outcomes import EXPERIMENTS
from rankscope.verbs.doctor.run import doctor


def explained(code: str) -> str:
    """Everything about one row; its sentence is that of the program with the fault, which is examined for it.

    Raises:
        UnknownNameError: there is no such row.
    """
    spec = ROWS[code]
    needs = ", ".join(("model and inputs", *sorted(spec.needs)))
    question = inspect.cleandoc(EXPERIMENTS[spec.reads].__doc__ or "")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        program = spec.bad()
        given = {"labels": program.labels, "loss": program.loss, "optimizer": program.optimizer}
        found = doctor(program.model, program.inputs, **given).findings
    said: list[str] = []
    for one in (one for one in found if one.code == code):
        change = f"{'Change' if one.tried else 'Hint'}: {one.change}" if one.change else ""
        said += filter(None, (f"{one.kind}: {one.sentence}", one.evidence, change))
    parts = (
        f"{code} ({spec.level}): {spec.title}",
        f"Needs {needs}. An experiment asks:",
        indent(question, "    "),
        "A program without it, and with it in the lines that are marked:",
        indent("\n".join(spec.bad.beside(spec.good)), "    "),
        "Then doctor says:",
        indent("\n".join(said), "    "),
    )
    return "\n\n".join(parts)

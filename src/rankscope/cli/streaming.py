"""Options of the commands that can read a model larger than memory block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rankscope.execution.support import SUPPORT

Offload = Annotated[
    bool,
    typer.Option(
        "--offload",
        "--stream",
        help="Read a local folder block by block, for a model larger than memory; --stream is the earlier spelling.",
    ),
]


def no_offload_option(verb: str) -> Any:
    """``--offload`` of a verb that has to refuse it: the help says why."""
    return typer.Option("--offload", help=f"Not possible: {SUPPORT[verb].no_offload}.")


Memory = Annotated[
    str | None, typer.Option("--memory", metavar="BUDGET", help="With --offload: keep to this much, e.g. 3GiB.")
]
Work = Annotated[
    Path | None,
    typer.Option(
        "--work", metavar="DIR", file_okay=False, help="With --offload: take up a killed run here; else beside --out."
    ),
]


def work_of(offload: bool, work: Path | None, out: Path | None) -> Path | None:
    """The work folder that was named, else one beside the place where the run is to be saved.

    Example:
        >>> work_of(True, None, Path("runs/llama")).name
        'llama.work'
    """
    if work is not None or not offload or out is None:
        return work
    return out.with_name(f"{out.name}.work")

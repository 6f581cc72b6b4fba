"""``reproduce``: is the paper right? Remeasure one of its figures and compare."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rankscope.errors import InputError
from rankscope.ext.papers._spec import REPRODUCTIONS, Reproduction, Settings
from rankscope.models.hf import require_transformers
from rankscope.models.inputs import InputsLike
from rankscope.models.model import ModelLike
from rankscope.runs.run import Run
from rankscope.runs.storage import write_page
from rankscope.verbs.ablate.run import ablate
from rankscope.verbs.calling import checked
from rankscope.views.figures import drawing_style

FORMATS: Mapping[str, dict[str, Any]] = {
    ".png": {"dpi": 150, "pil_kwargs": {"optimize": True}},
    ".svg": {"metadata": {"Date": None}},
}
TEXT = "text.md"


@checked()
def reproduce(
    name: str,
    model: ModelLike | None = None,
    inputs: InputsLike = None,
    *,
    small: bool = False,
    seeds: int | None = None,
    checkpoints: Mapping[str, str] | None = None,
    text: str | os.PathLike[str] | None = None,
    progress: bool = False,
    keep: str | os.PathLike[str] | None = None,
    only: Sequence[str] = (),
) -> Run:
    """Remeasure a published figure or rerun one of our experiments.

    Args:
        name: one of ``rankscope reproduce --list``.
        model: your own model, to measure the networks of the figure with it; None for the models of the paper.
            Possible if the figure removes components of a model, which ``dong2021-fig2`` does.
        inputs: what your model reads; as in :func:`rankscope.measure`.
        small: use tiny models to check the shapes in seconds.
        seeds: number of random initialisations; None for the reproduction's own number.
        checkpoints: folders or hub names of the original weights, if the reproduction can use them.
        text: a text file to read instead of the built-in sample.
        progress: show a progress bar.
        keep: folder for finished parts, so that an interrupted run can resume.
        only: names of the rows to measure, if the reproduction is a table.

    Returns:
        Every value behind the figure; ``write_reproduction`` draws and describes it. With your own model, the run of
        :func:`rankscope.ablate` that has the same networks; its ``plot()`` draws it.

    Raises:
        UnknownNameError: no such reproduction, or no such row.
        InputError: weights the reproduction does not know, or a model for one that builds its own.

    Example:
        >>> run = reproduce("dong2021-path-census", small=True)
        >>> run.kind
        'reproduce:dong2021-path-census'
    """
    if not isinstance(name, str):
        raise InputError(
            f"name is {type(name).__name__}; expected the name of a reproduction first, then your model: "
            "rankscope.reproduce('dong2021-fig2', model, inputs)."
        )
    wanted = REPRODUCTIONS[name]
    if model is not None:
        return _with_own_model(wanted, model, inputs, progress=progress)
    if inputs is not None:
        raise InputError(f"{name} without a model reads its own inputs. Pass your model too, or text=FILE.")
    require_transformers(f"`reproduce {name}`")
    read, kept = (None if path is None else Path(path) for path in (text, keep))
    settings = wanted.checked(Settings(name, small, seeds, dict(checkpoints or {}), read, progress, kept, tuple(only)))
    started = time.perf_counter()
    run = wanted.run()(settings)
    # Kept parts come from earlier processes: how long the whole took is not known.
    seconds = None if kept else round(time.perf_counter() - started, 3)
    return replace(run, verdict=wanted.show().judge(run), provenance=replace(run.provenance, wall_seconds=seconds))


def _with_own_model(wanted: Reproduction, model: ModelLike, inputs: InputsLike, *, progress: bool) -> Run:
    """The networks of a figure, derived from a model of the user's."""
    if not wanted.variants:
        able = ", ".join(sorted(name for name in REPRODUCTIONS if REPRODUCTIONS[name].variants))
        raise InputError(
            f"{wanted.name} builds its own networks and takes no model; {able} does. To ask about your model, use "
            "rankscope.ablate(model, inputs), with masks= for other attention masks."
        )
    return ablate(model, inputs, variants=wanted.variants, metrics=["relative_residual"], progress=progress)


def reproduction_of(run: Run) -> Reproduction:
    """The reproduction that made a run."""
    return REPRODUCTIONS[run.kind.removeprefix("reproduce:")]


def text_of(run: Run) -> str:
    """The figure, the answer, what the paper says, the results, and the method with its caveats, as Markdown."""
    made_by, seen = reproduction_of(run), run.provenance
    libraries = [name for name in ("torch", "transformers") if name in seen.versions]
    versions = ", ".join(f"{name} {seen.versions[name]}" for name in libraries)
    made = f"Measured {seen.created[:10]} with rankscope {seen.versions.get('rankscope', '')} ({versions})."
    parts = [
        f"# {made_by.title}",
        f"![{made_by.figure}](figure.png)" if made_by.figure else "",
        made_by.show().judge(run),
    ]
    parts += [f"**The paper.** {made_by.paper}", made_by.show().describe(run), *run.notes, made]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def write_reproduction(run: Run, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the rows (Parquet and ``run.json``), each figure as PNG and SVG, and the text.

    Returns:
        The files, the text last.
    """
    home = Path(run.save(folder))
    written = [home / "run.json", *sorted(home.glob("rows-*.parquet"))]
    for stem, figure in reproduction_of(run).show().draw(run).items():
        with drawing_style("reproduce", {"svg.hashsalt": "rankscope", "svg.fonttype": "none"}):
            for suffix, options in FORMATS.items():
                written.append(home / f"{stem}{suffix}")
                figure.savefig(written[-1], **options)
    write_page(home / TEXT, text_of(run))
    return [*written, home / TEXT]

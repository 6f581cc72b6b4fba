"""``reproduce``: is the paper right? Measure one of its figures again and lay both side by side."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rankscope.papers._recipe import RECIPES, Recipe, Settings, checked
from rankscope.runs.run import Run
from rankscope.runs.sheet import drawing_style
from rankscope.runs.storage import write_page

FIGURE_INCHES_TO_DOTS = 150
TEXT = "text.md"


def reproduce(
    name: str,
    *,
    small: bool = False,
    seeds: int | None = None,
    checkpoints: Mapping[str, str] | None = None,
    text: str | os.PathLike[str] | None = None,
    progress: bool = False,
    keep: str | os.PathLike[str] | None = None,
    only: Sequence[str] = (),
) -> Run:
    """Measure a published figure again.

    Args:
        name: one of ``rankscope reproduce --list``.
        small: tiny models, in seconds; the shapes only.
        seeds: random initialisations to average; None for the recipe's own number.
        checkpoints: folders of the original weights, where the recipe can use them.
        text: a text file to read instead of the built-in sample.
        progress: show a progress bar.
        keep: a folder for finished parts, where the recipe is long: an interrupted run goes on from them.
        only: names of the rows wanted, where the recipe is a table.

    Returns:
        Every value behind the figure; ``write_reproduction`` draws and describes it.

    Raises:
        UnknownNameError: no such reproduction.
        InputError: weights the recipe does not know.

    Example:
        >>> run = reproduce("dong2021-path-census", small=True)
        >>> run.kind
        'reproduce:dong2021-path-census'
    """
    recipe = RECIPES[name]
    folder = None if text is None else Path(text)
    settings = Settings(
        small=small,
        seeds=seeds,
        checkpoints=dict(checkpoints or {}),
        text=folder,
        progress=progress,
        keep=None if keep is None else Path(keep),
        only=tuple(only),
    )
    started = time.perf_counter()
    run = recipe.measure(checked(recipe, settings))
    # With kept parts there is no telling how long the whole would have taken.
    seconds = None if settings.keep else round(time.perf_counter() - started, 3)
    return replace(run, verdict=recipe.conclude(run), provenance=replace(run.provenance, wall_seconds=seconds))


def recipe_of(run: Run) -> Recipe:
    """The recipe a run was made by."""
    return RECIPES[run.kind.removeprefix("reproduce:")]


def text_of(run: Run) -> str:
    """What the paper says, what we see, where they differ and why, as Markdown."""
    recipe = recipe_of(run)
    sources = "; ".join(str(cite) for cite in recipe.cites)
    seen = run.provenance
    versions = ", ".join(
        f"{library} {seen.versions[library]}" for library in ("torch", "transformers") if library in seen.versions
    )
    made = f"Measured {seen.created[:10]} with rankscope {seen.versions.get('rankscope', '')} ({versions})."
    parts = [f"# {recipe.title}", f"Source: {sources}. {made}", f"**The paper.** {recipe.paper}", recipe.describe(run)]
    parts += [f"Note: {note}" for note in run.notes]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def write_reproduction(run: Run, folder: str | os.PathLike[str]) -> list[Path]:
    """Write the rows (Parquet and ``run.json``), each figure as PNG and SVG, and the text.

    Returns:
        The files, the text last.
    """
    home = run.save(folder)
    written = [home / "run.json", *sorted(home.glob("rows-*.parquet"))]
    for stem, figure in recipe_of(run).draw(run).items():
        with drawing_style("reproduce", {"svg.hashsalt": "rankscope", "svg.fonttype": "none"}):
            for suffix, options in ((".png", {"dpi": FIGURE_INCHES_TO_DOTS}), (".svg", {"metadata": {"Date": None}})):
                path = home / f"{stem}{suffix}"
                figure.savefig(path, **options)
                written.append(path)
    path = home / TEXT
    write_page(path, text_of(run))
    return [*written, path]

"""``card``: a run as a block for a model card: Markdown, a picture, and the Hub's evaluation results."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from rankscope._printing import brief
from rankscope._types import path_of
from rankscope.errors import ResultError
from rankscope.reporting.page.chapters import command_of, model_name, tiles
from rankscope.reporting.page.safe_text import (
    LONGEST_PARAGRAPH,
    clipped,
    readable,
    slug,
    split_verdict,
    spoken,
    visible,
)
from rankscope.runs.presenting import showing
from rankscope.runs.run import Run, load_run
from rankscope.runs.storage import write_page
from rankscope.runs.summary import Summary, summarise
from rankscope.views import Table, number
from rankscope.views.palette import BLUE, INK, UNKNOWN
from rankscope.views.text import markdown_text

MARKDOWN, PICTURE, RESULTS = "card.md", "strip.svg", "model-index.yaml"
_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")
_WIDTH, _LEFT, _BAR, _ROW = 720, 170, 22, 40


@dataclass(frozen=True)
class Card:
    """A run in the three forms a model card takes.

    Attributes:
        markdown: verdict, values at the first and last block, and the command that gave them; shows ``strip.svg``.
        svg: one strip per metric, a cell per block, the darker the larger the value.
        yaml: the ``model-index`` block of a model card's metadata, with the value at the last block of each metric.
    """

    markdown: str
    svg: str
    yaml: str

    __repr__ = brief

    def __str__(self) -> str:
        return self.markdown

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``card.md``, ``strip.svg`` and ``model-index.yaml`` into ``folder``, which is made if needed."""
        home = Path(folder)
        try:
            home.mkdir(parents=True, exist_ok=True)
            for name, text in ((MARKDOWN, self.markdown), (PICTURE, self.svg), (RESULTS, self.yaml)):
                write_page(home / name, text)
        except OSError as error:
            raise ResultError(f"The card cannot be written to {home} ({error.strerror}).") from error
        return home


def card(run: Run | str | os.PathLike[str]) -> Card:
    """Make a block for a model card from a run, or from the folder it was saved in.

    Args:
        run: a run whose rows are metrics by block, such as those of ``measure``.

    Raises:
        ResultError: the run has no values by block.

    Example:
        >>> import rankscope
        >>> run = rankscope.measure("init:tiny-bert", rankscope.Inputs(sequences=2, tokens=16))
        >>> card(run).markdown.splitlines()[0]
        '### Rank collapse: init:tiny-bert'
    """
    if not isinstance(run, Run):
        path_of(run, "run", "a run, or the folder it was saved in")
        run = load_run(run)
    with showing(run):
        return _card(run)


def _card(run: Run) -> Card:
    grids = [grid for grid in summarise(run.table) if grid.blocks.any()] if run.table.num_rows else []
    if not grids:
        raise ResultError(f"A card shows metrics by block, and this {clipped(run.kind, 30)} run has none.")
    return Card(_markdown(run, grids), _picture(run, grids), _results(run, grids))


def _markdown(run: Run, grids: list[Summary]) -> str:
    headline, rest = split_verdict(readable(run.verdict))
    facts = ", ".join(f"{name} {words}" for name, words in tiles(run)[1:])
    version = run.provenance.versions.get("rankscope", "")
    return "\n\n".join(
        [
            f"### Rank collapse: {_plain(model_name(run))}",
            f"**{_plain(headline)}.** {_plain(clipped(rest, LONGEST_PARAGRAPH))}".strip(),
            f"![Metrics by block]({PICTURE})",
            *(_ends(grid) for grid in grids),
            f"Measured with rankscope {_plain(version)} on {run.provenance.created[:10]}: {_plain(facts)}.",
            *([f"    $ {command_of(run)}"] if run.provenance.command[:1] == ("rankscope",) else []),
        ]
    ) + "\n"  # fmt: skip


def _ends(grid: Summary) -> str:
    blocks = np.flatnonzero(grid.blocks)
    first, last = int(blocks[0]), int(blocks[-1])
    head = ["metric", *(f"block {grid.labels[line]}" for line in (first, last))]
    rows = [
        (f"{_plain(spoken(metric))} (`{metric}`)", grid.cell(first, column), grid.cell(last, column))
        for column, metric in enumerate(grid.metrics)
    ]
    table = markdown_text(Table(head, rows))
    return table if grid.stack is None else f"{_plain(clipped(grid.stack))}:\n\n{table}"


def _picture(run: Run, grids: list[Summary]) -> str:
    """One strip per metric; the shade of a cell is its value as a share of the metric's largest."""
    rows, top = [], 46
    for grid in grids:
        blocks = np.flatnonzero(grid.blocks)
        for column, metric in enumerate(grid.metrics):
            name = spoken(metric) if grid.stack is None else f"{clipped(grid.stack, 12)}: {spoken(metric)}"
            rows.append(_strip(name, grid, column, blocks, top))
            top += _ROW
    title = escape(f"{model_name(run)}: {split_verdict(readable(run.verdict))[0]}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12"><title>{title}</title>'
        f'<rect width="{_WIDTH}" height="{top}" fill="#ffffff"/>'
        f'<text x="10" y="24" font-size="15" font-weight="600" fill="{INK}">{title}</text>{"".join(rows)}</svg>\n'
    )


def _strip(name: str, grid: Summary, column: int, blocks: np.ndarray, top: int) -> str:
    values = grid.values[blocks, column]
    known = values[np.isfinite(values)]
    largest = float(known.max()) if known.size else 0.0
    least = min(float(known.min()), 0.0) if known.size else 0.0
    width = (_WIDTH - _LEFT - 10) / len(blocks)
    cells = []
    for place, line in enumerate(blocks):
        value = float(values[place])
        share = (value - least) / (largest - least) if largest > least else 1.0
        fill = _shade(share) if np.isfinite(value) else UNKNOWN
        told = escape(f"block {grid.labels[line]}: {grid.cell(int(line), column)}")
        cells.append(
            f'<rect x="{_LEFT + place * width:.2f}" y="{top}" width="{max(width - 1, 0.5):.2f}" height="{_BAR}" '
            f'fill="{fill}"><title>{told}</title></rect>'
        )
    ends = f"{number(float(values[0]))} → {number(float(values[-1]))}"
    return (
        f'<text x="10" y="{top + 11}" fill="{INK}">{escape(name)}</text>'
        f'<text x="10" y="{top + 25}" fill="{INK}" font-size="11">{escape(ends)}</text>{"".join(cells)}'
    )


def _shade(share: float) -> str:
    """A blue between nearly white (0) and full (1)."""
    parts = (int(BLUE[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (part - 255) * (0.06 + 0.94 * share)):02x}" for part in parts)


def _results(run: Run, grids: list[Summary]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    inputs = clipped(run.provenance.inputs or "unknown")
    lines = []
    for grid in grids:
        last = int(np.flatnonzero(grid.blocks)[-1])
        for column, metric in enumerate(grid.metrics):
            value = float(grid.values[last, column])
            if np.isfinite(value):
                place = "last block" if grid.stack is None else f"last block, {clipped(grid.stack, 30)}"
                lines.append(
                    EvalResult(
                        task_type="feature-extraction",
                        dataset_type=slug(inputs),
                        dataset_name=inputs,
                        metric_type=metric,
                        metric_name=f"{spoken(metric)} ({place})",
                        metric_value=float(f"{value:.6g}"),
                    )
                )
    return str(ModelCardData(model_name=model_name(run), eval_results=lines).to_yaml()) + "\n"


def _plain(text: str) -> str:
    """``text`` that Markdown and HTML show as it is."""
    return _SPECIAL.sub(r"\\\1", " ".join(visible(text).split()))

"""The reproductions that the documentation shows: whole, current, and in agreement with the print."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rankscope.ext.papers._curves import line
from rankscope.ext.papers._spec import REPRODUCTIONS, Settings
from rankscope.ext.papers.dong2021_fig2.show import METRIC, compare
from rankscope.ext.papers.mechanisms.rows import MECHANISMS
from rankscope.ext.papers.mechanisms.show import AS_IT_IS, lines_of
from rankscope.ext.papers.reproducing import text_of
from rankscope.runs.rows import only
from rankscope.runs.run import Run

HOME = Path(__file__).resolve().parents[3] / "docs" / "data" / "reproductions"
LARGEST_DATA, LARGEST_FIGURE = 1_000_000, 300_000
LARGE = ("mechanisms", "training-fights-collapse", "width-depth")
"""Reproductions whose figures take longest to draw."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in REPRODUCTIONS])
def test_data_text_and_figures_belong_together(name: str) -> None:
    run = Run.load(HOME / name)
    assert run.kind == f"reproduce:{name}"
    assert run.provenance.created
    text = (HOME / name / "text.md").read_text(encoding="utf-8")
    assert text_of(run) == text
    assert run.verdict in text
    assert all((HOME / name / figure).is_file() for figure in re.findall(r"\]\((\S+\.png)\)", text))
    for path in (HOME / name).iterdir():
        assert path.stat().st_size < (LARGEST_FIGURE if path.suffix == ".png" else LARGEST_DATA), path.name
    assert (HOME / name / "figure.png").is_file()
    assert (HOME / name / "figure.svg").is_file()


def test_all_figures_are_made_again_within_three_hours() -> None:
    assert sum(recipe.minutes for recipe in REPRODUCTIONS.values()) < 180
    timed = {name: Run.load(HOME / name).provenance.wall_seconds for name in REPRODUCTIONS}
    for name, seconds in timed.items():
        assert seconds is None or seconds < 60 * (REPRODUCTIONS[name].minutes + 1), name


def test_dong_figure_2_at_initialisation_is_reproduced() -> None:
    """BERT and ALBERT: every block inside the stated spread plus ours, and no further than a single draw may stray."""
    found = compare(Run.load(HOME / "dong2021-fig2"))
    ours = [item for item in found if item.model in ("BERT", "ALBERT")]
    assert len(ours) == 8
    for item in ours:
        assert item.within_wide == item.compared, item
        assert item.deviations < 3, item
        assert "above" not in item.rounding, item


def test_the_plateau_of_bert_is_float32_rounding_as_printed() -> None:
    run = Run.load(HOME / "dong2021-fig2")
    where = {"model": "BERT", "curve": "SAN", "weights": "init", "text": "words"}
    plateau = line(run.table, METRIC, **where, reading="authors")
    assert plateau.at_floor[3:].all()
    rows = only(run.table, metric="relative_composite_residual_float32", **where)
    late = rows["value"].to_numpy()[rows["layer"].to_numpy() >= 6]
    assert late.mean() == pytest.approx(1.9e-7, rel=0.1)


def test_layer_norm_alone_stops_at_the_floor_of_each_format() -> None:
    run = Run.load(HOME / "wu2024-fig2")
    where = {"part": "figure", "model": "BERT", "weights": "init", "variant": "SAN+LN", "mask": "complete"}
    for dtype in (np.float32, np.float64):
        assert line(run.table, "mu_over_norm", **where, dtype=np.dtype(dtype).name).mean[-1] < 4 * np.finfo(dtype).eps


def test_the_table_of_mechanisms_is_whole_and_its_explanations_hold() -> None:
    run = Run.load(HOME / "mechanisms")
    lines = {(line.mechanism.name, line.change): line for line in lines_of(run)}
    plain = [line for (_, change), line in lines.items() if change == AS_IT_IS]
    assert len(plain) == len(MECHANISMS) >= 18
    assert all(line.seeds == run.extra["size"]["seeds"] >= 3 for line in plain)
    assert {lines[name, AS_IT_IS].order["cut"] for name in ("bert", "vit", "dinov2")} == {3}
    assert {lines[name, AS_IT_IS].order["cut"] for name in ("gpt2", "llama", "shifted-windows")} == {1}
    assert {lines[name, AS_IT_IS].order["cut"] for name in ("sinks", "nystrom", "mamba", "fourier")} == {0}
    assert lines["sinks", "no sinks"].order["cut"] == 1
    assert lines["relative-bias", "no bias"].order["cut"] == 3
    ends = {change: lines["llama", change].ends["full"].log10 for change in (AS_IT_IS, "embeddings x 50")}
    assert 10 ** ends[AS_IT_IS] < 0.5 < 0.9 < 10 ** ends["embeddings x 50"]


@pytest.mark.slow
def test_bert_gives_the_committed_numbers_again() -> None:
    from rankscope.ext.papers.dong2021_fig2.run import measure

    fresh = measure(Settings("dong2021-fig2", seeds=1), ["BERT"]).table
    kept = Run.load(HOME / "dong2021-fig2").table
    for curve in ("SAN", "SAN+MLP", "SAN+skip", "transformer"):
        where = {"metric": METRIC, "model": "BERT", "curve": curve, "reading": "authors", "seed": 0, "text": "words"}
        ours, theirs = (only(table, **where)["value"].to_numpy() for table in (fresh, kept))
        large = theirs > 1e-3
        np.testing.assert_allclose(ours[large], theirs[large], rtol=1e-4)
        assert (ours[~large] < 1e-5).all()

"""What a reader of a figure needs: nothing covered, nothing clipped, whole numbers under blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from rankscope.ext.theory.masks.run import graph as mask_graph
from rankscope.ext.theory.masks.show import plot as masks_plot
from rankscope.runs.run import load_run
from rankscope.views import BEFORE, BarChart, Guide, Line, LineChart, Plot, Style
from rankscope.views.figures import draw

SAVED = Path(__file__).parents[1] / "golden" / "saved"
KINDS = ("measure", "ablate", "decompose", "exact", "bound", "remedy", "predict")
DEEP = "sentence-transformers/a-very-long-name-of-a-checkpoint-with-no-space-in-it-anywhere-at-all-step-120000 " * 2


def crowded() -> Plot:
    """Lines through every corner of the panel, long names and long titles: there is no room inside."""
    x = np.arange(BEFORE, 12)
    waves = tuple(Line(f"variant number {k} of a few", x, 0.5 + 0.5 * np.cos(k + x)) for k in range(6))
    chart = LineChart("residual", waves, guides=(Guide(4, "a block"), Guide(0.5, "a level"), Guide(3.0, "x", axis="x")))
    bars = BarChart("bars", ("one", "two"), (1.0, 1e-3), (Style("#000000"),) * 2)
    return Plot(DEEP, f"{DEEP}\nA second line.", (chart, bars), columns=2)


def figure_of(name: str):
    if name == "crowded":
        return draw(crowded())
    if name == "masks":
        return draw(masks_plot([mask_graph("causal", 32), mask_graph("window(2) | sink(1)", 32)]))
    run = load_run(SAVED / name)
    return run.plot(["relative_residual", "stable_rank"]) if name == "measure" else run.plot()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*KINDS, "masks", "crowded"])
def test_nothing_is_covered_or_clipped_and_blocks_are_whole_numbers(name: str) -> None:
    figure = figure_of(name)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    panels = [axes.get_window_extent(renderer) for axes in figure.axes]
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend() is not None]
    for legend in (*legends, *figure.legends):
        place = legend.get_window_extent(renderer)
        assert not any(place.overlaps(panel) for panel in panels), "a legend covers a panel"
        assert place.x0 >= figure.bbox.x0 - 1, "a legend is clipped at the left"
        assert place.x1 <= figure.bbox.x1 + 1, "a legend is clipped at the right"
    for axes in figure.axes:
        low, high = axes.get_xlim()
        shown = [(tick, name.get_text()) for tick, name in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)]
        if axes.get_xlabel() == "block":
            shown = [(tick, name) for tick, name in shown if low <= tick <= high]
            assert shown
            assert all(name == ("in" if tick == BEFORE else f"{tick:.0f}") and tick % 1 == 0 for tick, name in shown)
    titles = [*figure.texts, *(text for axes in figure.axes for text in (axes.title, axes._left_title))]
    for text in (one for one in titles if one.get_text()):
        place = text.get_window_extent(renderer)
        assert place.x1 <= figure.bbox.x1, f"clipped: {text.get_text()[:40]}"
    for axes in figure.axes:
        left, right = (text.get_window_extent(renderer) for text in (axes._left_title, axes._right_title))
        assert not (axes.get_title("right") and left.overlaps(right)), f"titles overlap: {axes.get_title('left')}"


def test_the_title_of_a_folder_has_no_path() -> None:
    run = load_run(SAVED / "measure")
    cached = replace(run.provenance, model="../cache/hub/models/minilm", origin="folder")
    figure = replace(run, provenance=cached).plot()
    settings = figure.texts[2].get_text()
    assert settings.startswith("minilm,")
    assert "/" not in settings

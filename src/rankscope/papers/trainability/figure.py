"""What was reached after training above what was predicted before it, and one against the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rankscope.papers._drawing import FAINT, INK, figure_with_head, plain_axes
from rankscope.papers.trainability.reading import Networks, networks_of, skills

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from rankscope.runs.run import Run

Floats = NDArray[np.float64]
DEEPEST = -4.0
"""log10 of the least residual that has a colour of its own."""
WIDTHS = ("#E69F00", "#0072B2", "#009E73", "#CC79A7")
SLICES = {"map": "o", "heads": "s", "std": "^"}


def draw_map(run: Run) -> dict[str, Figure]:
    """``figure``: a column per width; accuracy, prediction; then all networks, and what each number tells."""
    networks = networks_of(run)
    widths = sorted({design[1] for design in networks.design})
    heads = int(run.extra["size"]["heads"])
    figure, panels = figure_with_head(
        2,
        len(widths) + 1,
        "Does the prediction at initialisation tell which corner trains?",
        f"BERT with scaled skips on the sort task, {run.extra['size']['steps']} steps, {len(set(networks.seed))} "
        f"seed{'s' if len(set(networks.seed)) > 1 else ''}, {heads} heads, weights of standard deviation "
        "1/sqrt(width). Numbers: accuracy on unseen sequences, mean over seeds; log10 of the predicted relative "
        "residual after the last block.",
        panel=(2.55, 2.35),
    )
    images: list[AxesImage] = []
    for column, width in enumerate(widths):
        inside = np.array(
            [
                design[1] == width and design[2] == heads and design[4] == f"{width**-0.5:.4g}"
                for design in networks.design
            ]
        )
        chosen = networks.where(inside)
        top = _heat(panels[0][column], chosen, chosen.accuracy, (0.0, 1.0), "viridis", "{:.2f}")
        low = _heat(panels[1][column], chosen, chosen.predicted, (DEEPEST, 0.0), "cividis", "{:.1f}")
        panels[0][column].set_title(f"width {width}", size=8.5, color=INK)
        panels[1][column].set_xlabel("skip gain")
        images = [top, low]
    for row, (image, label) in enumerate(zip(images, ("accuracy reached", "log10 predicted"), strict=True)):
        panels[row][0].set_ylabel("blocks")
        bar = figure.colorbar(image, ax=panels[row][len(widths) - 1], extend="neither" if row == 0 else "min")
        bar.set_label(label, size=8)
    _scatter(panels[0][-1], networks, widths, heads)
    _bars(panels[1][-1], networks)
    return {"figure": figure}


def _heat(
    axes: Axes, networks: Networks, values: Floats, limits: tuple[float, float], colours: str, form: str
) -> AxesImage:
    depths, gains = np.unique(networks.depth), np.unique(networks.gain)
    grid = np.full((depths.size, gains.size), np.nan)
    for row, depth in enumerate(depths):
        for column, gain in enumerate(gains):
            here = values[(networks.depth == depth) & (networks.gain == gain)]
            grid[row, column] = here.mean() if here.size else np.nan
    image = axes.imshow(
        np.clip(grid, *limits), aspect="auto", cmap=colours, vmin=limits[0], vmax=limits[1], interpolation="nearest"
    )
    middle = sum(limits) / 2
    for row, column in np.ndindex(grid.shape):
        value = grid[row, column]
        if np.isfinite(value):
            words = form.format(value) if value > -100 else f"−1e{np.log10(-value):.0f}"
            axes.text(
                column, row, words.replace("-", "−"), ha="center", va="center", size=6.8,
                color="#ffffff" if value < middle else "#111111",
            )  # fmt: skip
    axes.set_xticks(range(gains.size), [f"{gain:g}" for gain in gains])
    axes.set_yticks(range(depths.size), [f"{depth:g}" for depth in depths])
    axes.tick_params(colors=INK, labelsize=8, length=2)
    return image


def _scatter(axes: Axes, networks: Networks, widths: list[int], heads: int) -> None:
    score = -np.log10(np.maximum(-networks.predicted, 0.03))
    for colour, width in zip(WIDTHS, widths, strict=False):
        for kind, marker in SLICES.items():
            inside = np.array([design[1] == width and _kind(design, heads) == kind for design in networks.design])
            if inside.any():
                axes.scatter(
                    score[inside], networks.accuracy[inside], s=13, marker=marker, color=colour, alpha=0.7, lw=0,
                    label=f"width {width}" if kind == "map" else None,
                )  # fmt: skip
    axes.axhline(networks.learnt_at, color=FAINT, lw=0.8, linestyle="--")
    ticks = [tick for tick in (-8, -6, -4, -2, 0) if score.min() - 0.3 <= tick <= score.max() + 0.3]
    axes.set_xticks(ticks, [f"$10^{{-{10.0**-tick:g}}}$" if tick >= -2 else f"$10^{{-10^{-tick}}}$" for tick in ticks])
    axes.set_ylim(0, 1)
    axes.set_xlabel("predicted relative residual")
    axes.set_ylabel("accuracy")
    axes.legend(frameon=False, fontsize=7, loc="upper left", handletextpad=0.1, labelcolor=INK)
    plain_axes(axes)


def _kind(design: tuple[int, int, int, str, str], heads: int) -> str:
    if design[2] != heads:
        return "heads"
    return "map" if design[4] == f"{design[1] ** -0.5:.4g}" else "std"


def _bars(axes: Axes, networks: Networks) -> None:
    found = [skill for skill in skills(networks) if np.isfinite(skill.area.value)]
    for place, skill in enumerate(found):
        low, high = (end if np.isfinite(end) else skill.area.value for end in (skill.area.low, skill.area.high))
        axes.plot([low, high], [place, place], color=INK, lw=1.2)
        axes.plot(skill.area.value, place, "o", color="#0072B2", markersize=5)
        axes.text(
            skill.area.value, place - 0.18, f"{skill.area.value:.2f}", ha="center", va="bottom", size=7, color=INK
        )
    axes.set_yticks(range(len(found)), [skill.name.replace(" before", "\nbefore") for skill in found])
    axes.set_ylim(len(found) - 0.5, -0.7)
    axes.axvline(0.5, color=FAINT, lw=0.8, linestyle="--")
    axes.set_xlim(0.3, 1.03)
    axes.set_xlabel("area under the curve")
    plain_axes(axes)
    axes.grid(axis="y", visible=False)

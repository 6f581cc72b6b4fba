"""Accuracy after training compared with the prediction before it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.ext.papers._curves import Array
from rankscope.ext.papers._drawing import Look
from rankscope.ext.papers._spec import METHOD
from rankscope.ext.papers.width_depth.ranks import BootstrapInterval, area_under_curve, rank_correlation, with_interval
from rankscope.ext.theory.prediction import AGREEMENT
from rankscope.views import Table, number
from rankscope.views.figures import headed_figure, plain_axes
from rankscope.views.palette import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from rankscope.runs.run import Run

RESIDUAL = "log10_relative_residual"
QUARTER = 0.25
"""How far from the best answer per position to a perfect one a network must come to have learned."""
Design = tuple[int, int, int, str, str]
"""Depth, width, heads, gain and standard deviation."""


@dataclass(frozen=True, eq=False)
class Networks:
    """One entry per trained network.

    Attributes:
        design: of each.
        seed: of each.
        predicted: log10 of the relative residual after the last block, mean over draws, without any weights.
        measured: the same of this network before training, in exact arithmetic, mean over sequences.
        accuracy: on held-out sequences, after the fixed budget.
        loss: on training batches, at the end.
        learnt_at: accuracy from which a network counts as having learned.
    """

    design: tuple[Design, ...]
    seed: NDArray[np.int64]
    predicted: Array
    measured: Array
    accuracy: Array
    loss: Array
    learnt_at: float

    @property
    def group(self) -> NDArray[np.int64]:
        """Number of the design of each network."""
        known = {design: number for number, design in enumerate(dict.fromkeys(self.design))}
        return np.array([known[design] for design in self.design], dtype=np.int64)

    @property
    def depth(self) -> Array:
        """Blocks of each."""
        return np.array([float(design[0]) for design in self.design])

    @property
    def gain(self) -> Array:
        """Skip gain of each."""
        return np.array([float(design[3]) for design in self.design])

    @property
    def learnt(self) -> NDArray[np.bool_]:
        """Which have learned."""
        return self.accuracy >= self.learnt_at

    def where(self, chosen: NDArray[np.bool_]) -> Networks:
        """Some of them."""
        rows = np.flatnonzero(chosen)
        return Networks(
            tuple(self.design[row] for row in rows),
            self.seed[rows],
            self.predicted[rows],
            self.measured[rows],
            self.accuracy[rows],
            self.loss[rows],
            self.learnt_at,
        )


def networks_of(run: Run) -> Networks:
    """Every network of a map."""
    groups: dict[tuple[str, str, Design, int], list[float]] = {}
    kept = run.table.filter(pc.is_finite(run.table["value"]))
    names = ("metric", "source", "depth", "width", "heads", "gain", "std", "seed", "value")
    for metric, source, *design, seed, value in zip(*(kept[name].to_pylist() for name in names), strict=True):
        groups.setdefault((metric, source, tuple(design), seed), []).append(value)
    trained = [(design, seed) for metric, _, design, seed in groups if metric == "accuracy"]

    def means(metric: str, source: str, drawn: int | None = None) -> Array:
        keys = ((metric, source, design, seed if drawn is None else drawn) for design, seed in trained)
        return np.array([float(np.mean(groups[key])) for key in keys])

    blind = float(run.extra["blind"]["position"])
    return Networks(
        tuple(design for design, _ in trained),
        np.array([seed for _, seed in trained], dtype=np.int64),
        means(RESIDUAL, "predicted", -1),
        means(RESIDUAL, "measured"),
        means("accuracy", "trained"),
        means("loss", "trained"),
        blind + QUARTER * (1.0 - blind),
    )


@dataclass(frozen=True)
class Skill:
    """How well a number known before training predicts how a network ends.

    Attributes:
        name: of the number.
        area: area under the ROC curve for having learned.
        correlation: rank correlation with the accuracy.
    """

    name: str
    area: BootstrapInterval
    correlation: BootstrapInterval


def skills(networks: Networks) -> list[Skill]:
    """The prediction, the measurement before training, and two rules that need neither."""
    scores = {
        "predict": networks.predicted,
        "measured before training": networks.measured,
        "fewer blocks": -networks.depth,
        "larger gain": networks.gain,
    }

    def area(score: Array, outcome: Array) -> float:
        return area_under_curve(score, outcome, networks.learnt_at)

    def skill(name: str, score: Array) -> Skill:
        return Skill(
            name, *(with_interval(f, score, networks.accuracy, networks.group) for f in (area, rank_correlation))
        )

    return [skill(name, score) for name, score in scores.items()]


def judge(run: Run) -> str:
    """How well the prediction separates the networks that learn."""
    networks = networks_of(run)
    if run.extra["small"]:
        return f"Small size: {len(networks.design)} tiny networks were trained for a few steps; nothing follows."
    best, _, depth, gain = skills(networks)
    return (
        "The residual that `predict` computes from the configuration alone separates the networks that learn "
        f"from those that do not with an area under the ROC curve of {best.area}; depth alone reaches "
        f"{depth.area.value:.2f}, the skip gain alone {gain.area.value:.2f}. It does not say how well a network that "
        f"learns will do (rank correlation with accuracy {best.correlation.value:.2f})."
    )


def describe(run: Run) -> str:
    """What is known before training and how well it predicts, by slice; failures; method."""
    networks = networks_of(run)
    head = ("known before training", "area under the ROC curve", "rank correlation with accuracy")
    rows = [(skill.name, str(skill.area), str(skill.correlation)) for skill in skills(networks)]
    parts = [markdown_text(Table(head, rows)), _slices(networks), _failures(networks), METHOD, _method(run, networks)]
    return "\n\n".join(parts)


def _slices(networks: Networks) -> str:
    kinds = [(width, heads, std) for _, width, heads, _, std in networks.design]
    rows = []
    for kind in dict.fromkeys(kinds):
        inside = networks.where(np.array([other == kind for other in kinds]))
        area = area_under_curve(inside.predicted, inside.accuracy, inside.learnt_at)
        rows.append(
            (
                *map(str, kind),
                f"{int(inside.learnt.sum())} of {len(inside.design)}",
                f"{area:.2f}" if np.isfinite(area) else "–",
                f"{rank_correlation(inside.predicted, inside.accuracy):.2f}",
            )
        )
    head = ("width", "heads", "weight std", "learned", "area under the ROC curve", "rank correlation")
    return "Within each slice only depth and gain vary:\n\n" + markdown_text(Table(head, rows))


def _failures(networks: Networks) -> str:
    low, cut = networks.predicted < np.log10(AGREEMENT), best_cut(networks)
    words = (
        f"Of the {int(low.sum())} networks predicted below {number(AGREEMENT)}, where `predict` says that tokens "
        f"agree, {int((low & networks.learnt).sum())} learned; of the other {int((~low).sum())}, "
        f"{int((~low & networks.learnt).sum())} did."
    )
    if not np.isfinite(cut):
        return words
    hopes = (networks.predicted >= cut) & ~networks.learnt
    alarms = (networks.predicted < cut) & networks.learnt
    return (
        f"**Where it fails.** {words} The threshold that separates these networks best is 10^{cut:.2f}, chosen on the "
        f"same networks; it is wrong on {int(hopes.sum() + alarms.sum())} of {len(networks.design)}. Predicted to "
        f"learn but did not: {_listed(networks, hopes)}. Predicted to fail but learned: {_listed(networks, alarms)}."
    )


def best_cut(networks: Networks) -> float:
    """The predicted value that best separates networks that learn from those that do not; NaN if all did, or none."""
    learnt = networks.learnt
    if learnt.all() or not learnt.any():
        return float("nan")
    cuts = np.unique(networks.predicted)
    gains = [(networks.predicted[learnt] >= cut).mean() + (networks.predicted[~learnt] < cut).mean() for cut in cuts]
    return float(cuts[int(np.argmax(gains))])


def _listed(networks: Networks, chosen: NDArray[np.bool_]) -> str:
    groups: dict[str, list[str]] = {}
    counts = Counter(networks.design[row] for row in np.flatnonzero(chosen))
    for (depth, width, heads, gain, std), count in sorted(counts.items()):
        seeds = "" if count == 1 else f" (x{count})"
        kind = f"width {width}, {heads} heads, std {std}"
        groups.setdefault(kind, []).append(f"{depth} blocks at gain {gain}{seeds}")
    return "; ".join(f"{kind}: {', '.join(designs)}" for kind, designs in groups.items()) or "none"


def _method(run: Run, networks: Networks) -> str:
    plan, size, blind = run.extra["plan"], run.extra["size"], run.extra["blind"]
    differ = np.abs(networks.predicted - networks.measured)[networks.measured > -10]
    agree = rank_correlation(networks.predicted, networks.measured)
    return (
        f"{len(networks.design)} networks of {len(set(networks.design))} designs ({len(set(networks.seed))} seeds "
        f"each) were trained for {plan['steps']} steps of {plan['batch']} sequences (AdamW, learning rate "
        f"{plan['rate']:g}) to sort 8 of 10 symbols, on {size['learnt']} training sequences. Accuracies range from "
        f"{networks.accuracy.min():.2f} to {networks.accuracy.max():.2f}; the best constant answer reaches "
        f"{blind['symbol']:.2f}, the best answer per position {blind['position']:.2f}, and the best answer per "
        f"sequence, the most that a collapsed network can reach, {blind['sequence']:.2f}. A network counts as having "
        f"learned from an accuracy of {networks.learnt_at:.2f}, a quarter of the way from the per-position answer to "
        f"1; {int(networks.learnt.sum())} did. Predicted and measured residuals before training differ by "
        f"{np.median(differ):.2f} decades in the median above 1e-10 (rank correlation {agree:.2f}). Intervals are "
        "bootstrap intervals over designs. One task, one family (BERT, LayerNorm after each sum) and one training "
        "recipe were tested; a network that has not learned in this many steps might learn later."
    )


DEEPEST = -4.0
"""log10 of the smallest residual on the colour scale."""


def draw(run: Run) -> dict[str, Figure]:
    """``figure``: a column per width; accuracy, prediction; then all networks, and what each number tells."""
    networks = networks_of(run)
    widths = sorted({design[1] for design in networks.design})
    heads, seeds = int(run.extra["size"]["heads"]), len(set(networks.seed))
    figure, panels = headed_figure(
        "Does the prediction at initialisation tell which designs train?",
        f"BERT with scaled skips on the sort task, {run.extra['size']['steps']} steps, {seeds} "
        f"seed{'s' if seeds > 1 else ''}, {heads} heads, weights of standard deviation 1/sqrt(width). Top: accuracy "
        "on unseen sequences, mean over seeds. Bottom: log10 of the predicted relative residual after the last block.",
        rows=2,
        columns=len(widths) + 1,
        panel_size=(2.55, 2.35),
        asked_by="reproduce",
    )
    kinds = np.array([_kind(design, heads) for design in networks.design])
    width_of = np.array([design[1] for design in networks.design])
    for column, width in enumerate(widths):
        chosen = networks.where((width_of == width) & (kinds == "map"))
        top = _heat(panels[0][column], chosen, chosen.accuracy, (0.0, 1.0), "viridis", "{:.2f}")
        low = _heat(panels[1][column], chosen, chosen.predicted, (DEEPEST, 0.0), "cividis", "{:.1f}")
        panels[0][column].set_title(f"width {width}", size=8.5, color=INK)
        panels[1][column].set_xlabel("skip gain")
    for row, (image, label) in enumerate(((top, "accuracy"), (low, "log10 predicted residual"))):
        panels[row][0].set_ylabel("blocks")
        bar = figure.colorbar(image, ax=panels[row][len(widths) - 1], extend="neither" if row == 0 else "min")
        bar.set_label(label, size=8)
    _scatter(panels[0][-1], networks, width_of, kinds)
    _bars(panels[1][-1], networks)
    return {"figure": figure}


def _kind(design: Design, heads: int) -> str:
    if design[2] != heads:
        return "heads"
    return "map" if design[4] == f"{design[1] ** -0.5:.4g}" else "std"


def _heat(
    axes: Axes, networks: Networks, values: Array, limits: tuple[float, float], colours: str, form: str
) -> AxesImage:
    depths, gains = np.unique(networks.depth), np.unique(networks.gain)
    cells = [[values[(networks.depth == depth) & (networks.gain == gain)] for gain in gains] for depth in depths]
    grid = np.array([[here.mean() if here.size else np.nan for here in row] for row in cells])
    ends: Look = {"vmin": limits[0], "vmax": limits[1]}
    image = axes.imshow(np.clip(grid, *limits), aspect="auto", cmap=colours, interpolation="nearest", **ends)
    for (row, column), value in np.ndenumerate(grid):
        if np.isfinite(value):
            words = form.format(value) if value > -100 else f"−1e{np.log10(-value):.0f}"
            colour = "#ffffff" if value < sum(limits) / 2 else "#111111"
            axes.text(column, row, words.replace("-", "−"), ha="center", va="center", size=6.8, color=colour)
    axes.set_xticks(range(gains.size), [f"{gain:g}" for gain in gains])
    axes.set_yticks(range(depths.size), [f"{depth:g}" for depth in depths])
    axes.tick_params(colors=INK, labelsize=8, length=2)
    return image


def _scatter(axes: Axes, networks: Networks, width_of: NDArray[np.int64], kinds: NDArray[np.str_]) -> None:
    score = -np.log10(np.maximum(-networks.predicted, 0.03))
    for colour, width in zip((ORANGE, BLUE, GREEN, PURPLE), np.unique(width_of), strict=False):
        for kind, marker in {"map": "o", "heads": "s", "std": "^"}.items():
            inside, label = (width_of == width) & (kinds == kind), f"width {width}" if kind == "map" else None
            if inside.any():
                look: Look = {"s": 13, "marker": marker, "color": colour, "alpha": 0.7, "lw": 0, "label": label}
                axes.scatter(score[inside], networks.accuracy[inside], **look)
    axes.axhline(networks.learnt_at, color=FAINT, lw=0.8, linestyle="--")
    ticks = [tick for tick in (-8, -6, -4, -2, 0) if score.min() - 0.3 <= tick <= score.max() + 0.3]
    axes.set_xticks(ticks, [f"$10^{{-{10.0**-tick:g}}}$" if tick >= -2 else f"$10^{{-10^{-tick}}}$" for tick in ticks])
    axes.set_ylim(0, 1)
    axes.set_xlabel("predicted relative residual")
    axes.set_ylabel("accuracy")
    axes.legend(frameon=False, fontsize=7, loc="upper left", handletextpad=0.1, labelcolor=INK)
    plain_axes(axes)


def _bars(axes: Axes, networks: Networks) -> None:
    finite = [skill for skill in skills(networks) if np.isfinite(skill.area.value)]
    for place, skill in enumerate(finite):
        value = skill.area.value
        ends = [end if np.isfinite(end) else value for end in (skill.area.low, skill.area.high)]
        axes.plot(ends, [place, place], color=INK, lw=1.2)
        axes.plot(value, place, "o", color=BLUE, markersize=5)
        axes.text(value, place - 0.18, f"{value:.2f}", ha="center", va="bottom", size=7, color=INK)
    axes.set_yticks(range(len(finite)), [skill.name.replace(" before", "\nbefore") for skill in finite])
    axes.set_ylim(len(finite) - 0.5, -0.7)
    axes.axvline(0.5, color=FAINT, lw=0.8, linestyle="--")
    axes.set_xlim(0.3, 1.03)
    axes.set_xlabel("area under the ROC curve")
    plain_axes(axes)
    axes.grid(axis="y", visible=False)

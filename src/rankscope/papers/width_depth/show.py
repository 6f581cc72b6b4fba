"""Accuracy after training compared with the prediction before it: read, described and drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.papers._curves import Array
from rankscope.papers._drawing import Look
from rankscope.papers.width_depth.ranks import BootstrapInterval, area_under_curve, rank_correlation, with_interval
from rankscope.runs.prediction import AGREEMENT
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
"""How far from an answer without looking to a perfect one a network must come to have learnt."""
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
        learnt_at: accuracy from which a network counts as having learnt.
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
        """Which have learnt."""
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
        area: area under the curve for having learnt.
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
        return f"Small size: {len(networks.design)} tiny networks were predicted, trained and judged; nothing follows."
    best = skills(networks)[0]
    return (
        f"The residual predicted without weights tells which of {len(networks.design)} networks learn with an area "
        f"under the curve of {best.area} and a rank correlation with their accuracy of {best.correlation}."
    )


def describe(run: Run) -> str:
    """What we see, how well the prediction tells it, where it fails, what it rests on."""
    networks = networks_of(run)
    head = ("known before training", "area under the curve, learnt or not", "rank correlation with accuracy")
    rows = [(skill.name, str(skill.area), str(skill.correlation)) for skill in skills(networks)]
    parts = [
        _seen(run, networks),
        markdown_text(Table(head, rows)),
        _slices(networks),
        _level(networks),
        _failures(networks),
    ]
    if run.extra["small"]:
        parts.insert(
            0,
            "**Small size.** Tiny networks, hardly trained: the code runs, and nothing here answers the question.",
        )
    return "\n\n".join(part for part in [*parts, _rests(run, networks)] if part)


def _seen(run: Run, networks: Networks) -> str:
    blind = run.extra["blind"]
    differ = np.abs(networks.predicted - networks.measured)[networks.measured > -10]
    agree = rank_correlation(networks.predicted, networks.measured)
    return (
        f"**What we see.** {len(networks.design)} networks of {len(set(networks.design))} designs, each trained for "
        f"{run.extra['size']['steps']} steps with its skips scaled, end at accuracies from "
        f"{networks.accuracy.min():.2f} to {networks.accuracy.max():.2f}. One answer for everything gets "
        f"{blind['symbol']:.2f}, one for each position {blind['position']:.2f}, and the best one for each sequence, "
        f"all that a collapsed network can give, {blind['sequence']:.2f}. A network that comes a quarter of the way "
        f"from the position's answer to 1 ({networks.learnt_at:.2f}) is said to have learnt: "
        f"{int(networks.learnt.sum())} have. The residual predicted without weights is that of the networks "
        f"themselves: median difference {np.median(differ):.2f} decades where it is above 1e-10, rank correlation "
        f"{agree:.2f}."
    )


def _slices(networks: Networks) -> str:
    kinds = [(width, heads, std) for _, width, heads, _, std in networks.design]
    words = []
    for kind in dict.fromkeys(kinds):
        inside = networks.where(np.array([other == kind for other in kinds]))
        area = area_under_curve(inside.predicted, inside.accuracy, inside.learnt_at)
        words.append(
            "width {}, {} heads, std {}: ".format(*kind)
            + f"{int(inside.learnt.sum())} of {len(inside.design)} learnt, "
            + (f"area {area:.2f}" if np.isfinite(area) else "no area")
            + f", rank correlation {rank_correlation(inside.predicted, inside.accuracy):.2f}"
        )
    return "**Slice by slice**, where only depth and gain change: " + "; ".join(words) + "."


def _level(networks: Networks) -> str:
    low = networks.predicted < np.log10(AGREEMENT)
    return (
        f"**At the level `predict` itself calls agreement** ({number(AGREEMENT)}): of {int(low.sum())} networks "
        f"predicted below it {int((low & networks.learnt).sum())} learnt; of {int((~low).sum())} above it "
        f"{int((~low & networks.learnt).sum())}."
    )


def _failures(networks: Networks) -> str:
    cut = best_cut(networks)
    if not np.isfinite(cut):
        return ""
    hopes = (networks.predicted >= cut) & ~networks.learnt
    alarms = (networks.predicted < cut) & networks.learnt
    return (
        f"**Where it fails.** Cut where it separates these networks best (10^{cut:.2f}, chosen on the same networks), "
        f"the prediction is wrong on {int(hopes.sum() + alarms.sum())} of {len(networks.design)}. Kept apart and yet "
        f"not learnt: {_listed(networks, hopes)}. Collapsing further and yet learnt: {_listed(networks, alarms)}."
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


def _rests(run: Run, networks: Networks) -> str:
    plan, size = run.extra["plan"], run.extra["size"]
    return (
        f"**What it rests on.** One task (sort 8 of 10 symbols, {size['learnt']} sequences to learn from), one family "
        f"(BERT, LayerNorm after each sum), one recipe (AdamW, rate {plan['rate']:g}, {plan['steps']} steps of "
        f"{plan['batch']}), {len(set(networks.seed))} seeds. A network that has not learnt by then might later. "
        "Intervals: bootstrap over designs, seeds of a design kept together."
    )


DEEPEST = -4.0
"""log10 of the least residual that has a colour of its own."""


def draw(run: Run) -> dict[str, Figure]:
    """``figure``: a column per width; accuracy, prediction; then all networks, and what each number tells."""
    networks = networks_of(run)
    widths = sorted({design[1] for design in networks.design})
    heads, seeds = int(run.extra["size"]["heads"]), len(set(networks.seed))
    figure, panels = headed_figure(
        "Does the prediction at initialisation tell which corner trains?",
        f"BERT with scaled skips on the sort task, {run.extra['size']['steps']} steps, {seeds} "
        f"seed{'s' if seeds > 1 else ''}, {heads} heads, weights of standard deviation 1/sqrt(width). Numbers: "
        "accuracy on unseen sequences, mean over seeds; log10 of the predicted relative residual after the last block.",
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
    for row, (image, label) in enumerate(((top, "accuracy reached"), (low, "log10 predicted"))):
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
    found = [skill for skill in skills(networks) if np.isfinite(skill.area.value)]
    for place, skill in enumerate(found):
        value = skill.area.value
        ends = [end if np.isfinite(end) else value for end in (skill.area.low, skill.area.high)]
        axes.plot(ends, [place, place], color=INK, lw=1.2)
        axes.plot(value, place, "o", color=BLUE, markersize=5)
        axes.text(value, place - 0.18, f"{value:.2f}", ha="center", va="bottom", size=7, color=INK)
    axes.set_yticks(range(len(found)), [skill.name.replace(" before", "\nbefore") for skill in found])
    axes.set_ylim(len(found) - 0.5, -0.7)
    axes.axvline(0.5, color=FAINT, lw=0.8, linestyle="--")
    axes.set_xlim(0.3, 1.03)
    axes.set_xlabel("area under the curve")
    plain_axes(axes)
    axes.grid(axis="y", visible=False)

"""Trajectories on the plane, the distance between the two points, and whether the claim holds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.ext.papers._curves import Array
from rankscope.ext.papers._drawing import Look
from rankscope.ext.papers._spec import METHOD
from rankscope.runs.curves import names_in
from rankscope.runs.rows import only
from rankscope.views import Line, Style, Table, number
from rankscope.views.figures import headed_figure, legend_below, plain_axes
from rankscope.views.palette import BLUE, FAINT, GREEN, INK, PURPLE, VERMILION
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

PLACES = ("x_first", "y_first", "x_second", "y_second")
RADIUS, MET, APART = 0.3, 0.01, 10.0
"""Radius of the circle; multiples of the first distance below which two points have met, above which they diverged."""
LEARNED = 0.01
"""A block has learned the circle if its loss is below this share of the loss of always answering the centre."""
ENDS = {"met": "met", "apart": "diverged", "drifted": "drifted off", "kept": "stayed on the circle"}
LAW = (
    "**Why.** For opposite points ±p, attention without skip and biases returns the sum over heads of tanh(pᵀA_h "
    "p/√d) p W_h. Near the centre this is cubic in p, so a block maps a radius r to about c·r³. A circle that such a "
    "block maps to itself has a radial factor of 3: every step triples an error in the radius, inward or outward. The "
    "points therefore meet or diverge after about log(1/error)/log 3 steps, and the sign of the first error decides "
    "which. A skip adds the identity and moves the factor towards 1; a saturated softmax would too."
)


@dataclass(frozen=True, eq=False)
class FreeRun:
    """One block applied to its own output.

    Attributes:
        distance: between the points after 0, 1, ... steps, in float64.
        centre: distance of their midpoint from the centre of the circle.
        exact: decimal logarithm of the distance in exact arithmetic.
        places: (steps, 4), both points; empty except for the first seed.
        loss: at the end of training.
        radial: factor of one step on a small change of radius.
        steps: requested steps; the run is shorter if a point left for good.
    """

    distance: Array
    centre: Array
    exact: Array
    places: Array
    loss: float
    radial: float
    steps: int

    @property
    def end(self) -> str:
        """``"met"``, ``"apart"`` (diverged), ``"drifted"`` (together or not, off the circle) or ``"kept"``."""
        first = self.distance[0]
        if self.distance[-1] < MET * first:
            return "met"
        if self.distance.max() > APART * first or len(self.distance) <= self.steps:
            return "apart"
        off = max(abs(self.distance[-1] / first - 1.0), self.centre[-1] / RADIUS)
        return "kept" if off < 0.1 else "drifted"

    @property
    def learned(self) -> bool:
        """Whether training succeeded; always answering the centre has a loss of half a squared radius."""
        return self.loss < LEARNED * RADIUS**2 / 2

    @property
    def met_at(self) -> int | None:
        """First step at which the points have met; None if they never do."""
        met = np.flatnonzero(self.distance < MET * self.distance[0])
        return int(met[0]) if met.size else None

    @property
    def stays(self) -> int:
        """First step at which the distance is off by a tenth; the number of steps plus one if it never is."""
        off = np.flatnonzero(np.abs(self.distance / self.distance[0] - 1.0) > 0.1)
        return int(off[0]) if off.size else self.steps + 1


def widths(run: Run) -> list[int]:
    """Widths, in the order in which they were run."""
    return [int(width) for width in run.extra["widths"]]


def free_runs(run: Run, variant: str, *some: int) -> list[FreeRun]:
    """Every block of a variant, of all widths or only of these."""
    free_runs_shown = []
    for width in some or widths(run):
        rows = only(run.table, variant=variant, width=width)
        metric, seed = rows["metric"].to_numpy(zero_copy_only=False), rows["seed"].to_numpy()
        value = rows["value"].to_numpy()
        for one in np.unique(seed):
            own = {name: value[(metric == name) & (seed == one)] for name in (*PLACES, *np.unique(metric))}
            free_runs_shown.append(
                FreeRun(
                    distance=own["distance"],
                    centre=own["centre"],
                    exact=own["log10_distance_exact"],
                    places=np.stack([own[name] for name in PLACES], axis=-1),
                    loss=float(own["final_loss"][0]),
                    radial=float(own["radial_factor"][0]),
                    steps=int(run.extra["steps"]),
                )
            )
    return free_runs_shown


def judge(run: Run) -> str:
    """How many blocks lose the circle, with attention alone and with skip and MLP."""
    variants = names_in(run.table, "variant")
    alone, both = free_runs(run, variants[0]), free_runs(run, variants[-1])
    return (
        f"Attention alone loses the circle in {_lost(alone)} of {len(alone)} trained blocks ({_ends(alone)}); with "
        f"skip and MLP, {_lost(both)} of {len(both)} do. The reason is the factor by which one step multiplies an "
        f"error in the radius: {_radial(alone):.2f} for attention alone, {_radial(both):.2f} with skip and MLP."
    )


def describe(run: Run) -> str:
    """The table, the claim, the reason, the method."""
    head = (
        "width", "block", "final loss", "radial factor", "leaves the circle at step", "ends",
        "log10 of the final distance, exact",
    )  # fmt: skip
    rows = [
        (str(width), name, *_cells(free_runs(run, name, width)))
        for width in widths(run)
        for name in names_in(run.table, "variant")
    ]
    plan = run.extra["plan"]
    return "\n\n".join(
        [
            markdown_text(Table(head, rows)),
            f"**Does the claim hold?** {_claim(run)}",
            LAW,
            METHOD,
            f"{run.extra['seeds']} blocks of each kind were trained for {plan['steps']} steps on batches of "
            f"{plan['batch']} of the {run.extra['angles']} angles (AdamW, peak learning rate {plan['rate']:g}) and "
            f"then applied to their own output for {run.extra['steps']} steps. No block has norms. Variants without "
            "a skip have neither of the two; the authors' run left one in place. Ranges are over blocks.",
            f"Points have met when they are closer than {MET:g} of their first distance, and diverged beyond "
            f"{APART:g} times it. A block stays on the circle if distance and midpoint are within 10% at the end. "
            "Training does not fix the midpoint of the two points, so they may also meet far from the circle. "
            "Underflow in the last column means that the distance is zero in exact arithmetic too, because a "
            "saturated softmax gives both points the same weights, or because the logarithm of the distance is itself "
            "out of range (below about -10^18).",
        ]
    )


def _lost(found: list[FreeRun]) -> int:
    return sum(free.end != "kept" for free in found)


def _ends(found: list[FreeRun]) -> str:
    counts = Counter(free.end for free in found)
    return ", ".join(f"{counts[end]} {words}" for end, words in ENDS.items() if counts[end])


def _radial(found: list[FreeRun]) -> float:
    """Geometric mean of the radial factors."""
    return math.exp(math.fsum(math.log(free.radial) for free in found) / len(found))


def _cells(found: list[FreeRun]) -> list[str]:
    exact, losses, radial, stays = (
        sorted(values) for values in zip(*((float(f.exact[-1]), f.loss, f.radial, f.stays) for f in found), strict=True)
    )
    first, last = (f"{step}" if step <= found[0].steps else "never" for step in (stays[0], stays[-1]))
    logs = [f"{value:.3g}" if math.isfinite(value) else "underflow" for value in (exact[0], exact[-1])]
    return [
        f"{number(losses[0])} to {number(losses[-1])}",
        f"{radial[0]:.3f} to {radial[-1]:.3f}",
        first if first == last else f"{first} to {last}",
        _ends(found),
        f"{logs[0]} to {logs[1]}",
    ]


def _claim(run: Run) -> str:
    outcomes = _outcomes(run)
    factors = ", ".join(f"{_radial(free_runs(run, name)):.2f} ({name})" for name in names_in(run.table, "variant"))
    return (
        f"{_answer(run, outcomes)} By blocks: {'; '.join(f'{what} in {n} of {total}' for what, n, total in outcomes)}. "
        f"The radial factor separates the variants: {factors}. An MLP without a skip changes the constant of the cubic "
        "law, but not its order."
    )


def _outcomes(run: Run) -> list[tuple[str, int, int]]:
    """Each outcome the paper describes, the number of blocks that show it, and the number of blocks."""
    name = names_in(run.table, "variant")[0]
    alone, skip, mlp, _ = (free_runs(run, name) for name in names_in(run.table, "variant"))

    def not_or_later(one: FreeRun, other: FreeRun) -> bool:
        return other.met_at is None or (one.met_at is not None and other.met_at > one.met_at)

    outcomes = [("points meet without skip and MLP", sum(free.end == "met" for free in alone), len(alone))]
    for word, others in (("a skip", skip), ("an MLP", mlp)):
        held = sum(not_or_later(one, other) for one, other in zip(alone, others, strict=True))
        outcomes.append((f"points with {word} do not meet, or meet later,", held, len(others)))
    if len(widths(run)) > 1:
        narrow, wide = (free_runs(run, name, width) for width in (min(widths(run)), max(widths(run))))
        longer = sum(one.stays < other.stays for one, other in zip(narrow, wide, strict=True))
        outcomes.append(("the wider block stays on the circle for longer", longer, len(wide)))
    return outcomes


def _answer(run: Run, outcomes: list[tuple[str, int, int]]) -> str:
    """Yes only if every block learned the circle and shows every outcome."""
    blocks = [free for name in names_in(run.table, "variant") for free in free_runs(run, name)]
    failed = [free for free in blocks if not free.learned]
    if failed:
        return (
            f"Not tested: {len(failed)} of {len(blocks)} blocks have not learned the circle (loss up to "
            f"{number(max(free.loss for free in failed))}; always answering the centre gives {number(RADIUS**2 / 2)})."
        )
    whole = sum(held == total for _, held, total in outcomes)
    if whole == len(outcomes):
        return "Yes."
    if not any(held for _, held, _ in outcomes):
        return "No."
    return f"In part: {whole} of {len(outcomes)} outcomes occur in every block."


STYLES = (Style(VERMILION, "s"), Style(BLUE, "o", "--"), Style(PURPLE, "^", "-."), Style(GREEN, "D", ":"))
LEAST, MOST, SHOWN = -24.0, 6.5, 0.62


def draw(run: Run) -> dict[str, Figure]:
    """One row per width: four trajectories, then the distances."""
    names = names_in(run.table, "variant")
    figure, grid = headed_figure(
        "Two points moved around a circle by one trained block applied to its own output",
        f"{run.extra['steps']} steps of 1/1000 of a turn; the grey circle is the target. Trajectories are of one of "
        f"{run.extra['seeds']} trained blocks; a cross marks where one leaves the panel. Right: distance between the "
        "points for every block, in exact arithmetic (lines) and in float64 (dots).",
        rows=len(widths(run)),
        columns=len(STYLES) + 1,
        panel_size=(2.05, 2.15),
        legend_rows=1,
        asked_by="reproduce",
    )
    for row, width in zip(grid, widths(run), strict=True):
        last = row[-1]
        for axes, name, style in zip(row, names, STYLES, strict=False):
            _trajectory(axes, free_runs(run, name, width)[0])
            axes.set_title(name, size=8.5, color=INK)
            for free in free_runs(run, name, width):
                _distance(last, free, style)
        row[0].set_ylabel(f"width {width}", color=INK)
        last.set_title("log10 of the distance", size=8.5, color=INK)
        last.set(ylim=(LEAST, MOST), xlabel="steps")
        last.set_xscale("symlog", linthresh=1)
        last.set_xlim(0, run.extra["steps"])
        last.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
        last.axhline(-16, color=FAINT, linewidth=0.7, linestyle=(0, (4, 3)))
        plain_axes(last)
    legend_below(figure, [Line(name, (), (), style=style) for name, style in zip(names, STYLES, strict=True)])
    return {"figure": figure}


def _trajectory(axes: Axes, free: FreeRun) -> None:
    turn = np.linspace(0, 2 * np.pi, 200)
    axes.plot(RADIUS * np.cos(turn), RADIUS * np.sin(turn), color="#cccccc", linewidth=3.0, zorder=1)
    outside = np.abs(free.places).reshape(-1, 2, 2).max(axis=-1).min(axis=-1) > SHOWN
    seen = int(np.argmax(outside)) + 1 if outside.any() else len(free.places)
    for first, colour in ((0, VERMILION), (2, BLUE)):
        path = free.places[:seen, first : first + 2]
        axes.plot(path[:, 0], path[:, 1], color=colour, linewidth=1.1, marker=".", markersize=2.0, zorder=3)
        axes.plot(*path[0], marker="o", markersize=4.5, markerfacecolor="white", markeredgecolor=colour, zorder=4)
        last = np.clip(path[-1], -0.95 * SHOWN, 0.95 * SHOWN)
        axes.plot(*last, marker="x" if np.any(last != path[-1]) else "o", markersize=4.5, color=colour, zorder=4)
    axes.set(xlim=(-SHOWN, SHOWN), ylim=(-SHOWN, SHOWN), aspect="equal", xticks=[], yticks=[])
    axes.spines[["top", "right", "bottom", "left"]].set_color("#cccccc")


def _distance(axes: Axes, free: FreeRun, style: Style) -> None:
    known = np.where(np.isfinite(free.exact), free.exact, LEAST - 5)
    known = np.maximum(known, LEAST - 5)
    axes.plot(np.arange(known.size), known, color=style.colour, linestyle=style.dash, linewidth=1.2)
    seen = np.flatnonzero(free.distance > 0)
    marked = seen[np.unique(np.geomspace(1, seen.size, 12).astype(int)) - 1]
    dots: Look = {"linestyle": "none", "marker": style.marker, "markersize": 2.4, "color": style.colour}
    axes.plot(marked, np.log10(free.distance[marked]), **dots)

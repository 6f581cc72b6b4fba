"""Whether training slows collapse, changes its order, and what the gradients do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.ext.papers._curves import Array
from rankscope.ext.papers._drawing import Look
from rankscope.ext.papers._spec import METHOD
from rankscope.ext.papers.training_fights_collapse.arms import LONG, OWN, TrainedArm
from rankscope.runs.rows import only
from rankscope.verbs.exact.judge import SMALL
from rankscope.views import Line, Style, Table, number
from rankscope.views.figures import draw_line, headed_figure, plain_axes
from rankscope.views.palette import BLACK, BLUE, FAINT, GREEN, INK, MARKERS, ORANGE, PURPLE, SKY, VERMILION
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

RESIDUAL = "log10_relative_residual"
INVISIBLE = -7.0
"""log10 of the relative residual below which float32 cannot distinguish tokens."""
VANISHED = 1e-3
"""Q and K gradients below this share of the V gradient count as vanished."""


@dataclass(frozen=True, eq=False)
class TrainingCourse:
    """A number over training.

    Attributes:
        steps: at which it was read.
        values: shape ``(steps, seeds)``; NaN where it is not defined.
    """

    steps: NDArray[np.int64]
    values: Array

    @property
    def first(self) -> Array:
        """The first value of each seed."""
        return np.asarray(self.values[0])

    @property
    def last(self) -> Array:
        """The last value of each seed."""
        return np.asarray(self.values[-1])


class Training:
    """The values of one network, over its seeds.

    Args:
        run: of the experiment.
        arm: the network.
    """

    def __init__(self, run: Run, arm: TrainedArm) -> None:
        self.arm = arm
        rows = only(run.table, **arm.at())
        self._table, self._cut = rows.filter(pc.is_null(rows["cut"])), rows.filter(pc.is_valid(rows["cut"]))
        self._after_last: dict[str, str | int] = {"site": "block.out", "layer": arm.depth - 1}
        self.seeds = np.unique(self._table["seed"].to_numpy())

    def course(self, metric: str, reduce: Callable[[pa.Table], float], **where: str | int) -> TrainingCourse:
        """A metric at each step that has it, reduced over blocks and sequences."""
        rows = only(self._table, metric=metric, **where)
        steps = np.unique(rows["step"].to_numpy())
        values = [[reduce(only(rows, step=int(s), seed=int(seed))) for seed in self.seeds] for s in steps]
        return TrainingCourse(steps.astype(np.int64), np.array(values, dtype=np.float64))

    def loss(self) -> TrainingCourse:
        """Of the batch of the step."""
        return self.course("loss", _mean_value)

    def accuracy(self) -> Array:
        """On held-out sequences at the end, one per seed."""
        return self.course("accuracy", _mean_value).last

    def final_loss(self) -> Array:
        """Over the last steps, one per seed."""
        return self.course("final_loss", _mean_value).last

    def residual(self) -> TrainingCourse:
        """log10 of the relative residual after the last block, exact, mean over sequences."""
        return self.course(RESIDUAL, _mean_value, **self._after_last)

    def seen(self) -> TrainingCourse:
        """The same in float32, where it stops at the rounding of the format."""
        return self.course("relative_residual", lambda rows: float(np.log10(_geometric(rows))), **self._after_last)

    def order(self) -> TrainingCourse:
        """Median over blocks and sequences: over those whose tokens nearly agree, if there are any."""
        residuals = _by_place(only(self._table, metric=RESIDUAL, site="block.out"))
        return self.course("order", lambda rows: _median_order(rows, residuals))

    def factor(self) -> TrainingCourse:
        """Geometric mean over blocks and sequences: of the cube in a network of order 3, else of a tiny residual."""
        cubic = float(np.nanmedian(self.order().values)) > 2
        return self.course("factor" if cubic else "linear_factor", _geometric)

    def ratio(self) -> TrainingCourse:
        """Gradient of queries and keys over that of values, in the last block."""
        return self.course("qk_to_v_gradient", _mean_value, layer=self.arm.depth - 1)

    def cut_after(self, variant: str) -> Array:
        """log10 of the residual after the last block when it is cut down only after training, one per seed."""
        rows = only(self._cut, metric=RESIDUAL, cut=variant, **self._after_last)
        return np.array([_mean_value(only(rows, seed=int(seed))) for seed in self.seeds])

    def moved(self, which: str) -> Array:
        """How far a map (``q``, ``k``, ``v``) is from where it started, at the end, mean over blocks, one per seed."""
        return self.course(f"{which}_moved", _mean_value).last


def arms_of(run: Run) -> list[TrainedArm]:
    """The networks that were trained, in order."""
    names = ("family", "variant", "depth", "mask", "longer")
    rows = only(run.table, metric="accuracy")
    return [
        TrainedArm(*facts) for facts in dict.fromkeys(zip(*(rows[name].to_pylist() for name in names), strict=True))
    ]


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _mean_value(rows: pa.Table) -> float:
    return _mean(rows["value"].to_numpy())


def _geometric(rows: pa.Table) -> float:
    values = rows["value"].to_numpy()
    return float(np.exp(_mean(np.log(values[values > 0]))))


Place = tuple[Any, ...]


def _places(rows: pa.Table) -> list[Place]:
    return list(zip(*(rows[name].to_pylist() for name in ("seed", "step", "layer", "sequence")), strict=True))


def _by_place(rows: pa.Table) -> Mapping[Place, float]:
    exact = rows.filter(pc.is_finite(rows["value"]))
    return dict(zip(_places(exact), exact["value"].to_pylist(), strict=True))


def _median_order(rows: pa.Table, residuals: Mapping[Place, float]) -> float:
    known = zip(_places(rows), rows["value"].to_pylist(), strict=True)
    finite = [(residuals.get(place, 0.0), value) for place, value in known if np.isfinite(value)]
    chosen = [value for residual, value in finite if residual < SMALL] or [value for _, value in finite]
    return float(np.median(chosen)) if chosen else float("nan")


def _small(value: float) -> str:
    return number(value) if np.isfinite(value) else "–"


def _spread(values: Array) -> str:
    return f"{values.mean():.2f} ({values.min():.2f}–{values.max():.2f})" if values.size > 1 else f"{values.mean():.2f}"


def _label(arm: TrainedArm) -> str:
    mask = "" if arm.mask == OWN else f", {arm.mask}"
    longer = "" if arm.longer == 1 else f", {arm.longer}× steps"
    return f"{arm.family} {arm.depth}, {arm.variant}{mask}{longer}"


def _parted(trainings: list[Training]) -> tuple[list[Training], list[Training], list[Training]]:
    """Networks collapsed in float32 before training in every seed, the others, and collapsed ones trained longer."""
    usual, longer = ([t for t in trainings if (t.arm.longer > 1) == patient] for patient in (False, True))
    gone, patient = ([t for t in some if (t.residual().first < INVISIBLE).all()] for some in (usual, longer))
    return gone, [t for t in usual if t not in gone], patient


def _back(trainings: list[Training]) -> int:
    """How many have tokens that float32 can distinguish after training, in every seed."""
    return sum(bool((training.residual().last > INVISIBLE).all()) for training in trainings)


def judge(run: Run) -> str:
    """How many networks move away from collapse."""
    trainings = [Training(run, arm) for arm in arms_of(run)]
    if run.extra["small"]:
        return f"Small size: {len(trainings)} tiny networks were trained for a few steps; nothing follows."
    gone, seen, patient = _parted(trainings)
    up = sum(bool((t.residual().last > t.residual().first).all()) for t in seen)
    answer = "Yes, if float32 can still distinguish the tokens" if 2 * up > len(seen) else "Mostly not"
    words = (
        f"{answer}: in {run.extra['plan']['steps']} steps, {up} of {len(seen)} networks whose tokens float32 can "
        f"distinguish at the start move away from collapse in every seed. Of {len(gone)} networks that start below "
        f"the resolution of float32, {_back(gone) or 'none'} recover"
    )
    if patient:
        words += f"; with {patient[0].arm.longer} times as many steps, {_back(patient)} of {len(patient)} do"
    return words + "."


def describe(run: Run) -> str:
    """The table of networks, those that do not recover, networks ablated after training, gradients, the method."""
    trainings = [Training(run, arm) for arm in arms_of(run)]
    parts = [_table(trainings), _recovery(trainings), _cut_after(trainings), _order(trainings)]
    parts += [_gradients(trainings), _ceiling(run, trainings), METHOD, _method(run, trainings)]
    return "\n\n".join(part for part in parts if part)


def _table(trainings: list[Training]) -> str:
    def pair(course: TrainingCourse, form: Callable[[float], str]) -> str:
        return f"{form(_mean(course.first))} → {form(_mean(course.last))}"

    head = (
        "network", "accuracy", "loss", "log10 residual", "order", "factor", "Q, K over V gradient", "Q moved",
        "V moved",
    )  # fmt: skip
    rows = [
        (
            _label(training.arm),
            _spread(training.accuracy()),
            _spread(training.final_loss()),
            pair(training.residual(), "{:.2f}".format),
            pair(training.order(), "{:.2f}".format),
            pair(training.factor(), _small),
            pair(training.ratio(), _small),
            _small(_mean(training.moved("q"))),
            _small(_mean(training.moved("v"))),
        )
        for training in trainings
    ]
    return markdown_text(Table(head, rows))


def _recovery(trainings: list[Training]) -> str:
    gone, seen, patient = _parted(trainings)
    words = f"**Recovery.** Of the {len(seen)} networks that float32 resolves before training, {_gained(seen)}"
    if gone:
        most = max(float(t.residual().last.max()) for t in gone)
        words += (
            f" Of the {len(gone)} that it does not (relative residual below 10^{INVISIBLE:g}), {_gained(gone)} The "
            f"largest residual that any of these reaches in any seed is 10^{most:.1f}."
        )
    for training in patient:
        residual = training.residual()
        way = ", ".join(f"10^{_mean(v):.1f} at step {s}" for s, v in zip(residual.steps, residual.values, strict=True))
        words += f" {_label(training.arm).capitalize()}: {way}."
    return words


def _gained(trainings: list[Training]) -> str:
    """How many end with a larger residual than they began with, by how much, and which do not."""
    changes = {_label(t.arm): t.residual().last - t.residual().first for t in trainings}
    up = [_mean(change) for change in changes.values() if (change > 0).all()]
    words = f"{len(up)} end with a larger residual in every seed"
    words += f", by {min(up):.2f} to {max(up):.2f} decades." if up else "."
    others = [f"{n} ({c.min():+.2f} to {c.max():+.2f})" for n, c in changes.items() if not (c > 0).all()]
    return words + (f" The exceptions, with their change: {'; '.join(others)}." if others else "")


def _cut_after(trainings: list[Training]) -> str:
    """Training the whole network and ablating afterwards, as in the paper, compared with training the ablated one."""
    same = {training.arm: training for training in trainings}
    pairs = [(whole, cut, same.get(replace(whole.arm, variant=cut))) for whole in trainings for cut in whole.arm.cuts]
    rows = [
        (
            _label(one.arm),
            *(f"{_mean(n):.2f}" for n in (one.residual().first, whole.cut_after(cut), one.residual().last)),
        )
        for whole, cut, one in pairs
        if one is not None
    ]
    head = ("log10 residual, last block", "not trained", "trained whole, ablated afterwards", "trained as ablated")
    return markdown_text(Table(head, rows)) if rows else ""


def _order(trainings: list[Training]) -> str:
    orders = {t: t.order() for t in trainings}
    ends = {t: (_mean(factor.first), _mean(factor.last)) for t in trainings for factor in (t.factor(),)}
    cubic = [ends[t] for t, order in orders.items() if np.nanmedian(order.first) > 2]
    linear = [ends[t] for t, order in orders.items() if not np.nanmedian(order.first) > 2]
    changed = [_label(t.arm) for t, order in orders.items() if np.any(np.abs(order.last - order.first) > 1)]
    words = f"**Order and factor.** {len(cubic)} of the networks start with order 3. "
    told = f"The order changes by more than 1 in {'; '.join(changed)}." if changed else ""
    words += told or "No network changes its order by more than 1."
    if cubic:
        turns = [after / before for before, after in cubic]
        words += f" The constant of the cubic law changes by factors of {_small(min(turns))} to {_small(max(turns))}."
    if linear:
        before, after = zip(*linear, strict=True)
        words += (
            f" In the other {len(linear)}, the factor of a block on a small residual lies between "
            f"{_small(min(before))} and {_small(max(before))} before training and between {_small(min(after))} and "
            f"{_small(max(after))} afterwards, and rises in {sum(late > early for early, late in linear)} of them. It "
            f"is above 1, where it pushes tokens apart, in {sum(early > 1 for early in before)} before and "
            f"{sum(late > 1 for late in after)} after training."
        )
    return words


def _gradients(trainings: list[Training]) -> str:
    ratios = {_label(t.arm): (_mean(ratio.first), _mean(ratio.last)) for t in trainings for ratio in (t.ratio(),)}
    gone = [n for n, (first, _) in ratios.items() if first < VANISHED]
    back = [n for n in gone if not ratios[n][1] < VANISHED]
    return (
        f"**Query and key gradients.** In {len(gone)} networks the gradient of queries and keys in the last block "
        f"starts below {number(VANISHED)} of that of values; {len(back)} of them end above it"
        + (f" ({'; '.join(back)})" if back else "")
        + ". Near 1e-7 the ratio is rounding error; Adam, which divides by the size of a gradient, moves queries and "
        "keys regardless (last columns)."
    )


def _ceiling(run: Run, trainings: list[Training]) -> str:
    gone = [f"{t.accuracy().mean():.2f}" for t in trainings if (t.residual().last < INVISIBLE).all()]
    if not gone:
        return ""
    return (
        "**What a collapsed network can learn.** If all tokens are equal after the last block, a sequence gets one "
        f"answer for all its tokens, and the best such answers are right for {float(run.extra['collapsed']):.2f} of "
        f"the symbols. The {len(gone)} networks that end collapsed in every seed reach "
        f"{' to '.join(sorted({min(gone), max(gone)}))}."
    )


def _method(run: Run, trainings: list[Training]) -> str:
    plan, size = run.extra["plan"], run.extra["size"]
    return (
        f"{len(trainings)} networks learned to sort, ablated during training as well. Each pair in the first table is "
        "before and after training, the mean over seeds: log10 of the relative residual after the last block in exact "
        "arithmetic, the order of a block, its factor (on a small residual at order 1, on the cube at order 3), and "
        "the gradient of queries and keys over that of values in the last block. Moved: distance of the query and "
        f"value maps from their initial values, relative to their size. One task, width {size['width']}, "
        f"{size['heads']} heads, initial weights of standard deviation 1/sqrt(width), {plan['steps']} steps of AdamW "
        f"(learning rate {plan['rate']:g}, {plan['batch']} sequences), {trainings[0].seeds.size} seeds; residuals are "
        f"means over {size['probed']} held-out sequences. The encoder normalises after each sum (BERT), the causal "
        "model before each branch (GPT-2)."
    )


STYLES: Mapping[str, Style] = {
    "whole": Style(BLACK, "o"),
    "no MLP": Style(GREEN, "^"),
    "no norm": Style(SKY, "v"),
    "no skip": Style(VERMILION, "s"),
    "no skip, no norm": Style(ORANGE, "P"),
    "no skip, no MLP": Style(PURPLE, "D"),
    "attention alone": Style(BLUE, "X"),
}
OTHERS = (BLACK, VERMILION, BLUE, ORANGE, SKY, GREEN, PURPLE, "#7f7f7f")
TICKS = (0, -0.3, -1, -3, -10, -30, -100, -300)
"""Exponents marked on the axis of residuals."""
COLUMNS = ("relative residual, last block", "gradient: Q, K over V, last block", "loss")


def draw(run: Run) -> dict[str, Figure]:
    """``figure``: a row for the encoder, one for the causal model, one for fewer blocks and other masks."""
    arms, deepest = arms_of(run), int(run.extra["size"]["depth"])
    rows: dict[str, list[TrainedArm]] = {}
    for arm in sorted(arms, key=lambda arm: (not _is_main(arm, deepest), arm.family == "causal")):
        name = f"{arm.family}, {deepest} blocks" if _is_main(arm, deepest) else "encoder, other"
        rows.setdefault(name, []).append(arm)
    seeds = Training(run, arms[0]).seeds.size
    figure, panels = headed_figure(
        "Does training fight collapse?",
        "Networks that learn to sort 8 symbols, ablated during training as well. Residuals are computed in exact "
        f"arithmetic, mean over sequences. {seeds} " + ("seeds: mean and range." if seeds > 1 else "seed."),
        rows=len(rows),
        columns=len(COLUMNS),
        panel_size=(2.5, 1.7),
        legend_rows=2,
        asked_by="reproduce",
    )
    for line, (name, chosen) in zip(panels, rows.items(), strict=True):
        for place, arm in enumerate(chosen):
            training = Training(run, arm)
            for axes, course in zip(line, (training.residual(), training.ratio(), training.loss()), strict=True):
                _draw_course(axes, course, *_named_style(arm, place, deepest))
        _settle(line, name)
    for axes, title in zip(panels[0], COLUMNS, strict=True):
        axes.set_title(title, size=8.5, color=INK)
    return {"figure": figure}


def _is_main(arm: TrainedArm, depth: int) -> bool:
    return arm.mask == OWN and arm.depth == depth and arm.longer == 1


def _named_style(arm: TrainedArm, place: int, deepest: int) -> tuple[str, Style]:
    if _is_main(arm, deepest):
        return arm.variant, STYLES[arm.variant]
    where = arm.mask if arm.mask != OWN else f"{arm.depth} blocks" if arm.longer == 1 else f"{arm.longer}× steps"
    dash = "--" if arm.mask == OWN and arm.depth < deepest else "-"
    return f"{arm.variant}, {where}", Style(OTHERS[place % len(OTHERS)], MARKERS[place % len(MARKERS)], dash)


def _draw_course(axes: Axes, course: TrainingCourse, name: str, style: Style) -> None:
    known = np.isfinite(course.values).any(axis=1)
    if known.any():
        values = course.values[known]
        mean, low, high = (reduce(values, axis=1) for reduce in (np.nanmean, np.nanmin, np.nanmax))
        draw_line(axes, Line(name, course.steps[known] + 1, mean, low, high, style=style))


def _settle(line: list[Axes], name: str) -> None:
    for axes in line:
        axes.set_xscale("log")
        axes.set_xlabel("step + 1")
        plain_axes(axes)
    residual, ratio, loss = line
    low = min(residual.get_ylim()[0], -1.0) * 1.1
    ticks = [tick for tick in TICKS if tick >= low]
    residual.set_yscale("symlog", linthresh=1.0)
    residual.set_ylim(low, 0.05)
    residual.set_yticks(ticks, ["1" if tick == 0 else f"$10^{{{tick:g}}}$" for tick in ticks])
    residual.minorticks_off()
    residual.set_ylabel(name, weight="bold")
    ratio.set_yscale("log")
    loss.set_ylim(0, 2.9)
    loss.axhline(np.log(10), color=FAINT, lw=0.8, linestyle=":")
    plain: Look = {"frameon": False, "labelcolor": INK}
    if loss.get_xlim()[1] < 2 * LONG:
        loss.legend(fontsize=5.8, loc="lower left", handlelength=1.6, labelspacing=0.3, **plain)
    else:
        below: Any = loss.get_figure(root=True)
        named = loss.get_legend_handles_labels()
        below.legend(*named, loc="lower center", ncols=4, fontsize=6.4, handlelength=1.8, **plain)

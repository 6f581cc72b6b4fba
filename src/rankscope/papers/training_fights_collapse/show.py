"""Whether training slows collapse, changes its order, and what the gradients do: read, described and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from rankscope.papers._curves import Array
from rankscope.papers._drawing import Look
from rankscope.papers.training_fights_collapse.arms import LONG, OWN, TrainedArm
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
"""log10 of the relative residual below which float32 sees equal tokens."""
VANISHED = 1e-3
"""Q and K gradients below this share of the V gradient are said to have vanished."""


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
    longer = "" if arm.longer == 1 else f", {arm.longer} times longer"
    return f"{arm.family} {arm.depth}, {arm.variant}{mask}{longer}"


def _parted(trainings: list[Training]) -> tuple[list[Training], list[Training], list[Training]]:
    """Networks collapsed in float32 before training in every seed, the others, and collapsed ones trained longer."""
    usual, longer = ([t for t in trainings if (t.arm.longer > 1) == patient] for patient in (False, True))
    gone, patient = ([t for t in some if (t.residual().first < INVISIBLE).all()] for some in (usual, longer))
    return gone, [t for t in usual if t not in gone], patient


def _back(trainings: list[Training]) -> int:
    """How many have tokens that float32 tells apart after training, in every seed."""
    return sum(bool((training.residual().last > INVISIBLE).all()) for training in trainings)


def judge(run: Run) -> str:
    """How many networks move away from collapse."""
    trainings = [Training(run, arm) for arm in arms_of(run)]
    if run.extra["small"]:
        return f"Small size: {len(trainings)} tiny networks were trained for a few steps; nothing follows."
    gone, seen, patient = _parted(trainings)
    up = sum(bool((t.residual().last > t.residual().first).all()) for t in seen)
    words = (
        f"Within {run.extra['plan']['steps']} steps {up} of {len(seen)} networks whose tokens float32 tells apart at "
        f"the start end further from collapse in every seed, and {_back(gone)} of {len(gone)} whose tokens it cannot "
        "come back"
    )
    if patient:
        words += f"; {patient[0].arm.longer} times longer, {_back(patient)} of {len(patient)} of those come back"
    return words + "."


def describe(run: Run) -> str:
    """What we see, arm by arm; whether training slows collapse, changes its order, and what the gradients do."""
    trainings = [Training(run, arm) for arm in arms_of(run)]
    parts = [_seen(trainings), _table(trainings), _slower(trainings), _cut_after(trainings), _order(trainings)]
    parts += [_gradients(trainings), _ceiling(run, trainings), _rests(run, trainings)]
    if run.extra["small"]:
        parts.insert(
            0, "**Small size.** Tiny networks, a few steps: the code runs, and nothing here answers the question."
        )
    return "\n\n".join(part for part in parts if part)


def _seen(trainings: list[Training]) -> str:
    reached = {_label(training.arm): float(training.accuracy().mean()) for training in trainings}
    worst, best = min(reached, key=lambda name: reached[name]), max(reached, key=lambda name: reached[name])
    return (
        f"**What we see.** {len(trainings)} networks trained on sorting, whatever is cut from them cut in training "
        f"too. They end between {reached[worst]:.2f} ({worst}) and {reached[best]:.2f} ({best}) of the symbols right "
        "on unseen sequences. In the table, each pair is before and after training, means over seeds: log10 of the "
        "relative residual after the last block in exact arithmetic; the order of a block; its factor (of a tiny "
        "residual at order 1, of the cube at order 3); the gradient of queries and keys over that of values in the "
        "last block. Moved: how far the query and value maps end from where they started, relative to their size."
    )


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


def _slower(trainings: list[Training]) -> str:
    gone, seen, patient = _parted(trainings)
    words = (
        f"**Slower if retrained?** Before training float32 tells the tokens of {len(seen)} networks apart after the "
        f"last block. {_gained(seen)}"
    )
    if gone:
        most = max(float(t.residual().last.max()) for t in gone)
        words += (
            f" Those of {len(gone)} networks it cannot (below 10^{INVISIBLE:g}). {_gained(gone)} The furthest that any "
            f"of these comes in any seed is 10^{most:.1f}."
        )
    for training in patient:
        residual = training.residual()
        way = ", ".join(f"10^{_mean(v):.1f} at step {s}" for s, v in zip(residual.steps, residual.values, strict=True))
        words += f" {_label(training.arm).capitalize()}: {way}; accuracy {_spread(training.accuracy())}."
    return words


def _gained(trainings: list[Training]) -> str:
    """How many end with a larger residual than they began with, by how much, and which do not."""
    changes = {_label(t.arm): t.residual().last - t.residual().first for t in trainings}
    up = [_mean(change) for change in changes.values() if (change > 0).all()]
    words = f"{len(up)} of them end with a larger residual in every seed"
    words += f", by {min(up):.2f} to {max(up):.2f} decades." if up else "."
    others = [f"{n} ({c.min():+.2f} to {c.max():+.2f})" for n, c in changes.items() if not (c > 0).all()]
    return words + (f" Not so: {'; '.join(others)}." if others else "")


def _cut_after(trainings: list[Training]) -> str:
    """The paper's way, training the whole network and cutting afterwards, compared with training the cut network."""
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
    head = ("log10 residual, last block", "never trained", "trained whole, cut after", "trained as it is")
    return markdown_text(Table(head, rows)) if rows else ""


def _order(trainings: list[Training]) -> str:
    orders = {t: t.order() for t in trainings}
    ends = {t: (_mean(factor.first), _mean(factor.last)) for t in trainings for factor in (t.factor(),)}
    cubic = [ends[t] for t, order in orders.items() if np.nanmedian(order.first) > 2]
    linear = [ends[t] for t, order in orders.items() if not np.nanmedian(order.first) > 2]
    changed = [_label(t.arm) for t, order in orders.items() if np.any(np.abs(order.last - order.first) > 1)]
    words = f"**Order and factor.** {len(cubic)} of the networks start with order 3. "
    told = f"By more than 1 it changes in: {'; '.join(changed)}." if changed else ""
    words += told or "None changes its order by more than 1."
    if cubic:
        turns = [after / before for before, after in cubic]
        words += (
            f" The constant in front of the cube changes by factors from {_small(min(turns))} to {_small(max(turns))}."
        )
    if linear:
        before, after = zip(*linear, strict=True)
        words += (
            f" In the {len(linear)} others the factor of a block on a tiny residual lies between {_small(min(before))} "
            f"and {_small(max(before))} before training, between {_small(min(after))} and {_small(max(after))} after "
            f"it; it rises in {sum(late > early for early, late in linear)}. Above 1, pushing tokens apart: "
            f"{sum(early > 1 for early in before)} before, {sum(late > 1 for late in after)} after."
        )
    return words


def _gradients(trainings: list[Training]) -> str:
    ratios = {_label(t.arm): (_mean(ratio.first), _mean(ratio.last)) for t in trainings for ratio in (t.ratio(),)}
    words = [f"{n} ({_small(a)} → {_small(b)})" for n, (a, b) in ratios.items() if a < VANISHED]
    others = [first for first, _ in ratios.values() if not first < VANISHED]
    said = f" The others begin between {_small(min(others))} and {_small(max(others))}." if others else ""
    return (
        f"**Q and K gradients**, last block, over that of V. Below {number(VANISHED)} before training, and what "
        f"becomes of it: {'; '.join(words) or 'none'}.{said} Near 1e-7 a ratio is float32 rounding; Adam, which "
        "divides by the size of a gradient, moves queries and keys all the same (table)."
    )


def _ceiling(run: Run, trainings: list[Training]) -> str:
    gone = [t for t in trainings if (t.residual().last < INVISIBLE).all()]
    if not gone:
        return ""
    listed = "; ".join(f"{_label(t.arm)} {_spread(t.accuracy())}" for t in gone)
    return (
        "**What a collapsed network learns.** Where float32 shows no difference between tokens after the last block "
        f"(residual below 10^{INVISIBLE:g} at the end), a sequence gets one answer for all its tokens. The best such "
        f"answers are right for {float(run.extra['collapsed']):.2f} of the symbols; these networks end at: {listed}."
    )


def _rests(run: Run, trainings: list[Training]) -> str:
    plan, size = run.extra["plan"], run.extra["size"]
    return (
        f"**What it rests on.** One task, width {size['width']}, {size['heads']} heads, weights drawn with standard "
        f"deviation 1/sqrt(width), {plan['steps']} steps of AdamW at rate {plan['rate']:g} with {plan['batch']} "
        f"sequences, {trainings[0].seeds.size} seeds; residuals on {size['probed']} held-out sequences. The encoder "
        "has its LayerNorms after each sum (BERT), the causal model before each branch (GPT-2)."
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
        "Sorting 8 symbols; whatever is cut is cut in training too. Residual in exact arithmetic on the weights of the "
        f"moment, mean over sequences. {seeds} " + ("seeds: line the mean, band the range." if seeds > 1 else "seed."),
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
    where = arm.mask if arm.mask != OWN else f"{arm.depth} blocks" if arm.longer == 1 else f"{arm.longer} x longer"
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

"""Shares by path length for every skip gain, and the accuracy of networks that use long paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.ext.papers._curves import Array, MeanInterval, mean_interval
from rankscope.ext.papers._drawing import Look, drawn
from rankscope.ext.papers._spec import METHOD
from rankscope.runs.rows import only
from rankscope.views import Line, LineChart, Style, Table, number
from rankscope.views.palette import BLACK, BLUE, GREEN, MARKERS, ORANGE, SKY, VERMILION
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

FALLING, FIXED = "falling", "from the start"
LONG = 0.5
"""A network uses long paths if its mean path length is above this share of the depth."""
WORKS = 0.8
"""A network still works if it keeps this share of the plain network's accuracy."""
CLOSE = 0.02
"""Loss of accuracy that still counts as the plain network's accuracy."""


@dataclass(frozen=True, eq=False)
class GainArm:
    """Networks trained alike; one row of each array per seed.

    Attributes:
        schedule: how the gain reached its end.
        gain: at the end.
        shares: (seeds, lengths), projection shares of paths from the embedding.
        biases: (seeds,), share of what biases contribute.
        loss: (seeds,), at the end of training.
        accuracy: (seeds,), on unseen sequences.
    """

    schedule: str
    gain: float
    shares: Array
    biases: Array
    loss: Array
    accuracy: Array

    @property
    def lengths(self) -> Array:
        r"""(seeds,), mean length :math:`\sum_k k|s_k| / \sum_k |s_k|` of the shares."""
        sizes = np.abs(self.shares)
        mean_lengths: Array = (sizes * np.arange(sizes.shape[1])).sum(axis=1) / sizes.sum(axis=1)
        return mean_lengths

    @property
    def mean_length(self) -> MeanInterval:
        """Mean and interval over seeds."""
        return mean_interval(self.lengths.tolist())

    @property
    def mean_accuracy(self) -> MeanInterval:
        """Mean and interval over seeds."""
        return mean_interval(self.accuracy.tolist())

    @property
    def mean_loss(self) -> str:
        """Mean over seeds, rounded."""
        return number(mean_interval(self.loss.tolist()).mean)

    @property
    def share_words(self) -> list[str]:
        """Shares by length, and that of the biases, means over seeds."""
        return [f"{share:.3f}" for share in (*self.shares.mean(axis=0), self.biases.mean())]

    @property
    def name(self) -> str:
        """For tables and sentences."""
        how = "gradually" if self.schedule == FALLING else self.schedule
        return "1 (plain)" if self.gain == 1.0 else f"{self.gain:g}, {how}"


def arm(run: Run, schedule: str, gain: float) -> GainArm | None:
    """One arm, or None if it was not run."""
    rows = only(run.table, schedule=schedule, gain=f"{gain:g}")
    if rows.num_rows == 0:
        return None
    metric, seed = rows["metric"].to_numpy(zero_copy_only=False), rows["seed"].to_numpy()
    layer, value = rows["layer"].to_numpy(), rows["value"].to_numpy()
    seeds = np.unique(seed)

    def table(name: str, columns: int = 1) -> Array:
        values, chosen = np.zeros((seeds.size, columns)), metric == name
        values[np.searchsorted(seeds, seed[chosen]), layer[chosen]] = value[chosen]
        return values

    ends = (table(name)[:, 0] for name in ("projection_share_of_biases", "final_loss", "accuracy"))
    return GainArm(schedule, gain, table("projection_share", int(run.extra["layers"]) + 1), *ends)


def arms(run: Run) -> list[GainArm]:
    """All arms, the plain network first."""
    by_gain = [arm(run, schedule, float(gain)) for gain in run.extra["gains"] for schedule in (FIXED, FALLING)]
    return [each for each in by_gain if each is not None]


def judge(run: Run) -> str:
    """Whether a network can use long paths, and what that costs."""
    depth, all_arms, kept = int(run.extra["layers"]), arms(run), _longest_kept(run)
    plain = all_arms[0]
    long = [each for each in all_arms if each.mean_length.mean > LONG * depth]
    best = max(long, key=lambda each: each.mean_accuracy.mean, default=None)
    start = f"The plain network has mean path length {plain.mean_length} of {depth} and accuracy {plain.mean_accuracy}."
    if best is None:
        return f"No: no network has a mean path length above half the depth. {start}"
    works = best.mean_accuracy.mean >= WORKS * plain.mean_accuracy.mean
    same = kept is not None and best.name == kept.name
    answer = "Yes" if same else "Yes, at a cost in accuracy" if works else "No, accuracy is lost"
    return (
        f"{answer}: the best network with a mean path length above half the depth (skip gain {best.name}) has length "
        f"{best.mean_length} and accuracy {best.mean_accuracy}. {start}"
        + ("" if kept is None else f" The most at that accuracy is {kept.mean_length} (gain {kept.name}).")
    )


def describe(run: Run) -> str:
    """The table and the method."""
    plan, seeds = run.extra["plan"], run.extra["seeds"]
    shares = [f"length {length}" for length in range(int(run.extra["layers"]) + 1)]
    rows = [
        (each.name, str(each.mean_accuracy), each.mean_loss, str(each.mean_length), *each.share_words)
        for each in arms(run)
    ]
    return "\n\n".join(
        [
            "Share of the output carried by the paths of each length, for skips reduced to a gain g from the start of "
            "training or gradually:",
            markdown_text(Table(["g", "accuracy", "loss", "mean length", *shares, "biases"], rows)),
            METHOD,
            f"Networks of {run.extra['layers']} attention layers with LayerNorm and without MLPs learned to sort in "
            f"{plan['steps']} steps, {seeds} seeds each; ± is a 95% interval over seeds. Shares are those of "
            "`decompose` for paths from the embedding; contributions of biases have their own column. One task, one "
            "depth and one width were tested. LayerNorm after each sum restores the size that a gain below 1 takes "
            "away; in a network with norms before the branches the same gain would act differently. A network keeps "
            f"the plain accuracy if it is within {CLOSE:g} of it, and pays a cost if it keeps at least {WORKS:g} of "
            "it. These words, and the gains 0.03 and 0.01, were chosen after results for 1, 0.3, 0.1 and 0 were known.",
        ]
    )


def _longest_kept(run: Run) -> GainArm | None:
    plain, *others = arms(run)
    least, length = plain.mean_accuracy.mean - CLOSE, plain.mean_length.mean
    kept = [each for each in others if each.mean_accuracy.mean >= least and each.mean_length.mean > length]
    return max(kept, key=lambda each: each.mean_length.mean, default=None)


COLOURS = (BLACK, SKY, BLUE, GREEN, ORANGE, VERMILION)


def draw(run: Run) -> dict[str, Figure]:
    """Three panels: shares, and accuracy and loss over the mean path length."""
    depth, gains = int(run.extra["layers"]), [float(gain) for gain in run.extra["gains"]]
    looks = {gain: (COLOURS[i % 6], MARKERS[i % 6]) for i, gain in enumerate(gains)}
    shares, accuracy, loss = list[Line](), list[Line](), list[Line]()
    for each in arms(run):
        hollow, look = each.schedule == FIXED and each.gain != 1.0, looks[each.gain]
        dash, name = ("--", "") if hollow else ("-", f"g = {each.gain:g}")
        shares.append(Line(name, range(depth + 1), each.shares.mean(axis=0), style=Style(*look, dash)))
        for lines, values in ((accuracy, each.accuracy), (loss, each.loss)):
            lines.append(Line("", each.lengths, values, floor=values * 0 + hollow, style=Style(*look, "none", 2.5)))
    losses = np.concatenate([each.loss for each in arms(run)])
    log = bool(losses.max() > 5 * losses.min())
    ends: Look = {"x_label": "mean path length", "x_range": (-0.2, depth + 0.3), "names": "none"}
    figure = drawn(
        "Can a network be made to use its long paths?",
        f"Sorting with {depth} attention layers whose skips are scaled by g: reduced over the first 60% of training "
        f"(solid, filled) or from the start (dashed, hollow). {run.extra['seeds']} networks each. The mean path length "
        "weights each length by the size of its share.",
        [
            [
                LineChart("share of the output", tuple(shares), x_label="path length"),
                LineChart("accuracy on unseen sequences", tuple(accuracy), y_range=(0.0, 1.04), **ends),
                LineChart("loss at the end of training", tuple(loss), log=log, **ends),
            ]
        ],
        panel_size=(3.3, 2.9),
    )
    return {"figure": figure}

"""Shares by path length for every gain, and what long paths cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._curves import Array, MeanInterval, mean_interval
from rankscope.papers._drawing import Look, drawn
from rankscope.runs.rows import only
from rankscope.views import Line, LineChart, Style, Table, number
from rankscope.views.palette import BLACK, BLUE, GREEN, MARKERS, ORANGE, SKY, VERMILION
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

FALLING, FIXED = "falling", "from the start"
LONG = 0.5
"""Long paths carry the signal when its mean length is above this share of the depth."""
WORKS = 0.8
"""A network on long paths still works when it keeps this share of the plain network's accuracy."""
CLOSE = 0.02
"""Accuracy that counts as kept, below the plain network's."""
AFTERWARDS = (
    "Chosen after results were seen: the gains 0.03 and 0.01 were added when 1, 0.3, 0.1 and 0 had left a gap, and the "
    f"verdict's words with them: at a price means at least {WORKS:g} of the plain accuracy on paths above {LONG:g} of "
    "the depth."
)


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
        found: Array = (sizes * np.arange(sizes.shape[1])).sum(axis=1) / sizes.sum(axis=1)
        return found

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
        """As the text calls it."""
        return "1 (plain)" if self.gain == 1.0 else f"{self.gain:g}, {self.schedule}"


def arm(run: Run, schedule: str, gain: float) -> GainArm | None:
    """One arm, or None if it was not run."""
    rows = only(run.table, schedule=schedule, gain=f"{gain:g}")
    if rows.num_rows == 0:
        return None
    metric, seed = rows["metric"].to_numpy(zero_copy_only=False), rows["seed"].to_numpy()
    layer, value = rows["layer"].to_numpy(), rows["value"].to_numpy()
    seeds = np.unique(seed)

    def table(name: str, columns: int = 1) -> Array:
        found, chosen = np.zeros((seeds.size, columns)), metric == name
        found[np.searchsorted(seeds, seed[chosen]), layer[chosen]] = value[chosen]
        return found

    ends = (table(name)[:, 0] for name in ("projection_share_of_biases", "final_loss", "accuracy"))
    return GainArm(schedule, gain, table("projection_share", int(run.extra["layers"]) + 1), *ends)


def arms(run: Run) -> list[GainArm]:
    """All arms, the plain network first."""
    found = [arm(run, schedule, float(gain)) for gain in run.extra["gains"] for schedule in (FIXED, FALLING)]
    return [each for each in found if each is not None]


def judge(run: Run) -> str:
    """The longest paths at the accuracy of the plain network."""
    plain, best = arms(run)[0], _longest_kept(run)
    start = f"Plain network: mean length {plain.mean_length.mean:.2f}, accuracy {plain.mean_accuracy.mean:.3f}"
    if best is None:
        return f"{start}; no arm carries the signal on longer paths at that accuracy."
    return (
        f"{start}; longest at that accuracy: skips at {best.gain:g} ({best.schedule}), mean length "
        f"{best.mean_length.mean:.2f} of {run.extra['layers']}, accuracy {best.mean_accuracy.mean:.3f}."
    )


def describe(run: Run) -> str:
    """The table, whether it can be done, what it costs."""
    plan, seeds = run.extra["plan"], run.extra["seeds"]
    shares = [f"share {length}" for length in range(int(run.extra["layers"]) + 1)]
    rows = [
        (each.name, str(each.mean_accuracy), each.mean_loss, str(each.mean_length), *each.share_words)
        for each in arms(run)
    ]
    return "\n\n".join(
        [
            f"**What we see.** The sorting network of {run.extra['layers']} layers, trained for {plan['steps']} steps "
            f"({seeds} seeds each arm), LayerNorm kept, MLPs out, its skips turned down to a gain g. Shares are those "
            "of `decompose`, of paths from the embedding; what biases contribute is a column of its own.",
            markdown_text(Table(["g", "accuracy", "loss", "mean length", *shares, "biases"], rows)),
            f"**Can it be done?** {_can(run)}",
            f"**What it costs.** {_cost(run)}",
            f"**What it rests on.** One task, one depth, one width, {seeds} seeds; ± is a 95% interval over seeds. "
            "LayerNorm after each sum compensates for the size that a gain below 1 takes away; in a "
            "network with norms before the branches the same gain would act differently. " + AFTERWARDS,
        ]
    )


def _longest_kept(run: Run) -> GainArm | None:
    plain, *others = arms(run)
    least, length = plain.mean_accuracy.mean - CLOSE, plain.mean_length.mean
    kept = [each for each in others if each.mean_accuracy.mean >= least and each.mean_length.mean > length]
    return max(kept, key=lambda each: each.mean_length.mean, default=None)


def _can(run: Run) -> str:
    depth, all_arms, kept = int(run.extra["layers"]), arms(run), _longest_kept(run)
    plain = all_arms[0]
    long = [each for each in all_arms if each.mean_length.mean > LONG * depth]
    best = max(long, key=lambda each: each.mean_accuracy.mean, default=None)
    words = f"The plain network carries its signal at a mean length of {plain.mean_length} of {depth}. "
    if kept is None:
        words += f"No gain moved it to longer paths within {CLOSE:g} of its accuracy. "
    else:
        words += f"Within {CLOSE:g} of its accuracy the longest is {kept.mean_length} (g = {kept.name}). "
    if best is None:
        return f"No. {words}No arm carries its signal on paths longer than half the depth."
    works = best.mean_accuracy.mean >= WORKS * plain.mean_accuracy.mean
    best_is_kept = kept is not None and best.name == kept.name
    verdict = "Yes" if best_is_kept else "Yes, at a price" if works else "No"
    return (
        f"{verdict}. {words}Of the {len(long)} arms with a mean length above half the depth the best is g = "
        f"{best.name}: mean length {best.mean_length}, accuracy {best.mean_accuracy} against {plain.mean_accuracy}."
    )


def _cost(run: Run) -> str:
    plain, *others = arms(run)
    words = []
    for fixed, falling in zip(others[::2], others[1::2], strict=True):
        words.append(
            f"g = {fixed.gain:g}: loss {falling.mean_loss} when it falls, {fixed.mean_loss} from the start (accuracy "
            f"{falling.mean_accuracy.mean:.3f} and {fixed.mean_accuracy.mean:.3f})"
        )
    return f"Loss of the plain network {plain.mean_loss}. {'; '.join(words)}."


COLOURS = (BLACK, SKY, BLUE, GREEN, ORANGE, VERMILION)


def draw(run: Run) -> dict[str, Figure]:
    """Three panels: shares, and accuracy and loss over the mean length of what is carried."""
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
    ends: Look = {"x_label": "mean length of what is carried", "x_range": (-0.2, depth + 0.3), "names": "none"}
    figure = drawn(
        "Can a network be made to use its long paths?",
        f"Sorting, {depth} attention layers with skips turned down to a gain g: falling over the first 60% of training "
        f"(solid, filled) or from the start (dashed, hollow). {run.extra['seeds']} networks each; mean length: mean of "
        "the path length, weighted with the size of its share.",
        [
            [
                LineChart("share of the output", tuple(shares), x_label="length of the path"),
                LineChart("accuracy on unseen sequences", tuple(accuracy), y_range=(0.0, 1.04), **ends),
                LineChart("loss at the end of training", tuple(loss), log=log, **ends),
            ]
        ],
        panel_size=(3.3, 2.9),
    )
    return {"figure": figure}

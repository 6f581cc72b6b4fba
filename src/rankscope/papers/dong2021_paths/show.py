"""Accuracy by path length in both meanings of a path, and whether short paths carry the signal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._curves import MeanInterval, has_line, mean_interval, published
from rankscope.papers._drawing import Look, drawn
from rankscope.runs.rows import only
from rankscope.views import Guide, Line, LineChart, Note, Style, Table, number
from rankscope.views.palette import BLACK, BLUE, FAINT, GREEN, ORANGE, PURPLE, SKY, VERMILION
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

OFFSET, AS_PUBLISHED = "frozen, offset set right", "whole, trained as published"
LINES = {
    ("recomputed", "5"): ("recomputed, 5", Style(ORANGE, "v", ":")),
    ("recomputed", "20"): ("recomputed, 20", Style(VERMILION, "s")),
    ("frozen", "5"): ("frozen, 5", Style(SKY, "^", ":")),
    ("frozen", "20"): ("frozen, 20", Style(BLUE, "o")),
    ("frozen", "all"): ("frozen, all paths", Style(BLACK, "D", "--")),
    (OFFSET, "all"): ("all, offset set right", Style(FAINT, "P", "-.")),
}
"""What is judged, and how many paths: label and style."""
NEAR_CHANCE = 0.05
"""A path length "barely beats chance" when it is at most so much above it."""
CANCELS = 10.0
"""Times the output's size, from which on lengths are said to cancel."""
CANCELLING = "Sums so much larger than the output cancel each other: no length is the signal by itself."
AFTERWARDS = (
    "Chosen after results were seen: the line with the offset set right, and the marks for the verdict, when the "
    "convex hull had come out. The claim is said to hold when a length of at most 2 does best, more than "
    f"{2 * NEAR_CHANCE:g} above one answer for all, and the longest paths are at most {NEAR_CHANCE:g} above it. Steps "
    "and rate were picked in single trial trainings, looking at the whole network's accuracy on the same held-out "
    "data, and cut down once to save time."
)
NAMES = {"recomputed": "attention recomputed along the path", "frozen": "attention frozen (theorem 2.1)"}
GUESSES = {
    "constant": ("one answer for all tokens", "one answer for all"),
    "position": ("the best answer for each position", "best answer per position"),
    "token alone": ("the best answer for each token by itself", "best answer per token alone"),
    "twins": (
        "the most any network without positions can reach, because equal tokens of a sentence get equal answers",
        "most a model without positions can reach",
    ),
}
"""The baselines in the text, and in the figure."""
DIFFERS = {
    "sort": (
        "A network that knows only where a token stands already has the per-position line, so that chance in the sense "
        "of the paper is too easy to beat for paths of length 0."
    ),
    "memory": (
        "The sentences are substitutes drawn from Zipf's law (the paper's are not available), and the authors' run had "
        "MLPs by mistake; this one has none. The per-token line is what a table of words would reach without any "
        "attention. Paths are judged on {judged} of the sentences."
    ),
    "hull": "One answer for all gets {chance:.2f} on these data, more than the published chance.",
}


def lengths(run: Run) -> list[int]:
    """0 to the number of layers."""
    return list(range(int(run.extra["layers"]) + 1))


def seeds(run: Run) -> int:
    """Number of networks trained."""
    return len(np.unique(run.table["seed"].to_numpy()))


def published_facts(task: str) -> Mapping[str, float]:
    """What the paper says about a task."""
    facts: Mapping[str, float] = published("dong2021_paths")["tasks"][task]
    return facts


def by_seed(run: Run, metric: str, *, layer: int = 0, **where: str) -> list[float]:
    """One value per network, repeats averaged."""
    rows = only(run.table, metric=metric, layer=layer, **where)
    seed, value = rows["seed"].to_numpy(), rows["value"].to_numpy()
    return [float(value[seed == one].mean()) for one in np.unique(seed)]


def over_seeds(run: Run, metric: str, *, layer: int = 0, **where: str) -> MeanInterval:
    """Mean and interval over networks."""
    return mean_interval(by_seed(run, metric, layer=layer, **where))


def curve(run: Run, metric: str, of: str, paths: str) -> list[MeanInterval]:
    """One line over path lengths."""
    return [over_seeds(run, metric, layer=length, of=of, paths=paths) for length in lengths(run)]


def guess(run: Run, of: str) -> MeanInterval | None:
    """One of the horizontal lines, if the task has it."""
    return over_seeds(run, "accuracy", of=of) if has_line(run.table, metric="accuracy", of=of) else None


def _best(found: list[MeanInterval]) -> tuple[int, MeanInterval]:
    length = max(range(len(found)), key=lambda index: found[index].mean)
    return length, found[length]


def _chance(run: Run) -> float:
    return over_seeds(run, "accuracy", of="constant").mean


def judge(run: Run) -> str:
    """Accuracy of the whole network, of the best path length and of the longest."""
    parts = []
    for of, words in NAMES.items():
        found = curve(run, "accuracy", of, "20")
        length, best = _best(found)
        parts.append(f"length {length} alone {best.mean:.2f}, length {lengths(run)[-1]} {found[-1].mean:.2f} ({words})")
    whole = over_seeds(run, "accuracy", of="whole", paths="all")
    return f"{run.extra['task']}: whole network {whole.mean:.3f}; 20 paths of {'; '.join(parts)}."


def describe(run: Run) -> str:
    """Training, lines to beat, the table, the claim in both meanings, what differs."""
    found = {name: value.mean for name in GUESSES if (value := guess(run, name)) is not None}
    told = "; ".join(f"{GUESSES[name][0]} {value:.3f}" for name, value in found.items())
    head = [f"{of}, {'all' if paths == 'all' else paths + ' paths'}" for of, paths in LINES]
    columns = [[str(one) for one in curve(run, "accuracy", *key)] for key in LINES]
    columns += [
        [number(one.mean) for one in curve(run, metric, "frozen", "all")]
        for metric in ("size_over_output", "relative_residual")
    ]
    rows = [(str(length), *(column[length] for column in columns)) for length in lengths(run)]
    return "\n\n".join(
        [
            f"**What we see.** {_training(run)} Baselines from the data themselves: {told}.",
            markdown_text(Table(["length", *head, "size over output", "residual"], rows)),
            f"**Does the claim hold?** {_holds(run, 'recomputed')} {_holds(run, 'frozen')} {_collapse(run)}",
            f"**Where it differs.** {_differs(run)}",
        ]
    )


def _training(run: Run) -> str:
    facts, plan = run.extra, run.extra["plan"]
    words = (
        f"{seeds(run)} networks ({facts['layers']} layers, {facts['heads']} heads, width {facts['width']}), each on "
        f"data of its own ({facts['train']} sequences to learn, {facts['held']} to judge), trained for {plan['steps']} "
        f"steps of {plan['batch']} sequences with AdamW, highest rate {plan['rate']:g}, linear rise and cosine fall: "
        f"whole network {over_seeds(run, 'accuracy', of='whole', paths='all')} (published "
        f"{published_facts(str(facts['task']))['whole']:.2f})."
    )
    as_published = guess(run, AS_PUBLISHED)
    return words if as_published is None else f"{words} Trained as published, one seed: {as_published.mean:.3f}."


def _holds(run: Run, of: str) -> str:
    chance, found = _chance(run), curve(run, "accuracy", of, "20")
    length, best = _best(found)
    short = length <= 2 and best.mean - chance > 2 * NEAR_CHANCE
    verdict = "holds" if short and found[-1].mean - chance <= NEAR_CHANCE else "does not hold"
    alone = guess(run, "token alone")
    table = "" if alone is None else f" and {_by(best.mean - alone.mean)} the best answer for each token by itself"
    return (
        f"With {NAMES[of]} it {verdict}: of 20 paths of one length those of length {length} do best ({best}), "
        f"{_by(best.mean - chance)} one answer for all{table}; those of length {lengths(run)[-1]} reach {found[-1]}, "
        f"{_by(found[-1].mean - chance)} one answer for all."
    )


def _by(difference: float) -> str:
    return f"{abs(difference):.2f} {'above' if difference >= 0 else 'below'}"


def _collapse(run: Run) -> str:
    length, best = _best(curve(run, "accuracy", "frozen", "all"))
    residual = curve(run, "relative_residual", "frozen", "all")
    size = curve(run, "size_over_output", "frozen", "all")
    drawn = curve(run, "accuracy", "frozen", "20")[length].mean
    few = "; a length acts as a sum, and a few of its paths do not stand for it" if best.mean > drawn + 0.02 else ""
    largest, last = max(one.mean for one in size), lengths(run)[-1]
    offset = curve(run, "accuracy", OFFSET, "all")
    right, reached = _best(offset)
    return (
        f"All paths of length {length} together, attention frozen, reach {best}, against {drawn:.3f} for 20 of "
        f"them{few}. With one constant per class and one factor set right for each length, the best is length {right} "
        f"with {reached}, and length {last} reaches {offset[-1]}: what a length says beyond its offset. From length 0 "
        f"to length {last} the size of the sum goes from {number(size[0].mean)} to {number(size[-1].mean)} of the "
        f"output's, at most {number(largest)}, and its relative residual from {number(residual[0].mean)} to "
        f"{number(residual[-1].mean)}." + (f" {CANCELLING}" if largest > CANCELS else "")
    )


def _differs(run: Run) -> str:
    task = str(run.extra["task"])
    facts, judged = published_facts(task), run.extra["judged"] or run.extra["held"]
    return (
        f"The paper's chance line is {facts['chance']:.2f}; it says that paths of length 1 reach about "
        f"{facts['length_1']:.2f}. The scores of the paths drawn are averaged before the answer is taken; the same "
        "draws serve both meanings, five repeats each, averaged per network; ± is a 95% interval over networks. "
        f"{DIFFERS[task].format(judged=judged, chance=_chance(run))} {AFTERWARDS}"
    )


TITLES = {
    "sort": "Sorting 8 symbols",
    "hull": "Corners of the convex hull of 10 points",
    "memory": "Learning bits by heart",
}
SUM_STYLES = {"size_over_output": Style(GREEN, "o"), "relative_residual": Style(PURPLE, "s")}


def draw(run: Run) -> dict[str, Figure]:
    """Accuracies, and size and residual of the sums."""
    task = str(run.extra["task"])
    accuracies, sums = [], []
    for key, (label, style) in LINES.items():
        mean, half = np.array([(point.mean, point.half) for point in curve(run, "accuracy", *key)]).T
        # Other lines get a band of no width.
        half = half if key[1] == "20" and np.isfinite(half).all() else np.zeros_like(mean)
        accuracies.append(Line(label, lengths(run), mean, mean - half, mean + half, style=style))
    for metric, style in SUM_STYLES.items():
        values = np.array([by_seed(run, metric, layer=length, of="frozen", paths="all") for length in lengths(run)])
        mean, low, high = (np.maximum(y, 1e-12) for y in (values.mean(axis=1), values.min(axis=1), values.max(axis=1)))
        sums.append(Line(metric.replace("_", " "), lengths(run), mean, low, high, style=style))
    whole = over_seeds(run, "accuracy", of="whole").mean
    levels = {f"whole network {whole:.3f} (published {published_facts(task)['whole']:.2f})": whole}
    for name, (_, words) in GUESSES.items():
        if (found := guess(run, name)) is not None:
            levels[f"{words} {found.mean:.2f}"] = found.mean
    guides = tuple(Guide(level, "") for level in levels.values())
    # The longest paths are about as good as one answer for all: its label goes below their lines.
    heights = {words: level - 0.1 * words.startswith("one answer") for words, level in levels.items()}
    notes = tuple(Note(words, lengths(run)[-1] + 0.3, height) for words, height in heights.items())
    entered = "length of the path (attention layers entered)"
    shown: Look = {"guides": guides, "notes": notes, "x_label": entered, "y_range": (0.0, 1.1)}
    left = LineChart("accuracy", tuple(accuracies), **shown)
    right = LineChart("sum of all paths of a length", tuple(sums), x_label=entered, log=True, names="ends")
    figure = drawn(
        f"{TITLES[task]}: what is left when only paths of one length are kept?",
        f"{run.extra['layers']} attention layers, {run.extra['heads']} heads, width {run.extra['width']}, skips and "
        f"LayerNorm, no MLP; means over {seeds(run)} trained networks. Bands: 95% interval of the mean for 20 paths "
        "(left), range over networks (right). Attention frozen as the whole network has it (theorem 2.1), or "
        "recomputed from what a path carries.",
        [[left, right]],
        styles=dict(LINES.values()),
        panel_size=(4.1, 3.1),
        legend_rows=2,
    )
    return {"figure": figure}

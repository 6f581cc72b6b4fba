"""Accuracy by path length with attention frozen and recomputed, and whether short paths carry the signal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from rankscope.ext.papers._curves import MeanInterval, has_line, mean_interval, published
from rankscope.ext.papers._drawing import Look, drawn
from rankscope.ext.papers._spec import METHOD
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
    (OFFSET, "all"): ("frozen, all paths, recalibrated", Style(FAINT, "P", "-.")),
}
"""Attention and number of paths of each curve: label and style."""
NEAR_CHANCE = 0.05
"""Accuracy above the constant answer up to which a path length barely beats chance."""
CANCELS = 10.0
"""Ratio of a length's sum to the output from which lengths must cancel each other."""
NAMES = {"recomputed": "attention recomputed along each path", "frozen": "attention frozen as in theorem 2.1"}
GUESSES = {
    "constant": "best constant answer",
    "position": "best answer per position",
    "token alone": "best answer per token",
    "twins": "best possible without positions",
}
"""Baselines computed from the data."""
CAVEATS = {
    "sort": (
        "A network that knows only the position of a token reaches the per-position baseline, so chance in the sense "
        "of the paper is too weak a baseline for paths of length 0."
    ),
    "memory": (
        "The sentences are substitutes drawn from Zipf's law, because the paper's are not available; the authors' run "
        "had MLPs by mistake, this one has none. The per-token baseline is a lookup table of words without attention. "
        "Without positions, equal tokens of a sentence get equal answers, which limits any network. Paths are "
        "evaluated on {judged} of the sentences."
    ),
    "hull": "The best constant answer scores {chance:.2f} on these data, more than the chance level of the paper.",
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
    """A baseline, if the task has it."""
    return over_seeds(run, "accuracy", of=of) if has_line(run.table, metric="accuracy", of=of) else None


def _best(found: list[MeanInterval]) -> tuple[int, MeanInterval]:
    length = max(range(len(found)), key=lambda index: found[index].mean)
    return length, found[length]


def _chance(run: Run) -> float:
    return over_seeds(run, "accuracy", of="constant").mean


def judge(run: Run) -> str:
    """Accuracy of the whole network, of the best path length and of the longest, and whether the claim holds."""
    parts = []
    for of, words in NAMES.items():
        accuracy = curve(run, "accuracy", of, "20")
        length, best = _best(accuracy)
        parts.append(
            f"length {length} reaches {best.mean:.2f} and length {lengths(run)[-1]} {accuracy[-1].mean:.2f} ({words})"
        )
    held = [of for of in NAMES if _holds(run, of)]
    answer = "Yes" if len(held) == len(NAMES) else f"Only with {NAMES[held[0]]}" if held else "Not on this task"
    whole = over_seeds(run, "accuracy", of="whole", paths="all")
    return (
        f"{answer}. The whole network reaches an accuracy of {whole.mean:.3f}, the best constant answer "
        f"{_chance(run):.2f}; of 20 random paths of one length, {'; '.join(parts)}."
    )


def describe(run: Run) -> str:
    """The table by path length, what frozen paths add up to, the method."""
    head = [f"{of}, {'all' if paths == 'all' else paths + ' paths'}" for of, paths in LINES]
    columns = [[str(one) for one in curve(run, "accuracy", *key)] for key in LINES]
    columns += [
        [number(one.mean) for one in curve(run, metric, "frozen", "all")]
        for metric in ("size_over_output", "relative_residual")
    ]
    rows = [(str(length), *(column[length] for column in columns)) for length in lengths(run)]
    head = [name.replace(OFFSET, "frozen, recalibrated") for name in head]
    told = [f"{words} {value.mean:.3f}" for name, words in GUESSES.items() if (value := guess(run, name)) is not None]
    return "\n\n".join(
        [
            f"Accuracy by path length; baselines: {', '.join(told)}.",
            markdown_text(Table(["length", *head, "sum over output (norm)", "residual of the sum"], rows)),
            _sums(run),
            METHOD,
            _training(run),
            _method(run),
        ]
    )


def _holds(run: Run, of: str) -> bool:
    """Whether short paths do best and the longest barely beat a constant answer."""
    chance, accuracy = _chance(run), curve(run, "accuracy", of, "20")
    length, best = _best(accuracy)
    return length <= 2 and best.mean - chance > 2 * NEAR_CHANCE and accuracy[-1].mean - chance <= NEAR_CHANCE


def _sums(run: Run) -> str:
    length, best = _best(curve(run, "accuracy", "frozen", "all"))
    size = [one.mean for one in curve(run, "size_over_output", "frozen", "all")]
    few = curve(run, "accuracy", "frozen", "20")[length].mean
    words = f"**Sums of all paths.** All paths of length {length} together reach {best}, 20 of them {few:.3f}. "
    if max(size) > CANCELS:
        return words + (
            f"The sum of one length is up to {number(max(size))} times as large as the output, so lengths cancel each "
            "other and no single length is the signal."
        )
    return words + (
        f"The sum of a length shrinks from {number(max(size))} times the output's norm at its largest to "
        f"{number(size[-1])} at length {lengths(run)[-1]}."
    )


def _training(run: Run) -> str:
    facts, plan = run.extra, run.extra["plan"]
    words = (
        f"{seeds(run)} networks ({facts['layers']} layers, {facts['heads']} heads, width {facts['width']}), each on "
        f"its own data ({facts['train']} training and {facts['held']} evaluation sequences), were trained for "
        f"{plan['steps']} steps of {plan['batch']} sequences with AdamW (peak learning rate {plan['rate']:g}, linear "
        f"warmup, cosine decay). The whole network reaches {over_seeds(run, 'accuracy', of='whole', paths='all')} "
        f"(paper: {published_facts(str(facts['task']))['whole']:.2f})."
    )
    as_published = guess(run, AS_PUBLISHED)
    return words if as_published is None else f"{words} Trained as published, one seed reaches {as_published.mean:.3f}."


def _method(run: Run) -> str:
    task = str(run.extra["task"])
    facts, judged = published_facts(task), run.extra["judged"] or run.extra["held"]
    return (
        f"The paper's chance level is {facts['chance']:.2f}, and its paths of length 1 reach about "
        f"{facts['length_1']:.2f}. Scores of the sampled paths are averaged before the prediction; both kinds of "
        "attention use the same samples, five repeats each; ± is a 95% interval over networks. Recalibrated: with one "
        "constant per class and one factor fitted for each length. "
        f"{CAVEATS[task].format(judged=judged, chance=_chance(run))} The claim counts as holding if a length of at "
        f"most 2 does best, by more than {2 * NEAR_CHANCE:g} over the best constant answer, and the longest paths "
        f"exceed that answer by at most {NEAR_CHANCE:g}. These thresholds and the recalibrated curve were chosen "
        "after the results on the convex hull were known. Steps and learning rate were chosen in single trial runs, "
        "by the whole network's accuracy on the same held-out data; the number of steps was reduced once to save time."
    )


TITLES = {
    "sort": "Sorting 8 symbols",
    "hull": "Corners of the convex hull of 10 points",
    "memory": "Memorising bits",
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
    for name, words in GUESSES.items():
        if (guessed := guess(run, name)) is not None:
            levels[f"{words} {guessed.mean:.2f}"] = guessed.mean
    guides = tuple(Guide(level, "") for level in levels.values())
    # The longest paths are about as good as a constant answer: its label goes below their lines.
    heights = {words: level - 0.1 * words.startswith(GUESSES["constant"]) for words, level in levels.items()}
    notes = tuple(Note(words, lengths(run)[-1] + 0.3, height) for words, height in heights.items())
    entered = "path length (attention layers passed through)"
    shown: Look = {"guides": guides, "notes": notes, "x_label": entered, "y_range": (0.0, 1.1)}
    left = LineChart("accuracy", tuple(accuracies), **shown)
    right = LineChart("sum of all paths of a length", tuple(sums), x_label=entered, log=True, names="ends")
    figure = drawn(
        f"{TITLES[task]}: accuracy with paths of one length only",
        f"{run.extra['layers']} attention layers, {run.extra['heads']} heads, width {run.extra['width']}, skips and "
        f"LayerNorm, no MLPs; means over {seeds(run)} trained networks. Bands: 95% interval of the mean for 20 paths "
        "(left), range over networks (right). Attention is frozen at that of the whole network (theorem 2.1) or "
        "recomputed along each path.",
        [[left, right]],
        styles=dict(LINES.values()),
        panel_size=(4.1, 3.1),
        legend_rows=2,
    )
    return {"figure": figure}

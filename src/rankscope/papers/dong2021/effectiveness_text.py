"""What a path-effectiveness run says, every number from the run."""

from __future__ import annotations

from rankscope.papers.dong2021.effectiveness_lines import (
    LINES,
    curve,
    guess,
    lengths,
    over_seeds,
    published_facts,
    seeds,
)
from rankscope.papers.training.intervals import MeanInterval
from rankscope.runs.run import Run
from rankscope.views import number

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
WORDS = {
    "constant": "one answer for all tokens",
    "position": "the best answer for each position",
    "token alone": "the best answer for each token by itself",
    "twins": "the most any network without positions can reach, because equal tokens of a sentence get equal answers",
}


def describe_effectiveness(run: Run) -> str:
    """Training, lines to beat, the table, the claim in both meanings, what differs."""
    return "\n\n".join(
        [
            f"**What we see.** {_training(run)} {_guesses(run)}",
            _table(run),
            f"**Does the claim hold?** {_holds(run, 'recomputed')} {_holds(run, 'frozen')} {_collapse(run)}",
            f"**Where it differs.** {_differs(run)}",
        ]
    )


def conclude_effectiveness(run: Run) -> str:
    """One sentence."""
    best = {of: _best(run, of, "20") for of in NAMES}
    last = {of: curve(run, "accuracy", of, "20")[-1].mean for of in NAMES}
    parts = [
        f"length {best[of][0]} alone {best[of][1].mean:.2f}, length {lengths(run)[-1]} {last[of]:.2f} ({NAMES[of]})"
        for of in NAMES
    ]
    return f"{run.extra['task']}: whole network {_whole(run).mean:.3f}; 20 paths of {'; '.join(parts)}."


def _whole(run: Run) -> MeanInterval:
    return over_seeds(run, "accuracy", of="whole", paths="all")


def _best(run: Run, of: str, paths: str) -> tuple[int, MeanInterval]:
    found = curve(run, "accuracy", of, paths)
    length = max(range(len(found)), key=lambda index: found[index].mean)
    return length, found[length]


def _training(run: Run) -> str:
    facts, plan = run.extra, run.extra["plan"]
    words = (
        f"{seeds(run)} networks ({facts['layers']} layers, {facts['heads']} heads, width {facts['width']}), each on "
        f"data of its own ({facts['train']} sequences to learn, {facts['held']} to judge), trained for "
        f"{plan['steps']} steps of {plan['batch']} sequences with AdamW, highest rate {plan['rate']:g}, linear "
        f"rise and cosine fall: whole network {_whole(run)} "
        f"(published {published_facts(str(facts['task']))['whole']:.2f})."
    )
    as_published = guess(run, "whole, trained as published")
    if as_published is not None:
        words += f" Trained as published, one seed: {as_published.mean:.3f}."
    return words


def _guesses(run: Run) -> str:
    found = [f"{words} {value.mean:.3f}" for name, words in WORDS.items() if (value := guess(run, name)) is not None]
    return f"To be held against, from the data themselves: {'; '.join(found)}."


def _table(run: Run) -> str:
    head = "| length | " + " | ".join(f"{of}, {'all' if paths == 'all' else paths + ' paths'}" for of, paths in LINES)
    lines = [head + " | size over output | residual |", "|---" * (len(LINES) + 3) + "|"]
    columns = [curve(run, "accuracy", *key) for key in LINES]
    sizes = [curve(run, metric, "frozen", "all") for metric in ("size_over_output", "relative_residual")]
    for length in lengths(run):
        cells = [str(column[length]) for column in columns] + [number(size[length].mean) for size in sizes]
        lines.append(f"| {length} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _holds(run: Run, of: str) -> str:
    chance = _chance(run)
    values = curve(run, "accuracy", of, "20")
    length, best = _best(run, of, "20")
    last = values[-1]
    short = length <= 2 and best.mean - chance > 2 * NEAR_CHANCE
    verdict = "holds" if short and last.mean - chance <= NEAR_CHANCE else "does not hold"
    alone = guess(run, "token alone")
    table = "" if alone is None else f" and {_by(best.mean - alone.mean)} the best answer for each token by itself"
    return (
        f"With {NAMES[of]} it {verdict}: of 20 paths of one length those of length {length} do best ({best}), "
        f"{_by(best.mean - chance)} one answer for all{table}; those of length {lengths(run)[-1]} reach {last}, "
        f"{_by(last.mean - chance)} one answer for all."
    )


def _by(difference: float) -> str:
    return f"{abs(difference):.2f} {'above' if difference >= 0 else 'below'}"


def _collapse(run: Run) -> str:
    length, best = _best(run, "frozen", "all")
    residual = curve(run, "relative_residual", "frozen", "all")
    size = curve(run, "size_over_output", "frozen", "all")
    drawn = curve(run, "accuracy", "frozen", "20")[length].mean
    few = "; a length acts as a sum, and a few of its paths do not stand for it" if best.mean > drawn + 0.02 else ""
    largest = max(one.mean for one in size)
    cancels = f" {CANCELLING}" if largest > CANCELS else ""
    offset = curve(run, "accuracy", "frozen, offset set right", "all")
    right = max(range(len(offset)), key=lambda index: offset[index].mean)
    return (
        f"All paths of length {length} together, attention frozen, reach {best}, against {drawn:.3f} for 20 of "
        f"them{few}. With one constant per class and one factor set right for each length, the best is length {right} "
        f"with {offset[right]}, and length {lengths(run)[-1]} reaches {offset[-1]}: what a length says beyond its "
        f"offset. From length 0 to length {lengths(run)[-1]} the size of the sum goes from {number(size[0].mean)} to "
        f"{number(size[-1].mean)} of the output's, at most {number(largest)}, and its relative "
        f"residual from {number(residual[0].mean)} to {number(residual[-1].mean)}.{cancels}"
    )


def _chance(run: Run) -> float:
    found = guess(run, "constant")
    assert found is not None
    return found.mean


def _differs(run: Run) -> str:
    task = str(run.extra["task"])
    facts = published_facts(task)
    words = [
        f"The paper's chance line is {facts['chance']:.2f}; it says that paths of length 1 reach about "
        f"{facts['length_1']:.2f}. The scores of the paths drawn are averaged before the answer is taken; the same "
        "draws serve both meanings, five repeats each, averaged per network; ± is a 95% interval over networks."
    ]
    if task == "sort":
        words.append(
            "A network that knows only where a token stands already has the per-position line, so that chance in the "
            "sense of the paper is too easy to beat for paths of length 0."
        )
    if task == "memory":
        words.append(
            "The sentences are a stand-in drawn from Zipf's law (the paper's are not to be had), and the authors' run "
            "had MLPs by a slip; this one has none. The per-token line is what a table of words would reach without "
            f"any attention. Paths are judged on {run.extra['judged'] or run.extra['held']} of the sentences."
        )
    if task == "hull":
        words.append(f"One answer for all gets {_chance(run):.2f} on these data, more than the published chance.")
    words.append(AFTERWARDS)
    return " ".join(words)

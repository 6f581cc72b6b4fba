"""What a long-paths run says, every number from the run."""

from __future__ import annotations

from rankscope.papers.dong2021.long_paths import FALLING, FIXED
from rankscope.papers.dong2021.long_paths_lines import Arm, arms
from rankscope.runs.run import Run
from rankscope.views import number

LONG = 0.5
"""Long paths carry the signal when its mean length is above this share of the depth."""

WORKS = 0.8
"""A network on long paths still works when it keeps this share of the plain network's accuracy."""

AFTERWARDS = (
    "Chosen after results were seen: the gains 0.03 and 0.01 were added when 1, 0.3, 0.1 and 0 had left a gap, and "
    f"the verdict's words with them: at a price means at least {WORKS:g} of the plain accuracy on paths above "
    f"{LONG:g} of the depth."
)

CLOSE = 0.02
"""Accuracy that counts as kept, below the plain network's."""


def describe_long_paths(run: Run) -> str:
    """The table, whether it can be done, what it costs."""
    plan = run.extra["plan"]
    return "\n\n".join(
        [
            f"**What we see.** The sorting network of {run.extra['layers']} layers, trained for {plan['steps']} "
            f"steps ({run.extra['seeds']} seeds each arm), LayerNorm kept, MLPs out, its skips turned down to a gain "
            "g. Shares are those of `decompose`, of paths from the embedding; what biases bring in is a column of "
            "its own.",
            _table(run),
            f"**Can it be done?** {_can(run)}",
            f"**What it costs.** {_cost(run)}",
            f"**What it rests on.** One task, one depth, one width, {run.extra['seeds']} seeds; ± is a 95% interval "
            "over seeds. LayerNorm after each sum makes good for the size that a gain below 1 takes away; in a "
            "network with norms before the branches the same gain would act otherwise. " + AFTERWARDS,
        ]
    )


def conclude_long_paths(run: Run) -> str:
    """One sentence."""
    plain, best = arms(run)[0], _longest_kept(run)
    start = f"Plain network: mean length {plain.mean_length.mean:.2f}, accuracy {plain.mean_accuracy.mean:.3f}"
    if best is None:
        return f"{start}; no arm carries the signal on longer paths at that accuracy."
    return (
        f"{start}; longest at that accuracy: skips at {best.gain:g} ({best.schedule}), mean length "
        f"{best.mean_length.mean:.2f} of {run.extra['layers']}, accuracy {best.mean_accuracy.mean:.3f}."
    )


def _name(each: Arm) -> str:
    return "1 (plain)" if each.gain == 1.0 else f"{each.gain:g}, {each.schedule}"


def _table(run: Run) -> str:
    depth = int(run.extra["layers"])
    lines = [
        "| g | accuracy | loss | mean length | " + " | ".join(f"share {k}" for k in range(depth + 1)) + " | biases |",
        "|---" * (depth + 6) + "|",
    ]
    for each in arms(run):
        shares = " | ".join(f"{share:.3f}" for share in each.shares.mean(axis=0))
        lines.append(
            f"| {_name(each)} | {each.mean_accuracy} | {number(each.mean_loss.mean)} | {each.mean_length} | {shares} | "
            f"{each.biases.mean():.3f} |"
        )
    return "\n".join(lines)


def _longest_kept(run: Run) -> Arm | None:
    plain, *others = arms(run)
    kept = [
        each
        for each in others
        if each.mean_accuracy.mean >= plain.mean_accuracy.mean - CLOSE
        and each.mean_length.mean > plain.mean_length.mean
    ]
    return max(kept, key=lambda each: each.mean_length.mean) if kept else None


def _can(run: Run) -> str:
    depth = int(run.extra["layers"])
    plain, kept = arms(run)[0], _longest_kept(run)
    long = [each for each in arms(run) if each.mean_length.mean > LONG * depth]
    best = max(long, key=lambda each: each.mean_accuracy.mean, default=None)
    words = f"The plain network carries its signal at a mean length of {plain.mean_length} of {depth}. "
    if kept is None:
        words += f"No gain moved it to longer paths within {CLOSE:g} of its accuracy. "
    else:
        words += f"Within {CLOSE:g} of its accuracy the longest is {kept.mean_length} (g = {_name(kept)}). "
    if best is None:
        return f"No. {words}No arm carries its signal on paths longer than half the depth."
    works = best.mean_accuracy.mean >= WORKS * plain.mean_accuracy.mean
    verdict = "Yes" if best is kept else "Yes, at a price" if works else "No"
    return (
        f"{verdict}. {words}Of the {len(long)} arms with a mean length above half the depth the best is g = "
        f"{_name(best)}: mean length {best.mean_length}, accuracy {best.mean_accuracy} against {plain.mean_accuracy}."
    )


def _cost(run: Run) -> str:
    plain = arms(run)[0]
    words = []
    for gain in (float(gain) for gain in run.extra["gains"] if float(gain) != 1.0):
        pair = {each.schedule: each for each in arms(run) if each.gain == gain}
        words.append(
            f"g = {gain:g}: loss {number(pair[FALLING].mean_loss.mean)} when it falls, "
            f"{number(pair[FIXED].mean_loss.mean)} from the start (accuracy {pair[FALLING].mean_accuracy.mean:.3f} and "
            f"{pair[FIXED].mean_accuracy.mean:.3f})"
        )
    return f"Loss of the plain network {number(plain.mean_loss.mean)}. {'; '.join(words)}."

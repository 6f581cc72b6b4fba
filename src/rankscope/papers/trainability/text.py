"""What the map shows, in words whose every number comes from the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers.trainability.judging import Interval, area_under_curve, rank_correlation
from rankscope.papers.trainability.reading import Design, Networks, Skill, networks_of, skills
from rankscope.runs.prediction import AGREEMENT
from rankscope.views import number

if TYPE_CHECKING:
    from rankscope.runs.run import Run


def describe_map(run: Run) -> str:
    """What we see, how well the prediction tells it, where it fails, what it rests on."""
    networks = networks_of(run)
    found = skills(networks)
    parts = [_size(run), _seen(run, networks), _skill(found), _slices(networks), _level(networks), _failures(networks)]
    return "\n\n".join(part for part in [*parts, _rests(run, networks)] if part)


def conclude_map(run: Run) -> str:
    """One sentence."""
    networks = networks_of(run)
    if run.extra["small"]:
        return f"Small size: {len(networks.design)} tiny networks were predicted, trained and judged; nothing follows."
    best = skills(networks)[0]
    return (
        f"The residual predicted without weights tells which of {len(networks.design)} networks learn with an area "
        f"under the curve of {_interval(best.area)} and a rank correlation with their accuracy of "
        f"{_interval(best.correlation)}."
    )


def _interval(found: Interval) -> str:
    if not np.isfinite(found.value):
        return "(not defined: all learnt, or none)"
    if not np.isfinite(found.low):
        return f"{found.value:.2f}"
    return f"{found.value:.2f} (95%: {found.low:.2f} to {found.high:.2f})"


def _size(run: Run) -> str:
    if not run.extra["small"]:
        return ""
    return "**Small size.** Tiny networks, hardly trained: the pieces work, and nothing here answers the question."


def _seen(run: Run, networks: Networks) -> str:
    blind = run.extra["blind"]
    differ = np.abs(networks.predicted - networks.measured)[networks.measured > -10]
    agree = rank_correlation(networks.predicted, networks.measured)
    return (
        f"**What we see.** {len(networks.design)} networks of {len(set(networks.design))} designs, each trained for "
        f"{run.extra['size']['steps']} steps with its skips scaled, end at accuracies from "
        f"{networks.accuracy.min():.2f} to {networks.accuracy.max():.2f}. One answer for everything gets "
        f"{blind['symbol']:.2f}, one for each position {blind['position']:.2f}, and the best one for each sequence, "
        f"all that a collapsed network can give, {blind['sequence']:.2f}. A network that comes a "
        f"quarter of the way from the position's answer to 1 ({networks.learnt_at:.2f}) is said to have learnt: "
        f"{int(networks.learnt.sum())} have. The residual predicted without weights is that of the networks "
        f"themselves: median difference {np.median(differ):.2f} decades where it is above 1e-10, "
        f"rank correlation {agree:.2f}."
    )


def _skill(found: list[Skill]) -> str:
    lines = [
        "| known before training | area under the curve, learnt or not | rank correlation with accuracy |",
        "|---|---|---|",
    ]
    lines += [f"| {skill.name} | {_interval(skill.area)} | {_interval(skill.correlation)} |" for skill in found]
    return "\n".join(lines)


def _slices(networks: Networks) -> str:
    groups = list(dict.fromkeys(design[1:3] + design[4:] for design in networks.design))
    words = []
    for width, heads, std in groups:
        inside = networks.where(
            np.array([design[1:3] + design[4:] == (width, heads, std) for design in networks.design])
        )
        area = area_under_curve(inside.predicted, inside.accuracy, inside.learnt_at)
        share = f"{int(inside.learnt.sum())} of {len(inside.design)} learnt"
        said = f"area {area:.2f}" if np.isfinite(area) else "no area"
        together = rank_correlation(inside.predicted, inside.accuracy)
        words.append(f"width {width}, {heads} heads, std {std}: {share}, {said}, rank correlation {together:.2f}")
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
        f"the prediction is wrong on {int(hopes.sum() + alarms.sum())} of {len(networks.design)}. "
        f"Kept apart and yet not learnt: {_listed(networks, hopes)}. Collapsing further and yet learnt: "
        f"{_listed(networks, alarms)}."
    )


def best_cut(networks: Networks) -> float:
    """The predicted value at which trained and untrained are told apart best; NaN where all learnt or none."""
    learnt = networks.learnt
    if learnt.all() or not learnt.any():
        return float("nan")
    cuts = np.unique(networks.predicted)
    gains = [(networks.predicted[learnt] >= cut).mean() + (networks.predicted[~learnt] < cut).mean() for cut in cuts]
    return float(cuts[int(np.argmax(gains))])


def _listed(networks: Networks, chosen: np.ndarray) -> str:
    if not chosen.any():
        return "none"
    counts: dict[Design, int] = {}
    for row in np.flatnonzero(chosen):
        counts[networks.design[row]] = counts.get(networks.design[row], 0) + 1
    groups: dict[tuple[int, int, str], list[str]] = {}
    for (depth, width, heads, gain, std), count in sorted(counts.items()):
        seeds = "" if count == 1 else f" (x{count})"
        groups.setdefault((width, heads, std), []).append(f"{depth} blocks at gain {gain}{seeds}")
    return "; ".join(
        f"width {width}, {heads} heads, std {std}: {', '.join(designs)}"
        for (width, heads, std), designs in groups.items()
    )


def _rests(run: Run, networks: Networks) -> str:
    plan, size = run.extra["plan"], run.extra["size"]
    return (
        f"**What it rests on.** One task (sort 8 of 10 symbols, {size['learnt']} sequences to learn from), one family "
        f"(BERT, LayerNorm after each sum), one recipe (AdamW, rate {plan['rate']:g}, {plan['steps']} steps of "
        f"{plan['batch']}), {len(set(networks.seed))} seeds. A network that has not learnt by then might later. "
        "Intervals: bootstrap over designs, seeds of a design kept together."
    )

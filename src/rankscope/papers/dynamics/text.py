"""What training does to collapse, in words whose every number comes from the run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rankscope.papers.dynamics.arms import OWN, Arm
from rankscope.papers.dynamics.reading import Training, arms_of
from rankscope.views import number

if TYPE_CHECKING:
    from rankscope.runs.run import Run

Floats = NDArray[np.float64]
INVISIBLE = -7.0
"""log10 of the relative residual below which float32 sees equal tokens."""
VANISHED = 1e-3
"""Q and K gradients below this share of the V gradient are said to have vanished."""


def describe_training(run: Run) -> str:
    """What we see, arm by arm; whether training slows collapse, changes its order, and what the gradients do."""
    trainings = [Training(run, arm) for arm in arms_of(run)]
    parts = [
        _size(run),
        _seen(trainings),
        _table(trainings),
        _slower(trainings),
        _cut_after(trainings),
        _order(trainings),
        _gradients(trainings),
        _ceiling(run, trainings),
        _rests(run, trainings),
    ]
    return "\n\n".join(part for part in parts if part)


def conclude_training(run: Run) -> str:
    """One sentence."""
    trainings = [Training(run, arm) for arm in arms_of(run)]
    if run.extra["small"]:
        return f"Small size: {len(trainings)} tiny networks were trained for a few steps; nothing follows."
    gone, seen = _parted([t for t in trainings if t.arm.longer == 1])
    patient, _ = _parted([t for t in trainings if t.arm.longer > 1])
    up = [t for t in seen if (t.residual().last > t.residual().first).all()]
    words = (
        f"Within {run.extra['plan']['steps']} steps {len(up)} of {len(seen)} networks whose tokens float32 tells apart "
        f"at the start end further from collapse in every seed, and {len(_back(gone))} of {len(gone)} whose tokens it "
        "cannot come back"
    )
    if patient:
        words += f"; {patient[0].arm.longer} times longer, {len(_back(patient))} of {len(patient)} of those come back"
    return words + "."


def label(arm: Arm) -> str:
    """A network in words."""
    mask = "" if arm.mask == OWN else f", {arm.mask}"
    longer = "" if arm.longer == 1 else f", {arm.longer} times longer"
    return f"{arm.family} {arm.depth}, {arm.variant}{mask}{longer}"


def _size(run: Run) -> str:
    if not run.extra["small"]:
        return ""
    return "**Small size.** Tiny networks, a few steps: the pieces work, and nothing here answers the question."


def _seen(trainings: list[Training]) -> str:
    best = max(trainings, key=lambda t: float(t.accuracy().mean()))
    worst = min(trainings, key=lambda t: float(t.accuracy().mean()))
    return (
        f"**What we see.** {len(trainings)} networks trained on sorting, whatever is cut from them cut in training "
        f"too. They end between {_mean(worst.accuracy()):.2f} ({label(worst.arm)}) and {_mean(best.accuracy()):.2f} "
        f"({label(best.arm)}) of the symbols right on unseen sequences. In the table, each pair is before and after "
        "training, means over seeds: log10 of the relative residual after the last block in exact arithmetic; the "
        "order of a block; its factor (of a tiny residual at order 1, of the cube at order 3); the gradient of "
        "queries and keys over that of values in the last block. Moved: how far the query and value maps end "
        "from where they started, relative to their size."
    )


def _table(trainings: list[Training]) -> str:
    lines = [
        "| network | accuracy | loss | log10 residual | order | factor | Q, K over V gradient | Q moved | V moved |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for training in trainings:
        residual, order, factor, ratio = training.residual(), training.order(), training.factor(), training.ratio()
        cells = [
            label(training.arm),
            _spread(training.accuracy()),
            _spread(training.final_loss()),
            f"{_mean(residual.first):.2f} → {_mean(residual.last):.2f}",
            f"{_mean(order.first):.2f} → {_mean(order.last):.2f}",
            f"{_small(_mean(factor.first))} → {_small(_mean(factor.last))}",
            f"{_small(_mean(ratio.first))} → {_small(_mean(ratio.last))}",
            _small(_mean(training.moved("q"))),
            _small(_mean(training.moved("v"))),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _parted(trainings: list[Training]) -> tuple[list[Training], list[Training]]:
    """Networks whose last block float32 sees as collapsed before training in every seed, and the others."""
    gone = [training for training in trainings if (training.residual().first < INVISIBLE).all()]
    return gone, [training for training in trainings if training not in gone]


def _back(trainings: list[Training]) -> list[Training]:
    """Those whose tokens float32 tells apart after training, in every seed."""
    return [training for training in trainings if (training.residual().last > INVISIBLE).all()]


def _slower(trainings: list[Training]) -> str:
    gone, seen = _parted([t for t in trainings if t.arm.longer == 1])
    patient, _ = _parted([t for t in trainings if t.arm.longer > 1])
    words = (
        "**Slower if retrained?** Before training float32 tells the tokens of "
        f"{len(seen)} networks apart after the last block. {_gained(seen)}"
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
        words += f" {label(training.arm).capitalize()}: {way}; accuracy {_spread(training.accuracy())}."
    return words


def _cut_after(trainings: list[Training]) -> str:
    """The paper's way, training whole and cutting after, beside training what is cut."""
    rows = []
    for whole in trainings:
        for cut in whole.arm.cuts:
            same = [t for t in trainings if t.arm == replace(whole.arm, variant=cut)]
            if same:
                residual = same[0].residual()
                numbers = (residual.first, whole.cut_after(cut), residual.last)
                rows.append(f"| {label(same[0].arm)} | " + " | ".join(f"{_mean(n):.2f}" for n in numbers) + " |")
    if not rows:
        return ""
    head = "| log10 residual, last block | never trained | trained whole, cut after | trained as it is |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def _gained(trainings: list[Training]) -> str:
    """How many end with a larger residual than they began with, by how much, and which do not."""
    changes = [training.residual().last - training.residual().first for training in trainings]
    up = [_mean(change) for change in changes if (change > 0).all()]
    words = f"{len(up)} of them end with a larger residual in every seed"
    words += f", by {min(up):.2f} to {max(up):.2f} decades." if up else "."
    others = [
        f"{label(training.arm)} ({change.min():+.2f} to {change.max():+.2f})"
        for training, change in zip(trainings, changes, strict=True)
        if not (change > 0).all()
    ]
    return words + (f" Not so: {'; '.join(others)}." if others else "")


def _order_changes(training: Training) -> bool:
    order = training.order()
    return bool(np.any(np.abs(order.last - order.first) > 1))


def _order(trainings: list[Training]) -> str:
    cubic = [t for t in trainings if np.nanmedian(t.order().first) > 2]
    linear = [t for t in trainings if t not in cubic]
    changed = "; ".join(label(t.arm) for t in trainings if _order_changes(t))
    words = f"**Order and factor.** {len(cubic)} of the networks start with order 3. "
    words += f"By more than 1 it changes in: {changed}." if changed else "None changes its order by more than 1."
    if cubic:
        turns = [_mean(t.factor().last) / _mean(t.factor().first) for t in cubic]
        words += (
            f" The constant in front of the cube changes by factors from {_small(min(turns))} to {_small(max(turns))}."
        )
    if linear:
        before, after = ([_mean(end) for end in ends] for ends in zip(*(_ends(t) for t in linear), strict=True))
        rises = sum(late > early for early, late in zip(before, after, strict=True))
        words += (
            f" In the {len(linear)} others the factor of a block on a tiny residual lies between {_small(min(before))} "
            f"and {_small(max(before))} before training, between {_small(min(after))} and {_small(max(after))} "
            f"after it; it rises in {rises}. Above 1, pushing tokens apart: "
            f"{sum(early > 1 for early in before)} before, {sum(late > 1 for late in after)} after."
        )
    return words


def _ends(training: Training) -> tuple[Floats, Floats]:
    factor = training.factor()
    return factor.first, factor.last


def _gradients(trainings: list[Training]) -> str:
    gone = [t for t in trainings if _mean(t.ratio().first) < VANISHED]
    words = []
    for training in gone:
        ratio = training.ratio()
        words.append(f"{label(training.arm)} ({_small(_mean(ratio.first))} → {_small(_mean(ratio.last))})")
    others = [_mean(t.ratio().first) for t in trainings if t not in gone]
    said = f" The others begin between {_small(min(others))} and {_small(max(others))}." if others else ""
    return (
        f"**Q and K gradients**, last block, over that of V. Below {number(VANISHED)} before training, and what "
        f"becomes of it: {'; '.join(words) or 'none'}.{said} Near 1e-7 a ratio is float32 rounding; Adam, which "
        "divides by the size of a gradient, moves queries and keys all the same (table)."
    )


def _ceiling(run: Run, trainings: list[Training]) -> str:
    most = float(run.extra["collapsed"])
    gone = [t for t in trainings if (t.residual().last < INVISIBLE).all()]
    if not gone:
        return ""
    listed = "; ".join(f"{label(t.arm)} {_spread(t.accuracy())}" for t in gone)
    return (
        f"**What a collapsed network learns.** Where float32 shows no difference between tokens after the last block "
        f"(residual below 10^{INVISIBLE:g} at the end), a sequence gets one answer for all its tokens. The best such "
        f"answers are right for {most:.2f} of the symbols; these networks end at: {listed}."
    )


def _rests(run: Run, trainings: list[Training]) -> str:
    plan, size = run.extra["plan"], run.extra["size"]
    return (
        f"**What it rests on.** One task, width {size['width']}, {size['heads']} heads, weights drawn with standard "
        f"deviation 1/sqrt(width), {plan['steps']} steps of AdamW at rate {plan['rate']:g} with {plan['batch']} "
        f"sequences, {trainings[0].seeds.size} seeds; residuals on {size['probed']} held-out sequences. The encoder "
        "has its LayerNorms after each sum (BERT), the causal model before each branch (GPT-2)."
    )


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _small(value: float) -> str:
    return number(value) if np.isfinite(value) else "–"


def _spread(values: Floats) -> str:
    return f"{values.mean():.2f} ({values.min():.2f}–{values.max():.2f})" if values.size > 1 else f"{values.mean():.2f}"

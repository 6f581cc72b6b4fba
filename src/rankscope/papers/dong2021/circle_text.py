"""What a circle run says, every number from the run."""

from __future__ import annotations

import math
from collections import Counter

from rankscope.papers.dong2021.circle_lines import MET, RADIUS, Free, geometric, networks, variants, widths
from rankscope.runs.run import Run
from rankscope.views import number

ENDS = {"met": "met", "apart": "flew apart", "drifted": "drifted off", "kept": "kept the circle"}
LAW = (
    "**Why.** For opposing points ±p, attention without skip and biases gives the sum over heads of tanh(pᵀA_h p/√d) "
    "p W_h: near the centre a cube of p, as the cubic law has it. A radius r is then sent to about r³ times a "
    "constant, so that a circle that is sent to itself has a radial factor of 3 while scores are small: every step "
    "triples an error of the radius, inward or outward. The points must meet or fly apart, after about "
    "log(1/error)/log 3 steps, and the sign of the first error decides which. A saturated softmax would bring the "
    "factor down to 1, and two heads that work against each other even lower; a skip adds the identity and brings it "
    "down towards 1."
)


def describe_circle(run: Run) -> str:
    """The table, the claim, and why."""
    lines = [
        "| width | block | loss at the end | radial factor | off the circle from step | ends | log10 distance at "
        "the end, exact |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_line(width, name, networks(run, name, width)) for width in widths(run) for name in variants(run)]
    plan = run.extra["plan"]
    return "\n\n".join(
        [
            f"**What we see.** {run.extra['seeds']} blocks of each kind, trained for {plan['steps']} steps of "
            f"{plan['batch']} of the {run.extra['angles']} angles (AdamW, highest rate {plan['rate']:g}), then run for "
            f"{run.extra['steps']} steps on their own output. Norms are out everywhere, and without skip means without "
            "either skip. Ranges are over blocks.",
            "\n".join(lines),
            f"**Does the claim hold?** {_claim(run)}",
            LAW,
            "**Where it differs.** In the authors' run without skip one skip was left inside the block. Met means "
            f"closer than {MET:g} of the first distance, flown apart ten times as far; a block that keeps the circle "
            "is within a tenth of it in distance and centre at the end. Nothing in training holds the middle of the "
            "two points: where it drifts, points may meet far from the circle. Underflow: the distance reads zero "
            "in exact arithmetic too, because a saturated softmax gives both points the same weights, or because "
            "the logarithm of the distance itself is beyond about -10^18.",
        ]
    )


def conclude_circle(run: Run) -> str:
    """One sentence."""
    alone = _all(run, variants(run)[0])
    both = _all(run, variants(run)[-1])
    return (
        f"Attention alone loses the circle in {_lost(alone)} of {len(alone)} blocks ({_ends(alone)}), radial factor "
        f"{geometric([free.radial for free in alone]):.2f}; with skip and MLP {_lost(both)} of {len(both)} do, factor "
        f"{geometric([free.radial for free in both]):.2f}."
    )


def _all(run: Run, name: str) -> list[Free]:
    return [free for width in widths(run) for free in networks(run, name, width)]


def _lost(found: list[Free]) -> int:
    return sum(free.end != "kept" for free in found)


def _ends(found: list[Free]) -> str:
    counts = Counter(free.end for free in found)
    return ", ".join(f"{counts[end]} {words}" for end, words in ENDS.items() if counts[end])


def _line(width: int, name: str, found: list[Free]) -> str:
    left = sorted(free.steps + 1 if free.left is None else free.left for free in found)
    words = [f"{step}" if step <= found[0].steps else "never" for step in (left[0], left[-1])]
    exact = sorted(float(free.exact[-1]) for free in found)
    losses = sorted(free.loss for free in found)
    radial = sorted(free.radial for free in found)
    cells = [
        f"{number(losses[0])} to {number(losses[-1])}",
        f"{radial[0]:.3f} to {radial[-1]:.3f}",
        words[0] if words[0] == words[1] else f"{words[0]} to {words[1]}",
        _ends(found),
        f"{_log(exact[0])} to {_log(exact[-1])}",
    ]
    return f"| {width} | {name} | {' | '.join(cells)} |"


def _log(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "underflow"


def _claim(run: Run) -> str:
    alone, skip, mlp, both = (_all(run, name) for name in variants(run))
    factor = {name: geometric([free.radial for free in _all(run, name)]) for name in variants(run)}
    outcomes = _outcomes(run)
    told = "; ".join(f"{what}: {held} of {total}" for what, held, total in outcomes)
    return (
        f"{_answer(run, outcomes)} Outcomes, by blocks: {told}. Without skip and MLP {_lost(alone)} of {len(alone)} "
        f"blocks lose the circle ({_ends(alone)}). With a skip {_lost(skip)} of {len(skip)} lose it ({_ends(skip)}), "
        f"with skip and MLP {_lost(both)} of {len(both)} ({_ends(both)}), with an MLP in place of the skip "
        f"{_lost(mlp)} of {len(mlp)} ({_ends(mlp)}). The radial factor tells them apart: "
        f"{', '.join(f'{value:.2f} ({name})' for name, value in factor.items())}; an MLP alone changes the constant "
        "of the cubic law and not its order."
    )


def _outcomes(run: Run) -> list[tuple[str, int, int]]:
    """Everything the paper says happens, with in how many blocks it did and of how many."""
    alone, skip, mlp, _ = (_all(run, name) for name in variants(run))
    found = [("without skip and MLP the points meet", sum(free.end == "met" for free in alone), len(alone))]
    for word, others in (("a skip", skip), ("an MLP", mlp)):
        held = sum(_not_or_later(one, other) for one, other in zip(alone, others, strict=True))
        found.append((f"with {word} they do not, or later", held, len(others)))
    if len(widths(run)) > 1:
        narrow, wide = (networks(run, variants(run)[0], width) for width in (min(widths(run)), max(widths(run))))
        longer = sum(_stays(one) < _stays(other) for one, other in zip(narrow, wide, strict=True))
        found.append(("a wider block keeps the circle for longer", longer, len(wide)))
    return found


def _not_or_later(alone: Free, other: Free) -> bool:
    """Whether the points of a block do not meet, or later than those of the same seed without skip and MLP."""
    return other.met_at is None or (alone.met_at is not None and other.met_at > alone.met_at)


def _stays(free: Free) -> int:
    return free.steps + 1 if free.left is None else free.left


def _answer(run: Run, outcomes: list[tuple[str, int, int]]) -> str:
    """Yes only if every outcome was seen in every block, and every block had learned what it is then asked to do."""
    blocks = [free for name in variants(run) for free in _all(run, name)]
    failed = [free for free in blocks if not free.learned]
    if failed:
        return (
            f"Not tested: {len(failed)} of {len(blocks)} blocks have not learned the circle (loss up to "
            f"{number(max(free.loss for free in failed))}; always answering the centre gives {number(RADIUS**2 / 2)})."
        )
    whole = sum(held == total for _, held, total in outcomes)
    if whole == len(outcomes):
        return "Yes."
    return f"In part: {whole} of {len(outcomes)} outcomes in every block." if any(h for _, h, _ in outcomes) else "No."

"""What the table of mechanisms says, every number from the run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankscope.papers.mechanisms.declaring import GROUPS
from rankscope.papers.mechanisms.explaining import explain
from rankscope.papers.mechanisms.summing import AS_IT_IS, Line, lines_of
from rankscope.papers.mechanisms.wording import DASH, end_words, rate_words
from rankscope.views import number

if TYPE_CHECKING:
    from rankscope.runs.run import Run

FULL_DEPTH = 12
SHOWN_BELOW = 0.1


def describe_table(run: Run) -> str:
    """What is seen, the table, how to read it, and the rows that were explained by an experiment."""
    lines = lines_of(run)
    plain = [line for line in lines if line.change == AS_IT_IS]
    parts = [_size(run, plain), _seen(plain), _grid(plain), _reading(run, plain), explain(lines), _refused(plain)]
    return "\n\n".join(part for part in parts if part)


def conclude_table(run: Run) -> str:
    """One sentence."""
    plain = [line for line in lines_of(run) if line.change == AS_IT_IS]
    counts = {order: len(_of_order(plain, order)) for order in (3, 1, 0)}
    return (
        f"Of {len(plain)} mechanisms without skips {counts[3]} fall into collapse with order 3, {counts[1]} with order "
        f"1, and {counts[0]} cannot stay there: equal tokens leave them unequal."
    )


def _of_order(lines: Sequence[Line], order: int) -> list[Line]:
    return [line for line in lines if line.order.get("cut") == order]


def _size(run: Run, lines: Sequence[Line]) -> str:
    size = run.extra["size"]
    seeds = "1 seed" if size["seeds"] == 1 else f"{size['seeds']} seeds"
    words = (
        f"**Setting.** {len(lines)} mechanisms, each with {size['depth']} blocks of width {size['width']}, "
        f"{size['heads']} heads, {size['tokens']} tokens and a vocabulary of {size['vocabulary']}, at the random "
        f"initialisation of transformers, {seeds}. Text models read the same hashed words, vision models the "
        "same smooth images."
    )
    if size["depth"] == FULL_DEPTH:
        return words
    return f"{words} This is the small size: the pieces work, and nothing follows from the numbers."


def _seen(lines: Sequence[Line]) -> str:
    named = {order: ", ".join(line.mechanism.model for line in _of_order(lines, order)) for order in (3, 1, 0)}
    sentences = ["**What we see.** Without its skips, a mechanism meets collapse in one of three ways."]
    if named[3]:
        sentences.append(
            "*Order 3*: a block cubes the distance between tokens. In all of these every token sees every token, and "
            f"no position enters the scores ({named[3]})."
        )
    if named[1]:
        sentences.append(
            f"*Order 1*: a block multiplies it by a factor. These have a mask, a window or positions in the scores "
            f"({named[1]})."
        )
    if named[0]:
        sentences.append(
            f"*Order 0*: tokens that enter equal leave unequal, so that collapse is no state the network could rest in "
            f"({named[0]})."
        )
    return " ".join(sentences) + _whole(lines)


def _whole(lines: Sequence[Line]) -> str:
    logs = {line.mechanism.model: line.ends["full"].log10 for line in lines if "full" in line.ends}
    ends = {name: 10**log10 for name, log10 in logs.items() if log10 is not None}
    low = sorted((name for name in ends if ends[name] < SHOWN_BELOW), key=lambda name: ends[name])
    least = sorted(ends, key=lambda name: ends[name])[:3]
    listed = ", ".join(f"{name} {number(ends[name])}" for name in low or least)
    if low:
        return f" With skips, below {SHOWN_BELOW:g} after the last block: {listed}."
    return (
        f" With skips none of the {len(ends)} falls below {SHOWN_BELOW:g} in so many blocks; the lowest relative "
        f"residuals after the last are those of {listed}."
    )


def _grid(lines: Sequence[Line]) -> str:
    head = ("mechanism", "mixes tokens by", "std", "full", "no skips", "order", "factor or level", "alone", "read in")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for group, title in GROUPS.items():
        members = [line for line in lines if line.mechanism.group == group]
        if members:
            rows.append(f"| **{title}** |" + " |" * (len(head) - 1))
        rows += ["| " + " | ".join(_cells(line)) + " |" for line in members]
    return "\n".join(rows)


def _cells(line: Line) -> tuple[str, ...]:
    order = line.order.get("cut")
    return (
        f"{line.mechanism.model} (`{line.mechanism.name}`)",
        line.mechanism.words,
        number(line.std),
        end_words(line.ends.get("full")),
        end_words(line.ends.get("cut")),
        DASH if order is None else str(order),
        rate_words(line, "cut"),
        end_words(line.ends.get("pure")),
        line.order_read.get("cut") or line.order_read.get("full") or DASH,
    )


def _reading(run: Run, lines: Sequence[Line]) -> str:
    spread = max((line.ends["full"].half_range for line in lines if "full" in line.ends), default=0.0)
    floor = float(run.floor["relative"])
    return (
        "**How to read it.** `full`, `no skips` and `alone` are the relative residual ‖X − mean‖ / ‖X‖ after the last "
        "block (1: nothing in common, 0: all tokens equal): of the whole model, with every skip cut, and with skips, "
        "MLPs and norms all taken out; median over seeds. `std` is the median standard deviation of the weight "
        "matrices of the blocks as the library draws them. `order` is read near collapse without skips: exact where "
        "exact arithmetic follows the model, by tokens drawn together by e^−200 and e^−201; else in float64, drawn "
        "together by 1/100 and 1/1000, where relative residuals below "
        f"{number(floor)} are rounding. The factor (×, order 1) is what a block does to a relative residual near "
        "collapse, geometric mean over the second half of the blocks; the level (=, order 0) is the relative residual "
        "after the last block, or the one before it if that is larger, of tokens that entered the first one equal. "
        "Blocks are counted from 1. Over seeds, `full` differs from its median "
        f"by a factor of {10**spread:.2f} at most."
    )


def _short(reason: str) -> str:
    """A refusal without the module it was met in and the advice."""
    return re.sub(r" in transformers\.\S+:", ":", reason.split(". Register")[0]).rstrip(".")


def _refused(lines: Sequence[Line]) -> str:
    listed = []
    for line in lines:
        for variant, reason in line.reasons.items():
            if variant in ("cut", "None"):
                listed.append(f"{line.mechanism.model}: {_short(reason)}")
    return "**Not covered.** " + "; ".join(listed) + "." if listed else ""

"""The table of mechanisms: one line per mechanism and change, in words, and as a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rankscope._types import Status
from rankscope.papers._drawing import Look
from rankscope.papers.mechanisms.rows import GROUPS, MECHANISMS, Mechanism
from rankscope.views import Line, Style, Table, number
from rankscope.views.figures import headed_figure, legend_below, plain_axes
from rankscope.views.palette import BLUE, GREEN, INK
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

AS_IT_IS = "none"
Row = tuple[str, str, str]
Values = Mapping[int, float]
Fate = Literal["vanish", "grow", "equal"]


@dataclass(frozen=True)
class End:
    """Where a network ends: log10 of the relative residual after its last block, over seeds.

    Attributes:
        log10: median over seeds; None if no finite value is left.
        half_range: half the distance between the largest and the smallest over seeds, in the same logarithm.
        arithmetic: ``"exact"`` or ``"float64"``.
        lost_after: the last block that could be read, if that is not the last block of the network.
        fate: of the tokens after that block: they vanish, grow out of range, or are equal up to rounding.
    """

    log10: float | None
    half_range: float = 0.0
    arithmetic: str = "float64"
    lost_after: int | None = None
    fate: Fate | None = None


@dataclass(frozen=True)
class MechanismLine:
    """One line of the table.

    Attributes:
        mechanism: what is measured.
        change: what is changed in it, ``"none"`` in the table proper.
        ends: by variant; those that were refused are missing.
        order: near collapse, without skips, by variant: 3, 1 or 0; None if none could be determined.
        order_read: in which arithmetic.
        factor: of order 1, per block over the second half of the blocks, on the relative residual, by variant.
        level: of order 0, the relative residual that equal tokens have after the last block, or the one before it if
            that is larger, by variant.
        size: root mean square of the tokens after the first and after the last block of the whole model.
        std: of the weights at initialisation.
        seeds: how many.
        reasons: why a variant, or exact arithmetic in it, was refused.
    """

    mechanism: Mechanism
    change: str
    ends: Mapping[str, End]
    order: Mapping[str, int | None]
    order_read: Mapping[str, str]
    factor: Mapping[str, float]
    level: Mapping[str, float]
    size: tuple[float, float] | None
    std: float
    seeds: int
    reasons: Mapping[str, str]


class MechanismTable:
    """Values of a run by their coordinates; sequences are averaged, seeds and blocks kept.

    A row is ``(mechanism, change, variant)``.
    """

    def __init__(self, run: Run) -> None:
        self.depth = int(run.extra["size"]["depth"])
        self._cells: dict[tuple[str, ...], dict[int, dict[int, list[float]]]] = {}
        self._floors: set[tuple[Any, ...]] = set()
        self.notes: dict[Row, str] = {}
        for row in run.table.to_pylist():
            key = tuple(str(row[name]) for name in ("mechanism", "change", "variant", "arithmetic", "metric"))
            if row["note"]:
                self.notes.setdefault((key[0], key[1], key[2]), row["note"])
            if row["site"] == "block.in" and row["arithmetic"] is not None:
                continue
            layers = self._cells.setdefault(key, {}).setdefault(int(row["seed"]), {})
            layers.setdefault(int(row["layer"]), []).append(row["value"])
            if row["status"] == str(Status.FLOOR):
                self._floors.add((*key, row["layer"]))

    def over_depth(self, row: Row, arithmetic: str, metric: str) -> dict[int, Values]:
        """By seed, by block: the mean over sequences."""
        found = self._cells.get((*row, arithmetic, metric), {})
        return {
            seed: {layer: sum(values) / len(values) for layer, values in layers.items()}
            for seed, layers in found.items()
        }

    def last(self, row: Row, arithmetic: str, metric: str) -> list[float]:
        """After the last block, by seed; seeds that did not get there are missing."""
        ends = [layers.get(self.depth - 1, math.nan) for layers in self.over_depth(row, arithmetic, metric).values()]
        return [value for value in ends if math.isfinite(value)]

    def is_at_floor(self, row: Row, layer: int) -> bool:
        """Whether any relative residual there is rounding."""
        return (*row, "float64", "mu_over_norm", layer) in self._floors

    def pairs(self) -> list[tuple[str, str]]:
        """Mechanisms and changes, in the order of the table."""
        held = dict.fromkeys((key[0], key[1]) for key in self._cells)
        return sorted(held, key=lambda pair: (list(MECHANISMS).index(pair[0]), pair[1] != AS_IT_IS, pair[1]))


def lines_of(run: Run) -> list[MechanismLine]:
    """Every line of the run; changed mechanisms follow the one they belong to."""
    table = MechanismTable(run)
    return [_line(table, name, change) for name, change in table.pairs()]


def _line(table: MechanismTable, name: str, change: str) -> MechanismLine:
    rows = {variant: (name, change, variant) for variant in ("full", "cut", "pure")}
    rows = {variant: row for variant, row in rows.items() if table.over_depth(row, "float64", "mu_over_norm")}
    orders = {variant: _order(table, row) for variant, row in rows.items()}
    std = table.over_depth((name, change, "None"), "None", "initial_std")
    factors = {v: _factor(table, row, orders[v][1]) for v, row in rows.items() if orders[v][0] == 1}
    levels = {v: _level(table, row) for v, row in rows.items() if orders[v][0] == 0}
    return MechanismLine(
        mechanism=MECHANISMS[name],
        change=change,
        ends={variant: _end(table, row) for variant, row in rows.items()},
        order={variant: order for variant, (order, _) in orders.items()},
        order_read={variant: read for variant, (_, read) in orders.items()},
        factor={variant: value for variant, value in factors.items() if value is not None},
        level={variant: value for variant, value in levels.items() if value is not None},
        size=_size_of_tokens(table, (name, change, "full")),
        std=median(layers[0] for layers in std.values()) if std else math.nan,
        seeds=len(std),
        reasons={row[2]: note for row, note in table.notes.items() if row[:2] == (name, change)},
    )


def _level(table: MechanismTable, row: Row) -> float | None:
    seen = table.over_depth(row, "float64", "equal_tokens").values()
    ends = [max(layers.get(table.depth - back, math.nan) for back in (2, 1)) for layers in seen]
    return median(ends) if ends and all(math.isfinite(end) for end in ends) else None


def _size_of_tokens(table: MechanismTable, row: Row) -> tuple[float, float] | None:
    seen = table.over_depth(row, "float64", "log10_token_size").values()
    logs = [(layers[0], layers[table.depth - 1]) for layers in seen if table.depth - 1 in layers]
    if not logs or not all(math.isfinite(value) for pair in logs for value in pair):
        return None
    return 10 ** median(first for first, _ in logs), 10 ** median(last for _, last in logs)


def _end(table: MechanismTable, row: Row) -> End:
    seen = table.over_depth(row, "float64", "mu_over_norm")
    exact = table.last(row, "exact", "log10_relative_residual")
    if exact and len(exact) == len(seen):
        return End(median(exact), (max(exact) - min(exact)) / 2, "exact")
    last = [value for value in table.last(row, "float64", "mu_over_norm") if value > 0]
    if len(last) == len(seen) and not table.is_at_floor(row, table.depth - 1):
        logs = [math.log10(value) for value in last]
        return End(median(logs), (max(logs) - min(logs)) / 2)
    return _lost(table, seen, row)


def _lost(table: MechanismTable, seen: Mapping[int, Values], row: Row) -> End:
    """Tokens that vanished, overflowed or became equal: how far they got, in the arithmetic that got furthest."""
    exact = table.over_depth(row, "exact", "log10_relative_residual")
    sizes = table.over_depth(row, "float64", "log10_token_size").values()
    lasting = all(math.isfinite(layers.get(table.depth - 1, math.nan)) for layers in sizes)
    finite = [value for layers in sizes for _, value in sorted(layers.items()) if math.isfinite(value)]
    fate: Fate = "equal" if lasting else "grow" if finite and finite[-1] > 0 else "vanish"

    def leading(layers: Values) -> int:
        """How many blocks from the first give a number above rounding."""
        lost = (layer for layer in sorted(layers) if not layers[layer] > 0 or table.is_at_floor(row, layer))
        return next(lost, len(layers))

    in_float = min(leading(layers) for layers in seen.values())
    exactly = min(len(layers) for layers in exact.values()) if len(exact) == len(seen) else 0
    if exactly >= in_float and exactly:
        log10 = median(layers[exactly - 1] for layers in exact.values())
        return End(log10, arithmetic="exact", lost_after=exactly, fate=fate)
    log10s = [math.log10(layers[in_float - 1]) for layers in seen.values()] if in_float else []
    return End(median(log10s) if log10s else None, lost_after=in_float, fate=fate)


def _order(table: MechanismTable, row: Row) -> tuple[int | None, str]:
    """The median over blocks and seeds; 0 as soon as one kind of block makes equal tokens unequal."""
    for arithmetic in ("exact", "float64"):
        seen = table.over_depth(row, arithmetic, "order").values()
        found = [value for layers in seen for value in layers.values() if math.isfinite(value)]
        if found:
            return (0 if min(found) < 0.5 else round(median(found))), arithmetic
    return None, ""


def _factor(table: MechanismTable, row: Row, arithmetic: str) -> float | None:
    """Geometric mean over the second half of the blocks of the factor on the relative residual near collapse."""
    slopes = []
    for layers in table.over_depth(row, arithmetic, "log10_near_collapse").values():
        half = [layer for layer in sorted(layers) if layer >= table.depth // 2 - 1]
        if len(half) > 1:
            slopes.append((layers[half[-1]] - layers[half[0]]) / (half[-1] - half[0]))
    return 10 ** median(slopes) if slopes else None


DASH = "–"
FATES: Mapping[Fate, str] = {
    "vanish": "tokens vanish",
    "grow": "tokens grow out of range",
    "equal": "too little to tell",
}


def rate_words(line: MechanismLine, variant: str) -> str:
    """The factor per block of order 1, the level of order 0."""
    if variant in line.factor:
        return f"× {number(line.factor[variant])}"
    if variant in line.level:
        return f"= {number(line.level[variant])}"
    return DASH


def end_words(end: End | None) -> str:
    """A relative residual as the table shows it."""
    if end is None:
        return DASH
    if end.log10 is None:
        return "none: in the first block " + FATES[end.fate or "equal"]
    value = log10_words(end.log10)
    return value if end.lost_after is None else f"{value} at block {end.lost_after}, then {FATES[end.fate or 'equal']}"


def log10_words(log10: float) -> str:
    """A number given by its logarithm, as a power of ten where it is small."""
    if log10 > -3:
        return number(10**log10)
    return f"10<sup>−{abs(log10):.1f}</sup>" if log10 > -1000 else f"10<sup>−{abs(log10):.0f}</sup>"


FULL_DEPTH = 12
SHOWN_BELOW = 0.1


def describe(run: Run) -> str:
    """What is seen, the table, how to read it, and the rows that were explained by an experiment."""
    lines = lines_of(run)
    plain = [line for line in lines if line.change == AS_IT_IS]
    parts = [_size(run, plain), _seen(plain), _grid(plain), _reading(run, plain), _explained(lines), _refused(plain)]
    return "\n\n".join(part for part in parts if part)


def judge(run: Run) -> str:
    """How many mechanisms meet collapse in each of the three ways."""
    plain = [line for line in lines_of(run) if line.change == AS_IT_IS]
    counts = {order: len(_of_order(plain, order)) for order in (3, 1, 0)}
    return (
        f"Of {len(plain)} mechanisms without skips {counts[3]} fall into collapse with order 3, {counts[1]} with order "
        f"1, and {counts[0]} cannot stay there: equal tokens leave them unequal."
    )


def _of_order(lines: Sequence[MechanismLine], order: int) -> list[MechanismLine]:
    return [line for line in lines if line.order.get("cut") == order]


def _size(run: Run, lines: Sequence[MechanismLine]) -> str:
    size = run.extra["size"]
    seeds = "1 seed" if size["seeds"] == 1 else f"{size['seeds']} seeds"
    words = (
        f"**Setting.** {len(lines)} mechanisms, each with {size['depth']} blocks of width {size['width']}, "
        f"{size['heads']} heads, {size['tokens']} tokens and a vocabulary of {size['vocabulary']}, at the random "
        f"initialisation of transformers, {seeds}. Text models read the same hashed words, vision models the same "
        "smooth images."
    )
    if size["depth"] == FULL_DEPTH:
        return words
    return f"{words} This is the small size: the code runs, and nothing follows from the numbers."


def _seen(lines: Sequence[MechanismLine]) -> str:
    named = {order: ", ".join(line.mechanism.model for line in _of_order(lines, order)) for order in (3, 1, 0)}
    sentences = ["**What we see.** Without its skips, a mechanism meets collapse in one of three ways."]
    if named[3]:
        sentences.append(
            "*Order 3*: a block cubes the distance between tokens. In all of these every token sees every token, and "
            f"no position enters the scores ({named[3]})."
        )
    if named[1]:
        sentences.append(
            "*Order 1*: a block multiplies it by a factor. These have a mask, a window or positions in the scores "
            f"({named[1]})."
        )
    if named[0]:
        sentences.append(
            f"*Order 0*: tokens that enter equal leave unequal, so that the network cannot stay collapsed ({named[0]})."
        )
    return " ".join(sentences) + _whole(lines)


def _whole(lines: Sequence[MechanismLine]) -> str:
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


def _grid(lines: Sequence[MechanismLine]) -> str:
    head = ("mechanism", "mixes tokens by", "std", "full", "no skips", "order", "factor or level", "alone", "read in")
    rows: list[tuple[str, ...]] = []
    for group, title in GROUPS.items():
        members = [_cells(line) for line in lines if line.mechanism.group == group]
        rows += [(f"**{title}**", *[""] * (len(head) - 1)), *members] if members else []
    return markdown_text(Table(head, rows))


def _cells(line: MechanismLine) -> tuple[str, ...]:
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


def _reading(run: Run, lines: Sequence[MechanismLine]) -> str:
    spread = max((line.ends["full"].half_range for line in lines if "full" in line.ends), default=0.0)
    floor = float(run.floor["relative"])
    return (
        "**How to read it.** `full`, `no skips` and `alone` are the relative residual ‖X − mean‖ / ‖X‖ after the last "
        "block (1: nothing in common, 0: all tokens equal): of the whole model, with every skip cut, and with skips, "
        "MLPs and norms all taken out; median over seeds. `std` is the median standard deviation of the weight "
        "matrices of the blocks as the library draws them. `order` is read near collapse without skips: exact where "
        "exact arithmetic follows the model, by tokens drawn together by e^−200 and e^−201; else in float64, drawn "
        f"together by 1/100 and 1/1000, where relative residuals below {number(floor)} are rounding. The factor (×, "
        "order 1) is what a block does to a relative residual near collapse, geometric mean over the second half of "
        "the blocks; the level (=, order 0) is the relative residual after the last block, or the one before it if "
        "that is larger, of tokens that entered the first one equal. Blocks are counted from 1. Over seeds, `full` "
        f"differs from its median by a factor of {10**spread:.2f} at most."
    )


def _refused(lines: Sequence[MechanismLine]) -> str:
    listed = []
    for line in lines:
        for reason in (reason for variant, reason in line.reasons.items() if variant in ("cut", "None")):
            # Drop the name of the module and the advice.
            short = re.sub(r" in transformers\.\S+:", ":", reason.split(". Register")[0]).rstrip(".")
            listed.append(f"{line.mechanism.model}: {short}")
    return "**Not covered.** " + "; ".join(listed) + "." if listed else ""


def _explained(lines: Sequence[MechanismLine]) -> str:
    """The most surprising rows, each with the experiment that explains it: one component changed, all else kept."""
    held = {(line.mechanism.name, line.change): line for line in lines}
    told = []
    for (name, change), tell in EXPLANATIONS.items():
        if (name, change) in held and (name, AS_IT_IS) in held:
            told.append(tell(held[name, AS_IT_IS], held[name, change], held))
    return "\n\n".join(told)


def _last(line: MechanismLine, variant: str) -> str:
    return end_words(line.ends.get(variant))


Lines = Mapping[tuple[str, str], MechanismLine]


def _nystrom(own: MechanismLine, without: MechanismLine, held: Lines) -> str:
    bert = held.get(("bert", AS_IT_IS))
    return (
        "**Explained: an approximation of softmax that does not collapse.** Nyströmformer approximates the complete "
        f"attention of BERT, and without skips it stands at {_last(own, 'cut')}"
        + ("" if bert is None else f", where BERT is at {_last(bert, 'cut')}")
        + ". It is not the approximation: its heads also add a convolution of the values, which reads zeros beyond "
        "both ends of the sequence, so that tokens near the ends differ from those inside: equal tokens leave at "
        f"{number(own.level['cut'])}. With the weights of that convolution set to 0, equal tokens stay equal, and "
        f"float64 reads {_last(without, 'cut')}: the tokens are equal up to rounding."
    )


def _sinks(own: MechanismLine, without: MechanismLine, held: Lines) -> str:
    return (
        "**Explained: softmax attention that leaves equal tokens unequal.** gpt-oss is causal softmax attention like "
        f"Llama, yet of order {own.order['cut']}: equal tokens leave it at {number(own.level['cut'])} without skips, "
        f"and at {number(own.level['pure'])} without norms and MLPs. The sink takes a share that depends on how many "
        "keys stand beside it, so a row of attention sums to less than one by an amount that depends on its position. "
        f"Without the sinks the order is {without.order['cut']}, equal tokens stay equal to rounding, and attention "
        f"alone ends at {_last(without, 'pure')} instead of {_last(own, 'pure')}."
    )


def _llama(own: MechanismLine, raised: MechanismLine, held: Lines) -> str:
    gpt2 = held.get(("gpt2", AS_IT_IS))
    assert own.size is not None
    assert raised.size is not None
    return (
        "**Explained: skips that hardly help.** The whole Llama, with skips, is among the models that lose most: it "
        f"ends at {_last(own, 'full')}, not far from {_last(own, 'cut')} with its skips cut"
        + ("" if gpt2 is None else f", while GPT-2, causal as well, keeps {_last(gpt2, 'full')}")
        + ". Its embeddings are drawn with standard deviation 0.02, and the norm before a branch brings them to 1: "
        f"tokens leave the first block at a root mean square of {number(own.size[0])} and the last at "
        f"{number(own.size[1])}, so that most of what the stream holds came out of branches. With the embeddings 50 "
        f"times as large, and nothing else changed, tokens leave the first block at {number(raised.size[0])} and the "
        f"last at {number(raised.size[1])}, and the whole model ends at {_last(raised, 'full')}; without skips it ends "
        f"at {_last(raised, 'cut')}."
    )


def _bias(own: MechanismLine, without: MechanismLine, held: Lines) -> str:
    return (
        "**Explained: complete attention of order 1.** The encoder of T5 sees all tokens, as BERT does, and yet is of "
        f"order {own.order['cut']}: {_last(own, 'cut')} after the last block. With its bias per distance set to 0 it "
        f"is of order {without.order['cut']} and ends at {_last(without, 'cut')}: the bias alone, small as it is "
        "drawn, makes the difference between doubly exponential and exponential."
    )


def _modernbert(own: MechanismLine, without: MechanismLine, held: Lines) -> str:
    return (
        f"**Explained: tokens that vanish.** Without skips, ModernBERT is at {_last(own, 'cut')}: nothing is left to "
        "compare. Its weights are drawn so small that a block without its skip gives back tokens below the epsilon "
        "that its norms add to a variance; from there on a norm no longer restores their size, and a gated MLP, which "
        "multiplies two small numbers, squares it. With an epsilon of 1e-60 the same network ends at "
        f"{_last(without, 'cut')}, with order {without.order['cut']}."
    )


EXPLANATIONS: Mapping[tuple[str, str], Callable[[MechanismLine, MechanismLine, Lines], str]] = {
    ("nystrom", "no convolution"): _nystrom,
    ("sinks", "no sinks"): _sinks,
    ("llama", "embeddings x 50"): _llama,
    ("relative-bias", "no bias"): _bias,
    ("modernbert", "no epsilon"): _modernbert,
}


LOOKS = {
    3: ("#B2182B", "v", "order 3: cubes distances between tokens"),
    1: (BLUE, "o", "order 1: multiplies them"),
    0: (GREEN, "D", "order 0: makes equal tokens unequal"),
    None: ("#777777", "o", "no order: skips not all cut, or no tokens left"),
}
"""Colour, marker and label by order."""
LEAST = -19.0
TICKS = {0.0: "1", -0.046: "0.9", -0.301: "0.5", -1.0: "0.1", -3.0: "$10^{-3}$", -6.0: "$10^{-6}$", -12.0: "$10^{-12}$"}
LINE_INCHES = 0.2


def draw(run: Run) -> dict[str, Figure]:
    """``figure``: every mechanism, ranked by what is left without skips, within its order."""

    def rank(line: MechanismLine) -> tuple[int, float]:
        order, end = line.order.get("cut"), line.ends.get("cut")
        left = end.log10 if end is not None and end.log10 is not None else 1.0
        return (-1 if order is None else order, -left)

    lines = sorted((line for line in lines_of(run) if line.change == AS_IT_IS), key=rank)
    size = run.extra["size"]
    figure, ((axes,),) = headed_figure(
        f"What is left after {size['depth']} blocks, with skips and without",
        f"Relative residual of the tokens (1: nothing in common, 0: equal). Width {size['width']}, {size['tokens']} "
        f"tokens, random initialisation, median of {size['seeds']} {'seed' if size['seeds'] == 1 else 'seeds'}. "
        "Hollow: whole model. Filled: every skip cut, MLPs and norms kept. The axis is stretched toward 1.",
        rows=1,
        columns=1,
        panel_size=(8.6, LINE_INCHES * len(lines) + 0.5),
        legend_rows=2,
        asked_by="reproduce",
    )
    _draw(axes, lines)
    orders = {line.order.get("cut") for line in lines}
    looks = [look for order, look in LOOKS.items() if order in orders]
    named = [Line(label, (), (), style=Style(colour, marker, "none")) for colour, marker, label in looks]
    legend_below(figure, named, rows=2)
    return {"figure": figure}


def _at(log10: float) -> float:
    """Place on the axis: minus the root of the number of digits in which tokens agree, wide near 1."""
    return -math.sqrt(max(0.0, -log10))


def _draw(axes: Axes, lines: Sequence[MechanismLine]) -> None:
    for place, line in enumerate(lines):
        colour, marker, _ = LOOKS[line.order.get("cut")]
        full, cut = line.ends["full"], line.ends.get("cut")
        if full.log10 is not None:
            axes.plot(_at(full.log10), place, marker, mfc="white", mec=colour, mew=1.0, ms=4.6, zorder=3)
        if cut is not None and cut.log10 is not None:
            shown = _at(max(cut.log10, LEAST))
            if full.log10 is not None:
                axes.plot([_at(full.log10), shown], [place, place], color=colour, linewidth=0.8, alpha=0.45, zorder=1)
            axes.plot(shown, place, marker, color=colour, ms=4.6, zorder=4)
            _label(axes, cut, shown, place)
    axes.set_yticks(range(len(lines)), [line.mechanism.model for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(_at(LEAST) - 0.12, 0.12)
    axes.set_xticks([_at(tick) for tick in TICKS], list(TICKS.values()))
    axes.axvline(_at(-15.05), color="#777777", linewidth=0.7, linestyle=(0, (1, 1.5)), zorder=0)
    axes.text(_at(-15.05), -0.75, "float64 rounding", size=6.8, color="#444444", ha="center", va="bottom")
    plain_axes(axes)
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.6)


def _label(axes: Axes, end: End, shown: float, place: int) -> None:
    """The value itself if it lies beyond the axis, and what became of tokens that did not last."""
    words = []
    if end.log10 is not None and end.log10 < LEAST:
        words.append(f"$10^{{{end.log10:.0f}}}$")
    if end.lost_after is not None:
        words.append(f"at block {end.lost_after}, then {FATES[end.fate or 'equal']}")
    if words:
        side, aside = ("left", 0.08) if shown < _at(-1.0) else ("right", -0.5)
        box: Look = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.9}
        look: Look = {"ha": side, "va": "center", "size": 7.2, "color": INK, "zorder": 5, "bbox": box}
        axes.text(shown + aside, place - 0.06, ", ".join(words), **look)

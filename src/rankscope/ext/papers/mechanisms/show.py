"""The table of mechanisms, one line per mechanism and change, and its figure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from rankscope._types import Status
from rankscope.ext.papers._drawing import Look
from rankscope.ext.papers._spec import METHOD
from rankscope.ext.papers.mechanisms.rows import GROUPS, MECHANISMS, Mechanism
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
        by_layer = self._cells.get((*row, arithmetic, metric), {})
        return {
            seed: {layer: sum(values) / len(values) for layer, values in layers.items()}
            for seed, layers in by_layer.items()
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
        orders = [value for layers in seen for value in layers.values() if math.isfinite(value)]
        if orders:
            return (0 if min(orders) < 0.5 else round(median(orders))), arithmetic
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
    "equal": "lost in rounding",
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
        return f"{FATES[end.fate or 'equal']} in the first block"
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
    """The three orders, the table and its columns, the rows that an experiment explains, the method."""
    lines = lines_of(run)
    plain = [line for line in lines if line.change == AS_IT_IS]
    parts = [_orders(plain), _grid(plain), COLUMNS, _explained(lines), METHOD, _method(run, plain), _refused(plain)]
    return "\n\n".join(part for part in parts if part)


def judge(run: Run) -> str:
    """How many mechanisms have each order, and which models come closest to collapse with their skips."""
    plain = [line for line in lines_of(run) if line.change == AS_IT_IS]
    counts = {order: len(_of_order(plain, order)) for order in (3, 1, 0)}
    return (
        f"Without skips, {counts[3]} of {len(plain)} mechanisms collapse with order 3 (a block cubes the distance "
        f"between tokens), {counts[1]} with order 1 (a block multiplies it), and {counts[0]} cannot stay collapsed "
        f"(order 0: a block makes equal tokens unequal). {_whole(plain)}"
    )


def _of_order(lines: Sequence[MechanismLine], order: int) -> list[MechanismLine]:
    return [line for line in lines if line.order.get("cut") == order]


MEANINGS = {
    3: "a block cubes the distance between tokens; every token sees every token, and scores contain no positions",
    1: "a block multiplies the distance; there is a mask, a window, or positions in the scores",
    0: "a block makes equal tokens unequal, so the network cannot stay collapsed",
}


def _orders(lines: Sequence[MechanismLine]) -> str:
    named = {order: ", ".join(line.mechanism.model for line in _of_order(lines, order)) for order in MEANINGS}
    rows = [(str(order), MEANINGS[order], names) for order, names in named.items() if names]
    return markdown_text(Table(("order without skips", "meaning", "mechanisms"), rows))


def _whole(lines: Sequence[MechanismLine]) -> str:
    logs = {line.mechanism.model: line.ends["full"].log10 for line in lines if "full" in line.ends}
    ends = {name: 10**log10 for name, log10 in logs.items() if log10 is not None}
    least = ", ".join(f"{name} {number(ends[name])}" for name in sorted(ends, key=lambda name: ends[name])[:3])
    low = sum(end < SHOWN_BELOW for end in ends.values())
    words = f"With skips, {low or 'none'} of them end{'s' if low < 2 else ''} below {SHOWN_BELOW:g}"
    return f"{words}; the lowest are {least}."


def _grid(lines: Sequence[MechanismLine]) -> str:
    head = (
        "mechanism", "mixes tokens by", "std", "full", "no skips", "order", "factor or level", "mixer alone",
        "arithmetic",
    )  # fmt: skip
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


COLUMNS = (
    "`full`, `no skips` and `mixer alone` give the relative residual ‖X − mean‖ / ‖X‖ after the last block (1: "
    "nothing in common, 0: all tokens equal) of the whole model, without skips, and without skips, MLPs and norms. "
    "`factor or level`: at order 1, the factor (×) of a block on a relative residual near collapse; at order 0, the "
    "relative residual (=) that tokens have at the end if they entered the first block equal."
)


def _method(run: Run, lines: Sequence[MechanismLine]) -> str:
    size, floor = run.extra["size"], float(run.floor["relative"])
    spread = max((line.ends["full"].half_range for line in lines if "full" in line.ends), default=0.0)
    small = "" if size["depth"] == FULL_DEPTH else " This is the small size: nothing follows from the numbers."
    return (
        f"Every mechanism has {size['depth']} blocks of width {size['width']}, {size['heads']} heads, "
        f"{size['tokens']} tokens and a vocabulary of {size['vocabulary']}, at the random initialisation of "
        f"transformers, {size['seeds']} seed{'' if size['seeds'] == 1 else 's'}; values are medians over seeds, and "
        f"`full` varies by a factor of at most {10**spread:.2f}. Text models read the same hashed words, vision "
        "models the same smooth images. `std` is the median standard deviation of the weight matrices. The order is "
        "computed without skips in exact arithmetic, with tokens brought together by factors of e^−200 and e^−201, if "
        "exact arithmetic supports the model; otherwise in float64 with 1/100 and 1/1000, where values below "
        f"{number(floor)} are rounding. Factors are geometric means over the second half of the blocks. A level is "
        f"that after the last block, or the one before it if that is larger. Blocks are counted from 1.{small}"
    )


def _refused(lines: Sequence[MechanismLine]) -> str:
    listed = []
    for line in lines:
        for reason in (reason for variant, reason in line.reasons.items() if variant in ("cut", "None")):
            # Drop the name of the module and the advice.
            short = re.sub(r" in transformers\.\S+:", ":", reason.split(". Register")[0]).rstrip(".")
            listed.append(f"{line.mechanism.model}: {short}")
    return "Limits of exact arithmetic and surgery: " + "; ".join(listed) + "." if listed else ""


def _explained(lines: Sequence[MechanismLine]) -> str:
    """Surprising rows, each with the experiment that explains it: one component changed, all else kept."""
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
        "**Why Nyströmformer does not collapse.** It approximates the complete attention of BERT, yet without skips it "
        f"ends at {_last(own, 'cut')}"
        + ("" if bert is None else f", BERT at {_last(bert, 'cut')}")
        + ". The reason is not the approximation but a convolution of the values, which reads zeros beyond both ends "
        "of the sequence and so makes tokens near the ends different: equal tokens leave at "
        f"{number(own.level['cut'])}. With the weights of the convolution set to 0, the residual is "
        f"{_last(without, 'cut')}."
    )


def _sinks(own: MechanismLine, without: MechanismLine, held: Lines) -> str:
    return (
        f"**Why gpt-oss has order {own.order['cut']}.** It uses causal softmax attention like Llama, but equal tokens "
        f"leave it at {number(own.level['cut'])} without skips. Its sinks take a share of the attention that depends "
        "on the number of visible keys, so that a row of attention sums to less than one by an amount that depends on "
        f"the position. Without the sinks the order is {without.order['cut']}, equal tokens stay equal up to "
        f"rounding, and attention alone ends at {_last(without, 'pure')} instead of {_last(own, 'pure')}."
    )


def _llama(own: MechanismLine, raised: MechanismLine, held: Lines) -> str:
    gpt2 = held.get(("gpt2", AS_IT_IS))
    assert own.size is not None
    assert raised.size is not None
    return (
        f"**Why skips hardly help Llama.** The whole model ends at {_last(own, 'full')}, without skips at "
        f"{_last(own, 'cut')}"
        + ("" if gpt2 is None else f"; GPT-2, also causal, keeps {_last(gpt2, 'full')}")
        + ". Llama's embeddings have standard deviation 0.02, and the norm before each branch scales them up to 1, so "
        f"that branches dominate the stream: its root mean square grows from {number(own.size[0])} after the first "
        f"block to {number(own.size[1])} after the last. With embeddings 50 times as large it stays near "
        f"{number(raised.size[1])}, and the whole model ends at {_last(raised, 'full')}."
    )


def _bias(own: MechanismLine, without: MechanismLine, held: Lines) -> str:
    return (
        f"**Why the T5 encoder has order {own.order['cut']}.** Every token sees every token, as in BERT, yet it ends "
        f"at {_last(own, 'cut')}. With its bias per distance set to 0 it has order {without.order['cut']} and ends at "
        f"{_last(without, 'cut')}: the small bias alone turns doubly exponential collapse into exponential collapse."
    )


def _modernbert(own: MechanismLine, without: MechanismLine, held: Lines) -> str:
    return (
        f"**Why ModernBERT's tokens vanish.** Without skips it is at {_last(own, 'cut')}. Its initial weights are so "
        "small that a block without its skip returns tokens below the epsilon in its norms. From there on the norms "
        "no longer restore their size, and a gated MLP, which multiplies two small numbers, squares it. With an "
        f"epsilon of 1e-60 the same network ends at {_last(without, 'cut')}, with order {without.order['cut']}."
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
    1: (BLUE, "o", "order 1: multiplies distances"),
    0: (GREEN, "D", "order 0: makes equal tokens unequal"),
    None: ("#777777", "o", "order unknown: skips cannot all be removed, or tokens vanish"),
}
"""Colour, marker and label by order."""
LEAST = -19.0
TICKS = {0.0: "1", -0.046: "0.9", -0.301: "0.5", -1.0: "0.1", -3.0: "$10^{-3}$", -6.0: "$10^{-6}$", -12.0: "$10^{-12}$"}
LINE_INCHES = 0.2


def draw(run: Run) -> dict[str, Figure]:
    """``figure``: every mechanism, by order and by residual without skips."""

    def rank(line: MechanismLine) -> tuple[int, float]:
        order, end = line.order.get("cut"), line.ends.get("cut")
        left = end.log10 if end is not None and end.log10 is not None else 1.0
        return (-1 if order is None else order, -left)

    lines = sorted((line for line in lines_of(run) if line.change == AS_IT_IS), key=rank)
    size = run.extra["size"]
    figure, ((axes,),) = headed_figure(
        f"Relative residual after {size['depth']} blocks, with and without skips",
        f"1: tokens have nothing in common; 0: all tokens are equal. Width {size['width']}, {size['tokens']} tokens, "
        f"random initialisation, median of {size['seeds']} {'seed' if size['seeds'] == 1 else 'seeds'}. Hollow: whole "
        "model. Filled: without skips, MLPs and norms kept. The axis is stretched towards 1.",
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
    """Position on the axis: minus the root of the number of digits in which tokens agree, which is wide near 1."""
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
    """The value if it is off the axis, and what happened to tokens that vanished or overflowed."""
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

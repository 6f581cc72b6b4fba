"""Our curves and the published ones, compared block by block."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.ext.papers._curves import (
    DepthLine,
    PublishedLine,
    has_line,
    line,
    published,
    published_line,
)
from rankscope.ext.papers._drawing import COLOURS, depth_line, drawn
from rankscope.ext.papers._spec import METHOD
from rankscope.runs.curves import names_in
from rankscope.runs.rows import only
from rankscope.views import Guide, Line, LineChart, Note, Style, Table, number
from rankscope.views.palette import MARKERS
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

METRIC = "relative_composite_residual"
IN_FLOAT32 = "relative_composite_residual_float32"
"""The same metric with the mean, the differences and the sums in float32, as the authors computed it."""
CURVES = ("SAN", "SAN+MLP", "SAN+skip", "transformer")
TEXTS = {"BERT": "words", "ALBERT": "pieces", "XLNet": "pieces"}
"""How the text is split for each model of the figure."""
TRAINED: Mapping[str, tuple[str, str]] = {
    "minilm": ("BERT", "MiniLM (BERT, 6 blocks, English)"),
    "reaction-bert": ("BERT", "rxnfp (BERT, 12 blocks, reactions)"),
    "antiberty": ("BERT", "AntiBERTy (BERT, 8 blocks, antibodies)"),
    "reaction-albert": ("ALBERT", "RXNMapper (ALBERT, 12 calls, reactions)"),
}
"""Trained models that come as packages: family and title."""
BASE_DEPTH = 12
ENOUGH_SEEDS = 4
"""The least number of initialisations for a standard deviation between them."""
READABLE = 1e-3
"""Below this the published figure, which has a linear axis, cannot be read."""


@dataclass(frozen=True)
class PrintComparison:
    """How far one of our curves is from the published one.

    Attributes:
        model: as the paper names it.
        curve: as the paper names it.
        text: how our text was split.
        depth: where the deviation is largest, measured in the allowance there.
        ours: our mean there.
        theirs: the published value there.
        allowance: their stated spread (its small end) plus ours, there.
        within: number of depths where the deviation is inside that allowance.
        compared: number of depths that can be compared: both above rounding.
        within_wide: the same with the large end of the stated spread.
        deviations: largest distance in standard deviations between our initialisations; NaN with too few.
        ratio: largest factor between the two where the published value is above a thousandth.
        rounding: depths where the published curve shows rounding, and what ours shows there.
    """

    model: str
    curve: str
    text: str
    depth: int
    ours: float
    theirs: float
    allowance: float
    within: int
    compared: int
    within_wide: int
    deviations: float
    ratio: float
    rounding: str


def compare(run: Run) -> list[PrintComparison]:
    """Every published curve at random initialisation; none for a run at small size."""
    facts = published("dong2021_fig2")
    stated = (float(facts["spread"]["low"]), float(facts["spread"]["high"]))
    comparisons = []
    for model in names_in(run.table, "model"):
        for text in names_in(run.table, "text"):
            for curve in CURVES:
                where = {"model": model, "weights": "init", "reading": "authors", "curve": curve, "text": text}
                if has_line(run.table, **where) and (ours := line(run.table, METRIC, **where)).depth[-1] == BASE_DEPTH:
                    theirs = published_line(facts, model=model, weights="init", curve=curve)
                    comparisons.append(compared(model, curve, text, ours, theirs, stated))
    return comparisons


def compared(
    model: str, curve: str, text: str, ours: DepthLine, theirs: PublishedLine, stated: tuple[float, float]
) -> PrintComparison:
    """One curve compared with its published version, whose stated spread is from ``stated[0]`` to ``stated[1]``."""
    rounding = np.array([theirs.is_rounding(int(depth)) for depth in ours.depth])
    mine, printed, spread = ours.mean[~rounding], theirs.values[~rounding], ours.spread[~rounding]
    away = np.abs(mine - printed)
    worst = int(np.argmax(away / (stated[0] + spread)))
    between = np.maximum(ours.over_seeds[~rounding], np.finfo(float).tiny)
    readable = printed > READABLE
    return PrintComparison(
        model=model,
        curve=curve,
        text=text,
        depth=int(ours.depth[~rounding][worst]),
        ours=float(mine[worst]),
        theirs=float(printed[worst]),
        allowance=float(stated[0] + spread[worst]),
        within=int((away <= stated[0] + spread).sum()),
        compared=int(away.size),
        within_wide=int((away <= stated[1] + spread).sum()),
        deviations=float((away / between).max()) if ours.seeds >= ENOUGH_SEEDS else float("nan"),
        ratio=float(np.exp(np.abs(np.log(mine[readable] / printed[readable]))).max()),
        rounding=_rounding(ours, rounding),
    )


def _rounding(ours: DepthLine, rounding: np.ndarray) -> str:
    if not rounding.any():
        return "none"
    depths, floor = ours.depth[rounding], ours.depth[ours.at_floor]
    small = bool((ours.mean[rounding] < READABLE).all())
    words = f"{depths[0]} to {depths[-1]}; ours {'also below' if small else 'above'} {READABLE:g}"
    return f"{words}, at the float floor from block {floor[0]}" if floor.size else words


def judge(run: Run) -> str:
    """How many published curves are matched."""
    comparisons = [item for item in compare(run) if item.text == TEXTS[item.model]]
    if not comparisons:
        return "Small size: tiny models show the shapes only and are not compared with the paper."
    wide, narrow = (
        [item for item in comparisons if getattr(item, name) == item.compared] for name in ("within_wide", "within")
    )
    return (
        f"Within the upper end of the published spread {_counted(wide, comparisons)} published curves agree with ours "
        f"at every comparable block, within its lower end {_counted(narrow, comparisons)}.{_far(comparisons)}"
    )


def _counted(some: list[PrintComparison], found: list[PrintComparison]) -> str:
    """How many curves, and of which models; the same rule for every model."""
    if len(some) == len(found):
        return f"all {len(found)}"
    models = {item.model: [one for one in found if one.model == item.model] for item in found}
    each = ", ".join(f"{m} {sum(one in some for one in own)} of {len(own)}" for m, own in models.items())
    return f"{len(some)} of {len(found)} ({each})"


def _far(found: list[PrintComparison]) -> str:
    """The largest distance of each model's curves, in standard deviations between initialisations."""
    largest = {item.model: max(one.deviations for one in found if one.model == item.model) for item in found}
    if any(math.isnan(value) for value in largest.values()):
        return ""
    each = ", ".join(f"{value:.1f} in {model}" for model, value in largest.items())
    return f" The largest distance, in standard deviations between our initialisations, is {each}."


def describe(run: Run) -> str:
    """Where the curves end, the comparison, the differences and their reasons, the method."""
    comparisons = compare(run)
    parts = [_ends(run)]
    if comparisons:
        parts += [
            _table(comparisons),
            _agreement([item for item in comparisons if item.text == TEXTS[item.model]]),
            _floor(run),
            _xlnet(comparisons),
        ]
    return "\n\n".join(part for part in [*parts, _theorem(run), _trained(run), METHOD, _method()] if part)


def _lines(run: Run, reading: str) -> dict[str, dict[str, DepthLine]]:
    """By model and curve, at random initialisation."""
    lines_by_model: dict[str, dict[str, DepthLine]] = {}
    for model, text in TEXTS.items():
        base = {"model": model, "weights": "init", "reading": reading, "text": text}
        if has_line(run.table, **base, curve="SAN"):
            curves = [curve for curve in CURVES if has_line(run.table, **base, curve=curve)]
            lines_by_model[model] = {curve: line(run.table, METRIC, **base, curve=curve) for curve in curves}
    return lines_by_model


def _ends(run: Run) -> str:
    sentences = []
    for model, lines in _lines(run, "authors").items():
        end = {curve: number(ours.end) for curve, ours in lines.items()}
        below = lines["SAN"].depth[lines["SAN"].mean < READABLE]
        fate = f"falls below {READABLE:g} by block {below[0]}" if below.size else f"ends at {end['SAN']}"
        sentences.append(
            f"In {model}, the relative residual without skips {fate} (with MLPs it ends at {end['SAN+MLP']}); with "
            f"skips and no MLPs it ends at {end['SAN+skip']}, in the whole model at {end['transformer']}."
        )
    return " ".join(sentences)


def _table(found: list[PrintComparison]) -> str:
    head = (
        "model", "curve", "text split into", "worst block", "ours", "paper", "allowed", "blocks within",
        "largest distance (sd between initialisations)", "largest factor", "blocks with rounding in the paper",
    )  # fmt: skip
    rows = [
        (
            item.model, item.curve, item.text, str(item.depth), number(item.ours), number(item.theirs),
            f"±{number(item.allowance)}", f"{item.within} of {item.compared}",
            "too few" if math.isnan(item.deviations) else f"{item.deviations:.1f}", f"{item.ratio:.2f}", item.rounding,
        )
        for item in found
    ]  # fmt: skip
    return markdown_text(Table(head, rows))


def _agreement(found: list[PrintComparison]) -> str:
    stated = published("dong2021_fig2")["spread"]
    inside = sum(item.within == item.compared for item in found)
    wide = sum(item.within_wide == item.compared for item in found)
    listed = "; ".join(
        f"{item.model} {item.curve}, {item.compared - item.within} of {item.compared} blocks, worst at {item.depth}"
        for item in found
        if item.within < item.compared
    )
    return (
        f"**Agreement.** The paper states a standard deviation over sequences of {stated['low']} to "
        f"{stated['high']}. Allowing its upper end plus our own standard deviation, {wide} of {len(found)} curves "
        f"agree at every comparable block; allowing its lower end (column 'allowed'), {inside} do."
    ) + (f" Blocks outside the lower end: {listed}." if listed else "")


def _floor(run: Run) -> str:
    where = {"model": "BERT", "weights": "init", "curve": "SAN", "text": "words"}
    rows = only(run.table, metric=IN_FLOAT32, **where)
    if rows.num_rows == 0:
        return ""
    plateau = float(line(run.table, METRIC, reading="authors", **where).mean[-4:].mean())
    layers = rows["layer"].to_numpy()
    in_float32 = float(np.mean(rows["value"].to_numpy()[layers >= layers.max() - 3]))
    printed = published("dong2021_fig2")["curves"][0]["values"][-1]
    return (
        f"**The plateau is rounding.** BERT's SAN curve stays at {number(plateau)} in its last four blocks: one to two "
        f"units in the last place of float32, not a property of attention. The paper reports {number(printed)}; with "
        f"the metric computed in float32, as the authors did, rather than in float64, we get {number(in_float32)}. "
        "`rankscope exact` shows what happens below."
    )


def _xlnet(found: list[PrintComparison]) -> str:
    ratio = {item.text: item.ratio for item in found if (item.model, item.curve) == ("XLNet", "SAN")}
    if set(ratio) != {"pieces", "words"}:
        return ""
    return (
        "**XLNet agrees least, possibly because of repeated tokens.** XLNet neither adds positions to its "
        "embeddings nor normalises them, so its residual depends on how often tokens repeat, and the authors' text "
        "(wiki_bio) and tokenizer were not available. If we insert a token before every punctuation mark, so that "
        f"tokens repeat more often, the SAN curve is off by a factor of at most {ratio['pieces']:.2f}; with plain "
        f"words, by {ratio['words']:.2f}. We added that splitting after a first comparison, in which the distance was "
        "larger, and it only imitates the tokenizer, so it is not independent evidence. The original text and "
        "checkpoint (`--text`, `--xlnet`) would settle the question."
    )


def _theorem(run: Run) -> str:
    sentences = []
    for model, lines in _lines(run, "theorem").items():
        pure, mlp, skip = (lines[curve] for curve in ("SAN", "SAN+MLP", "SAN+skip"))
        equal = pure.depth[pure.mean == 0.0]
        fate = f"ends at {number(pure.end)}" + (", which is rounding" if pure.at_floor[-1] else "")
        fate = f"makes all tokens bitwise equal by block {equal[0]}" if equal.size else fate
        sentences.append(
            f"In {model}, pure attention {fate}; with MLPs and no skips the residual ends at {number(mlp.end)}, with "
            f"skips only at {number(skip.end)}."
        )
    return "**The networks of the theorem**, without norms or any remainder of MLPs and skips. " + " ".join(sentences)


def _trained(run: Run) -> str:
    names = [name for name in names_in(run.table, "model") if has_line(run.table, model=name, weights="trained")]
    if not names:
        return "No trained weights were available."
    rows = []
    for name in names:
        base = {"model": name, "weights": "trained", "reading": "authors"}
        rows.append((name, *(number(line(run.table, METRIC, **base, curve=curve).end) for curve in CURVES)))
    exception = published_line(published("dong2021_fig2"), model="ALBERT", weights="trained", curve="SAN+skip")
    return "\n\n".join(
        [
            "**Trained weights**, relative residual after the last block:",
            markdown_text(Table(("model", *CURVES), rows)),
            "![Relative residual over depth in trained models, ablated as by the authors](figure-trained.png)",
            "Skips do not always prevent collapse in the paper either: its trained ALBERT with skips and without MLPs "
            f"is reported at {float(exception.values[-1]):g} after twelve blocks.",
        ]
    )


def _method() -> str:
    return (
        "Each published curve is one initialisation, ours is a mean over several, so the table also gives the largest "
        "distance in standard deviations between our initialisations. That column was added after the lower end of "
        "the published spread had been missed. As run by the authors, SAN keeps LayerNorm, SAN+MLP keeps the MLP's "
        "own skip, and ALBERT's SAN keeps the MLP's activation, skip and norm, so that each block ends in LN(x + "
        "gelu(x))."
    )


STYLES = {curve: Style(COLOURS[i], MARKERS[i]) for i, curve in enumerate(CURVES)}
ASIDE = {"SAN": -0.14, "SAN+MLP": 0.14, "SAN+skip": -0.14, "transformer": 0.14}
"""Published values are moved sideways, so that curves that coincide stay visible."""
LEAST = 1e-9


def draw(run: Run) -> dict[str, Figure]:
    """``figure``: random initialisation, both readings. ``figure-trained``: trained weights, if there are any."""
    rows = {
        "as run by the authors": ("authors", False),
        "the same, log scale": ("authors", True),
        "as stated in the theorem": ("theorem", True),
    }
    figure = drawn(
        "Residual over depth at random initialisation",
        "Lines: ours, mean over initialisations and sequences. Bands: one standard deviation; on log scales, 10% to "
        "90% quantiles. Hollow markers: Dong et al. 2021, figure 2. Exact zeros (bitwise equal tokens) are drawn on "
        "the lower edge.",
        [
            [
                _panel(run, f"{model}, {label}", model, text, "init", reading, log=log, printed=model)
                for model, text in TEXTS.items()
            ]
            for label, (reading, log) in rows.items()
        ],
        styles=STYLES,
    )
    trained = [name for name in names_in(run.table, "model") if has_line(run.table, model=name, weights="trained")]
    if not trained:
        return {"figure": figure}
    panels = []
    for name in trained:
        family, title = TRAINED.get(name, (name, name))
        panels.append(_panel(run, title, name, "tokenizer", "trained", "authors", log=True, printed=family))
    second = drawn(
        "Residual over depth in trained models, ablated as by the authors",
        "Lines: ours. Hollow markers: published values of bert-base-cased or albert-base-v2, for orientation.",
        [panels[start : start + 2] for start in range(0, len(panels), 2)],
        styles=STYLES,
        panel_size=(3.6, 2.35),
    )
    return {"figure": figure, "figure-trained": second}


def _panel(
    run: Run, title: str, model: str, text: str, weights: str, reading: str, *, log: bool, printed: str
) -> LineChart:
    facts = published("dong2021_fig2")
    lines = []
    for curve, style in STYLES.items():
        # The whole model is the same network in both readings.
        how = "authors" if curve == "transformer" else reading
        where = {"model": model, "weights": weights, "curve": curve, "text": text, "reading": how}
        if not has_line(run.table, **where):
            continue
        ours = line(run.table, METRIC, **where)
        lines.append(depth_line(curve, ours, style, least=LEAST if log else None, quantiles=log))
        if reading == "authors" and printed in TEXTS and (weights == "trained" or ours.depth[-1] == BASE_DEPTH):
            theirs = published_line(facts, model=printed, weights=weights, curve=curve).values
            known = np.flatnonzero(np.isfinite(theirs))
            hollow = Style(style.colour, style.marker, "none")
            lines.append(Line("", known + ASIDE[curve], theirs[known], floor=known >= 0, style=hollow))
    floor, deepest = float(run.floor["relative"]), float(max(np.max(line.x) for line in lines))
    return LineChart(
        title,
        tuple(lines),
        guides=(Guide(floor, "", "floor"),) if log else (),
        notes=(Note(f"{run.floor['dtype']} rounding, below {number(floor)}", deepest, 1.5 * LEAST),) if log else (),
        y_label="relative residual (1,∞)",
        log=log,
        y_range=(LEAST, 3.0) if log else (-0.02, 1.08),
    )

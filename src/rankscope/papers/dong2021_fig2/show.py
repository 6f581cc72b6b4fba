"""Our curves and the published ones: compared block by block, described and drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._curves import (
    DepthLine,
    PublishedLine,
    has_line,
    line,
    published,
    published_line,
)
from rankscope.papers._drawing import COLOURS, depth_line, drawn
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
"""How the text of each model of the figure is cut."""
TRAINED: Mapping[str, tuple[str, str]] = {
    "minilm": ("BERT", "MiniLM (BERT, 6 blocks, English)"),
    "reaction-bert": ("BERT", "rxnfp (BERT, 12 blocks, reactions)"),
    "antiberty": ("BERT", "AntiBERTy (BERT, 8 blocks, antibodies)"),
    "reaction-albert": ("ALBERT", "RXNMapper (ALBERT, 12 calls, reactions)"),
}
"""Trained models that come as packages: family and title."""
BASE_DEPTH = 12
ENOUGH_SEEDS = 4
"""With fewer initialisations their standard deviation says nothing."""
READABLE = 1e-3
"""Below this the published figure, drawn on a linear axis, says little more than that the value is small."""


@dataclass(frozen=True)
class PrintComparison:
    """How far one of our curves is from the published one.

    Attributes:
        model: as the paper names it.
        curve: as the paper names it.
        text: how our text was cut.
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
    found = []
    for model in names_in(run.table, "model"):
        for text in names_in(run.table, "text"):
            for curve in CURVES:
                where = {"model": model, "weights": "init", "reading": "authors", "curve": curve, "text": text}
                if has_line(run.table, **where) and (ours := line(run.table, METRIC, **where)).depth[-1] == BASE_DEPTH:
                    theirs = published_line(facts, model=model, weights="init", curve=curve)
                    found.append(compared(model, curve, text, ours, theirs, stated))
    return found


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
    words = f"{depths[0]} to {depths[-1]}: ours {'below a thousandth too' if small else 'above a thousandth'}"
    return f"{words}, at the float floor from {floor[0]}" if floor.size else words


def judge(run: Run) -> str:
    """How many published curves are matched."""
    found = [item for item in compare(run) if item.text == TEXTS[item.model]]
    main = [item for item in found if item.model != "XLNet"]
    if not main:
        return "Small size: nothing is compared with the paper."
    others = [item for item in found if item.model == "XLNet"]
    small, large = sum(i.within == i.compared for i in main), sum(i.within_wide == i.compared for i in main)
    return (
        f"BERT and ALBERT: {large} of {len(main)} published curves are within the large end of their stated spread "
        f"plus ours at every block that can be compared, {small} within its small end. XLNet: "
        f"{sum(i.within == i.compared for i in others)} of {len(others)} within the small end; not matched."
    )


def describe(run: Run) -> str:
    """What we see, the comparison, where the two differ and why."""
    found = compare(run)
    parts = [_seen(run)]
    if found:
        parts += [_table(found), _agreement(found), _floor(run), _xlnet(found)]
    else:
        parts.append("Small size: tiny models show the shapes only and are not compared with the paper.")
    return "\n\n".join(part for part in [*parts, _theorem(run), _trained(run)] if part)


def _lines(run: Run, reading: str) -> dict[str, dict[str, DepthLine]]:
    """By model and curve, at random initialisation."""
    found: dict[str, dict[str, DepthLine]] = {}
    for model, text in TEXTS.items():
        base = {"model": model, "weights": "init", "reading": reading, "text": text}
        if has_line(run.table, **base, curve="SAN"):
            curves = [curve for curve in CURVES if has_line(run.table, **base, curve=curve)]
            found[model] = {curve: line(run.table, METRIC, **base, curve=curve) for curve in curves}
    return found


def _seen(run: Run) -> str:
    sentences = []
    for model, lines in _lines(run, "authors").items():
        end = {curve: number(ours.end) for curve, ours in lines.items()}
        below = lines["SAN"].depth[lines["SAN"].mean < READABLE]
        fate = f"below a thousandth from block {below[0]}" if below.size else f"at {end['SAN']} at the end"
        sentences.append(
            f"{model}: without skips the residual is {fate}, with MLPs ({end['SAN+MLP']} at the end) or without; with "
            f"skips it ends at {end['SAN+skip']}, the whole model at {end['transformer']}."
        )
    return "**What we see.** " + " ".join(sentences)


def _table(found: list[PrintComparison]) -> str:
    head = (
        "model", "curve", "our text", "worst block", "ours", "paper", "allowed", "blocks within",
        "largest distance, in sd between initialisations", "largest factor", "paper shows rounding at blocks",
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
    main = [item for item in found if item.model != "XLNet"]
    if not main:
        return ""
    inside = sum(item.within == item.compared for item in main)
    wide = sum(item.within_wide == item.compared for item in main)
    listed = "; ".join(
        f"{item.model} {item.curve}, {item.compared - item.within} of {item.compared} blocks, worst at {item.depth}"
        for item in main
        if item.within < item.compared
    )
    return (
        f"**Compared with the paper, BERT and ALBERT.** The paper states a spread of {stated['low']} to "
        f"{stated['high']} over sequences. Within its large end plus our own standard deviation {wide} of {len(main)} "
        f"curves are inside at every block that can be compared; within its small end (the column 'allowed') {inside} "
        "are. Each published curve is one initialisation, ours the mean of several: the column of distances in "
        "standard deviations between initialisations, added after the small end had been missed, says how unusual a "
        "draw it would be."
    ) + (f" Outside the small end: {listed}." if listed else "")


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
        f"units in the last place of float32, not a property of attention. The paper reports {number(printed)}; taking "
        "the mean, the differences and the sums in float32 as the authors did, rather than in float64, we read "
        f"{number(in_float32)}. What happens below is shown by `rankscope exact`."
    )


def _xlnet(found: list[PrintComparison]) -> str:
    ratio = {item.text: item.ratio for item in found if (item.model, item.curve) == ("XLNet", "SAN")}
    if set(ratio) != {"pieces", "words"}:
        return ""
    return (
        "**XLNet is not matched; repetition is a possible reason, not a proven one.** XLNet adds no position to its "
        "embeddings and does not normalise them, so the relative residual depends on how often tokens repeat. The "
        "authors' text (wiki_bio) and tokenizer were not available. With one extra token before every punctuation "
        "mark, so that tokens repeat more (chances in the notes), the SAN curve is off by a factor of at most "
        f"{ratio['pieces']:.2f}; cut into plain words, by {ratio['words']:.2f}. That cut was made after the first "
        "comparison had failed and imitates a tokenizer nobody ran, so it is not an independent confirmation. The "
        "original text and checkpoint (`--text`, `--xlnet`) would settle it."
    )


def _theorem(run: Run) -> str:
    sentences = []
    for model, lines in _lines(run, "theorem").items():
        pure, mlp, skip = (lines[curve] for curve in ("SAN", "SAN+MLP", "SAN+skip"))
        equal = pure.depth[pure.mean == 0.0]
        fate = f"{number(pure.end)} at the end" + (", which is rounding" if pure.at_floor[-1] else "")
        fate = f"all tokens are equal bit for bit from block {equal[0]}" if equal.size else fate
        sentences.append(
            f"{model}: pure attention, {fate}; with MLPs but no skip of any kind, {number(mlp.end)} at the end; with "
            f"skips only, {number(skip.end)}."
        )
    return (
        "**As the theorem means it.** The authors' SAN keeps LayerNorm; their SAN+MLP keeps the MLP's own skip; their "
        "ALBERT SAN keeps the activation of the MLP, its skip and its norm, so that each block ends in LN(x + "
        "gelu(x)). Without any of these: " + " ".join(sentences)
    )


def _trained(run: Run) -> str:
    names = [name for name in names_in(run.table, "model") if has_line(run.table, model=name, weights="trained")]
    if not names:
        return "No trained weights were available."
    sentences = []
    for name in names:
        base = {"model": name, "weights": "trained", "reading": "authors"}
        ends = [f"{curve} {number(line(run.table, METRIC, **base, curve=curve).end)}" for curve in CURVES]
        sentences.append(f"{name}: {', '.join(ends)} at the end.")
    exception = published_line(published("dong2021_fig2"), model="ALBERT", weights="trained", curve="SAN+skip")
    return (
        "**Trained weights.** "
        + " ".join(sentences)
        + " The paper's own data contain an exception to 'skips stop it': "
        f"its trained ALBERT with skips but without MLPs is reported at {float(exception.values[-1]):g} after twelve "
        "blocks."
    )


STYLES = {curve: Style(COLOURS[i], MARKERS[i]) for i, curve in enumerate(CURVES)}
ASIDE = {"SAN": -0.14, "SAN+MLP": 0.14, "SAN+skip": -0.14, "transformer": 0.14}
"""Published values are moved sideways, so that curves that coincide stay visible."""
LEAST = 1e-9


def draw(run: Run) -> dict[str, Figure]:
    """``figure``: random initialisation, both readings. ``figure-trained``: trained weights, if there are any."""
    rows = {
        "as the authors ran it": ("authors", False),
        "the same, log scale": ("authors", True),
        "as the theorem means it": ("theorem", True),
    }
    figure = drawn(
        "Residual over depth at random initialisation",
        "Lines: ours, mean over initialisations and sequences; band of one standard deviation, on log scales from the "
        "10% to the 90% quantile. Hollow marks: Dong et al. 2021, figure 2. Values of exactly zero (tokens equal bit "
        "for bit) lie on the lower edge.",
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
        "Residual over depth in trained models, cut as the authors cut",
        "Lines: ours on these models. Hollow marks: published values of bert-base-cased or albert-base-v2, for "
        "orientation.",
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

"""Masks and LayerNorm: mu and its scale-free partner, in both float formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankscope.papers._curves import DepthLine, has_line, line
from rankscope.papers._drawing import COLOURS, drawn
from rankscope.runs.curves import names_in
from rankscope.views import Guide, Line, LineChart, Note, Style, Table, number
from rankscope.views.figures import draw_line, headed_figure, legend_below, plain_axes
from rankscope.views.palette import INK, MARKERS
from rankscope.views.text import markdown_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.run import Run

BASE_DEPTH = 12
INIT = {"part": "figure", "model": "BERT", "weights": "init", "temperature": "1"}
FLOORS = {name: 4 * float(np.finfo(name).eps) for name in ("float32", "float64")}
VARIANTS = ("SAN", "SAN+skip", "SAN+LN", "SAN+LN+skip", "transformer")
MASKS = {
    "complete": "complete",
    "causal": "causal",
    "window(1)": "window ±1",
    "causal_window(1)": "causal window 1",
}


def masks_in(run: Run, **where: str) -> list[str]:
    """Masks that have such rows, in our order."""
    return [mask for mask in MASKS if has_line(run.table, mask=mask, **where)]


def _line(run: Run, metric: str, variant: str, mask: str, dtype: str) -> DepthLine:
    return line(run.table, metric, **INIT, variant=variant, mask=mask, dtype=dtype)


def _end(run: Run, variant: str, mask: str, dtype: str = "float64", metric: str = "mu_over_norm") -> float:
    return _line(run, metric, variant, mask, dtype).end


def _ends(run: Run, variant: str) -> str:
    return ", ".join(f"{mask} {number(_end(run, variant, mask))}" for mask in masks_in(run))


def _is_small(run: Run) -> bool:
    """Whether the run is of a tiny model, from which nothing follows about the paper."""
    return int(_line(run, "mu", "SAN", "complete", "float64").depth[-1]) != BASE_DEPTH


def judge(run: Run) -> str:
    """What LayerNorm alone ends at in both formats."""
    narrow, wide = (number(_end(run, "SAN+LN", "complete", dtype)) for dtype in FLOORS)
    size = "Small size, a tiny BERT: attention" if _is_small(run) else "Attention"
    return (
        f"{size} with LayerNorm under the complete mask ends at a relative {narrow} in float32 and {wide} in float64."
    )


def describe(run: Run) -> str:
    """What we see, where it differs from the paper and why."""
    parts = [_pure(run), _table(run), _norm(run), _scaling(run), _trained(run), _temperature(run), _deep(run)]
    if _is_small(run):
        seen = _line(run, "mu", "SAN", "complete", "float64")
        parts.insert(
            0,
            f"**Small size.** A tiny BERT of {seen.depth[-1]} blocks on {seen.sequences} short sequences, not "
            "BERT-base: the code runs, and the numbers say nothing about the paper.",
        )
    return "\n\n".join(part for part in parts if part)


def _pure(run: Run) -> str:
    ends = {mask: (_end(run, "SAN", mask, metric="mu"), _end(run, "SAN", mask)) for mask in masks_in(run)}
    start = float(_line(run, "mu", "SAN", "complete", "float64").mean[0])
    listed = "; ".join(f"{mask}: mu {number(mu)}, relative {number(share)}" for mask, (mu, share) in ends.items())
    return (
        f"**What we see.** Pure attention at initialisation, float64: mu starts at {number(start)} and ends at, "
        f"{listed}. In mu itself every mask falls, as published. Part of that fall is only the tokens getting smaller, "
        "because nothing rescales them: the relative number says how far the tokens have come together; 0 means that "
        "float64 no longer holds any difference (`rankscope exact` shows how far it goes)."
    )


def _table(run: Run) -> str:
    rows = [(variant, *(number(_end(run, variant, mask)) for mask in masks_in(run))) for variant in VARIANTS]
    return markdown_text(Table(("last block, relative, float64", *masks_in(run)), rows))


def _norm(run: Run) -> str:
    narrow, wide = (_end(run, "SAN+LN", "complete", dtype) for dtype in FLOORS)
    mu32, mu64 = (number(_end(run, "SAN+LN", "complete", dtype, "mu")) for dtype in FLOORS)
    words = (
        "**LayerNorm alone.** The paper says that with LayerNorm mu no longer goes to zero at initialisation. Under "
        f"the complete mask it ends at {mu32} in float32 and at {mu64} in float64; relative to the tokens, "
        f"{number(narrow)} and {number(wide)}."
    )
    if not _is_small(run) and narrow <= FLOORS["float32"] and wide <= FLOORS["float64"]:
        words += (
            " Here we differ. Both are rounding of their own format (float32 shows nothing below "
            f"{number(FLOORS['float32'])}, float64 nothing below {number(FLOORS['float64'])}): LayerNorm brings the "
            "tokens back to full size in every block, and the rounding error with them, so the curve stops at the "
            "floor of whatever format is used. A float32 plateau is not evidence that the norm stops the fall. Below "
            "the float64 floor these curves cannot tell."
        )
    with_norm, without = _end(run, "SAN+LN", "causal"), _end(run, "SAN", "causal")
    return words + (
        f" Under the causal mask the fall is slower: {number(with_norm)} at the last block with LayerNorm, "
        f"{number(without)} without."
    )


def _scaling(run: Run) -> str:
    if not has_line(run.table, **INIT, variant="SAN+row scaling"):
        return ""
    return (
        "**The paper's LayerNorm.** In the theorems LayerNorm only scales each token to unit length. Read that way, "
        f"attention with it ends at: {_ends(run, 'SAN+row scaling')}; as in the model, with centring and gain: "
        f"{_ends(run, 'SAN+LN')}."
    )


def _trained(run: Run) -> str:
    names = [name for name in names_in(run.table, "model") if has_line(run.table, model=name, weights="trained")]
    if not names:
        return "No trained weights were available."
    sentences = []
    for name in names:
        where = {"part": "figure", "model": name, "weights": "trained", "dtype": "float64", "mask": "complete"}
        ends = [f"{each} {number(line(run.table, 'mu_over_norm', **where, variant=each).end)}" for each in VARIANTS]
        sentences.append(f"{name}: {', '.join(ends)}.")
    return "**Trained weights**, complete mask, float64, relative, last block. " + " ".join(sentences)


def _temperature(run: Run) -> str:
    where = {"part": "temperature", "variant": "SAN", "mask": "complete"}
    if not has_line(run.table, **where):
        return ""
    seen = {
        t: line(run.table, "mu_over_norm", **where, temperature=t)
        for t in sorted(names_in(run.table, "temperature"), key=float)
        if has_line(run.table, **where, temperature=t)
    }
    listed = ", ".join(f"T = {t}: {number(float(found.mean[2]))}" for t, found in seen.items())
    return f"**Temperature.** Pure attention, complete mask, relative, after two blocks: {listed}."


def _deep(run: Run) -> str:
    where = {"part": "deep", "dtype": "float64"}
    if not has_line(run.table, **where):
        return ""
    sentences = []
    for variant in (name for name in VARIANTS if has_line(run.table, **where, variant=name)):
        ends = {mask: line(run.table, "mu_over_norm", **where, variant=variant, mask=mask) for mask in masks_in(run)}
        depth = ends["complete"].depth[-1]
        sentences.append(f"{variant}: {', '.join(f'{mask} {number(found.end)}' for mask, found in ends.items())}.")
    return f"**At {depth} blocks**, relative, float64. " + " ".join(sentences)


STYLES = {mask: Style(COLOURS[i], MARKERS[i]) for i, mask in enumerate(MASKS)}
LEAST, LEAST_DECADES = 1e-19, 2.2
MEASURES = {"mu": "μ(X)", "mu_over_norm": "μ(X) / ‖X‖"}
TITLES = {"BERT": "BERT-base", "minilm": "MiniLM (BERT, 6 blocks)", "reaction-bert": "rxnfp (BERT, 12 blocks)"}


def draw(run: Run) -> dict[str, Figure]:
    """``figure`` (initialisation), one figure per trained model, ``figure-temperature`` and ``figure-deep``."""
    depth = int(_line(run, "mu", "SAN", "complete", "float64").depth[-1])
    named = "BERT-base" if depth == BASE_DEPTH else f"a tiny BERT ({depth} blocks)"
    title = f"Networks and masks: {named} at initialisation"
    drawn = {"figure": _grid(run, title, VARIANTS, part="figure", model="BERT", weights="init")}
    for name in names_in(run.table, "model"):
        if has_line(run.table, model=name, weights="trained"):
            title, where = f"Networks and masks: {TITLES.get(name, name)}, trained", {"model": name}
            drawn[f"figure-{name.lower()}"] = _grid(run, title, VARIANTS, part="figure", weights="trained", **where)
    if has_line(run.table, part="deep"):
        variants = [name for name in VARIANTS if has_line(run.table, part="deep", variant=name)]
        deepest = line(run.table, "mu", part="deep", variant="SAN", mask="complete", dtype="float64").depth[-1]
        title = f"The same at {deepest} blocks"
        drawn["figure-deep"] = _grid(run, title, variants, part="deep", model="BERT", weights="init")
    if has_line(run.table, part="temperature"):
        drawn["figure-temperature"] = _temperatures(run, named)
    return drawn


def _grid(run: Run, title: str, variants: Sequence[str], **where: str) -> Figure:
    figure, grid = headed_figure(
        title,
        "Log-log, from the end of the first block. Solid: float64. Dotted: float32, where the two part. Below 1e-19, "
        "drawn there.",
        rows=2,
        columns=len(variants),
        panel_size=(2.5, 2.3),
        legend_rows=1,
        asked_by="reproduce",
    )
    for row, (metric, label) in zip(grid, MEASURES.items(), strict=True):
        for axes, variant in zip(row, variants, strict=True):
            deepest = _draw_masks(axes, run, metric, {**where, "variant": variant, "temperature": "1"})
            axes.set_yscale("log")
            _settle_log_axes(axes, deepest)
            if metric == "mu":
                axes.set_title(variant, size=9.5, color=INK)
                _widen(axes)
            else:
                axes.set(xlabel="block", ylim=(LEAST, 3.0))
                for dtype, floor in FLOORS.items():
                    axes.axhline(floor, color="#777777", linewidth=0.7, linestyle=(0, (1, 1.5)), zorder=1)
                    if variant == variants[-1]:
                        axes.text(1.0, floor, f"{dtype} rounding", va="bottom", size=6.5, color="#444444")
        row[0].set_ylabel(label)
    legend_below(figure, [Line(MASKS[mask], (), (), style=STYLES[mask]) for mask in masks_in(run)])
    return figure


def _draw_masks(axes: Axes, run: Run, metric: str, where: Mapping[str, str]) -> int:
    deepest = 1
    for mask, style in STYLES.items():
        for dtype, dash in (("float64", "-"), ("float32", ":")):
            if has_line(run.table, **where, mask=mask, dtype=dtype):
                seen = line(run.table, metric, **where, mask=mask, dtype=dtype)
                keep, deepest = seen.depth >= 1, max(deepest, int(seen.depth[-1]))
                look = Style(style.colour, style.marker if dtype == "float64" else "", dash)
                draw_line(axes, Line("", seen.depth[keep], np.maximum(seen.mean[keep], LEAST), style=look))
    return deepest


def _settle_log_axes(axes: Axes, deepest: int) -> None:
    """Depth on a log scale, from the first block on."""
    axes.set_xscale("log")
    axes.set_xlim(0.93, deepest * 1.08)
    ticks = [tick for tick in (1, 2, 4, 8, 12, 32, 128) if tick <= deepest]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    plain_axes(axes)


def _widen(axes: Axes) -> None:
    """Show at least two powers of ten, so that the axis has numbers and a small change looks small."""
    low, high = axes.get_ylim()
    missing = max(0.0, LEAST_DECADES - np.log10(high / low)) / 2
    axes.set_ylim(low / 10**missing, high * 10**missing)


def _temperatures(run: Run, named: str) -> Figure:
    variants = [name for name in VARIANTS if has_line(run.table, part="temperature", variant=name)]
    temperatures = sorted(names_in(run.table, "temperature"), key=float)
    most = max(1, len(temperatures) - 1)
    shades = {t: Style(_shade(i / most), MARKERS[i % 6]) for i, t in enumerate(temperatures)}
    floor = FLOORS["float64"]

    def panel(variant: str, mask: str) -> LineChart:
        where = {"part": "temperature", "variant": variant, "mask": mask}
        held = {t: style for t, style in shades.items() if has_line(run.table, **where, temperature=t)}
        lines = [(line(run.table, "mu_over_norm", **where, temperature=t), style) for t, style in held.items()]
        words = Note(f"float64 rounding, below {number(floor)}", float(lines[0][0].depth[-1]), 2 * LEAST)
        return LineChart(
            f"{variant}, {MASKS[mask]} mask",
            tuple(Line("", seen.depth, np.maximum(seen.mean, LEAST), style=style) for seen, style in lines),
            guides=(Guide(floor, "", "floor"),),
            notes=(words,),
            y_label=MEASURES["mu_over_norm"],
            log=True,
            y_range=(LEAST, 3.0),
        )

    return drawn(
        f"Attention temperature: scores divided by T, {named} at initialisation, float64",
        "Small T makes attention sharper.",
        [[panel(variant, mask) for mask in masks_in(run, part="temperature")] for variant in variants],
        styles={f"T = {t}": style for t, style in shades.items()},
    )


def _shade(share: float) -> str:
    """From dark blue (sharp) to orange (flat), of growing lightness."""
    dark, light = np.array([0x08, 0x30, 0x6B]), np.array([0xF2, 0x9E, 0x4C])
    red, green, blue = (round(float(a + share * (b - a))) for a, b in zip(dark, light, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"

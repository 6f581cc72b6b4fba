"""Masks and LayerNorm: mu, and mu over the norm of the tokens, in float32 and float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankscope.ext.papers._curves import DepthLine, has_line, line
from rankscope.ext.papers._drawing import COLOURS, drawn
from rankscope.ext.papers._spec import METHOD
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


def _is_small(run: Run) -> bool:
    """Whether the run is of a tiny model, which is not comparable with the paper."""
    return int(_line(run, "mu", "SAN", "complete", "float64").depth[-1]) != BASE_DEPTH


def judge(run: Run) -> str:
    """How far each mask falls, and what LayerNorm alone ends at in both formats."""
    falls = ", ".join(f"{number(_end(run, 'SAN', mask))} ({mask})" for mask in masks_in(run))
    narrow, wide = (number(_end(run, "SAN+LN", "complete", dtype)) for dtype in FLOORS)
    answer = " It does not stop the fall: both are rounding errors of the format." if _is_rounding(run) else ""
    return (
        f"{'Small size, a tiny BERT. ' if _is_small(run) else ''}With pure attention, the residual relative to the "
        f"tokens ends at {falls}. With LayerNorm added, it ends at {narrow} in float32 and {wide} in float64 under "
        f"the complete mask.{answer}"
    )


def _is_rounding(run: Run) -> bool:
    """Whether LayerNorm alone ends at the float floor in both formats; a tiny model shows nothing."""
    ends = {dtype: _end(run, "SAN+LN", "complete", dtype) for dtype in FLOORS}
    return not _is_small(run) and all(ends[dtype] <= floor for dtype, floor in FLOORS.items())


def describe(run: Run) -> str:
    """The table, LayerNorm alone, trained weights, temperature, depth, the method."""
    parts = [_table(run), _norm(run), _trained(run), _temperature(run), _deep(run), METHOD, _method(run)]
    return "\n\n".join(part for part in parts if part)


def _table(run: Run) -> str:
    known = [name for name in (*VARIANTS, "SAN+row scaling") if has_line(run.table, **INIT, variant=name)]
    rows = [(variant, *(number(_end(run, variant, mask)) for mask in masks_in(run))) for variant in known]
    head = ("network", *masks_in(run))
    return "Residual relative to the tokens after the last block, float64:\n\n" + markdown_text(Table(head, rows))


def _norm(run: Run) -> str:
    mu32, mu64 = (number(_end(run, "SAN+LN", "complete", dtype, "mu")) for dtype in FLOORS)
    words = f"**LayerNorm alone.** Under the complete mask, mu ends at {mu32} in float32 and at {mu64} in float64. "
    if _is_rounding(run):
        words += (
            "Here we disagree with the paper: both values are rounding error. LayerNorm rescales the tokens to full "
            "size in every block, and the rounding error with them, so the curve stops at the floor of the format "
            f"(relative {number(FLOORS['float32'])} in float32, {number(FLOORS['float64'])} in float64). The plateau "
            "in float32 is not evidence that the norm stops the fall; below the float64 floor these curves cannot "
            "tell. "
        )
    with_norm, without = _end(run, "SAN+LN", "causal"), _end(run, "SAN", "causal")
    return words + (
        f"Under the causal mask the residual ends at {number(with_norm)} with LayerNorm and at {number(without)} "
        "without."
    )


def _trained(run: Run) -> str:
    names = [name for name in names_in(run.table, "model") if has_line(run.table, model=name, weights="trained")]
    if not names:
        return "No trained weights were available."
    rows = []
    for name in names:
        where = {"part": "figure", "model": name, "weights": "trained", "dtype": "float64", "mask": "complete"}
        rows.append((name, *(number(line(run.table, "mu_over_norm", **where, variant=each).end) for each in VARIANTS)))
    figures = [f"![The same networks and masks for {TITLES.get(n, n)}, trained](figure-{n.lower()}.png)" for n in names]
    head = "**Trained weights**, complete mask, float64, after the last block:"
    return "\n\n".join([head, markdown_text(Table(("model", *VARIANTS), rows)), *figures])


def _temperature(run: Run) -> str:
    where = {"part": "temperature", "variant": "SAN", "mask": "complete"}
    held = [t for t in names_in(run.table, "temperature") if has_line(run.table, **where, temperature=t)]
    if not held:
        return ""
    held.sort(key=float)
    ends = [number(float(line(run.table, "mu_over_norm", **where, temperature=t).mean[2])) for t in held]
    return "\n\n".join(
        [
            "**Temperature.** Pure attention, complete mask, relative residual after two blocks, scores divided by T:",
            markdown_text(Table(tuple(f"T = {t}" for t in held), [ends])),
            "![Relative residual over depth for several attention temperatures](figure-temperature.png)",
        ]
    )


def _deep(run: Run) -> str:
    where = {"part": "deep", "dtype": "float64"}
    if not has_line(run.table, **where):
        return ""
    rows = []
    for variant in (name for name in VARIANTS if has_line(run.table, **where, variant=name)):
        lines = [line(run.table, "mu_over_norm", **where, variant=variant, mask=mask) for mask in masks_in(run)]
        depth = lines[0].depth[-1]
        rows.append((variant, *(number(one.end) for one in lines)))
    return "\n\n".join(
        [
            f"**{depth} blocks**, relative residual after the last, float64:",
            markdown_text(Table(("network", *masks_in(run)), rows)),
            f"![mu, and mu over the norm of the tokens, over {depth} blocks](figure-deep.png)",
        ]
    )


def _method(run: Run) -> str:
    seen = _line(run, "mu", "SAN", "complete", "float64")
    ends = ", ".join(f"{number(_end(run, 'SAN', mask, metric='mu'))} ({mask})" for mask in masks_in(run))
    small = " These are tiny models: the numbers say nothing about the paper." if _is_small(run) else ""
    return (
        f"The network at initialisation has {seen.depth[-1]} blocks and was run with {seen.seeds} "
        f"seed{'s' if seen.seeds > 1 else ''} on {seen.sequences} sequences; the temperature sweep and the deep "
        "network use one seed, the latter two sequences, and without norms float64 only. Trained weights are one "
        f"model each and not the BERT of the paper, which was not available (`--bert FOLDER` uses it).{small}\n\nThe "
        "paper plots mu itself. Without norms the tokens shrink, and mu with them, so we divide it by their norm. "
        f"With pure attention mu starts at {number(float(seen.mean[0]))} and ends at {ends}: it falls under every "
        "mask, as published. A value of 0 means that float64 resolves no difference between the tokens (`rankscope "
        "exact` shows how far it falls). The theorems use a LayerNorm that only scales each token to unit length, "
        "here 'SAN+row scaling'."
    )


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
        title = f"Networks and masks: {deepest} blocks"
        drawn["figure-deep"] = _grid(run, title, variants, part="deep", model="BERT", weights="init")
    if has_line(run.table, part="temperature"):
        drawn["figure-temperature"] = _temperatures(run, named)
    return drawn


def _grid(run: Run, title: str, variants: Sequence[str], **where: str) -> Figure:
    figure, grid = headed_figure(
        title,
        "Log-log, from the output of the first block. Solid: float64. Dotted: float32, visible where it differs. "
        "Values below 1e-19 are drawn there.",
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
        "Smaller T makes attention sharper.",
        [[panel(variant, mask) for mask in masks_in(run, part="temperature")] for variant in variants],
        styles={f"T = {t}": style for t, style in shades.items()},
    )


def _shade(share: float) -> str:
    """From dark blue (sharp) to orange (flat), of growing lightness."""
    dark, light = np.array([0x08, 0x30, 0x6B]), np.array([0xF2, 0x9E, 0x4C])
    red, green, blue = (round(float(a + share * (b - a))) for a, b in zip(dark, light, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"

"""Masks side by side in one figure: what is left of random tokens, layer by layer, and the late law of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope._errors import InputError
from rankscope.runs.figure import FAINT, INK
from rankscope.runs.sheet import sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rankscope.runs.mask_facts import MaskGraph

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8a8a8a")
DASHES = ("-", "--", "-.", (0, (1, 1)))
DEEPEST = -6.0
AGREEMENT = -3.0
WIDTH = 9.4


def draw_masks(graphs: Sequence[MaskGraph]) -> Figure:
    """Left, log10 of the relative residual of random tokens over depth; right, the factor of each layer.

    On the right the dotted lines are the second eigenvalues, which the factors reach after the transient.

    Raises:
        InputError: without masks.
        MissingExtraError: without matplotlib.
    """
    if not graphs:
        raise InputError("No mask was given to draw. Expected one or more results of mask_graph.")
    with sheet("The figure of masks", WIDTH, 3.9 + 0.17 * math.ceil(len(graphs) / 2)) as figure:
        figure.set_layout_engine("constrained", wspace=0.06)
        left, right = figure.subplots(1, 2)
        for number, graph in enumerate(graphs):
            dashes = DASHES[number // len(COLOURS) % len(DASHES)]
            style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}
            _lines(left, right, graph, style)
        _dress(left, right, graphs)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        tokens = sorted({graph.tokens for graph in graphs})
        length = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
        title = f"Random tokens under uniform attention, {length} of them"
        figure.suptitle(title, x=0.012, ha="left", weight="bold", size=9.5, color=INK)
    return figure


def _lines(left: Axes, right: Axes, graph: MaskGraph, style: dict[str, Any]) -> None:
    decay = np.array(graph.log10_decay)
    shown = decay[: int(np.argmax(decay < DEEPEST - 1)) + 1] if (decay < DEEPEST - 1).any() else decay
    layers = np.arange(len(shown))
    left.plot(layers, np.maximum(shown, DEEPEST - 1), lw=1.8, label=_label(graph), **style)
    finite = np.isfinite(shown)
    factors = 10 ** np.diff(shown[finite])
    right.plot(layers[finite][1:], factors, lw=1.8, **style)
    if graph.lambda_2 is not None and graph.lambda_2 > 0:
        right.axhline(graph.lambda_2, color=style["color"], linestyle=":", lw=0.9)


def _label(graph: MaskGraph) -> str:
    name = graph.mask if len(graph.mask) <= 44 else graph.mask[:41] + "..."
    late = "?" if graph.lambda_2 is None else f"{graph.lambda_2:.4g}"
    agree = "?" if graph.layers_to_agreement is None else f"{graph.layers_to_agreement:,}"
    if not graph.quasi_strongly_connected:
        agree = "never"
    return f"{name}   ($|\\lambda_2|$ {late}, to $10^{{-3}}$: {agree})"


def _dress(left: Axes, right: Axes, graphs: Sequence[MaskGraph]) -> None:
    left.axhline(AGREEMENT, color=FAINT, lw=0.8)
    left.annotate(
        "tokens agree to $10^{-3}$",
        (0.99, AGREEMENT - 0.3),
        xycoords=("axes fraction", "data"),
        ha="right",
        size=7.5,
        color=FAINT,
    )
    left.set_ylim(DEEPEST, 0.3)
    left.set_ylabel("log10 of the relative residual")
    right.set_ylabel("factor of the layer; dotted: $|\\lambda_2|$")
    right.set_ylim(0, 1.08)
    longest = max(len(graph.log10_decay) for graph in graphs)
    for axes in (left, right):
        axes.set_xlabel("layer")
        if longest > 60:
            axes.set_xscale("symlog", linthresh=10, linscale=0.6)
            axes.set_xlim(0, longest)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3, color=FAINT)

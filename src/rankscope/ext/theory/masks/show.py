"""How masks are compared: a table of facts, and the residual of random tokens layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rankscope.errors import InputError
from rankscope.ext.theory.masks.facts import AGREEMENT_KEY, count_words
from rankscope.views import Column, Document, Guide, Line, LineChart, Plot, Style, Table
from rankscope.views.figures import DASHES
from rankscope.views.palette import SERIES

if TYPE_CHECKING:
    from rankscope.ext.theory.masks.facts import MaskGraph

COLUMNS = (
    Column("tokens", spare=1), Column("pairs", spare=3), Column("centres", spare=3), Column("connected", spare=1),
    Column("radius", spare=2), "diameter", "lambda_2", Column("gap", spare=4), "transient", "to 1e-3",
)  # fmt: skip
"""The gap is one minus the second eigenvalue, so it is left out first."""
DEEPEST = -6.0
AGREEMENT = -3.0
SURE = ("exact", "simulated", "infinite", "no late")
"""Beginning of a status that needs no remark."""


def document(graphs: Sequence[MaskGraph]) -> Document:
    """A table with one row per mask, and a sentence for each."""
    table = Table([Column("mask", align="left"), *COLUMNS], [_row(graph) for graph in graphs])
    sentences = [f"{graph.mask}: {graph.verdict}" for graph in graphs]
    unsure = [
        f"{graph.mask}, {name}: {status}."
        for graph in graphs
        for name, status in graph.statuses.items()
        if name in graph.ranges or not status.startswith(SURE)
    ]
    return Document("", parts=(table, "\n".join([*sentences, *unsure])))


def _row(graph: MaskGraph) -> list[str]:
    connected = "strongly" if graph.strongly_connected else "quasi" if graph.quasi_strongly_connected else "no"
    return [
        graph.mask,
        f"{graph.tokens:,}",
        f"{graph.edges:,}",
        f"{graph.centres:,}",
        connected,
        _known(graph, "radius", graph.radius),
        _known(graph, "diameter", graph.diameter),
        _known(graph, "lambda_2", graph.lambda_2),
        "unknown" if graph.spectral_gap is None else f"{graph.spectral_gap:.6g}",
        _known(graph, "transient", graph.transient),
        _known(graph, AGREEMENT_KEY, graph.layers_to_agreement),
    ]


def _known(graph: MaskGraph, name: str, value: float | None) -> str:
    if value is not None:
        return f"{value:,}" if isinstance(value, int) else f"{value:.10g}"
    if name not in graph.ranges:
        return "infinite" if graph.statuses.get(name, "").startswith("infinite") else "unknown"
    lower, upper = graph.ranges[name]
    return f"{count_words(lower)} or more" if upper is None else f"{count_words(lower)} to {count_words(upper)}"


def plot(graphs: Sequence[MaskGraph]) -> Plot:
    """Left, log10 of the relative residual of random tokens over depth; right, the factor of each layer.

    On the right the dotted lines are the second eigenvalues, which the factors reach after the transient.

    Raises:
        InputError: without masks.
    """
    if not graphs:
        raise InputError("No mask was given to draw. Expected one or more results of graph.")
    left: list[Line] = []
    right: list[Line] = []
    longest = max(len(graph.log10_decay) for graph in graphs)
    for number, graph in enumerate(graphs):
        style = Style(SERIES[number % len(SERIES)], "", DASHES[number // len(SERIES) % len(DASHES)], 1.8)
        decay = np.array(graph.log10_decay)
        deep = decay < DEEPEST - 1
        shown = decay[: int(np.argmax(deep)) + 1] if deep.any() else decay
        layers, finite = np.arange(len(shown)), np.isfinite(shown)
        left.append(Line(_label(graph), layers, np.maximum(shown, DEEPEST - 1), style=style))
        right.append(Line("", layers[finite][1:], 10 ** np.diff(shown[finite]), style=style))
        if graph.lambda_2 is not None and graph.lambda_2 > 0:
            late = Style(style.colour, dash=":", width=0.9)
            right.append(Line("", [0, longest], [graph.lambda_2] * 2, style=late))
    tokens = sorted({graph.tokens for graph in graphs})
    length = f"{tokens[0]:,}" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,}"
    panels = (
        LineChart(
            "log10 of the relative residual",
            tuple(left),
            guides=(Guide(AGREEMENT, "tokens agree to $10^{-3}$"),),
            x_label="layer",
            log_x=longest > 60,
            x_range=(0, longest) if longest > 60 else None,
            y_range=(DEEPEST, 0.3),
        ),
        LineChart(
            "factor of the layer; dotted: $|\\lambda_2|$",
            tuple(right),
            x_label="layer",
            log_x=longest > 60,
            x_range=(0, longest) if longest > 60 else None,
            y_range=(0, 1.08),
            empty="no factor: equal after one layer",
        ),
    )
    title = f"Random tokens under uniform attention, {length} of them"
    return Plot(title, "", panels, columns=2, panel_size=(4.7, 3.6))


def _label(graph: MaskGraph) -> str:
    name = graph.mask if len(graph.mask) <= 44 else graph.mask[:41] + "..."
    late = "?" if graph.lambda_2 is None else f"{graph.lambda_2:.4g}"
    agree = "?" if graph.layers_to_agreement is None else f"{graph.layers_to_agreement:,}"
    if not graph.quasi_strongly_connected:
        agree = "never"
    return f"{name}   ($|\\lambda_2|$ {late}, to $10^{{-3}}$: {agree})"

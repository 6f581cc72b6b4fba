"""``rankscope masks``."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.cli import parameters
from rankscope.cli.showing import save_figure
from rankscope.cli.streams import print_json


def masks_command(
    masks: Annotated[
        list[str],
        typer.Argument(metavar="MASK", help="Mask names, expressions such as 'causal | sink(1)', or graph files."),
    ],
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=2, help="Sequence length; a graph file has its own.")
    ] = None,
    seed: parameters.Seed = 0,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    quiet: parameters.Quiet = False,
) -> None:
    """What does a mask do to collapse? Reports centre nodes, radius, diameter, spectrum, layers until tokens agree."""
    import rankscope
    from rankscope.verbs.masks.show import document, plot
    from rankscope.views.text import document_text

    graphs = [rankscope.mask_graph(mask, tokens, seed=seed) for mask in masks]
    if figure is not None:
        from rankscope.views.figures import draw

        save_figure(draw(plot(graphs), "The figure of masks"), figure)
    if as_json:
        answers = [graph.to_json() for graph in graphs]
        print_json(answers[0] if len(answers) == 1 else {"kind": "masks", "masks": answers})
    elif quiet:
        for graph in graphs:
            typer.echo(f"{graph.mask}: {graph.verdict}")
    else:
        typer.echo(document_text(document(graphs)))

"""``rankscope bound``."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.cli import parameters, processes, streaming
from rankscope.cli.showing import show_run, wants_progress
from rankscope.cli.words import split_names


def bound_command(
    spec: parameters.Spec,
    text: parameters.Text = None,
    tokenizer: parameters.Tokenizer = None,
    theorems: Annotated[
        list[str] | None, typer.Option("--theorems", help="Theorems, with commas or repeated; see `ls theorems`.")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Read a local folder tensor by tensor, without building the model.")
    ] = False,
    lanczos: Annotated[
        int, typer.Option("--lanczos", min=0, help="Steps per layer and sequence for the largest gain; 0 for none.")
    ] = 60,
    random_tokens: parameters.RandomTokens = False,
    sequences: parameters.Sequences = 2,
    tokens: parameters.Tokens = 64,
    batch: parameters.BatchSize = 4,
    dtype: parameters.Dtype = None,
    seed: parameters.Seed = 0,
    blocks: parameters.Blocks = None,
    layout: parameters.Layout = None,
    parallel: Annotated[processes.Way | None, processes.parallel_option("bound")] = None,
    offload: streaming.Offload = False,
    memory: streaming.Memory = None,
    work: streaming.Work = None,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    out: parameters.Out = None,
    quiet: parameters.Quiet = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """What do the theorems say of these weights? Hypotheses, bound, measured value and slack, layer by layer."""
    import rankscope

    run = rankscope.bound(
        spec,
        text,
        theorems=split_names(theorems),
        weights_only=weights_only,
        lanczos=lanczos,
        sequences=sequences,
        tokens=tokens,
        batch=batch,
        random_tokens=random_tokens,
        tokenizer=tokenizer,
        dtype=dtype,
        seed=seed,
        blocks=blocks,
        stream=layout,
        parallel=processes.way(parallel),
        offload=offload,
        memory=memory,
        work=streaming.work_of(offload, work, out),
        progress=wants_progress(quiet=quiet, no_progress=no_progress),
    )
    if not processes.is_first():
        return
    show_run(run, as_json=as_json, quiet=quiet, out=out, figure=figure)

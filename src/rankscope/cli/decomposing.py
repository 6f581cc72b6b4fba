"""``rankscope decompose``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from rankscope.cli import parameters, processes, streaming
from rankscope.cli.showing import show_run, wants_progress
from rankscope.cli.words import split_names


class Convention(str, Enum):
    """What becomes of MLPs."""

    sources = "sources"
    linearised = "linearised"


class Marginal(str, Enum):
    """Through what paths are counted besides."""

    heads = "heads"
    layers = "layers"
    pairs = "pairs"


def decompose_command(
    spec: parameters.Spec,
    text: parameters.Text = None,
    tokenizer: parameters.Tokenizer = None,
    convention: Annotated[
        Convention, typer.Option("--convention", help="MLPs start new paths, or are linearised at each token.")
    ] = Convention.sources,
    marginals: Annotated[
        list[Marginal] | None,
        typer.Option("--through", help="Also all paths through: heads, layers, pairs; repeat it."),
    ] = None,
    layers: Annotated[
        list[int] | None, typer.Option("--layer", help="Report the lengths behind this block as well; repeat it.")
    ] = None,
    origins: Annotated[bool, typer.Option("--origins", help="Embedding, MLPs and biases apart.")] = False,
    token: Annotated[int | None, typer.Option("--token", help="Vocabulary id whose logit is split too.")] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GIB", min=0.0, help="GiB it may take beside the model.")
    ] = None,
    random_tokens: parameters.RandomTokens = False,
    sequences: parameters.Sequences = 8,
    tokens: parameters.Tokens = 128,
    batch: parameters.BatchSize = 8,
    metrics: parameters.Metrics = None,
    tokens_policy: parameters.Policy = parameters.TokensPolicy.content,
    dtype: parameters.Dtype = None,
    seed: parameters.Seed = 0,
    blocks: parameters.Blocks = None,
    layout: parameters.Layout = None,
    parallel: Annotated[processes.Way | None, processes.parallel_option("decompose")] = None,
    offload: Annotated[bool, streaming.no_offload_option("decompose")] = False,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    out: parameters.Out = None,
    quiet: parameters.Quiet = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """Which paths carry the signal? The exact sum of all paths of each length, and through each head."""
    import rankscope

    run = rankscope.decompose(
        spec,
        text,
        convention=convention.value,
        marginals=[choice.value for choice in marginals or ()],
        layers=layers or (),
        origins=origins,
        token=token,
        metrics=split_names(metrics),
        memory=memory,
        sequences=sequences,
        tokens=tokens,
        batch=batch,
        tokens_policy=tokens_policy.value,
        random_tokens=random_tokens,
        tokenizer=tokenizer,
        dtype=dtype,
        seed=seed,
        blocks=blocks,
        stream=layout,
        parallel=processes.way(parallel),
        offload=offload,
        progress=wants_progress(quiet=quiet, no_progress=no_progress),
    )
    if not processes.is_first():
        return
    show_run(run, as_json=as_json, quiet=quiet, out=out, figure=figure)

"""``rankscope remedy``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from rankscope.cli import parameters, processes, streaming
from rankscope.cli.showing import show_run, wants_progress
from rankscope.cli.words import split_names


class TreatedWeights(str, Enum):
    """Which weights are treated."""

    given = "given"
    init = "init"


def remedy_command(
    spec: parameters.Spec,
    text: parameters.Text = None,
    tokenizer: parameters.Tokenizer = None,
    remedies: Annotated[
        list[str] | None,
        typer.Option("--remedies", help="Remedies, with commas, each NAME or NAME=STRENGTH; see `ls remedies`."),
    ] = None,
    variant: Annotated[str, typer.Option("--variant", help="The network that is treated; see `ls variants`.")] = "full",
    weights: Annotated[
        TreatedWeights, typer.Option("--weights", help="The given weights, or a random initialisation.")
    ] = TreatedWeights.given,
    gradients: Annotated[bool, typer.Option(help="Measure the gradients of queries and keys against values.")] = True,
    repeats: Annotated[int, typer.Option("--repeats", min=0, help="Timed forward passes of each; 0 for none.")] = 3,
    random_tokens: parameters.RandomTokens = False,
    sequences: parameters.Sequences = 4,
    tokens: parameters.Tokens = 64,
    batch: parameters.BatchSize = 8,
    tokens_policy: parameters.Policy = parameters.TokensPolicy.content,
    dtype: parameters.Dtype = None,
    seed: parameters.Seed = 0,
    blocks: parameters.Blocks = None,
    layout: parameters.Layout = None,
    parallel: Annotated[processes.Way | None, processes.parallel_option("remedy")] = None,
    offload: Annotated[bool, streaming.no_offload_option("remedy")] = False,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    out: parameters.Out = None,
    quiet: parameters.Quiet = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """Which remedy would help? Each known one on this model: collapse, gradients and cost, ranked."""
    import rankscope

    run = rankscope.remedy(
        spec,
        text,
        remedies=split_names(remedies),
        variant=variant,
        weights=weights.value,
        gradients=gradients,
        repeats=repeats,
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

"""``rankscope exact``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from rankscope.cli import parameters, processes, streaming
from rankscope.cli.showing import show_run, wants_progress


class Mlp(str, Enum):
    """What becomes of the MLPs."""

    keep = "keep"
    drop = "drop"


class Norm(str, Enum):
    """What stands in for the norms."""

    keep = "keep"
    identity = "identity"
    scale = "scale"
    rms = "rms"


def exact_command(
    spec: parameters.Spec,
    text: parameters.Text = None,
    tokenizer: parameters.Tokenizer = None,
    skip: Annotated[
        float | None, typer.Option("--skip", metavar="GAIN", help="Gain on every skip; 0 removes it.")
    ] = None,
    mlp: Annotated[Mlp, typer.Option("--mlp", help="Keep or drop the MLPs.")] = Mlp.keep,
    norm: Annotated[Norm, typer.Option("--norm", help="The norms, or what stands in for them.")] = Norm.keep,
    mask: Annotated[
        str | None, typer.Option("--mask", metavar="EXPRESSION", help="Another mask, e.g. 'causal & window(4)'.")
    ] = None,
    stability: Annotated[
        bool, typer.Option("--stability", help="Each block's factor on an infinitesimal residual as well.")
    ] = False,
    random_tokens: parameters.RandomTokens = False,
    sequences: parameters.Sequences = 4,
    tokens: parameters.Tokens = 128,
    tokens_policy: parameters.Policy = parameters.TokensPolicy.content,
    seed: parameters.Seed = 0,
    blocks: parameters.Blocks = None,
    layout: parameters.Layout = None,
    parallel: Annotated[processes.Way | None, processes.parallel_option("exact")] = None,
    offload: streaming.Offload = False,
    memory: streaming.Memory = None,
    work: streaming.Work = None,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    out: parameters.Out = None,
    quiet: parameters.Quiet = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """How fast does it collapse, really? Residuals far below the float floor, with order, factor and the law's word."""
    import rankscope

    run = rankscope.exact(
        spec,
        text,
        skip=skip,
        mlp=mlp.value,
        norm=norm.value,
        mask=mask,
        stability=stability,
        sequences=sequences,
        tokens=tokens,
        tokens_policy=tokens_policy.value,
        random_tokens=random_tokens,
        tokenizer=tokenizer,
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

"""``rankscope measure``."""

from __future__ import annotations

from typing import Annotated

import typer

from rankscope.cli import parameters, processes, streaming
from rankscope.cli.interrupting import keeping
from rankscope.cli.showing import fail_where, show_run, wants_progress
from rankscope.cli.words import split_names


def measure_command(
    spec: parameters.Spec,
    text: parameters.Text = None,
    tokenizer: parameters.Tokenizer = None,
    random_tokens: parameters.RandomTokens = False,
    sequences: parameters.Sequences = 8,
    tokens: parameters.Tokens = 128,
    batch: parameters.BatchSize = 8,
    metrics: parameters.Metrics = None,
    sites: parameters.Sites = None,
    tokens_policy: parameters.Policy = parameters.TokensPolicy.content,
    dtype: parameters.Dtype = None,
    seed: parameters.Seed = 0,
    null: Annotated[bool, typer.Option("--null", help="Measure random tokens of the same shape as well.")] = False,
    similarity: Annotated[
        bool,
        typer.Option("--similarity", help="Keep the cosines between tokens of the first sequence, for the report."),
    ] = False,
    blocks: parameters.Blocks = None,
    layout: parameters.Layout = None,
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="HOW",
            help="dense, blockwise or blockwise:WALKS; by default by the memory probabilities would take.",
        ),
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-if",
            metavar="CONDITION",
            help="Exit with 1 if it holds, e.g. 'relative_residual@block.out < 1e-3'; repeat it.",
        ),
    ] = None,
    parallel: Annotated[processes.Way | None, processes.parallel_option("measure")] = None,
    offload: streaming.Offload = False,
    memory: streaming.Memory = None,
    work: streaming.Work = None,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    out: parameters.Out = None,
    quiet: parameters.Quiet = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """Where does this model stand? The battery per block, the float floor and a verdict that names its evidence."""
    import rankscope
    from rankscope.runs.conditions import parse_condition

    conditions = [parse_condition(words) for words in fail_if or ()]
    with keeping(out):
        run = rankscope.measure(
            spec,
            text,
            metrics=split_names(metrics),
            sites=split_names(sites),
            sequences=sequences,
            tokens=tokens,
            batch=batch,
            tokens_policy=tokens_policy.value,
            random_tokens=random_tokens,
            tokenizer=tokenizer,
            dtype=dtype,
            seed=seed,
            null=null,
            similarity=similarity,
            blocks=blocks,
            stream=layout,
            attention=attention,
            parallel=processes.way(parallel),
            offload=offload,
            memory=memory,
            work=streaming.work_of(offload, work, out),
            progress=wants_progress(quiet=quiet, no_progress=no_progress),
        )
    if not processes.is_first():
        return
    show_run(run, as_json=as_json, quiet=quiet, out=out, figure=figure)
    fail_where(run, conditions)

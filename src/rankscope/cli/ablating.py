"""``rankscope ablate``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from rankscope.cli import parameters, processes, streaming
from rankscope.cli.interrupting import keeping
from rankscope.cli.showing import show_run, wants_progress
from rankscope.cli.words import split_names


class Weights(str, Enum):
    """Which weights are ablated."""

    given = "given"
    init = "init"
    both = "both"


def ablate_command(
    spec: parameters.Spec,
    text: parameters.Text = None,
    tokenizer: parameters.Tokenizer = None,
    variants: Annotated[
        list[str] | None, typer.Option("--variants", help="Networks to compare, with commas; see `ls variants`.")
    ] = None,
    masks: Annotated[
        list[str] | None,
        typer.Option("--masks", help="Masks, with commas: own, or expressions such as 'causal' or 'window(1)'."),
    ] = None,
    weights: Annotated[
        Weights, typer.Option("--weights", help="The given weights, a random initialisation, or both.")
    ] = Weights.given,
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
    offload: streaming.Offload = False,
    memory: streaming.Memory = None,
    work: streaming.Work = None,
    parallel: Annotated[processes.Way | None, processes.parallel_option("ablate")] = None,
    figure: parameters.Figure = None,
    as_json: parameters.AsJson = False,
    out: parameters.Out = None,
    quiet: parameters.Quiet = False,
    no_progress: parameters.NoProgress = False,
) -> None:
    """Which component prevents collapse? Attention alone, with norms, skips, MLPs, and the whole, side by side."""
    import rankscope

    with keeping(out):
        run = rankscope.ablate(
            spec,
            text,
            variants=split_names(variants),
            masks=split_expressions(masks),
            metrics=split_names(metrics),
            weights=weights.value,
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
            offload=offload,
            memory=memory,
            work=streaming.work_of(offload, work, out),
            parallel=processes.way(parallel),
            progress=wants_progress(quiet=quiet, no_progress=no_progress),
        )
    if not processes.is_first():
        return
    show_run(run, as_json=as_json, quiet=quiet, out=out, figure=figure)


def split_expressions(given: list[str] | None) -> list[str] | None:
    """Mask expressions from a repeated option; commas inside brackets belong to their expression.

    Example:
        >>> split_expressions(["own,dilated(2, 3) | sink(1)", "causal"])
        ['own', 'dilated(2, 3) | sink(1)', 'causal']
    """
    found: list[str] = []
    for word in given or ():
        depth, start = 0, 0
        for position, letter in enumerate(word):
            depth += (letter == "(") - (letter == ")")
            if letter == "," and depth == 0:
                found.append(word[start:position])
                start = position + 1
        found.append(word[start:])
    return [expression.strip() for expression in found if expression.strip()] or None

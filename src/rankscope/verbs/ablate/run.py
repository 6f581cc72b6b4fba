"""``ablate``: which component prevents collapse, and which causes it?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope._errors import InputError
from rankscope.execution.passes import declared_or_offloaded, executing
from rankscope.execution.support import Parallel
from rankscope.metrics import NORM_METRICS, PAIR_METRICS
from rankscope.models.inputs import InputPlan, Padding, TokensPolicy, prepare_planned
from rankscope.models.stream import Stream
from rankscope.runs.run import Run
from rankscope.verbs.ablate import EXECUTION
from rankscope.verbs.ablate.grid import OWN_MASK, Grid, Weights, arms_of, models_of
from rankscope.verbs.ablate.judge import judge_ablation
from rankscope.verbs.ablate.variants import DEFAULT_VARIANTS
from rankscope.verbs.origin import about_inputs, floor_of, provenance_of

DEFAULT_METRICS = (*NORM_METRICS, *PAIR_METRICS, "stable_rank")


def ablate(
    model: str | Path | nn.Module,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    *,
    variants: Sequence[str] | None = None,
    masks: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    weights: Weights = "given",
    sequences: int | None = None,
    tokens: int = 128,
    batch: int = 8,
    tokens_policy: TokensPolicy = "content",
    random_tokens: bool = False,
    tokenizer: Any = None,
    padding: Padding = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | bool | None = None,
    offload: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    parallel: Parallel | None = None,
    progress: bool = False,
) -> Run:
    """Run one model with components taken out, one variant after the other, and measure every block.

    Args:
        model: a spec or a module you hold; it is left as it was.
        inputs: as for ``measure``.
        variants: names from ``rankscope ls variants``; None for the grid of norms, skips and MLPs.
        masks: ``"own"`` for the model's own mask, or expressions such as ``"causal"`` or ``"window(1)"``.
        metrics: token metrics; None for those of norms and of pairs of tokens, and the stable rank.
        weights: ``"given"``, ``"init"`` (a random initialisation of the same architecture) or ``"both"``.
        sequences: at most how many sequences; None takes all that are given, and 8 of a file or of the sample text.
        tokens: length at which texts are cut.
        batch: sequences per forward pass.
        tokens_policy: which tokens count.
        random_tokens: random ids instead of text.
        tokenizer: reads the texts, where the model comes without one; see ``measure``.
        padding: which of your own tokens do not count; see ``measure``.
        dtype: of the weights, when the model is loaded here.
        seed: of a random initialisation and of random inputs.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        offload: read a local folder block by block, for a model larger than memory; same values, given weights only.
        memory: with ``offload``, a budget such as ``"3GiB"``; see ``measure``.
        work: with ``offload``, a folder in which a run that is killed is kept; see ``measure``.
        parallel: share the work among the processes of an initialised group; see ``measure``.
        progress: show a progress bar.

    Returns:
        Rows as in ``measure``, with the further columns ``variant``, ``mask`` and ``weights``. What a model cannot
        undergo is left out and said in the notes.

    Raises:
        Interrupted: a ``KeyboardInterrupt`` whose ``run`` holds the networks finished before it.

    Example:
        >>> run = ablate("init:tiny-bert", sequences=2, tokens=16, variants=["pure", "full"])
        >>> run.table.column_names[-3:]
        ['variant', 'mask', 'weights']
    """
    started = time.perf_counter()
    declared, offload = declared_or_offloaded(stream, offload)
    if offload and weights != "given":
        raise InputError(
            f"weights={weights!r}: offload reads the given weights, and a random twin would fill the memory."
        )
    with executing(
        EXECUTION,
        model,
        seed=seed,
        dtype=dtype,
        offload=offload,
        memory=memory,
        work=work,
        parallel=parallel,
        progress=progress,
    ) as execution:
        loaded = execution.loaded
        plan = InputPlan(sequences, tokens, batch, tokens_policy, seed, random_tokens, tokenizer, padding)
        prepared = prepare_planned(loaded, inputs, plan)
        arms = list(arms_of(variants or DEFAULT_VARIANTS, masks or (OWN_MASK,)))
        grid = Grid(arms, metrics or DEFAULT_METRICS, tokens_policy, prepared, blocks, declared)
        grid.run(models_of(loaded, weights, seed), execution)
    table = grid.table()
    floor = floor_of(grid.reader.dtypes)
    verdict = judge_ablation(
        table,
        floor["relative"],
        lengths=grid.reader.lengths,
        dim=min((width for _, width in grid.reader.shapes), default=None),
        model=str(model) if isinstance(model, str | Path) else None,
    )
    run = Run(
        kind="ablate",
        provenance=provenance_of(loaded, prepared, grid.reader, seed, time.perf_counter() - started, declared),
        floor=floor,
        **verdict.fields(),
        table=table,
        notes=(*loaded.notes, *prepared.notes, *grid.refused, *grid.where_it_breaks(table)),
        extra=execution.described,
    )
    return grid.finished.checked(about_inputs(run, prepared))

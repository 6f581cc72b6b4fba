"""``measure``: where does this model stand?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.execution.passes import declared_or_offloaded, executing
from rankscope.execution.support import Parallel
from rankscope.models.inputs import InputPlan, Padding, TokensPolicy, prepare_planned
from rankscope.models.stream import Stream
from rankscope.options import renamed
from rankscope.runs.not_finite import CODE
from rankscope.runs.run import Run
from rankscope.verbs.locating import where_it_breaks
from rankscope.verbs.measure import EXECUTION
from rankscope.verbs.measure.choice import BatteryChoice, metrics_named, sites_for
from rankscope.verbs.measure.judge import notes_on_estimates
from rankscope.verbs.measure.null import gaussian_null
from rankscope.verbs.measure.passes import MeasuringPasses
from rankscope.verbs.origin import about_inputs, floor_of, provenance_of
from rankscope.verdicts import judge


def measure(
    model: str | Path | nn.Module,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    *,
    metrics: Sequence[str] | None = None,
    sites: Sequence[str] | None = None,
    sequences: int | None = None,
    tokens: int = 128,
    batch: int = 8,
    tokens_policy: TokensPolicy = "content",
    random_tokens: bool = False,
    tokenizer: Any = None,
    padding: Padding = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    null: bool = False,
    similarity: bool = False,
    blocks: str | Sequence[str] | None = None,
    attention_algorithm: str | None = None,
    parallel: Parallel | None = None,
    stream: Stream | str | bool | None = None,
    offload: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    progress: bool = False,
    attention: str | None = None,
) -> Run:
    """Run a model on some inputs and measure token uniformity and attention at its sites.

    The model runs in evaluation mode, without gradients, and is left as it was found.

    Args:
        model: a spec (``"init:tiny-bert"``, a folder, a hub id) or a module you hold.
        inputs: texts, a text file (``Path``), tensors, or None for the built-in sample text.
        metrics: names from ``rankscope ls metrics``; None for the battery a verdict is drawn from.
        sites: words such as ``"block.out"`` or ``"block.in@0"``; None for the default sites.
        sequences: at most how many sequences; None takes all that are given, and 8 of a file or of the sample text.
        tokens: length at which texts are cut.
        batch: sequences per forward pass.
        tokens_policy: ``"content"``, ``"no-first"`` or ``"no-special"``.
        random_tokens: random ids instead of text.
        tokenizer: reads the texts, where the model comes without one: a tokenizer, its folder, or a hub name.
        padding: which of your own tokens do not count: a tensor that is True there, or the argument that says so, as
            ``"NAME"`` or with the value that marks padding, ``"NAME=1"``; ``"none"`` counts all. None finds such an
            argument and tries on the model how it is read.
        dtype: of the weights, when the model is loaded here.
        seed: of a random initialisation and of random inputs.
        null: also measure Gaussian tokens of the same shape, for comparison.
        similarity: also keep the cosines between at most 64 tokens of the first sequence behind each block.
        blocks: names or patterns of the block modules, where discovery needs help.
        attention_algorithm: ``"dense"`` holds all probabilities of a block in memory, ``"blockwise"`` goes through them
            tile by tile, ``"blockwise:20"`` with up to 20 walks per head for ``attention_contraction``; None by size.
        parallel: share the work among the processes of an initialised group, all of which must make this call and get
            the same answer: ``"data"`` deals out whole batches, ``"fsdp"`` and ``"tensor"`` load the model in parts.
            None for this process alone, or for the way a module you hold is spread already.
        stream: where the residual stream is, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        offload: read the weights of a local folder block by block, for a model larger than memory; same values. The
            earlier spelling ``stream=True`` still works.
        memory: with ``offload``, a budget such as ``"3GiB"``, kept by putting streams into files; refused with an
            estimate where one block at a time is too much. None for no limit.
        work: with ``offload``, a folder in which a run that is killed is kept, to go on behind its last finished block.
        progress: show a progress bar.
        attention: the earlier name of ``attention_algorithm``.

    Returns:
        Values per metric, site, layer and sequence, with verdict, float floor and provenance.

    Raises:
        Interrupted: a ``KeyboardInterrupt`` whose ``run`` holds the sequences finished before it.

    Example:
        >>> run = measure("init:tiny-bert", sequences=2, tokens=16)
        >>> run.curve("relative_residual", "block.out").layers.tolist()
        [0, 1, 2]
    """
    started = time.perf_counter()
    algorithm = renamed("measure", "attention", attention, "attention_algorithm", attention_algorithm)
    declared, offload = declared_or_offloaded(stream, offload)
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
        specs = metrics_named(metrics)
        choice = BatteryChoice(specs, sites_for(specs, sites), tokens_policy, algorithm, similarity)
        plan = InputPlan(sequences, tokens, batch, tokens_policy, seed, random_tokens, tokenizer, padding)
        prepared = prepare_planned(loaded, inputs, plan)
        passes = MeasuringPasses(choice, execution, prepared)
        passes.run(blocks, declared)
    table = passes.table()
    random_values = gaussian_null(specs, passes.reader.shapes, seed=seed) if null else None
    floor = floor_of(passes.reader.dtypes)
    verdict = judge(
        table,
        random_values,
        floor_relative=floor["relative"],
        lengths=passes.reader.lengths,
        dim=min((width for _, width in passes.reader.shapes), default=None),
        model=str(model) if isinstance(model, str | Path) else None,
    )
    lost = execution.is_in_memory and verdict.code == CODE
    broken = where_it_breaks(loaded.model, passes.prepared) if lost else []
    run = Run(
        kind="measure",
        provenance=provenance_of(loaded, passes.prepared, passes.reader, seed, time.perf_counter() - started, declared),
        floor=floor,
        **verdict.fields(),
        table=table,
        null=random_values,
        notes=(*loaded.notes, *prepared.notes, *notes_on_estimates(table), *passes.reader.notes(), *broken),
        extra={**passes.extra, **execution.described},
    )
    return passes.finished.checked(about_inputs(run, prepared))

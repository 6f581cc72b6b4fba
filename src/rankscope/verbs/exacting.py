"""``exact``: how fast does it collapse, really? Residuals far below the float floor, with order and factor."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankscope.execution.passes import declared_or_offloaded, executing
from rankscope.execution.support import SUPPORT, Parallel
from rankscope.masks import Mask
from rankscope.models.inputs import InputPlan, Padding, TokensPolicy, prepare_planned
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream
from rankscope.runs.exactness import cross_checked
from rankscope.runs.run import Run
from rankscope.stream.viewing import undisturbed
from rankscope.surgery.operating import operating, operation_of
from rankscope.surgery.operation import AttentionChoice, MaskChoice, MlpChoice, NormChoice
from rankscope.verbs.exact_passes import ExactPasses
from rankscope.verbs.origin import about_inputs, exact_floors, provenance_of
from rankscope.verdicts.exactness import judge_exact


def exact(
    model: str | Path | nn.Module,
    inputs: str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None = None,
    *,
    skip: float | None = None,
    attention_skip: float | None = None,
    mlp_skip: float | None = None,
    mlp: MlpChoice = "keep",
    norm: NormChoice = "keep",
    mask: Mask | str | None = None,
    mask_mode: MaskChoice = "replace",
    attention: AttentionChoice = "keep",
    layers: int | Collection[int] | None = None,
    sequences: int | None = None,
    tokens: int = 128,
    tokens_policy: TokensPolicy = "content",
    random_tokens: bool = False,
    tokenizer: Any = None,
    padding: Padding = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    stability: bool = False,
    plain: bool = True,
    blocks: str | Sequence[str] | None = None,
    stream: Stream | str | bool | None = None,
    offload: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    parallel: Parallel | None = None,
    progress: bool = False,
) -> Run:
    """Run a model in exact arithmetic and read its residual at every block, however small.

    Surgery can be asked for here (``skip=0.0``), or be under way around the call (``with operate(...)``).

    Args:
        model: a spec or a module you hold; it runs in float64 and is left as it was.
        inputs: as for ``measure``.
        skip: gain on every skip; 0 removes it.
        attention_skip: gain where attention is added; overrides ``skip``.
        mlp_skip: gain where the MLP is added; overrides ``skip``.
        mlp: ``"drop"`` takes the MLP out.
        norm: ``"identity"``, ``"scale"`` or ``"rms"`` in place of the blocks' norms.
        mask: a mask or an expression such as ``"causal"``.
        mask_mode: how it meets the model's own.
        attention: ``"uniform"`` or ``"centred"``.
        layers: blocks the surgery is meant for; None for all.
        sequences: at most how many; None takes all that are given, and 4 of the sample text.
        tokens: length at which texts are cut.
        tokens_policy: which tokens count.
        random_tokens: random ids instead of text.
        tokenizer: reads the texts, where the model comes without one; see ``measure``.
        padding: which of your own tokens do not count; see ``measure``.
        dtype: of the weights, when the model is loaded here.
        seed: of a random initialisation and of random inputs.
        stability: also give each block's factor on an infinitesimal residual (``linear_factor``): above 1 the block
            pushes away from collapse, below 1 toward it.
        plain: also give what float64 and the model's own format read.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, for a model that does not hold it as ``batch tokens dim`` or
            ``tokens batch dim``: ``Stream("batch dim tokens")``, or the same as text; see ``rankscope.Stream``.
        offload: read a local folder block by block, for a model larger than memory; same values.
        memory: with ``offload``, a budget such as ``"3GiB"``; see ``measure``. A block is also held in float64 here.
        work: with ``offload``, a folder in which a run that is killed is kept; see ``measure``.
        parallel: ``"data"`` shares the sequences among the processes of an initialised group; see ``measure``.
        progress: show a progress bar.

    Returns:
        Rows with the further column ``arithmetic``: ``exact``, ``law`` (what the cubic law predicts from the weights,
        where it applies), ``float64`` and the model's own format.

    Raises:
        UnsupportedArithmeticError: the model does something for which there is no exact rule yet.

    Example:
        >>> run = exact("init:tiny-bert", sequences=1, tokens=16, skip=0.0)
        >>> run.curve("order", "block.out").mean.round(2).tolist()
        [3.0, 3.0, 3.0]
    """
    started = time.perf_counter()
    declared, offload = declared_or_offloaded(stream, offload)
    operation = operation_of(
        skip=skip,
        attention_skip=attention_skip,
        mlp_skip=mlp_skip,
        mlp=mlp,
        norm=norm,
        mask=mask,
        mask_mode=mask_mode,
        attention=attention,
        layers=layers,
    )
    most = 4 if sequences is None and inputs is None else sequences
    plan = InputPlan(most, tokens, 1, tokens_policy, seed, random_tokens, tokenizer, padding)
    with executing(
        SUPPORT["exact"],
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
        prepared = prepare_planned(loaded, inputs, plan)
        passes = ExactPasses(execution, prepared, operation, stability=stability, plain=plain)
        view = passes.run(blocks, declared)
    with undisturbed(loaded.model), quiet_transformers(), operating(loaded.model, operation, view=view):
        provenance = provenance_of(loaded, prepared, passes.counted, seed, time.perf_counter() - started, declared)
    table, contradictions = cross_checked(passes.writer.table())
    floor = exact_floors(loaded.dtype)
    verdict = judge_exact(table, floor["formats"], str(model) if isinstance(model, str | Path) else None)
    run = Run(
        kind="exact",
        provenance=provenance,
        floor=floor,
        verdict=verdict.sentence,
        evidence=verdict.evidence,
        code=verdict.code,
        next_steps=verdict.next_steps,
        table=table,
        notes=(*contradictions, *loaded.notes, *prepared.notes),
        extra=execution.described,
    )
    return about_inputs(run, prepared)

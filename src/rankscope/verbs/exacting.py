"""``exact``: how fast does it collapse, really? Residuals far below the float floor, with order and factor."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from rankscope.masks import Mask
from rankscope.models.inputs import TokensPolicy, prepare_inputs
from rankscope.models.loading import load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.results.exactness import judge_exact
from rankscope.results.rows import RowWriter
from rankscope.results.run import Run
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating, operation_of
from rankscope.surgery.operation import AttentionChoice, MaskChoice, MlpChoice, NormChoice
from rankscope.verbs.exact_by_blocks import ExactByBlocks
from rankscope.verbs.exact_readings import Readings, read_exactly, read_in_float64, read_plainly
from rankscope.verbs.laws import predicted_residuals
from rankscope.verbs.origin import exact_floors, provenance_of
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.streaming import described, need_weights, streaming_of


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
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    stability: bool = False,
    plain: bool = True,
    blocks: str | Sequence[str] | None = None,
    stream: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
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
        dtype: of the weights, when the model is loaded here.
        seed: of a random initialisation and of random inputs.
        stability: also give each block's factor on an infinitesimal residual (``linear_factor``): above 1 the block
            pushes away from collapse, below 1 toward it.
        plain: also give what float64 and the model's own format read.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: read a local folder block by block, for a model larger than memory; same values.
        memory: with ``stream``, a budget such as ``"3GiB"``; see ``measure``. A block is also held in float64 here.
        work: with ``stream``, a folder in which a run that is killed is kept; see ``measure``.
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
    streaming = streaming_of(model, stream, memory, work, dtype=dtype)
    loaded = load(model, seed=seed, dtype=dtype) if streaming is None else streaming.loaded
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
    prepared = prepare_inputs(
        loaded,
        inputs,
        sequences=4 if sequences is None and inputs is None else sequences,
        tokens=tokens,
        batch=1,
        tokens_policy=tokens_policy,
        seed=seed,
        random_tokens=random_tokens,
    )
    writer = RowWriter(coordinates=("arithmetic",))
    counted = SiteReader([], tokens_policy, writer)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(loaded.model))
        stack.enter_context(quiet_transformers())
        if streaming is not None:
            options = ("exact", operation, tokens_policy, stability, plain)
            walk = streaming.walk(prepared, options, blocks=blocks, lanes=3 + stability + plain, widened=True)
            by_blocks = ExactByBlocks(loaded, operation, writer, counted, stability=stability, plain=plain)
            by_blocks.run(walk, shown=progress)
            stack.enter_context(operating(loaded.model, operation, view=walk.view))
        else:
            need_weights(loaded.model, "exact")
            view = view_of(loaded.model, prepared[0], blocks=blocks)
            stack.enter_context(operating(loaded.model, operation, view=view))
            for part in tqdm(prepared, desc="exact", unit="sequence", disable=not progress):
                readings = Readings(part.first_sequence, writer)
                states = read_exactly(view, part, readings, stability=stability)
                predicted_residuals(loaded, view, part, states, readings)
                if plain:
                    read_plainly(view, part, readings, counted)
                    if next(loaded.model.parameters()).dtype != torch.float64:
                        read_in_float64(view, part, readings, counted)
        provenance = provenance_of(loaded, prepared, counted, seed, time.perf_counter() - started)
    table = writer.table()
    floor = exact_floors(loaded.dtype)
    verdict, evidence = judge_exact(table, floor["formats"])
    return Run(
        kind="exact",
        provenance=provenance,
        floor=floor,
        verdict=verdict,
        evidence=evidence,
        table=table,
        notes=(*loaded.notes, *prepared.notes),
        extra=described(streaming),
    )

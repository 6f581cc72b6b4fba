"""``measure``: where does this model stand?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from rankscope._errors import InputError
from rankscope.metrics import DEFAULT_ATTENTION_METRICS, DEFAULT_TOKEN_METRICS, METRICS, MetricSpec
from rankscope.models.inputs import TokensPolicy, prepare_inputs
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.view import ModelView
from rankscope.results.estimates import notes_on_estimates
from rankscope.results.not_finite import CODE
from rankscope.results.rows import RowWriter
from rankscope.results.run import Run
from rankscope.results.verdict import judge
from rankscope.stream.sites import DEFAULT_SITES, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.verbs.attention_choice import parse_attention_choice
from rankscope.verbs.interrupting import Finished
from rankscope.verbs.likeness import SITE, LikenessReader, labels_of
from rankscope.verbs.locating import where_it_breaks
from rankscope.verbs.null import gaussian_null
from rankscope.verbs.origin import floor_of, provenance_of
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.sharing import Parallel, sharing
from rankscope.verbs.streaming import described, measure_by_blocks, streaming_of


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
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    null: bool = False,
    similarity: bool = False,
    blocks: str | Sequence[str] | None = None,
    attention: str | None = None,
    parallel: Parallel | None = None,
    stream: bool = False,
    memory: int | str | None = None,
    work: str | Path | None = None,
    progress: bool = False,
) -> Run:
    """Run a model on some inputs and measure token uniformity and attention at its sites.

    The model runs in evaluation mode, without gradients, and is left as it was found.

    Args:
        model: a spec (``"init:tiny-bert"``, a folder, a hub id) or a module you hold.
        inputs: texts, a text file (``Path``), tensors, or None for the built-in sample text.
        metrics: names from ``rankscope ls metrics``; None for the battery a verdict is drawn from.
        sites: words such as ``"block.out"`` or ``"block.in@0"``; None for the default sites.
        sequences: at most how many sequences.
        tokens: length at which texts are cut.
        batch: sequences per forward pass.
        tokens_policy: ``"content"``, ``"no-first"`` or ``"no-special"``.
        random_tokens: random ids instead of text.
        dtype: of the weights, when the model is loaded here.
        seed: of a random initialisation and of random inputs.
        null: also measure Gaussian tokens of the same shape, for comparison.
        similarity: also keep the cosines between at most 64 tokens of the first sequence behind each block.
        blocks: names or patterns of the block modules, where discovery needs help.
        attention: ``"dense"`` holds all probabilities of a block in memory, ``"blockwise"`` goes through them tile by
            tile, ``"blockwise:20"`` with up to 20 walks per head for ``attention_contraction``; None by size.
        parallel: share the work among the processes of an initialised group, all of which must make this call and get
            the same answer: ``"data"`` deals out whole batches, ``"fsdp"`` and ``"tensor"`` load the model in parts.
            None for this process alone, or for the way a module you hold is spread already.
        stream: read the weights of a local folder block by block, for a model larger than memory; same values.
        memory: with ``stream``, a budget such as ``"3GiB"``, kept by reading less ahead and putting streams into files;
            refused with an estimate where one block at a time is too much. None for no limit.
        work: with ``stream``, a folder in which a run that is killed is kept, to go on behind its last finished block.
        progress: show a progress bar.

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
    streaming = streaming_of(model, stream, memory, work, dtype=dtype, parallel=parallel)
    with sharing(model, parallel) as share:
        loaded = share.load(model, seed=seed, dtype=dtype) if streaming is None else streaming.loaded
        specs, choice = _metrics(metrics), parse_attention_choice(attention)
        selection = _selection(sites, specs)
        prepared = prepare_inputs(
            loaded,
            inputs,
            sequences=sequences,
            tokens=tokens,
            batch=batch,
            tokens_policy=tokens_policy,
            seed=seed,
            random_tokens=random_tokens,
        )
        writer = RowWriter()
        reader = SiteReader(specs, tokens_policy, writer, attention=choice)
        if similarity and not selection.wants(SITE):
            raise InputError(f"similarity is taken at {SITE}, which is not among the sites asked for: add it to sites.")
        likeness = LikenessReader(reader, labels_of(prepared, loaded.tokenizer)) if similarity else None
        shown = progress and share.is_first
        finished = Finished(writer, prepared.sequences, "sequences")
        if streaming is not None:
            options = ([spec.name for spec in specs], selection, tokens_policy, similarity, attention)
            walk = streaming.walk(prepared, ("measure", *options), blocks=blocks)
            view = measure_by_blocks(walk, selection, reader, likeness, writer, shown=shown)
        else:
            with undisturbed(loaded.model), quiet_transformers():
                view = view_of(loaded.model, prepared[0], blocks=blocks)
                parts = share.parts(prepared, loaded.model)
                watched = share.watch(likeness or reader)
                with finished.kept(alone=share.is_alone), trace(view, selection, watched):
                    rounds = share.rounds(prepared)
                    for part in tqdm(parts, desc="measure", unit="batch", total=rounds, disable=not shown):
                        reader.start(part)
                        part.run(loaded.model)
                        finished.add(part.sequences)
                prepared = finished.sequences_of(prepared)
        similar = {} if likeness is None else {"similarity": likeness.stored()}
        extra = share.collect(writer, reader, loaded, prepared, similar)[0]
    table = writer.table()
    if table.num_rows == 0:
        raise InputError(_nothing_measured(selection, specs, view))
    random_values = gaussian_null(specs, reader.shapes, seed=seed) if null else None
    floor = floor_of(reader.dtypes)
    verdict = judge(table, floor["relative"], random_values)
    broken = [] if streaming is not None or verdict.code != CODE else where_it_breaks(loaded.model, prepared)
    run = Run(
        kind="measure",
        provenance=provenance_of(loaded, prepared, reader, seed, time.perf_counter() - started),
        floor=floor,
        verdict=verdict.sentence,
        evidence=verdict.evidence,
        table=table,
        null=random_values,
        notes=(*loaded.notes, *prepared.notes, *notes_on_estimates(table), *broken),
        extra={**extra, **share.described, **described(streaming)},
    )
    return finished.checked(run)


def _metrics(names: Sequence[str] | None) -> list[MetricSpec]:
    chosen = (*DEFAULT_TOKEN_METRICS, *DEFAULT_ATTENTION_METRICS) if names is None else tuple(names)
    return [METRICS[name] for name in dict.fromkeys(chosen)]


def _selection(words: Sequence[str] | None, specs: Sequence[MetricSpec]) -> SiteSelection:
    """The sites asked for; by default those that the chosen metrics can read."""
    if words is not None:
        return SiteSelection.parse(words)
    sides = {spec.side for spec in specs}
    return SiteSelection.parse(
        word for word in DEFAULT_SITES if ("attention" if word.endswith(".probs") else "tokens") in sides
    )


def _nothing_measured(selection: SiteSelection, specs: Sequence[MetricSpec], view: ModelView) -> str:
    asked = ", ".join(selection.layers)
    names = ", ".join(spec.name for spec in specs)
    skips = sorted({label for stack in view.stacks for plan in stack.plans for label in plan.skips})
    return (
        f"None of the metrics ({names}) could be taken at the sites asked for ({asked}). This model has "
        f"{view.depth} blocks with skip adds {', '.join(skips) or 'none'}; token metrics go with stream sites, "
        "attention metrics with attention.probs."
    )

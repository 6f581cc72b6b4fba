"""``ablate``: which component prevents collapse, and which causes it?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm.auto import tqdm

from rankscope._errors import InputError, UnsupportedOperationError
from rankscope.masks import parse_mask
from rankscope.metrics import METRICS, NORM_METRICS
from rankscope.models.inputs import Prepared, TokensPolicy, prepare_inputs
from rankscope.models.loading import LoadedModel, load_initialised_twin
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.processes.sharded import spread_of
from rankscope.results.ablation import judge_ablation
from rankscope.results.rows import RowWriter
from rankscope.results.run import Run
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.ablating_by_blocks import Arm, BlockGrid
from rankscope.verbs.interrupting import Finished
from rankscope.verbs.origin import floor_of, provenance_of
from rankscope.verbs.reader import SiteReader
from rankscope.verbs.sharing import Parallel, Share, sharing
from rankscope.verbs.streaming import Streaming, described, streaming_of
from rankscope.verbs.variants import DEFAULT_VARIANTS, variant_named

OWN_MASK = "own"
DEFAULT_METRICS = (*NORM_METRICS, "stable_rank")
Weights = Literal["given", "init", "both"]


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
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    blocks: str | Sequence[str] | None = None,
    stream: bool = False,
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
        metrics: token metrics; None for the norm-type ones and the stable rank.
        weights: ``"given"``, ``"init"`` (a random initialisation of the same architecture) or ``"both"``.
        sequences: at most how many sequences.
        tokens: length at which texts are cut.
        batch: sequences per forward pass.
        tokens_policy: which tokens count.
        random_tokens: random ids instead of text.
        dtype: of the weights, when the model is loaded here.
        seed: of a random initialisation and of random inputs.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: read a local folder block by block, for a model larger than memory; same values, given weights only.
        memory: with ``stream``, a budget such as ``"3GiB"``; see ``measure``.
        work: with ``stream``, a folder in which a run that is killed is kept; see ``measure``.
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
    streaming = streaming_of(model, stream, memory, work, dtype=dtype, parallel=parallel)
    if streaming is not None and weights != "given":
        raise InputError(
            f"weights={weights!r}: stream reads the given weights, and a random twin would fill the memory."
        )
    with sharing(model, parallel) as share:
        loaded = share.load(model, seed=seed, dtype=dtype) if streaming is None else streaming.loaded
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
        arms = list(_arms(variants or DEFAULT_VARIANTS, masks or (OWN_MASK,)))
        grid = _Grid(metrics or DEFAULT_METRICS, tokens_policy, prepared, blocks, share)
        shown = progress and share.is_first
        finished = Finished(grid.writer, 0, "networks")
        if streaming is not None:
            grid.run_by_blocks(streaming, arms, shown=shown)
        else:
            models = _models(loaded, weights, seed)
            order = [(variant, mask, origin) for origin in models for variant, mask, _ in arms]
            finished = Finished(grid.writer, len(order), "networks")
            bar = tqdm(total=len(order), desc="ablate", unit="network", disable=not shown)
            with bar, finished.kept(alone=share.is_alone):
                for origin, candidate in models.items():
                    for variant, mask, operation in arms:
                        grid.run(candidate, operation, {"variant": variant, "mask": mask, "weights": origin})
                        finished.add()
                        bar.update()
            grid.collect(loaded, order)
    table = grid.writer.table()
    if table.num_rows == 0:
        raise InputError("None of the variants could be run. " + " ".join(grid.refused))
    floor = floor_of(grid.reader.dtypes)
    verdict, evidence = judge_ablation(table, floor["relative"])
    run = Run(
        kind="ablate",
        provenance=provenance_of(loaded, prepared, grid.reader, seed, time.perf_counter() - started),
        floor=floor,
        verdict=verdict,
        evidence=evidence,
        table=table,
        notes=(*loaded.notes, *prepared.notes, *grid.refused),
        extra={**share.described, **described(streaming)},
    )
    return finished.checked(run)


def _arms(variants: Sequence[str], masks: Sequence[str]) -> Iterator[tuple[str, str, Operation]]:
    for name in variants:
        variant = variant_named(name)
        for mask in masks:
            if mask == OWN_MASK:
                yield name, mask, variant.operation
            else:
                parsed = parse_mask(mask)
                yield name, str(parsed), replace(variant.operation, mask=parsed)


def _models(loaded: LoadedModel, weights: Weights, seed: int) -> dict[str, nn.Module]:
    given = "init" if loaded.origin == "init" else "given"
    if weights == "given" or loaded.origin == "init":
        return {given: loaded.model}
    if spread_of(loaded.model) is not None:
        raise InputError(f"weights={weights!r}: the random twin of a model spread over processes would be whole.")
    twin = load_initialised_twin(loaded, seed=seed).model
    return {"init": twin} if weights == "init" else {"given": loaded.model, "init": twin}


class _Grid:
    """Measures one network after the other into one table."""

    def __init__(
        self,
        metrics: Sequence[str],
        policy: TokensPolicy,
        prepared: Prepared,
        blocks: str | Sequence[str] | None,
        share: Share,
    ) -> None:
        self.writer = RowWriter(coordinates=("variant", "mask", "weights"))
        self.refused: list[str] = []
        self._specs = [METRICS[name] for name in dict.fromkeys(metrics)]
        self._policy = policy
        self._prepared = prepared
        self._blocks = blocks
        self._share = share
        self._selection = SiteSelection.parse(("block.in@0", "block.out"))
        self.reader = SiteReader(self._specs, policy, self.writer)

    def run_by_blocks(self, streaming: Streaming, arms: Sequence[Arm], *, shown: bool) -> None:
        names = [spec.name for spec in self._specs]
        walk = streaming.walk(
            self._prepared, ("ablate", names, self._policy, arms), blocks=self._blocks, lanes=len(arms)
        )
        grid = BlockGrid(arms, self._specs, self._policy, self.writer, self._selection)
        grid.run(walk, shown=shown)
        self.reader = grid.reader
        self.refused += grid.refused

    def run(self, model: nn.Module, operation: Operation, at: dict[str, str | int | None]) -> None:
        reader = SiteReader(self._specs, self._policy, self.writer, at)
        with undisturbed(model), quiet_transformers():
            view = view_of(model, self._prepared[0], blocks=self._blocks)
            try:
                observe = self._share.watch(reader)
                with operating(model, operation, view=view), trace(view, self._selection, observe):
                    for part in self._share.parts(self._prepared, model):
                        reader.start(part)
                        part.run(model)
            except UnsupportedOperationError as error:
                self.refused.append(f"{at['variant']} under the mask {at['mask']} was left out: {error}")
                return
        self.reader = reader

    def collect(self, loaded: LoadedModel, order: Sequence[tuple[str, str, str]]) -> None:
        """Put the rows of all processes together."""
        told = self._share.collect(
            self.writer, self.reader, loaded, self._prepared, {"refused": self.refused}, order=order
        )
        self.refused = list(dict.fromkeys(sentence for remarks in told for sentence in remarks["refused"]))

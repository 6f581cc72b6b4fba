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
from rankscope.models.loading import LoadedModel, load, load_initialised_twin
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.results.ablation import judge_ablation
from rankscope.results.rows import RowWriter
from rankscope.results.run import Run
from rankscope.stream.sites import SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from rankscope.verbs.origin import floor_of, provenance_of
from rankscope.verbs.reader import SiteReader
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
        progress: show a progress bar.

    Returns:
        Rows as in ``measure``, with the further columns ``variant``, ``mask`` and ``weights``. What a model cannot
        undergo is left out and said in the notes.

    Example:
        >>> run = ablate("init:tiny-bert", sequences=2, tokens=16, variants=["pure", "full"])
        >>> run.table.column_names[-3:]
        ['variant', 'mask', 'weights']
    """
    started = time.perf_counter()
    loaded = load(model, seed=seed, dtype=dtype)
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
    models = _models(loaded, weights, seed)
    grid = _Grid(metrics or DEFAULT_METRICS, tokens_policy, prepared, blocks)
    with tqdm(total=len(models) * len(arms), desc="ablate", unit="network", disable=not progress) as bar:
        for origin, candidate in models.items():
            for variant, mask, operation in arms:
                grid.run(candidate, operation, {"variant": variant, "mask": mask, "weights": origin})
                bar.update()
    table = grid.writer.table()
    if table.num_rows == 0:
        raise InputError("None of the variants could be run. " + " ".join(grid.refused))
    floor = floor_of(grid.reader.dtypes)
    verdict, evidence = judge_ablation(table, floor["relative"])
    return Run(
        kind="ablate",
        provenance=provenance_of(loaded, prepared, grid.reader, seed, time.perf_counter() - started),
        floor=floor,
        verdict=verdict,
        evidence=evidence,
        table=table,
        notes=(*loaded.notes, *prepared.notes, *grid.refused),
    )


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
    twin = load_initialised_twin(loaded, seed=seed).model
    return {"init": twin} if weights == "init" else {"given": loaded.model, "init": twin}


class _Grid:
    """Measures one network after the other into one table."""

    def __init__(
        self, metrics: Sequence[str], policy: TokensPolicy, prepared: Prepared, blocks: str | Sequence[str] | None
    ) -> None:
        self.writer = RowWriter(coordinates=("variant", "mask", "weights"))
        self.refused: list[str] = []
        self._specs = [METRICS[name] for name in dict.fromkeys(metrics)]
        self._policy = policy
        self._prepared = prepared
        self._blocks = blocks
        self._selection = SiteSelection.parse(("block.in@0", "block.out"))
        self.reader = SiteReader(self._specs, policy, self.writer)

    def run(self, model: nn.Module, operation: Operation, at: dict[str, str | int | None]) -> None:
        reader = SiteReader(self._specs, self._policy, self.writer, at)
        with undisturbed(model), quiet_transformers():
            view = view_of(model, self._prepared[0], blocks=self._blocks)
            try:
                with operating(model, operation, view=view), trace(view, self._selection, reader):
                    for part in self._prepared:
                        reader.start(part)
                        part.run(model)
            except UnsupportedOperationError as error:
                self.refused.append(f"{at['variant']} under the mask {at['mask']} was left out: {error}")
                return
        self.reader = reader

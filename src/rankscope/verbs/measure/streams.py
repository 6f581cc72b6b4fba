"""How a model with several residual streams per token mixes them, and what ``measure`` says about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import RankscopeError
from rankscope.execution.passes import Execution
from rankscope.linalg.stream_mixing import (
    contraction,
    kind_of,
    log_product_contractions,
    on_differences,
    second_eigenvalue,
)
from rankscope.models.inputs import Batch
from rankscope.models.view import ModelView, Stack
from rankscope.models.wrapping import needs_all_ranks
from rankscope.stream.mixing import mixing_matrices
from rankscope.stream.viewing import undisturbed


def stream_mixing(execution: Execution, view: ModelView, batch: Batch) -> list[dict[str, Any]]:
    """For each stack with several streams per token: their number and layout, and how each block mixes them.

    The matrices are measured on one batch. Values are means over its tokens; the spread over tokens is that of the
    contraction.
    """
    return [_of_stack(execution, view, stack, batch) for stack in view.stacks if stack.stream.has_streams]


def notes_on_depth(view: ModelView) -> list[str]:
    """A sentence for each stack whose blocks read more than the output of the block before."""
    return [
        f"{f'{stack.name}: ' if stack.name else ''}{len(stack.reads_earlier)} blocks, the first of them block "
        f"{stack.reads_earlier[0]}, take a combination of what several earlier blocks returned (long skips, weights or "
        "attention over depth); block.out shows what a block returned, block.in what the next one takes, and the "
        "weights of the combination are not measured"
        for stack in view.stacks
        if stack.reads_earlier
    ]


def _of_stack(execution: Execution, view: ModelView, stack: Stack, batch: Batch) -> dict[str, Any]:
    facts: dict[str, Any] = {"stack": stack.name, "layout": str(stack.stream)}
    if not execution.is_in_memory or needs_all_ranks(view.model):
        return facts | {"why": "mixing matrices are measured on a whole model in one process"}
    try:
        with undisturbed(view.model):
            matrices = mixing_matrices(view, stack, batch)
    except RankscopeError as error:
        return facts | {"why": str(error)}
    if next(iter(matrices.values())).shape[-1] < 2:
        return facts | {"why": "a token has one stream"}
    return facts | _described(matrices, batch.keep)


def _described(matrices: Mapping[int, Tensor], keep: Tensor | None) -> dict[str, Any]:
    first = next(iter(matrices.values()))
    kept = torch.ones(first.shape[:2], dtype=torch.bool) if keep is None else keep.cpu()
    kept = torch.nn.functional.pad(kept, (0, first.shape[1] - kept.shape[1]), value=False)
    chosen = {layer: H.cpu()[kept] for layer, H in matrices.items()}
    kinds = {kind_of(H) for H in chosen.values()}
    kind = next((k for k in ("not stochastic", "row-stochastic") if k in kinds), "doubly stochastic")
    apart = {layer: on_differences(H) for layer, H in chosen.items()}
    by_token = {layer: contraction(D) for layer, D in apart.items()}
    products = log_product_contractions(chosen.values(), stochastic=kind != "not stochastic")
    return {
        "count": int(first.shape[-1]),
        "kind": kind,
        "tokens": int(kept.sum()),
        "blocks": list(chosen),
        "contraction": [float(values.mean()) for values in by_token.values()],
        "contraction_sd": [float(values.std(correction=0)) for values in by_token.values()],
        "second_eigenvalue": [float(second_eigenvalue(D).mean()) for D in apart.values()],
        "log10_product_contraction": [float(logs.mean()) / 2.302585092994046 for logs in products],
        "mean_matrix": [H.mean(dim=0).tolist() for H in chosen.values()],
    }

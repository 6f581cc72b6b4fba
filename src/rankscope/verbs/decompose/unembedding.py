"""The unembedding of a language model, and whether it reads the stream that a decomposition ends with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import InputError
from rankscope.models.inputs import Batch
from rankscope.models.loading import LoadedModel
from rankscope.models.view import ModelView
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace


def unembedding_of(loaded: LoadedModel, token: int) -> tuple[nn.Module, Tensor]:
    """The module that makes logits, and its row for a token.

    Raises:
        InputError: the model has none, or not for this token.
    """
    from transformers import PreTrainedModel

    owner = loaded.model.get_output_embeddings() if isinstance(loaded.model, PreTrainedModel) else None
    if owner is None:
        raise InputError(
            f"token={token}: {type(loaded.model).__name__} has no unembedding. Load the model with its language head, "
            "e.g. rankscope.load(spec, model_class='AutoModelForCausalLM').model, and pass that."
        )
    weight: Tensor = owner.weight
    if not 0 <= token < weight.shape[0]:
        raise InputError(f"token={token}: the vocabulary has {weight.shape[0]} entries.")
    return owner, weight.detach()[token]


def check_reads_the_stream(owner: nn.Module, view: ModelView, batch: Batch) -> None:
    """Run the model once and hold what the unembedding reads against the last stream, bit by bit.

    Raises:
        InputError: something lies between the two, so that a share of the stream is no share of the logit.
    """
    last: list[Tensor] = []
    read: list[Tensor] = []

    def observe(ref: SiteRef, seen: Tensor | AttentionCall) -> None:
        if isinstance(seen, Tensor):
            last.append(seen.detach().clone())

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        read.append(args[0].detach().clone())

    handle = owner.register_forward_pre_hook(keep)
    try:
        with trace(view, SiteSelection.parse(["block.out", "final"]), observe):
            batch.run(view.model)
    finally:
        handle.remove()
    if not any(_tail(given, last[-1]) for given in read):
        raise InputError(
            f"token=: the unembedding of {type(view.model).__name__} does not read the final stream (its head changes "
            "it on the way), so that the logit is not a sum over paths. Decompose without token."
        )


def _tail(given: Tensor, stream: Tensor) -> bool:
    """Whether the rows read are the last rows of the stream; some models make logits of the last token only."""
    if given.dim() != stream.dim() or given.shape[1] > stream.shape[1]:
        return False
    return torch.equal(given, stream[:, stream.shape[1] - given.shape[1] :])

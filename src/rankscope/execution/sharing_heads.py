"""Rows of several processes made those of one: batches back in order, heads side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rankscope._errors import ProcessError, UnsupportedConfigError
from rankscope.models.loading import LoadedModel
from rankscope.models.spread import is_distributed
from rankscope.runs.rows import Piece
from rankscope.stream.operators import is_attention


@dataclass(frozen=True)
class Heads:
    """What is known of a tensor-parallel model's attention heads.

    Attributes:
        total: how many a layer has in all, by the configuration; None where nothing says.
        cut: whether each rank saw its own, by the weights of what is called attention.
    """

    total: int | None
    cut: bool


def heads_of(loaded: LoadedModel, *, gathered: bool) -> Heads:
    """Read them off a model: from its configuration, else from the weights of what is called attention.

    Args:
        loaded: the model.
        gathered: whether heads were distributed tensors that have been put together already.
    """
    config = loaded.config
    total = None if config is None else config.get_text_config().to_dict().get("num_attention_heads")
    inside = [
        parameter
        for name, module in loaded.model.named_modules()
        if is_attention(name, module)
        for parameter in module.parameters()
    ]
    return Heads(total if isinstance(total, int) else None, not gathered and any(map(_is_cut, inside)))


def _is_cut(parameter: Any) -> bool:
    return is_distributed(parameter) and not all(placement.is_replicate() for placement in parameter.placements)


def in_order_of_batches(ranks: Sequence[Sequence[Piece]], order: Sequence[tuple[str | int | None, ...]]) -> list[Piece]:
    """Pieces of whole batches from several ranks, as one process writes them.

    Args:
        ranks: the pieces of each rank.
        order: values of the further columns, in the order in which one process goes through them.
    """
    place = {coordinates: number for number, coordinates in enumerate(order)}
    every = [piece for pieces in ranks for piece in pieces]
    return sorted(every, key=lambda piece: (place[piece.coordinates], piece.first_sequence))


def with_all_heads(ranks: Sequence[Sequence[Piece]], heads: Heads) -> list[Piece]:
    """Pieces of the same batches from several ranks, each with its own heads, as one process writes them.

    Rows without a head are the same on every rank, and the first one's are taken.

    Raises:
        ProcessError: the ranks saw different sites.
        UnsupportedConfigError: the heads are neither all on every rank nor dealt out among them.
    """
    if len({tuple(map(_key, pieces)) for pieces in ranks}) > 1:
        raise ProcessError("The processes saw different sites. Pass the same model, inputs and sites on every one.")
    return [_joined(same, heads) for same in zip(*ranks, strict=True)]


def _key(piece: Piece) -> tuple[object, ...]:
    return piece.metric, piece.site, piece.stack, piece.layer, piece.first_sequence, piece.coordinates


def _joined(same: Sequence[Piece], heads: Heads) -> Piece:
    first = same[0]
    if first.values.ndim == 1:
        return first
    counts = [piece.values.shape[1] for piece in same]
    if not (heads.cut if heads.total is None else sum(counts) == heads.total):
        if heads.total is None or set(counts) == {heads.total}:
            return first
        raise UnsupportedConfigError(
            f"Block {first.layer} has {heads.total} heads by its configuration, and the processes saw "
            f"{', '.join(map(str, counts))}. Ask for metrics of tokens only, or measure it with parallel='fsdp'."
        )
    return replace(
        first,
        values=np.concatenate([piece.values for piece in same], axis=1),
        statuses=np.concatenate([piece.statuses for piece in same], axis=1),
    )

"""What lies outside the blocks: read once and kept; of the token table only the rows that are used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rankscope._errors import InputError
from rankscope.execution.offload.meta_model import Skeleton, Slot
from rankscope.models.inputs import Prepared


def read_rest(skeleton: Skeleton, blocks: Sequence[str], prepared: Prepared) -> None:
    """Read what is outside the blocks, and of the token table only the rows that are used."""
    table = _token_table(skeleton, prepared)
    for slot in _outside(skeleton, blocks):
        assert slot.stored is not None
        if slot.module is table:
            _read_rows(slot, table, _ids(prepared))
        else:
            place = torch.empty(slot.parameter.shape, dtype=slot.parameter.dtype)
            slot.stored.read_into(place)
            slot.put(place)


def rest_bytes(skeleton: Skeleton, blocks: Sequence[str], prepared: Prepared) -> int:
    """What :func:`read_rest` will take."""
    table = _token_table(skeleton, prepared)
    total = 0
    for slot in _outside(skeleton, blocks):
        whole = slot.nbytes
        total += whole * len(_ids(prepared)) // slot.parameter.shape[0] if slot.module is table else whole
    return total


def _outside(skeleton: Skeleton, blocks: Sequence[str]) -> list[Slot]:
    inside = tuple(f"{block}." for block in blocks)
    return [slot for slot in skeleton.slots.values() if slot.stored is not None and not slot.name.startswith(inside)]


def _ids(prepared: Prepared) -> Tensor:
    """The token ids that occur, sorted."""
    every = torch.cat([part.inputs["input_ids"].reshape(-1) for part in prepared])
    ids: Tensor = torch.unique(every)
    return ids


def _token_table(skeleton: Skeleton, prepared: Prepared) -> nn.Embedding | None:
    """The embedding whose rows are token ids, if it can do with some of them."""
    model = skeleton.loaded.model
    found = model.get_input_embeddings() if all("input_ids" in part.inputs for part in prepared) else None  # type: ignore[operator]
    if not isinstance(found, nn.Embedding) or found.max_norm is not None:
        return None
    holders = [slot for slot in skeleton.slots.values() if slot.parameter is found.weight]
    return found if len(holders) == 1 else None


def _read_rows(slot: Slot, table: nn.Embedding, ids: Tensor) -> None:
    assert slot.stored is not None
    if int(ids[0]) < 0 or int(ids[-1]) >= slot.stored.shape[0]:
        raise InputError(
            f"Token ids run from {int(ids[0])} to {int(ids[-1])}; the table has {slot.stored.shape[0]} rows."
        )

    def renumber(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.searchsorted(ids, args[0]), *args[1:])

    slot.put(slot.stored.read_rows(ids.tolist(), slot.parameter.dtype))
    table.padding_idx = None  # it matters to gradients only, and counts rows of the whole table
    table.register_forward_pre_hook(renumber)

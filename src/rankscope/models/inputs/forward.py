"""What a forward pass needs beside the data: the decoder's side, no cache, the right device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rankscope._errors import InputError
from rankscope.models.inputs.hashed_words import special_ids
from rankscope.models.inputs.record import Batch
from rankscope.models.loading import LoadedModel


def takes(model: torch.nn.Module, argument: str) -> bool:
    """Whether the model's forward names ``argument``."""
    return argument in inspect.signature(model.forward).parameters


def completed(loaded: LoadedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` with the decoder's ids (the encoder's, shifted right) and ``use_cache=False`` where these are due."""
    found = dict(inputs)
    ids = found.get("input_ids")
    if loaded.input_kind == "text-to-text" and ids is not None and "decoder_input_ids" not in found:
        named = special_ids(loaded.config)
        start = (named.get("decoder_start") or named.get("bos") or named.get("pad") or (0,))[0]
        found["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
        if "attention_mask" in found and takes(loaded.model, "decoder_attention_mask"):
            found["decoder_attention_mask"] = found["attention_mask"]
    if takes(loaded.model, "use_cache"):
        found.setdefault("use_cache", False)
    return found


def on_device(batches: Sequence[Batch], model: torch.nn.Module) -> tuple[Batch, ...]:
    """The batches where the model's first parameter is; weights that are elsewhere until they are used say nothing."""
    first = next(model.parameters(), None)
    if first is None or first.device.type in ("cpu", "meta"):
        return tuple(batches)
    return tuple(_moved(batch, first.device) for batch in batches)


def _moved(batch: Batch, device: torch.device) -> Batch:
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.inputs.items()
    }
    keep = None if batch.keep is None else batch.keep.to(device)
    return replace(batch, inputs=inputs, keep=keep, arguments=tuple(value.to(device) for value in batch.arguments))


def refuse_ids_without_embedding(model: Any, ids: torch.Tensor) -> None:
    """Raise for ids of a tokenizer that the model has no embedding for; running it would end in an index error.

    Raises:
        InputError: with the id and the number of embeddings.
    """
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:  # a family that does not say which table it reads
        return
    if isinstance(table, torch.nn.Embedding) and not 0 <= int(ids.min()) <= int(ids.max()) < table.num_embeddings:
        worst = int(ids.max()) if int(ids.max()) >= table.num_embeddings else int(ids.min())
        raise InputError(
            f"The tokenizer gives the id {worst:,}, and the model has {table.num_embeddings:,} embeddings: they do not "
            "belong together. Fetch the model again, or pass token ids yourself."
        )


def longest_sequence(model: torch.nn.Module, config: Any) -> int | None:
    """How many positions a text model has, None if nothing says; a table with a padding row starts behind it."""
    described = config.get_text_config().to_dict()
    limits = [described.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
    found = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    for name, module in model.named_modules():
        table = name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding)
        if table and module.padding_idx is not None:
            found.append(module.num_embeddings - module.padding_idx - 1)
    return min(found) if found else None

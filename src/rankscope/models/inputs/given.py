"""Splits the caller's own tensors, dictionaries and lists into batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rankscope._types import kind_of
from rankscope.errors import InputError
from rankscope.models.inputs.padding import content_of, is_mask_like, is_pattern
from rankscope.models.inputs.record import Batch, InputPlan, Prepared
from rankscope.models.inputs.rows import TokenRows, all_or_some, kept_tokens, special_ids
from rankscope.models.loading import LoadedModel


def takes(model: torch.nn.Module, argument: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return argument in inspect.signature(model.forward).parameters


def completed(loaded: LoadedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` with the decoder's ids (the encoder's, shifted right) and ``use_cache=False`` where needed."""
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
    """The batches on the device of the model's first parameter; unchanged if that is offloaded (on meta)."""
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
    """Raise for ids of a tokenizer without an embedding in the model; running it would end in an index error.

    Raises:
        InputError: the message has the id and the number of embeddings.
    """
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:  # a family that does not say which embedding it uses
        return
    if isinstance(table, torch.nn.Embedding) and not 0 <= int(ids.min()) <= int(ids.max()) < table.num_embeddings:
        worst = int(ids.max()) if int(ids.max()) >= table.num_embeddings else int(ids.min())
        raise InputError(
            f"The tokenizer gives the id {worst:,}, and the model has {table.num_embeddings:,} embeddings: they do not "
            "belong together. Fetch the model again, or pass token ids yourself."
        )


def longest_sequence(model: torch.nn.Module, config: Any) -> int | None:
    """Number of positions of a text model, None if unknown; a table with a padding row starts after it."""
    described = config.get_text_config().to_dict()
    limits = [described.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
    found = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    for name, module in model.named_modules():
        table = name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding)
        if table and module.padding_idx is not None:
            found.append(module.num_embeddings - module.padding_idx - 1)
    return min(found) if found else None


def prepare_given(loaded: LoadedModel, given: Any, plan: InputPlan) -> Prepared:
    """Batches of the caller's own tensors; tokens are excluded if ids or an attention mask say which."""
    config = loaded.config
    if isinstance(given, torch.Tensor):
        parts = batches_from_tensor(given, plan.batch, _sequence_axis(loaded.model, given))
    elif isinstance(given, Mapping):
        parts = batches_from_mapping(given, plan.batch)
    elif isinstance(given, (list, tuple)) and given:
        parts = batches_from_list(given)
    else:
        empty = " without entries" if isinstance(given, (list, tuple)) else ""
        raise InputError(
            f"inputs is {kind_of(given)}{empty}; expected texts, a text file (Path), a tensor, a dictionary of keyword "
            "arguments, a list of these, or None for the sample text."
        )
    parts = _first_sequences(parts, plan.sequences)
    special = None
    if config is not None:
        parts = tuple(_for_transformers(loaded, part) for part in parts)
        special = frozenset[int]().union(*special_ids(config).values()) if "input_ids" in parts[0].inputs else None
    if plan.tokenizer is not None:
        special = frozenset(map(int, plan.tokenizer.all_special_ids)) | (special or frozenset())
    parts = on_device(parts, loaded.model)
    content = content_of(loaded.model, parts, plan.padding, is_transformers=config is not None)
    kept = [
        replace(part, keep=_keep(part, mask, plan, special)) for part, mask in zip(parts, content.masks, strict=True)
    ]
    source = "tensors given by the caller" + (f", padding by {content.how}" if content.how else "")
    return Prepared(on_device(kept, loaded.model), source, (), plan.policy, content.notes, padding=content.how)


def _for_transformers(loaded: LoadedModel, part: Batch) -> Batch:
    """A bare tensor is the model's main input; decoder ids and ``use_cache`` are added."""
    inputs = dict(part.inputs)
    if inputs.get("past_key_values") is not None:
        raise InputError(
            f"past_key_values is a {type(inputs['past_key_values']).__name__}: the tokens of earlier passes are keys "
            "without queries, and a static cache has empty places among them. A single step of generation is not "
            "measured; pass the whole sequence, prompt and continuation, without a cache."
        )
    if part.arguments:
        inputs[str(loaded.model.main_input_name)] = part.arguments[0]
    return replace(part, inputs=completed(loaded, inputs), arguments=())


def _keep(
    part: Batch, content: torch.Tensor | None, plan: InputPlan, special: frozenset[int] | None
) -> torch.Tensor | None:
    ids = part.inputs.get("input_ids")
    bare = part.arguments[0] if part.arguments else None
    if content is not None:
        pass
    elif isinstance(ids, torch.Tensor):
        content = torch.ones_like(ids, dtype=torch.bool)
    elif bare is not None and bare.ndim in (2, 3):
        content = torch.ones(bare.transpose(0, part.axis).shape[:2], dtype=torch.bool, device=bare.device)
    elif plan.policy == "no-special":
        raise InputError("tokens_policy 'no-special' needs input_ids or a (batch, tokens) attention_mask.")
    else:
        return None
    if isinstance(ids, torch.Tensor):
        return all_or_some(kept_tokens(TokenRows(ids, content), plan.policy, special))
    return all_or_some(kept_tokens(TokenRows(content.long(), content), plan.policy, None))


def _first_sequences(parts: tuple[Batch, ...], most: int | None) -> tuple[Batch, ...]:
    if most is None:
        return parts
    kept = []
    for part in parts:
        room = most - part.first_sequence
        if room >= part.sequences:
            kept.append(part)
        elif room > 0:
            cut = {name: _cut(value, part.sequences, room) for name, value in part.inputs.items()}
            arguments = tuple(x.narrow(part.axis, 0, room) for x in part.arguments)
            kept.append(replace(part, inputs=cut, sequences=room, arguments=arguments))
    return tuple(kept)


def _cut(value: Any, count: int, room: int) -> Any:
    batched = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == count
    return value[:room] if batched else value


def batches_from_mapping(given: Mapping[str, Any], batch: int) -> tuple[Batch, ...]:
    """Slices of ``batch`` sequences along the first axis of every tensor; other values are passed to every batch."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    sizes = {name: value.shape[0] for name, value in tensors.items() if value.ndim > 0}
    told = {size for name, size in sizes.items() if not is_mask_like(name)}
    if len(told) == 1:  # a mask between tokens has no batch axis
        sequences = told.pop()
        sizes = {name: size for name, size in sizes.items() if not is_pattern(name, tensors[name], sequences)}
    if not sizes:
        raise InputError(
            f"The inputs hold no tensor with a batch axis; got {', '.join(map(str, given)) or 'nothing'}. Pass what "
            "the model is called with, e.g. {'input_ids': ids} with ids of shape (batch, tokens)."
        )
    count = max(sizes.values())
    uneven = {name: size for name, size in sizes.items() if size != count}
    if uneven:
        raise InputError(f"The inputs disagree on the number of sequences: {sizes}. Their first axes must be equal.")
    if count == 0:
        raise InputError("The inputs hold no sequence: their first axis has length 0.")
    found = []
    for start in range(0, count, batch):
        inputs = {name: value[start : start + batch] if name in sizes else value for name, value in dict(given).items()}
        found.append(Batch(inputs, None, start, min(batch, count - start)))
    return tuple(found)


def batches_from_tensor(given: torch.Tensor, batch: int, axis: int = 0) -> tuple[Batch, ...]:
    """Slices along the batch axis, passed to the model as its only positional argument."""
    if given.ndim <= axis or given.shape[axis] == 0:
        raise InputError(f"Expected a tensor with a batch axis that is not empty; got shape {tuple(given.shape)}.")
    parts = torch.split(given, batch, dim=axis)
    return tuple(Batch({}, None, i * batch, part.shape[axis], (part,), axis) for i, part in enumerate(parts))


def _sequence_axis(model: torch.nn.Module, given: torch.Tensor) -> int:
    """1 if torch's own attention was built to read ``tokens batch dim`` (``batch_first=False``), else 0."""
    if given.ndim != 3 or not given.is_floating_point():
        return 0
    own = [module for module in model.modules() if isinstance(module, torch.nn.MultiheadAttention)]
    return int(bool(own) and not any(module.batch_first for module in own))


def batches_from_list(given: Sequence[Any]) -> tuple[Batch, ...]:
    """A list whose entries are already batches: tensors or dictionaries."""
    found: list[Batch] = []
    first = 0
    for index, entry in enumerate(given):
        if isinstance(entry, torch.Tensor):
            part = batches_from_tensor(entry, max(1, entry.shape[0] if entry.ndim else 1))[0]
        elif isinstance(entry, Mapping):
            part = batches_from_mapping(entry, batch=2**62)[0]
        else:
            raise InputError(
                f"Entry {index} of the inputs is a {type(entry).__name__}; expected tensors or dictionaries."
            )
        found.append(Batch(part.inputs, None, first, part.sequences, part.arguments))
        first += part.sequences
    return tuple(found)

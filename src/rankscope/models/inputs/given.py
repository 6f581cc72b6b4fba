"""Splits the caller's own tensors, dictionaries and lists into batches."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rankscope._types import kind_of
from rankscope.errors import InputError
from rankscope.models.inputs.axes import main_tensors, sequence_axis
from rankscope.models.inputs.padding import content_of, is_pattern
from rankscope.models.inputs.record import Batch, InputPlan, Prepared, is_mask_like
from rankscope.models.inputs.rows import TokenRows, all_or_some, kept_tokens, special_ids
from rankscope.models.loading import LoadedModel
from rankscope.models.wrapping import needs_all_ranks


def completed(loaded: LoadedModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """``inputs`` with the decoder's ids (the encoder's, shifted right) and ``use_cache=False`` where needed."""
    complete = dict(inputs)
    ids = complete.get("input_ids")
    if loaded.input_kind == "text-to-text" and ids is not None and "decoder_input_ids" not in complete:
        named = special_ids(loaded.config)
        start = (named.get("decoder_start") or named.get("bos") or named.get("pad") or (0,))[0]
        complete["decoder_input_ids"] = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
        if "attention_mask" in complete and "decoder_attention_mask" in loaded.arguments:
            complete["decoder_attention_mask"] = complete["attention_mask"]
    if "use_cache" in loaded.arguments:
        complete.setdefault("use_cache", False)
    return complete


def on_device(batches: Sequence[Batch], device: torch.device | None) -> tuple[Batch, ...]:
    """The batches on a device; unchanged for None."""
    return tuple(batches if device is None else (_moved(batch, device) for batch in batches))


def _moved(batch: Batch, device: torch.device) -> Batch:
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.inputs.items()
    }
    keep = None if batch.keep is None else batch.keep.to(device)
    return replace(batch, inputs=inputs, keep=keep, arguments=tuple(value.to(device) for value in batch.arguments))


def refuse_ids_without_embedding(embeddings: int | None, ids: torch.Tensor) -> None:
    """Raise for ids of a tokenizer without an embedding in the model; running it would end in an index error.

    Raises:
        InputError: the message has the id and the number of embeddings.
    """
    if embeddings is not None and not 0 <= int(ids.min()) <= int(ids.max()) < embeddings:
        worst = int(ids.max()) if int(ids.max()) >= embeddings else int(ids.min())
        raise InputError(
            f"The tokenizer gives the id {worst:,}, and the model has {embeddings:,} embeddings: they do not "
            "belong together. Fetch the model again, or pass token ids yourself."
        )


def prepare_given(loaded: LoadedModel, given: Any, plan: InputPlan) -> Prepared:
    """Batches of the caller's own tensors; tokens are excluded if ids or an attention mask say which."""
    config = loaded.config
    if needs_all_ranks(loaded.model):  # in the experiments that find how these are read
        need_same_inputs(loaded.gather(digest_of((given, plan.axes, plan.padding))))
    if isinstance(given, torch.Tensor):
        parts = batches_from_tensor(given, plan.batch, _sequence_axis(loaded, given, plan))
    elif isinstance(given, Mapping):
        parts = batches_from_mapping(given, plan.batch, _sequence_axis(loaded, given, plan))
    elif isinstance(given, (list, tuple)) and given:
        _refuse_targets(loaded.model, given)
        parts = batches_from_list(given, _sequence_axis(loaded, given[0], plan))
    else:
        empty = " without entries" if isinstance(given, (list, tuple)) else ""
        raise InputError(
            f"inputs is {kind_of(given)}{empty}; expected texts, a text file (Path), a tensor, a dictionary of keyword "
            f"arguments, a list of these, or None for the sample text.{_instead_of(given)}"
        )
    parts = _first_sequences(parts, plan.sequences)
    special = None
    if config is not None:
        parts = tuple(_for_transformers(loaded, part) for part in parts)
        special = frozenset[int]().union(*special_ids(config).values()) if "input_ids" in parts[0].inputs else None
    if plan.tokenizer is not None:
        special = frozenset(map(int, plan.tokenizer.all_special_ids)) | (special or frozenset())
    parts = on_device(parts, loaded.inputs_device)
    content = content_of(loaded.model, parts, plan.padding, is_transformers=config is not None)
    kept = [
        replace(part, keep=_keep(part, mask, plan, special)) for part, mask in zip(parts, content.masks, strict=True)
    ]
    source = "tensors given by the caller" + (f", padding by {content.how}" if content.how else "")
    return Prepared(on_device(kept, loaded.inputs_device), source, (), plan.policy, content.notes, padding=content.how)


def need_same_inputs(digests: Sequence[bytes]) -> None:
    """Check that all ranks were given the same.

    Args:
        digests: of the inputs of each rank, in order.

    Raises:
        InputError: they were not.
    """
    different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if different:
        raise InputError(
            f"Process {', '.join(map(str, different))} received other inputs than process 0. rankscope distributes the "
            "batches itself: pass all inputs, the same ones, on every process."
        )


def digest_of(given: Any) -> bytes:
    """A hash of all tensors in what was given, and of the names, numbers and words given with them."""
    digest = hashlib.sha256(f"{type(given).__name__} ".encode())
    if isinstance(given, torch.Tensor):
        bits = given.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(f"{tuple(given.shape)}{given.dtype}".encode() + bits.numpy().tobytes())
    elif isinstance(given, Mapping):
        for name, value in given.items():
            digest.update(f"{name} ".encode() + digest_of(value))
    elif isinstance(given, (list, tuple)):
        for value in given:
            digest.update(digest_of(value))
    elif isinstance(given, (str, int, float)):
        digest.update(repr(given).encode())
    return digest.digest()


def _refuse_targets(model: torch.nn.Module, given: Sequence[Any]) -> None:
    """Raise for what a data loader yields, inputs with their targets, which would be measured as two batches.

    A list is one of ready batches, if its tensors are alike; a tuple never is.
    """
    tensors = [entry for entry in given if isinstance(entry, torch.Tensor)]
    kinds = {(entry.ndim, entry.is_floating_point()) for entry in tensors}
    if len(given) < 2 or not tensors or (isinstance(given, list) and len(kinds) < 2):
        return
    shapes = " and ".join(str(tuple(entry.shape)) for entry in tensors[:3])
    names = [name for name in inspect.signature(model.forward).parameters if not name.startswith("_")][: len(given)]
    named = ", ".join(f"{name!r}: inputs[{place}]" for place, name in enumerate(names))
    all_of_them = f"If the model takes them all, pass {{{named}}}. " if len(names) > 1 else ""
    raise InputError(
        f"inputs is a {type(given).__name__} of tensors of shape {shapes}. If it is inputs and targets, as a data "
        f"loader yields them, pass the inputs alone: inputs[0]. {all_of_them}If each is a batch of inputs, pass a list "
        "of tensors of the same kind."
    )


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
        ids = ids.transpose(0, part.axis)
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
            kept.append(part.taken(0, room))
    return tuple(kept)


def batches_from_mapping(given: Mapping[str, Any], batch: int, axis: int = 0) -> tuple[Batch, ...]:
    """Slices of ``batch`` sequences of every tensor that counts them; other values are passed to every batch.

    Args:
        given: keyword arguments of the model.
        batch: sequences per slice.
        axis: along which axis ids and vectors count sequences. Masks and lengths may count them along the first one.
    """
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.ndim > 0}
    counted = {name: axis if value.ndim > axis else 0 for name, value in tensors.items()}
    told = {tensors[name].shape[axis] for name in counted if not is_mask_like(name) and tensors[name].ndim > axis}
    if len(told) == 1:
        (sequences,) = told
        # A mask between tokens counts no sequences.
        counted = {name: at for name, at in counted.items() if not is_pattern(name, tensors[name], sequences)}
        if axis == 1:
            counted = {name: _axis_of_further(name, tensors[name], sequences, at) for name, at in counted.items()}
    sizes = {name: tensors[name].shape[at] for name, at in counted.items()}
    if not sizes:
        raise InputError(
            f"The inputs hold no tensor with a batch axis; got {', '.join(map(str, given)) or 'nothing'}. Pass what "
            "the model is called with, e.g. {'input_ids': ids} with ids of shape (batch, tokens)."
        )
    count = max(sizes.values())
    uneven = {name: size for name, size in sizes.items() if size != count}
    if uneven:
        ordinal = "first" if axis == 0 else "second"
        raise InputError(
            f"The inputs disagree on the number of sequences: {sizes}. Their {ordinal} axes must be equal."
        )
    if count == 0:
        raise InputError("The inputs hold no sequence: their batch axis has length 0.")
    whole = Batch(dict(given), None, 0, count, (), axis, frozenset(name for name, at in counted.items() if at == 0))
    return tuple(_taken(whole, counted, start, min(batch, count - start)) for start in range(0, count, batch))


def _axis_of_further(name: str, value: torch.Tensor, sequences: int, axis: int) -> int:
    """Along which axis a tensor counts sequences, for ids of shape (tokens, batch): masks often are (batch, tokens).

    Raises:
        InputError: a mask with as many sequences as tokens, which could be either, or between tokens.
    """
    if value.ndim < 2 or not is_mask_like(name):
        return axis
    if value.shape[0] == value.shape[1] == sequences:
        raise InputError(
            f"The axis of sequences of {name!r} is ambiguous: its shape {tuple(value.shape)} has as many sequences as "
            "tokens. Pass one sequence fewer."
        )
    return 0 if value.shape[0] == sequences else axis


def _taken(whole: Batch, counted: Mapping[str, int], start: int, count: int) -> Batch:
    """Some sequences of all tensors that count them."""
    inputs = {
        name: value.narrow(counted[name], start, count) if name in counted else value
        for name, value in whole.inputs.items()
    }
    return replace(whole, inputs=inputs, first_sequence=start, sequences=count)


def batches_from_tensor(given: torch.Tensor, batch: int, axis: int = 0) -> tuple[Batch, ...]:
    """Slices along the batch axis, passed to the model as its only positional argument."""
    if given.ndim <= axis or given.shape[axis] == 0:
        raise InputError(f"Expected a tensor with a batch axis that is not empty; got shape {tuple(given.shape)}.")
    parts = torch.split(given, batch, dim=axis)
    return tuple(Batch({}, None, i * batch, part.shape[axis], (part,), axis) for i, part in enumerate(parts))


def _sequence_axis(loaded: LoadedModel, given: Any, plan: InputPlan) -> int:
    """Along which axis the inputs count sequences, by experiment.

    Models of transformers document ``(batch, tokens)``; the checks of the stream enforce it. A model that is not
    in memory cannot be tried.
    """
    named = {"": given} if isinstance(given, torch.Tensor) else given
    mains = main_tensors(named) if isinstance(named, Mapping) else {}
    if not mains or any(value.numel() == 0 for value in mains.values()):
        return 0
    on_meta = any(parameter.is_meta for parameter in loaded.model.parameters())
    if plan.axes is None and (loaded.config is not None or on_meta):
        return 0

    def ready(part: Batch) -> Batch:
        if loaded.config is not None:
            part = _for_transformers(loaded, part)
        return on_device([part], loaded.inputs_device)[0]

    def cut(axis: int) -> Batch:
        batches = batches_from_tensor if isinstance(given, torch.Tensor) else batches_from_mapping
        part = batches(given, 2, axis)[0]
        if part.sequences == 1:
            part = part.mapped(lambda _, value, at: torch.cat([value, value], dim=at), sequences=2)
        return ready(part)

    def whole() -> Batch:
        alone = isinstance(given, torch.Tensor)
        return ready(Batch({} if alone else dict(given), None, 0, 1, (given,) if alone else ()))

    key = tuple(sorted((name, value.ndim, value.is_floating_point()) for name, value in mains.items()))
    return sequence_axis(loaded.model, cut, key, plan.axes, entire=whole, gather=loaded.gather)


def _instead_of(given: Any) -> str:
    """What to pass in place of common things that are no inputs."""
    numbers = isinstance(given, Sequence) and given and isinstance(given[0], (Sequence, int, float))
    if numbers or hasattr(given, "__array__"):
        return " Pass torch.as_tensor(inputs)."
    if isinstance(given, Iterable) and hasattr(given, "dataset"):
        return " Pass one batch of it: next(iter(inputs)), without the targets."
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        return " Pass a batch of it, as a data loader makes them: next(iter(DataLoader(inputs, batch_size=8)))."
    return ""


def batches_from_list(given: Sequence[Any], axis: int = 0) -> tuple[Batch, ...]:
    """A list whose entries are already batches: tensors or dictionaries."""
    batches: list[Batch] = []
    first = 0
    for index, entry in enumerate(given):
        if isinstance(entry, torch.Tensor):
            part = batches_from_tensor(entry, 2**62, axis)[0]
        elif isinstance(entry, Mapping):
            part = batches_from_mapping(entry, 2**62, axis)[0]
        else:
            raise InputError(
                f"Entry {index} of the inputs is a {type(entry).__name__}; expected tensors or dictionaries."
                f"{_instead_of(given)}"
            )
        batches.append(replace(part, first_sequence=first))
        first += part.sequences
    return tuple(batches)

"""The same texts at several lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rankscope.errors import InputError
from rankscope.models.inputs._prepare import are_texts, prepare_planned
from rankscope.models.inputs.given import batches_from_mapping, completed, on_device
from rankscope.models.inputs.inputs import Given
from rankscope.models.inputs.record import Batch, InputPlan, Prepared
from rankscope.models.inputs.rows import all_or_some, text_encoder
from rankscope.models.loading import LoadedModel

LONGEST = 1 << 20


def prepare_prefixes(loaded: LoadedModel, given: Given, plan: InputPlan, lengths: Sequence[int]) -> dict[int, Prepared]:
    """Inputs of each length, ascending; the shorter ones are prefixes of the longest.

    A closing special token, such as BERT's [SEP], is at the end of every prefix.

    Args:
        loaded: the model.
        given: as for :func:`rankscope.models.inputs.prepare_inputs`; token ids or text.
        plan: how much to prepare; its number of tokens is replaced.
        lengths: tokens per sequence.

    Raises:
        InputError: the inputs are not token ids, or a sequence is shorter than the longest length.
    """
    wanted = sorted(set(lengths))
    if len(wanted) < 2 or wanted[0] < 2 or wanted[-1] > LONGEST:
        raise InputError(
            f"lengths={list(lengths)}: expected at least two different lengths of two to {LONGEST:,} tokens."
        )
    prepared = prepare_planned(loaded, given, replace(plan, tokens=wanted[-1]))
    closing = 0
    if prepared.lengths and not plan.random_tokens and (given is None or isinstance(given, Path) or are_texts(given)):
        tokenizer = loaded.tokenizer if plan.tokenizer is None else plan.tokenizer
        closing = len(text_encoder(loaded.config, tokenizer).suffix)
    for part in prepared:
        _check(part, wanted[-1])
    cut = {length: _cut(loaded, prepared, length, closing) for length in wanted[:-1]}
    return {**cut, wanted[-1]: prepared}


def _check(part: Batch, longest: int) -> None:
    ids = part.inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or part.arguments:
        raise InputError("lengths cuts token ids, and this model reads something else. Measure each length by itself.")
    if odd := sorted(set(part.inputs) - {"input_ids", "use_cache", "decoder_input_ids"}):
        raise InputError(
            f"lengths cannot cut inputs with {odd[0]}: some sequences are shorter than the longest length, or there is "
            "more than ids. Pass longer texts, or token ids alone."
        )
    if ids.shape[1] < longest:
        raise InputError(
            f"lengths asks for {longest} tokens, and the inputs have {ids.shape[1]} (the text ends, or the model takes "
            "no more). Pass a longer text, or shorter lengths."
        )


def _cut(loaded: LoadedModel, prepared: Prepared, length: int, closing: int) -> Prepared:
    """The first tokens of every sequence, with the closing special tokens after them."""

    def shortened(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, : length - closing], x[:, x.shape[1] - closing :]], dim=1)

    batches: list[Batch] = []
    counts: list[int] = []
    for part in prepared:
        inputs = completed(loaded, {"input_ids": shortened(part.inputs["input_ids"])})
        keep = None if part.keep is None else all_or_some(shortened(part.keep))
        shorter = batches_from_mapping(inputs, batch=part.sequences)[0]
        batches.append(replace(shorter, keep=keep, first_sequence=part.first_sequence))
        counts += [length] * part.sequences if keep is None else keep.sum(dim=1).tolist()
    return replace(prepared, batches=on_device(batches, loaded.inputs_device), lengths=tuple(counts))

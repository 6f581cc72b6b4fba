"""Turns what the user passes (texts, a file, ids, tensors, nothing) into the batches on which a model runs."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from rankscope._types import is_named
from rankscope.errors import InputError
from rankscope.models.inputs.given import prepare_given
from rankscope.models.inputs.inputs import Given, Inputs
from rankscope.models.inputs.opening import opened
from rankscope.models.inputs.padding import NO_PADDING
from rankscope.models.inputs.record import InputPlan, Prepared
from rankscope.models.inputs.synthetic import prepare_synthetic
from rankscope.models.inputs.text import prepare_text
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.tokenizer import tokenizer_from


def prepare_inputs(loaded: LoadedModel, given: Given = None, **fields: Any) -> Prepared:
    """Batches for ``loaded``.

    Text is split by the model's tokenizer, or into hashed words if it has none. Sequences are truncated at ``tokens``,
    shorter ones are padded on the right and masked. The decoder of an encoder-decoder reads the input shifted right.

    Args:
        loaded: the model.
        given: what it is fed, the ``data`` of :class:`rankscope.Inputs`.
        **fields: the other fields of :class:`rankscope.Inputs`.

    Raises:
        InputError: the model cannot read these inputs.
    """
    return prepare_planned(loaded, given, Inputs(**fields).plan())


def prepare_planned(loaded: LoadedModel, given: Given, plan: InputPlan) -> Prepared:
    """Like :func:`prepare_inputs`, with the defaults of a verb."""
    given = opened(given)
    if plan.tokenizer is not None:
        plan = replace(plan, tokenizer=tokenizer_from(plan.tokenizer))
    if given is None or isinstance(given, (str, Path)) or are_texts(given):
        for text in [given] if isinstance(given, str) else given if isinstance(given, Sequence) else ():
            _refuse_a_path(text)
        config = loaded.config
        if config is None:
            what = "Pass a tensor, a dictionary of keyword arguments, or a list of either."
            if is_named(loaded.spec):  # as on the command line
                what = f"Pass --inputs {loaded.spec.partition(':')[0]}:NAME, a batch or a function that returns one."
            raise InputError(f"{loaded.spec} is not a transformers model, so how it reads text is unknown. {what}")
        if plan.padding is not None and not (isinstance(plan.padding, str) and plan.padding == NO_PADDING):
            raise InputError("padding= is for your own tensors; texts are padded here, and padding is excluded.")
        if loaded.input_kind not in ("image", "audio"):
            return prepare_text(loaded, config, given, plan)
        if given is not None:
            raise InputError(f"{loaded.spec} reads {loaded.input_kind}, not text. Pass its tensors, or nothing.")
        if plan.tokenizer is not None:
            raise InputError(f"{loaded.spec} reads {loaded.input_kind}: leave tokenizer out.")
        return prepare_synthetic(loaded, config, plan)
    return prepare_given(loaded, given, plan)


_PATH = re.compile(r"(~|\.{0,2})/\S+|[A-Za-z]:\\\S+|\S+\.(txt|text|md|csv|tsv|jsonl?|gz|parquet|pt|np[yz]|safetensors)")


def _refuse_a_path(text: str) -> None:
    """Raise for a text that is the name of a file, which would be measured as a text of a few tokens."""
    is_file = len(text) < 1024 and "\n" not in text and os.path.isfile(os.path.expanduser(text))
    if is_file:
        raise InputError(
            f"The text {text!r} is the name of a file. Pass pathlib.Path({text!r}) to read the file, which has to be "
            "UTF-8 text."
        )
    if _PATH.fullmatch(text):
        raise InputError(
            f"The text {text!r} looks like the name of a file, and there is no such file. Pass a pathlib.Path to one "
            "that exists; or add a space, if it is the text to measure."
        )


def are_texts(given: object) -> TypeGuard[Sequence[str]]:
    """Whether the inputs are texts."""
    return isinstance(given, Sequence) and all(isinstance(entry, str) for entry in given)

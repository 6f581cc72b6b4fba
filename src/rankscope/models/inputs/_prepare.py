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
from rankscope.models.inputs.inputs import Given
from rankscope.models.inputs.opening import opened
from rankscope.models.inputs.padding import NO_PADDING
from rankscope.models.inputs.record import Axes, InputPlan, Padding, Prepared, TokensPolicy
from rankscope.models.inputs.synthetic import prepare_synthetic
from rankscope.models.inputs.text import prepare_text
from rankscope.models.loading import LoadedModel
from rankscope.models.loading.tokenizer import tokenizer_from


def prepare_inputs(
    loaded: LoadedModel,
    given: Given = None,
    *,
    sequences: int | None = None,
    tokens: int = 128,
    batch: int = 8,
    tokens_policy: TokensPolicy = "content",
    seed: int = 0,
    random_tokens: bool = False,
    tokenizer: Any = None,
    padding: Padding = None,
    axes: Axes | None = None,
) -> Prepared:
    """Batches for ``loaded``.

    Text is split by the model's tokenizer, or into hashed words if it has none. Sequences are truncated at ``tokens``,
    shorter ones are padded on the right and masked. The decoder of an encoder-decoder reads the input shifted right.

    Args:
        loaded: the model.
        given: one text (str), several (list of str), a text file (Path, read as one stream), token ids or pixels
            (tensor), keyword arguments (mapping), a list of ready batches (tensors or mappings), or None for the
            built-in sample text, or smooth random images or audio for models that read these.
        sequences: maximum number of sequences; None uses all that are given, and 8 of a file or of the sample.
        tokens: length at which a text is truncated; the caller's own tensors are not.
        batch: sequences per forward pass.
        tokens_policy: ``"content"`` excludes padding, ``"no-first"`` also the first token, ``"no-special"`` also all
            special tokens.
        seed: seed of random tokens, images and audio.
        random_tokens: ids drawn uniformly from those that are not special, instead of text.
        tokenizer: reads the text instead of the model's own: a tokenizer, its folder, or a hub name.
        padding: which of the caller's own tokens do not count: a tensor that is True there, or the name of the argument
            that marks them, with the value that means padding if known (``"mask=0"``); ``"none"`` counts all. None
            looks for such an argument and tests on the model how it is interpreted.
        axes: what the first two axes of the caller's own tensors are, ``"batch tokens"`` or ``"tokens batch"``. None
            finds it by an experiment on the model, unless it is a transformers model, which takes the former.

    Raises:
        InputError: the model cannot read these inputs.
    """
    plan = InputPlan(sequences, tokens, batch, tokens_policy, seed, random_tokens, tokenizer, padding, axes=axes)
    return prepare_planned(loaded, given, plan)


def prepare_planned(loaded: LoadedModel, given: Given, plan: InputPlan) -> Prepared:
    """Like :func:`prepare_inputs`, with the arguments already collected in a plan."""
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

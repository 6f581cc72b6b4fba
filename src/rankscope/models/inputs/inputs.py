"""``Inputs``: what a model is fed, as every verb takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import torch

from rankscope._printing import brief
from rankscope.errors import InputError
from rankscope.models.inputs.record import Axes, InputPlan, Padding, TokensPolicy
from rankscope.options import INPUTS_FIELDS, checked_fields

MOST_TOKENS = 2**40
"""More than any file holds."""

Given: TypeAlias = str | Path | Sequence[Any] | torch.Tensor | Mapping[str, Any] | None
"""What a user may pass: texts, a file, ids, tensors, nothing."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model is fed: texts or tensors, how many, how long, and which tokens count.

    Every verb takes it as ``inputs``. Texts, a file, a tensor, a mapping or None are accepted in its place. A field
    that is None has the default of the verb: ``measure`` reads 8 sequences of 128 tokens, ``bound`` 2 of 64.

    Args:
        data: one text (str), several (list of str), a text file (``Path``, read as one stream), token ids or pixels
            (tensor), keyword arguments of the model (mapping), a list of ready batches (tensors or mappings), or None
            for the built-in sample text, or random images or audio for models that read these.
        sequences: maximal number of sequences; None for all that are passed, and for the default number of a file or
            of the sample text.
        tokens: length to which texts are truncated; your own tensors are not.
        batch: sequences per forward pass.
        tokens_policy: ``"content"`` excludes padding, ``"no-first"`` also the first token, ``"no-special"`` also all
            special tokens. None for ``"content"``.
        tokenizer: tokenizer for the texts, if the model comes without one: an object, a folder or a hub name.
        random_tokens: use random ids instead of text.
        padding: which of your own tokens are padding: a tensor that is True there, or the model argument that marks
            them, as ``"NAME"`` or with the value that marks padding, ``"NAME=1"``; ``"none"`` for no padding. None
            looks for such an argument and tests on the model how it is interpreted.
        axes: order of the first two axes of your own tensors: ``"batch tokens"`` or ``"tokens batch"``. None to find
            it by experiment on the model.
        labels: the class of each sequence, if inputs of one class are expected to meet.
        seed: seed of random tokens, images and audio; None for that of the model.

    Raises:
        InputError: a value is not one of those above.

    Example:
        >>> Inputs(["one text", "another"], tokens=16).tokens
        16
        >>> Inputs(tokens=0)
        Traceback (most recent call last):
        rankscope.errors.InputError: tokens=0: expected a whole number, 1 or more.
    """

    data: Given = None
    sequences: int | None = field(default=None, kw_only=True)
    tokens: int | None = field(default=None, kw_only=True)
    batch: int | None = field(default=None, kw_only=True)
    tokens_policy: TokensPolicy | None = field(default=None, kw_only=True)
    tokenizer: Any = field(default=None, kw_only=True)
    random_tokens: bool = field(default=False, kw_only=True)
    padding: Padding = field(default=None, kw_only=True)
    axes: Axes | None = field(default=None, kw_only=True)
    labels: Sequence[Any] | torch.Tensor | None = field(default=None, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name, value in checked_fields(INPUTS_FIELDS, values).items():
            object.__setattr__(self, name, value)

    def plan(self, *, sequences: int = 8, tokens: int = 128, batch: int = 8, seed: int = 0) -> InputPlan:
        """What to prepare, with the defaults of a verb where nothing was given.

        Raises:
            InputError: more tokens are asked for than could be counted.
        """
        plan = InputPlan(
            self.sequences,
            tokens if self.tokens is None else self.tokens,
            batch if self.batch is None else self.batch,
            "content" if self.tokens_policy is None else self.tokens_policy,
            seed if self.seed is None else self.seed,
            self.random_tokens,
            self.tokenizer,
            self.padding,
            sequences,
            axes=self.axes,
            labels=self.labels,
        )
        if plan.wanted * plan.tokens > MOST_TOKENS:
            raise InputError(
                f"{plan.wanted:,} sequences of {plan.tokens:,} tokens are too many; at most {MOST_TOKENS:,} tokens "
                "are read. Pass fewer."
            )
        return plan


InputsLike: TypeAlias = Inputs | Given
"""What every verb accepts as ``inputs``."""


def as_inputs(given: InputsLike) -> Inputs:
    """``given`` as :class:`Inputs`."""
    return given if isinstance(given, Inputs) else Inputs(given)

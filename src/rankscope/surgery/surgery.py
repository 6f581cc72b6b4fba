"""``Surgery``: what is changed in a model, as every verb takes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeAlias

from rankscope._printing import brief
from rankscope._types import kind_of
from rankscope.errors import InputError, UnknownNameError
from rankscope.masks import Mask, parse_mask
from rankscope.options import SURGERY_FIELDS, checked_fields
from rankscope.surgery.operation import AttentionChoice, MaskChoice, MlpChoice, NormChoice, Operation, number_set


@dataclass(frozen=True, eq=False, kw_only=True)
class Surgery:
    """What is changed in a model while it runs; no weight is changed.

    Every verb that runs a model takes it as ``surgery``, and ``with rankscope.operate(module, surgery):`` applies it to
    whatever runs inside. A dictionary of its fields is accepted in its place: ``{"skip": 0}``.

    Args:
        skip: gain on every skip: 0 removes it, any number scales it.
        attention_skip: gain where attention is added; overrides ``skip``.
        mlp_skip: gain where the MLP is added; overrides ``skip``.
        mlp: ``"drop"`` removes the MLP.
        norm: ``"identity"``, ``"scale"`` (unit length) or ``"rms"`` in place of the blocks' norms.
        mask: a mask or an expression such as ``"causal & window(4)"``.
        mask_mode: ``"replace"``, ``"intersect"`` or ``"unite"`` with the model's own.
        attention: ``"uniform"`` or ``"centred"``.
        layers: blocks to change, from 0; None for all.
        temperature: divides attention scores.
        attention_scale: factor on the deviation from uniform attention (AttnScale).
        heads: heads to remove.
        stack: the stack to change (``"encoder"``, ``"decoder"``); None for all.

    Raises:
        InputError: a value is not one of those above.
        UnknownNameError: no mask of that name.

    Example:
        >>> Surgery(skip=0, mlp="drop").operation.describe()
        {'attention_skip': 0.0, 'mlp_skip': 0.0, 'mlp': 'drop'}
    """

    skip: float | None = None
    attention_skip: float | None = None
    mlp_skip: float | None = None
    mlp: MlpChoice = "keep"
    norm: NormChoice = "keep"
    mask: Mask | str | None = None
    mask_mode: MaskChoice = "replace"
    attention: AttentionChoice = "keep"
    layers: int | Collection[int] | None = None
    temperature: float = 1.0
    attention_scale: float = 1.0
    heads: int | Collection[int] = ()
    stack: str | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        usual = {entry.name: entry.default for entry in fields(self)}
        values = {name: getattr(self, name) for name in usual}
        for name, value in checked_fields(SURGERY_FIELDS, values).items():
            object.__setattr__(self, name, usual[name] if value is None else value)
        _ = self.operation  # an impossible mask or temperature is refused here, not in the middle of a run

    @cached_property
    def operation(self) -> Operation:
        """The changes in the form that runs."""
        both = 1.0 if self.skip is None else self.skip
        return Operation(
            attention_skip=both if self.attention_skip is None else self.attention_skip,
            mlp_skip=both if self.mlp_skip is None else self.mlp_skip,
            mlp=self.mlp,
            norm=self.norm,
            mask=parse_mask(self.mask) if isinstance(self.mask, str) else self.mask,
            mask_mode=self.mask_mode,
            temperature=self.temperature,
            attention=self.attention,
            attention_scale=self.attention_scale,
            heads=number_set(self.heads),
            layers=None if self.layers is None else number_set(self.layers),
            stack=self.stack,
        )

    @property
    def changes_nothing(self) -> bool:
        """Whether a model runs under it as it is."""
        return not self.operation.describe()


SurgeryLike: TypeAlias = Surgery | Mapping[str, Any] | None
"""What every verb accepts as ``surgery``."""


def as_surgery(given: SurgeryLike) -> Surgery:
    """``given`` as :class:`Surgery`; None changes nothing.

    Raises:
        InputError: it is neither, or a dictionary with other entries.
    """
    if given is None:
        return Surgery()
    if isinstance(given, Surgery):
        return given
    if not isinstance(given, Mapping):
        raise InputError(
            f"surgery is {kind_of(given)}; expected a rankscope.Surgery, a dictionary of its fields such as "
            "{'skip': 0}, or None."
        )
    known = [entry.name for entry in fields(Surgery)]
    for name in given:
        if name not in known:
            raise UnknownNameError("field of Surgery", str(name), known)
    return Surgery(**given)

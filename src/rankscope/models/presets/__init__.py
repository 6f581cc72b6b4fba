"""Architectures that ``init:NAME`` can build at random: published shapes, a few tiny twins, a deep one."""

from __future__ import annotations

from rankscope.errors import UnknownNameError
from rankscope.models.presets.real import REAL
from rankscope.models.presets.record import InputKind, Preset
from rankscope.models.presets.tiny import DEEP, TINY

__all__ = ["PRESETS", "InputKind", "Preset", "preset"]

PRESETS: dict[str, Preset] = {entry.name: entry for entry in (*REAL, *DEEP, *TINY)}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UnknownNameError: no such preset; the message names the nearest ones.

    Example:
        >>> preset("bert-base").model_type
        'bert'
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UnknownNameError("preset", name, PRESETS) from None

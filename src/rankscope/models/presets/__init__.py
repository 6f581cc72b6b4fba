"""Architectures that ``init:NAME`` can build at random: published shapes, a tiny twin of each family, a deep one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rankscope.errors import UnknownNameError
from rankscope.models.presets.real import REAL
from rankscope.models.presets.record import InputKind, Preset
from rankscope.models.presets.tiny import DEEP, TINY_AUDIO, TINY_DECODERS, TINY_ENCODERS, TINY_SEQ2SEQ, TINY_VISION

__all__ = ["PRESETS", "TINY_PRESETS", "InputKind", "Preset", "preset"]


def _by_name(presets: tuple[Preset, ...]) -> Mapping[str, Preset]:
    table: dict[str, Preset] = {}
    for entry in presets:
        if entry.name in table:
            raise ValueError(f"the preset {entry.name!r} is written twice")
        table[entry.name] = entry
    return MappingProxyType(table)


PRESETS: Mapping[str, Preset] = _by_name(
    (*REAL, *DEEP, *TINY_ENCODERS, *TINY_DECODERS, *TINY_SEQ2SEQ, *TINY_VISION, *TINY_AUDIO)
)
TINY_PRESETS: tuple[str, ...] = tuple(name for name in PRESETS if name.startswith("tiny-"))


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

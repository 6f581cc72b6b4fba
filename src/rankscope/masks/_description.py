"""Masks from the plain descriptions that results carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope._errors import InputError
from rankscope.masks._composed import both, complement, either
from rankscope.masks._mask import Mask
from rankscope.masks._spec import make

DEPTH_LIMIT = 50


def mask_from_description(description: Mapping[str, Any]) -> Mask:
    """The mask that ``describe()`` was called on.

    Args:
        description: ``{"mask": name, "parameters": {...}}``, ``{"any": [...]}``, ``{"all": [...]}`` or
            ``{"not": ...}``.

    Raises:
        InputError: anything else.
        UnknownNameError: a mask or a parameter that does not exist.

    Example:
        >>> print(mask_from_description({"all": [{"mask": "causal"}, {"mask": "window", "parameters": {"width": 2}}]}))
        causal & window(2)
    """
    return _read(description, 0)


def _read(description: Any, depth: int) -> Mask:
    if not isinstance(description, Mapping) or depth > DEPTH_LIMIT:
        raise _refusal(description, depth)
    match dict(description):
        case {"mask": str(name), **rest} if set(rest) <= {"parameters"}:
            parameters = rest.get("parameters", {})
            if not isinstance(parameters, Mapping):
                raise _refusal(description, depth)
            return make(name, (), {str(key): value for key, value in parameters.items()})
        case {"any": [_, *_] as parts, **rest} if not rest:
            return either(*(_read(part, depth + 1) for part in parts))
        case {"all": [_, *_] as parts, **rest} if not rest:
            return both(*(_read(part, depth + 1) for part in parts))
        case {"not": part, **rest} if not rest:
            return complement(_read(part, depth + 1))
    raise _refusal(description, depth)


def _refusal(description: object, depth: int) -> InputError:
    got = f"more than {DEPTH_LIMIT} levels" if depth > DEPTH_LIMIT else repr(description)[:80]
    return InputError(
        f"Not the description of a mask: {got}. Expected what Mask.describe() gives: "
        '{"mask": name, "parameters": {...}}, {"any": [...]}, {"all": [...]} or {"not": ...}.'
    )

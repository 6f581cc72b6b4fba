"""Where the head weights of an architecture are: descriptions as data, one small file per layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from rankscope._registry import Registry
from rankscope.errors import UnsupportedConfigError

Layout = Literal["separate", "stacked", "grouped", "einsum"]
Position = Literal["none", "rotary", "alibi", "relative"]
Scale = Literal["head width", "one", "value", "inverse root"]
ABSENT = object()


@dataclass(frozen=True)
class Family:
    """How the attention of a group of architectures is laid out inside one block.

    Attributes:
        name: name of the group.
        model_types: transformers model types with this layout.
        layout: ``separate`` matrices for query, key and value; one matrix with all queries, then keys, then values
            (``stacked``); one with each key-value group's queries, key and value together (``grouped``); or parameters
            with a head axis (``einsum``).
        projections: paths inside the block: query, key and value, or the one fused matrix.
        output: path of the output projection.
        transposed: the matrices are stored (in, out).
        heads: configuration keys of the number of query heads; all must agree.
        scale: of the scores: ``head width`` is its inverse root, ``value`` and ``inverse root`` refer to ``scale_key``.
        scale_key: configuration key of the scale.
        position: how positions enter the scores.
        qk_norm: queries and keys are normalised; True, False, or the configuration key that says so.
        norms: paths of the norms of the block.
        mlp: paths of the parts of the MLP.
        requires: configuration keys (dotted for nested ones) and the supported values; an absent key passes.
        notes: what the weights do not show.
    """

    name: str
    model_types: tuple[str, ...]
    layout: Layout
    projections: tuple[str, ...]
    output: str
    transposed: bool = False
    heads: tuple[str, ...] = ("num_attention_heads",)
    scale: Scale = "head width"
    scale_key: str = ""
    position: Position = "none"
    qk_norm: bool | str = False
    norms: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    requires: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        expected = 3 if self.layout in ("separate", "einsum") else 1
        if len(self.projections) != expected:
            raise ValueError(f"family {self.name}: layout {self.layout} has {expected} projections")
        object.__setattr__(self, "requires", MappingProxyType(dict(self.requires)))


FAMILIES: Registry[Family] = Registry("family", f"{__package__}.families")
# Known model types that cannot be read as heads, each with the reason.
REFUSED: dict[str, str] = {}


def register(*families: Family) -> None:
    """Add descriptions to the registry; a family file calls this once."""
    for entry in families:
        FAMILIES.add(entry.name, entry)


def family_of(config: Any) -> Family:
    """The description that matches ``config``.

    Raises:
        UnsupportedConfigError: there is none, or the configuration has a value that it does not support.
    """
    model_type = str(config.model_type)
    families = [entry for entry in FAMILIES.values() if model_type in entry.model_types]
    if not families:
        reason = REFUSED.get(model_type, "no family description says where its head weights are")
        raise UnsupportedConfigError(f"The heads of {model_type!r} cannot be read: {reason}.")
    entry = families[0]
    for key, allowed in entry.requires.items():
        value = config_value(config, key)
        if value is not ABSENT and value not in allowed:
            known = " or ".join(repr(choice) for choice in allowed)
            raise UnsupportedConfigError(
                f"The heads of {model_type!r} cannot be read with {key}={value!r}: the family {entry.name!r} has "
                f"understood only {known}."
            )
    return entry


def undescribed(model: object) -> str:
    """What to do about a module that is not a transformers model, as the end of a sentence."""
    return (
        f"{type(model).__name__} is not a transformers model with a description of where they are. Describe one of "
        "your own as a PreTrainedModel (a configuration with model_type and num_attention_heads; a forward that "
        "takes input_ids) and a rankscope.models.Family for its model_type; the page 'Adding', section 'A family', "
        "shows one. measure, ablate, exact and doctor need neither"
    )


def config_value(config: Any, key: str) -> Any:
    """The value under a dotted key of a configuration; :data:`ABSENT` if it has none."""
    value = config
    for part in key.split("."):
        value = value.get(part, ABSENT) if isinstance(value, Mapping) else getattr(value, part, ABSENT)
        if value is ABSENT:
            return ABSENT
    return value

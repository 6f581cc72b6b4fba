"""The variants that an ablation compares: a model with components removed, each declared as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rankscope._citations import Cite
from rankscope.errors import UnknownNameError
from rankscope.surgery.operation import Operation


@dataclass(frozen=True)
class Variant:
    """A network with some components removed.

    Attributes:
        name: name in tables and on the command line.
        operation: the surgery on every block.
        meaning: a description.
        cites: papers that study it.
    """

    name: str
    operation: Operation
    meaning: str
    cites: tuple[Cite, ...] = ()


_WU = Cite("wu2024role", "fig. 2")

_ALL = (
    Variant(
        "pure",
        Operation(attention_skip=0.0, mlp_skip=0.0, mlp="drop", norm="identity"),
        "attention alone, as in the theorem",
        (Cite("dong2021attention", "thm. 2.2"),),
    ),
    Variant("+norm", Operation(attention_skip=0.0, mlp_skip=0.0, mlp="drop"), "attention and norms", (_WU,)),
    Variant("+skip", Operation(mlp="drop", norm="identity"), "attention and skips", (_WU,)),
    Variant("+mlp", Operation(attention_skip=0.0, mlp_skip=0.0, norm="identity"), "attention and MLPs", ()),
    Variant("+norm+skip", Operation(mlp="drop"), "attention, norms and skips", (_WU,)),
    Variant("+norm+mlp", Operation(attention_skip=0.0, mlp_skip=0.0), "everything but the skips", ()),
    Variant("full", Operation(), "the whole model", ()),
)

VARIANTS: Mapping[str, Variant] = MappingProxyType({variant.name: variant for variant in _ALL})
DEFAULT_VARIANTS = ("pure", "+norm", "+skip", "+mlp", "+norm+skip", "full")


def variant_named(name: str) -> Variant:
    """The variant of that name.

    Raises:
        UnknownNameError: no such variant; the message names the nearest ones.
    """
    try:
        return VARIANTS[name]
    except KeyError:
        raise UnknownNameError("variant", name, VARIANTS) from None

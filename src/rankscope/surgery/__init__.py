"""Surgery: how a model runs is changed for the length of a ``with`` block, and left as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._deferred import names_of

if TYPE_CHECKING:
    from rankscope.surgery.branch_grafts import BranchGains
    from rankscope.surgery.graft import Graft
    from rankscope.surgery.operating import grafting, operate
    from rankscope.surgery.operation import Operation

__all__ = [
    "BranchGains",
    "Graft",
    "Operation",
    "grafting",
    "operate",
]

_HOME = {
    "BranchGains": "rankscope.surgery.branch_grafts",
    "Graft": "rankscope.surgery.graft",
    "Operation": "rankscope.surgery.operation",
    "grafting": "rankscope.surgery.operating",
    "operate": "rankscope.surgery.operating",
}

__getattr__ = names_of(__name__, _HOME)

"""Surgery: how a model runs is changed for the length of a ``with`` block, and left as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope._lazy import names_of

if TYPE_CHECKING:
    from rankscope.surgery.branch_grafts import BranchGains
    from rankscope.surgery.graft import Graft
    from rankscope.surgery.operating import grafting, operate
    from rankscope.surgery.operating import operating as operating_on
    from rankscope.surgery.operation import Operation
    from rankscope.surgery.surgery import SurgeryLike, as_surgery

__all__ = [
    "BranchGains",
    "Graft",
    "Operation",
    "SurgeryLike",
    "as_surgery",
    "grafting",
    "operate",
    "operating_on",
]

__getattr__ = names_of(__name__)

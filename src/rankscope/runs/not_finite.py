"""NaN and infinity in a run: where they first occur, which a verdict reports first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope._types import Status

CODE = "not finite"
ORDER = ("block.in", "attention.probs", "attention.mixed", "attention.out", "attention.sum", "cross_attention.probs",
         "cross_attention.mixed", "cross_attention.out", "cross_attention.sum", "mixer.out", "mixer.sum", "mlp.out",
         "mlp.sum", "both.out", "both.sum", "block.out", "final")  # fmt: skip
"""Sites of a block, in the order in which most blocks reach them."""


@dataclass(frozen=True)
class Lost:
    """The first place where a run is not finite.

    Attributes:
        stack: stack of the block, None in a model with one stack.
        layer: number of the block.
        site: the first of its measured sites.
        sequences: how many sequences are lost there or later.
        of: number of sequences measured.
    """

    stack: str | None
    layer: int
    site: str
    sequences: int
    of: int

    def __str__(self) -> str:
        return self.sentence("Not finite")

    def sentence(self, beginning: str) -> str:
        """A sentence with this beginning, the place and the number of sequences."""
        stack = f"{self.stack} " if self.stack else ""
        return (
            f"{beginning}: NaN or infinity at {stack}block {self.layer} ({self.site}), the first place "
            f"measured where they are, in {self.sequences} of {self.of} sequence{'s' if self.of != 1 else ''}."
        )

    def evidence(self) -> Mapping[str, Any]:
        """The place, in the format of a verdict's evidence."""
        return {"code": CODE, "site": self.site, "stack": self.stack, "layer": self.layer}


def first_not_finite(table: pa.Table) -> Lost | None:
    """Where a run stops being finite; None if it never does."""
    lost = table.filter(pc.equal(pc.cast(table["status"], pa.string()), str(Status.NOT_FINITE)))
    if lost.num_rows == 0:
        return None
    sites = lost["site"].to_pylist()
    places = zip(lost["layer"].to_pylist(), (_rank(site) for site in sites), range(len(sites)), strict=True)
    layer, _, row = min(places)
    lost_sequences, measured = (np.unique(rows["sequence"].to_numpy()).size for rows in (lost, table))
    return Lost(lost["stack"][row].as_py(), int(layer), str(sites[row]), lost_sequences, measured)


def _rank(site: str) -> int:
    return ORDER.index(site) if site in ORDER else len(ORDER)

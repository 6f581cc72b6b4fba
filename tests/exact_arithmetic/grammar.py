"""``exact`` on a network of the grammar, compared with hundreds and thousands of digits.

The criterion, fixed before the first comparison: after each block, the logarithm (base 10) of the relative residual
must be within 1e-6 of the truth, or within 1e-6 of its size if that is larger; or the row carries a status other than
``ok``; or ``exact`` raises an error of rankscope. A residual smaller than the reference can show must be given as zero,
as smaller than that, or with a status; one that is zero by construction, as zero or with a status.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pyarrow.compute as pc

import rankscope
from rankscope.errors import RankscopeError
from tests.reference.grammar import Network
from tests.reference.grammar_mpmath import Truth, truth_of
from tests.reference.grammar_torch import Toy

NEAR = 1e-6


@dataclass(frozen=True)
class Compared:
    """What became of one network.

    Attributes:
        truth: of the reference.
        got: log10 of the relative residual after each block, as ``exact`` gives it; empty if it refused.
        statuses: of each of them.
        refusal: what ``exact`` said, if it refused.
        is_equal: whether the residuals are zero by construction.
    """

    truth: Truth
    got: tuple[float, ...]
    statuses: tuple[str, ...]
    refusal: str = ""
    is_equal: bool = False

    @property
    def outcomes(self) -> tuple[str, ...]:
        """One of ``right``, ``marked``, ``wrong`` for each block, or ``refused`` once."""
        if self.refusal:
            return ("refused",)
        parts = zip(self.truth.exponents, self.truth.vanished, self.got, self.statuses, strict=True)
        return tuple(self._outcome(*part) for part in parts)

    def _outcome(self, true: float | None, vanished: bool, got: float, status: str) -> str:
        if status != "ok":
            return "marked"
        if self.is_equal:
            return "right" if got == -math.inf and not vanished else "wrong"
        if true is None:
            return "wrong" if vanished or math.isnan(got) or got > self.truth.ceiling else "right"
        return "right" if abs(got - true) <= NEAR * max(1.0, abs(true)) else "wrong"


def compared(network: Network, most_digits: int) -> Compared:
    """Run both."""
    truth = truth_of(network, most_digits)
    skip = 0.0 if network.skip == "cut" else None
    try:
        run = rankscope.exact(
            rankscope.Model(Toy(network), blocks="blocks.*"),
            {"inputs_embeds": network.input[None]},
            rankscope.Surgery(skip=skip),
            plain=False,
        )
    except RankscopeError as error:
        return Compared(truth, (), (), f"{type(error).__name__}: {error}")
    table = run.table
    mine = pc.and_(
        pc.and_(pc.equal(table["metric"], "log10_relative_residual"), pc.equal(table["site"], "block.out")),
        pc.equal(table["arithmetic"], "exact"),
    )
    rows = table.filter(mine).sort_by("layer")
    values = [math.nan if value is None else float(value) for value in rows["value"].to_pylist()]
    statuses = tuple(str(status) for status in rows["status"].to_pylist())
    return Compared(truth, tuple(values), statuses, is_equal=network.is_equal)

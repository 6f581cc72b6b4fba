"""Conditions on a result, such as ``relative_residual@block.out < 1e-3``: parsed, never evaluated as code."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import pyarrow as pa

from rankscope.errors import InputError, UnknownNameError
from rankscope.runs.curves import curve, names_in
from rankscope.runs.rows import of_stack, only
from rankscope.runs.summary import stacks_of
from rankscope.views import number

Quantifier = Literal["any", "all", "last"]
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
GRAMMAR = re.compile(
    r"\s*(?:(?P<quantifier>any|all|last)\s+)?(?P<metric>[A-Za-z_][A-Za-z0-9_]*)\s*@\s*(?P<site>[a-z_]+(?:\.[a-z_]+)?)"
    r"(?:@(?P<layers>[0-9]+(?:,[0-9]+)*))?\s*(?P<operator><=|>=|<|>)\s*(?P<value>[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*"
)
LONGEST = 500


@dataclass(frozen=True)
class Condition:
    """A comparison of the mean over sequences (and heads) of a metric, block by block, with a number.

    Args:
        quantifier: whether it must hold in ``any`` block, in ``all``, or in the ``last``.
        metric: name of a metric.
        site: name of a site.
        layers: blocks to check; None for all.
        comparison: ``<``, ``<=``, ``>`` or ``>=``.
        value: the threshold.
    """

    quantifier: Quantifier
    metric: str
    site: str
    layers: tuple[int, ...] | None
    comparison: str
    value: float

    def __str__(self) -> str:
        at = "" if self.layers is None else "@" + ",".join(str(layer) for layer in self.layers)
        return f"{self.quantifier} {self.metric}@{self.site}{at} {self.comparison} {self.value:g}"

    def where_met(self, table: pa.Table) -> str | None:
        """The blocks in which the condition holds, in words; None if it does not hold.

        Raises:
            InputError: no value it needs was measured or is defined. A check that cannot be evaluated does not pass.
            UnknownNameError: the metric or the site is not in the table.
        """
        for kind, name in (("metric", self.metric), ("site", self.site)):
            if name not in (there := names_in(table, kind)):
                raise UnknownNameError(f"{kind} in this run (named by --fail-if {str(self)!r})", name, there)
        values = list(self._values(table))
        if not any(math.isfinite(value) for _, _, value in values):
            raise InputError(
                f"{str(self)!r} cannot be judged: {self.metric} at {self.site} has no defined value in these "
                "blocks. Measure more than one token, name other blocks, or another metric."
            )
        holding = self._holding(values)
        if not holding:
            return None
        stack, layer, value = holding[0]
        more = f" and {len(holding) - 1} more" if len(holding) > 1 else ""
        return f"{self} holds at {f'{stack} ' if stack else ''}block {layer} ({number(value)}){more}"

    def _values(self, table: pa.Table) -> Iterator[tuple[str | None, int, float]]:
        rows = only(table, metric=self.metric, site=self.site)
        for stack in stacks_of(rows):
            mine = of_stack(rows, stack)
            if mine.num_rows == 0:
                continue
            line = curve(mine, self.metric, self.site)
            chosen = [at for at, layer in enumerate(line.layers) if self.layers is None or int(layer) in self.layers]
            for at in chosen[-1:] if self.quantifier == "last" else chosen:
                yield stack, int(line.layers[at]), float(line.mean[at])

    def _holding(self, found: list[tuple[str | None, int, float]]) -> list[tuple[str | None, int, float]]:
        compare = OPERATORS[self.comparison]
        known = [item for item in found if np.isfinite(item[2])]
        holding = [item for item in known if compare(item[2], self.value)]
        return holding if self.quantifier != "all" or len(holding) == len(known) else []


def parse_condition(words: str) -> Condition:
    """Read ``[any|all|last] METRIC@SITE[@BLOCKS] OPERATOR NUMBER``; the quantifier defaults to ``any``.

    Raises:
        InputError: for anything else.

    Example:
        >>> str(parse_condition("relative_residual@block.out < 1e-3"))
        'any relative_residual@block.out < 0.001'
        >>> parse_condition("last stable_rank@block.out@3,5 <= 2").layers
        (3, 5)
    """
    match = GRAMMAR.fullmatch(words) if len(words) <= LONGEST else None
    try:
        value = float(match["value"]) if match else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise InputError(
            f"{words[:80]!r} is not a condition. Expected [any|all|last] METRIC@SITE[@BLOCKS] < NUMBER (or <=, >, >=), "
            "as in 'relative_residual@block.out < 1e-3' or 'last stable_rank@block.out <= 2'."
        )
    layers = tuple(int(layer) for layer in match["layers"].split(",")) if match["layers"] else None
    quantifier: Quantifier = next((word for word in get_args(Quantifier) if word == match["quantifier"]), "any")
    return Condition(quantifier, match["metric"], match["site"], layers, match["operator"], value)

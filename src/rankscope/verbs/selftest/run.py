"""Are the numbers right on this machine? Recomputes a known table and compares it digit by digit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS
from rankscope.views import Column, Table
from rankscope.views.text import table_text

SEED = 1
TOKENS, DIM = 128, 64

COLUMNS: dict[str, str] = {
    "relative_composite_residual": "residual (1,inf)",
    "mu_over_norm": "mu/norm",
    "mean_cosine": "mean cosine",
    "stable_rank": "stable rank",
    "centred_stable_rank": "centred s.r.",
    "effective_rank": "erank",
    "centred_effective_rank": "centred erank",
    "participation_ratio": "participation",
}

PRINTED: dict[str, tuple[str, ...]] = {
    "iid Gaussian": (".997", ".997", "-.002", "23.5", "23.4", "59.4", "59.3", "42.6"),
    "+ constant vector (3x)": (".211", ".328", ".893", "1.12", "23.4", "33.8", "59.3", "1.25"),
    "token 0 scaled x1000 (sink)": ("1.378", ".996", "-.002", "1.00", "1.00", "1.93", "1.93", "1.00"),
    "channel 0 scaled x300": (".997", "1.00", ".002", "1.00", "1.00", "3.08", "3.07", "1.00"),
    "truly collapsed (1a^T + 1e-3 noise)": (".001", ".001", "1.00", "1.00", "23.4", "1.09", "59.3", "1.00"),
}


@dataclass(frozen=True)
class SelfTest:
    """The table as this machine computes it.

    Attributes:
        values: per kind of tokens, one value for each of ``COLUMNS``.
    """

    values: dict[str, tuple[float, ...]]

    @property
    def differences(self) -> tuple[str, ...]:
        """What does not agree with the printed digits, in words."""
        return tuple(
            f"{kind}: {metric} is {value!r}, expected {digits}"
            for kind, printed in PRINTED.items()
            for metric, value, digits in zip(COLUMNS, self.values[kind], printed, strict=True)
            if as_printed(value, digits) != digits
        )

    @property
    def passed(self) -> bool:
        """Whether every value has the printed digits."""
        return not self.differences

    def to_json(self) -> dict[str, object]:
        """Plain data: passed, differences, and rows of metric values."""
        rows = [{"tokens": kind, **dict(zip(COLUMNS, row, strict=True))} for kind, row in self.values.items()]
        return {"passed": self.passed, "differences": list(self.differences), "rows": rows}

    def __str__(self) -> str:
        rows = [
            [kind, *(as_printed(v, digits) for v, digits in zip(self.values[kind], printed, strict=True))]
            for kind, printed in PRINTED.items()
        ]
        lines = [table_text(Table([Column("", align="left"), *COLUMNS.values()], rows), rule=False)]
        lines.append("No single number tells these five apart: a verdict needs the battery.")
        lines.append("All 40 values agree with the published table." if self.passed else "\n".join(self.differences))
        return "\n".join(lines)


def selftest() -> SelfTest:
    """Recompute the five-row confusion table: what healthy, offset, sink, outlier and collapsed tokens look like.

    The tokens are drawn from a fixed seed, so every machine measures the same numbers.

    Example:
        >>> selftest().passed
        True
    """
    views = {kind: Tokens(x) for kind, x in confusing_tokens().items()}
    return SelfTest({kind: tuple(_measure(name, view) for name in COLUMNS) for kind, view in views.items()})


def confusing_tokens() -> dict[str, Tensor]:
    """Five kinds of tokens, four of which some metric takes for collapse, or collapse for health."""
    rng = np.random.default_rng(SEED)
    x, offset, collapsed = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((TOKENS, DIM), (DIM,), (DIM,)))
    sink, outlier = x.clone(), x.clone()
    sink[0] *= 1000
    outlier[:, 0] *= 300
    return dict(zip(PRINTED, (x, x + 3 * offset, sink, outlier, collapsed + 1e-3 * x), strict=True))


def as_printed(value: float, digits: str) -> str:
    """``value`` with as many decimals as ``digits`` shows, and no zero before the point.

    Example:
        >>> as_printed(-0.00163, "-.002")
        '-.002'
    """
    decimals = len(digits.partition(".")[2])
    return f"{value:.{decimals}f}".replace("-0.", "-.") if value < 0 else f"{value:.{decimals}f}".removeprefix("0")


def _measure(name: str, view: Tokens) -> float:
    return float(METRICS[name].function(view))

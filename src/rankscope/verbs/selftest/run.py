"""Are the numbers right on this machine? Recomputes a known table and compares it digit by digit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rankscope.linalg.precision import device_name, has_float64, widest
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS
from rankscope.models.loading.devices import parse_device
from rankscope.verbs.calling import checked
from rankscope.verbs.selftest import SELFTEST
from rankscope.verbs.selftest.parity import ALLOWED, VerbParity, verbs_on
from rankscope.views import Column, Document, Table
from rankscope.views.text import document_text

SEED = 1
TOKENS, DIM = 128, 64

COLUMNS: dict[str, str] = {
    "relative_composite_residual": "residual (1,inf)",
    "mu_over_norm": "mu/norm",
    "mean_cosine": "mean cosine",
    "stable_rank": "stable rank",
    "centred_stable_rank": "centred stable rank",
    "effective_rank": "effective rank",
    "centred_effective_rank": "centred effective rank",
    "participation_ratio": "participation ratio",
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
        device: where they were computed.
        verbs: the verbs on that device, compared with the processor; none unless a device was named.
    """

    values: dict[str, tuple[float, ...]]
    device: str = "cpu"
    verbs: tuple[VerbParity, ...] = ()

    @property
    def differences(self) -> tuple[str, ...]:
        """What does not agree with the printed digits, in words."""
        return tuple(
            f"{kind}: {metric} is {value!r}, expected {digits}"
            for kind, printed in PRINTED.items()
            for metric, value, digits in zip(COLUMNS, self.values[kind], printed, strict=True)
            if as_printed(value, digits) != digits
        ) + tuple(
            f"{entry.verb} on {self.device}: {entry.error or _disagreement(entry)}"
            for entry in self.verbs
            if not entry.passed
        )

    @property
    def passed(self) -> bool:
        """Whether every value has the printed digits, and every verb the values of the processor."""
        return not self.differences

    @property
    def brief(self) -> str:
        """Nothing: the exit code gives the result."""
        return ""

    def to_json(self) -> dict[str, object]:
        """Plain data: passed, differences, and rows of metric values."""
        rows = [{"tokens": kind, **dict(zip(COLUMNS, row, strict=True))} for kind, row in self.values.items()]
        verbs = [entry.to_json() for entry in self.verbs]
        return {
            "passed": self.passed,
            "device": self.device,
            "differences": list(self.differences),
            "rows": rows,
            "verbs": verbs,
        }

    def __repr__(self) -> str:
        outcome = "passed" if self.passed else f"{len(self.differences)} values differ"
        return f"<SelfTest on {self.device}: {outcome}>"

    def __str__(self) -> str:
        return document_text(document(self))


@checked(*SELFTEST.options)
def selftest(device: torch.device | str | None = None) -> SelfTest:
    """Recompute the five-row confusion table: what healthy, offset, sink, outlier and collapsed tokens look like.

    The tokens are drawn from a fixed seed, so every machine measures the same numbers.

    Args:
        device: also compute the table on this device, such as ``"cuda"``, and compare every verb on it with the
            processor, for a tiny model.

    Example:
        >>> selftest().passed
        True
    """
    place = parse_device(device)
    here = torch.device("cpu") if place is None else place
    dtype = widest(here)
    views = {kind: Tokens(x.to(dtype).to(here)) for kind, x in confusing_tokens().items()}
    values = {kind: tuple(_measure(name, view) for name in COLUMNS) for kind, view in views.items()}
    if place is None:
        return SelfTest(values, str(here))
    return SelfTest(values, str(here), verbs_on(place))


def document(result: SelfTest) -> Document:
    """The table, whether its digits are those expected, and the verbs on a device."""
    rows = [
        [name, *(as_printed(result.values[kind][place], printed[place]) for kind, printed in PRINTED.items())]
        for place, name in enumerate(COLUMNS.values())
    ]
    kinds = [kind.partition(" (")[0] for kind in PRINTED]
    verdict = "All 40 values agree with the published table." if result.passed else "\n".join(result.differences)
    reading = "No single metric distinguishes these five; a verdict needs several."
    table = Table([Column("metric", align="left"), *kinds], rows)
    if not result.verbs:
        return Document("selftest: five kinds of tokens", verdict, parts=(table, reading))
    if result.passed:
        verdict += f" Every verb gives the values of the processor on {result.device}."
    return Document(
        f"selftest on {_described(torch.device(result.device))}",
        verdict,
        parts=(table, reading, _verbs(result)),
    )


def _verbs(result: SelfTest) -> Table:
    columns: list[str | Column] = [
        Column("verb", align="left"),
        "values",
        "largest difference",
        Column("", align="left"),
    ]
    rows = [
        [entry.verb, str(entry.values), f"{entry.difference:.1e}", "ok"]
        if entry.passed
        else [entry.verb, str(entry.values), f"{entry.difference:.1e}", entry.error or "different"]
        for entry in result.verbs
    ]
    return Table(columns, rows)


def _described(device: torch.device) -> str:
    """What a bug report must say about a device."""
    words = [str(device), device_name(device), f"torch {torch.__version__}"]
    words.append("has float64" if has_float64(device) else "no float64: statistics are computed on the processor")
    return ", ".join(word for word in words if word)


def _disagreement(entry: VerbParity) -> str:
    if math.isnan(entry.difference):
        return "its rows differ from those of the processor"
    return f"values differ from those of the processor by up to {entry.difference:.1e}, allowed is {ALLOWED:.0e}"


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

"""The error of every metric, compared with its definition in 50-digit arithmetic, by conditioning of the matrix.

    python scripts/metric_errors.py

The definitions are in ``tests/reference`` and use nothing of rankscope. They are given the numbers that the tensor
holds after rounding to its format, so the table shows what rankscope loses, not what the format lost before. Writes
``docs/data/metric_errors.json`` and its tables, ``metric_errors*.inc``. Exits with 1 if a value with the status ``ok``
has fewer than six correct digits.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpmath import mp, mpf
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rankscope._types import Status  # noqa: E402
from rankscope.linalg.precision import float_floor  # noqa: E402
from rankscope.metrics import METRICS, SIDES, evaluate  # noqa: E402
from rankscope.runs.provenance import installed_versions  # noqa: E402
from tests.reference import attention, metrics, sides  # noqa: E402

DATA = ROOT / "docs" / "data" / "metric_errors.json"
DIGITS = 50
PROMISE = 1e-6
"""A value with the status ``ok`` has six correct digits."""
GRAM_ERROR = 5e-8
"""Times the side: the error that ``effective_rank`` declares for float32 and narrower input near collapse."""
FORMATS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = ((12, 7), (7, 12))
SEEDS = range(3)
REFERENCE: Mapping[str, Callable[..., mpf]] = metrics.REFERENCE | attention.EXACT | sides.REFERENCE
INTEGER_SIDES = ("router",)
Make = Callable[[int, int, int], tuple[Tensor, ...]]


def gaussian(seed: int, *shape: int) -> Tensor:
    """Independent normal entries in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def alike(seed: int, n: int, d: int, residual: float) -> Tensor:
    """Tokens with this relative residual around a common vector."""
    noise = gaussian(seed, n, d)
    noise -= noise.mean(0)
    common = gaussian(seed + 100, 1, d).expand(n, d)
    return common / common.norm() * (1 - residual**2) ** 0.5 + residual * noise / noise.norm()


def graded(seed: int, n: int, d: int) -> Tensor:
    """Singular values from 1 down to 1e-6, evenly spaced in the logarithm."""
    U, _, V = torch.linalg.svd(gaussian(seed, n, d), full_matrices=False)
    return U * torch.logspace(0, -6, min(n, d), dtype=torch.float64) @ V


def scaled_entry(seed: int, n: int, d: int, *, token: float = 1.0, channel: float = 1.0) -> Tensor:
    """Independent entries; one token or one channel is larger."""
    x = gaussian(seed, n, d)
    x[0] *= token
    x[:, 1] *= channel
    return x


def of_tokens(residual: float) -> Make:
    """One matrix of tokens."""
    return lambda seed, n, d: (alike(seed, n, d, residual),)


def of_scores(size: float) -> Make:
    """Probabilities that differ between rows by about this factor, around a common row."""
    return lambda seed, n, d: ((gaussian(seed + 100, 1, 1, n) + size * gaussian(seed, 1, n, n)).softmax(-1),)


def of_update(size: float) -> Make:
    """A change of this size relative to the stream."""
    return lambda seed, n, d: (gaussian(seed, n, d), size * gaussian(seed + 100, n, d))


def of_branch(residual: float) -> Make:
    """What is read has this relative residual, and fewer tokens than channels."""
    return lambda seed, n, d: (alike(seed, 5, d, residual), gaussian(seed + 100, 5, d))


def of_router(spread: float) -> Make:
    """Probabilities over experts from scores of this size, the two largest chosen."""

    def make(seed: int, n: int, d: int) -> tuple[Tensor, ...]:
        probs = (spread * gaussian(seed, n, d)).softmax(-1)
        return probs, probs.topk(2, dim=-1).indices

    return make


STEPS = {"1": 1.0, "1e-2": 1e-2, "1e-4": 1e-4, "1e-6": 1e-6, "1e-8": 1e-8}
OTHERS: dict[str, Make] = {
    "offset 1e6": lambda seed, n, d: (gaussian(seed, n, d) + 1e6,),
    "one token ×1e6": lambda seed, n, d: (scaled_entry(seed, n, d, token=1e6),),
    "one channel ×1e6": lambda seed, n, d: (scaled_entry(seed, n, d, channel=1e6),),
    "spectrum to 1e-6": lambda seed, n, d: (graded(seed, n, d),),
    "size 1e-30": lambda seed, n, d: (1e-30 * alike(seed, n, d, 0.1),),
}
CASES: dict[str, dict[str, Make]] = {
    "tokens": {name: of_tokens(size) for name, size in STEPS.items()} | OTHERS,
    "attention": {name: of_scores(size) for name, size in STEPS.items()},
    "scores": {name: lambda seed, n, d, size=size: (size * gaussian(seed, 1, n, d),) for name, size in STEPS.items()},
    "queries": {
        name: lambda seed, n, d, size=size: (size * gaussian(seed, 1, n, d), gaussian(seed + 1, 1, n, d))
        for name, size in STEPS.items()
    },
    "update": {name: of_update(size) for name, size in STEPS.items()},
    "branch": {name: of_branch(size) for name, size in STEPS.items()},
    "router": {"1": of_router(1.0), "1e-2": of_router(1e-2), "1e-4": of_router(1e-4), "30": of_router(30.0)},
}
MEANING = {
    "tokens": "relative residual of the tokens, or what else is special about them",
    "attention": "size of the differences between the scores of two rows",
    "scores": "size of the scores",
    "queries": "size of the queries",
    "update": "size of the change relative to the stream",
    "branch": "relative residual of the tokens that are read",
    "router": "size of the router's scores",
}
NEAR_FLOOR = {"tokens": of_tokens, "branch": of_branch, "update": of_update}


def cases(side: str, dtype: torch.dtype) -> Iterator[tuple[str, Make]]:
    """Matrices of a side; the last ones are just above the floor of the format, and well below it."""
    yield from CASES[side].items()
    if side in NEAR_FLOOR:
        yield "2 × floor", NEAR_FLOOR[side](2 * float_floor(dtype))
        yield "floor / 10", NEAR_FLOOR[side](float_floor(dtype) / 10)


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In a format; expert numbers stay whole."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def error(name: str, got: float, want: mpf) -> float:
    """Relative to the exact value; for metrics with negative values, which pass zero, to the larger of it and 1."""
    signed = METRICS[name].range[0] < 0
    size = max(abs(want), mpf(1)) if signed else abs(want)
    return float(abs(mpf(got) - want) / size) if size else float(abs(got) > 0)


def exact(name: str, rows: list[metrics.Rows], floor: float) -> mpf:
    """The definition; NaN where it divides by zero."""
    try:
        if name == "outside_span_share":
            return sides.outside_span_above(floor, *rows)
        return REFERENCE[name](*rows)
    except ZeroDivisionError:
        return mp.nan


def measured(side: str, format: str) -> Iterator[dict[str, Any]]:
    """Every metric of a side on every matrix in one format, with the exact value."""
    specs = [spec for spec in METRICS.values() if spec.side == side]
    dtype = FORMATS[format]
    for conditioning, make in cases(side, dtype):
        for n, d in SHAPES:
            for seed in SEEDS:
                tensors = tuple(rounded(tensor, dtype) for tensor in make(seed, n, d))
                found = evaluate(specs, SIDES[side].view(*tensors), float_floor(dtype))
                rows = [metrics.exact_rows(tensor[0] if SIDES[side].has_heads else tensor) for tensor in tensors]
                for place, spec in enumerate(specs):
                    got, want = found.values[place].item(), exact(spec.name, rows, float_floor(dtype))
                    status = list(Status)[int(found.statuses[place].item())]
                    known = got == got and not mp.isnan(want)
                    yield {
                        "metric": spec.name,
                        "format": format,
                        "conditioning": conditioning,
                        "shape": [n, d],
                        "seed": seed,
                        "value": got if got == got else None,
                        "exact": float(want) if not mp.isnan(want) else None,
                        "error": error(spec.name, got, want) if known else None,
                        "status": str(status),
                        "both_undefined": got != got and bool(mp.isnan(want)),
                    }


def worst(values: list[dict[str, Any]]) -> dict[str, Any]:
    """One cell: the largest error of values with the status ok, that of marked values, and how many of each."""
    sound = [one["error"] for one in values if one["status"] == Status.OK and one["error"] is not None]
    marked = [one["error"] for one in values if one["status"] != Status.OK and one["error"] is not None]
    statuses: dict[str, int] = defaultdict(int)
    for one in values:
        statuses[one["status"]] += 1
    odd = [one for one in values if one["error"] is None and not one["both_undefined"]]
    return {
        "ok": max(sound, default=None),
        "marked": max(marked, default=None),
        "statuses": dict(statuses),
        "undefined_in_one": len(odd),
    }


def summary(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Worst errors by metric, format and conditioning."""
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in values:
        cells[one["metric"], one["format"], one["conditioning"]].append(one)
    found: dict[str, Any] = {}
    for (metric, format, conditioning), some in cells.items():
        found.setdefault(metric, {}).setdefault(format, {})[conditioning] = worst(some)
    return found


def kind(name: str) -> str:
    """The word of the docstring: Exact, Bound, Estimate or Heuristic."""
    text = METRICS[name].function.__doc__ or ""
    return next(word for word in ("Exact", "Bound", "Estimate", "Heuristic") if f"**{word}" in text).lower()


def cell(by_format: list[dict[str, Any]]) -> str:
    """Worst error over the formats, and whether values were marked."""
    sound = [one["ok"] for one in by_format if one["ok"] is not None]
    statuses: set[str] = set().union(*(one["statuses"] for one in by_format)) - {str(Status.OK)}
    short = {str(Status.FLOOR): "f", str(Status.ESTIMATE): "e", str(Status.UNDEFINED): "u"}
    marks = "".join(sorted(short[status] for status in statuses))
    shown = "0" if sound and not max(sound) else f"{max(sound):.0e}" if sound else "–"
    return f"{shown} {marks}".strip()


def table(figures: dict[str, Any], side: str) -> str:
    """Metrics by conditioning."""
    names = [name for name in figures if METRICS[name].side == side]
    columns = list(figures[names[0]]["float64"])
    lines = [f"| metric | declared | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name in names:
        cells = [cell([by[column] for by in figures[name].values()]) for column in columns]
        lines.append(f"| `{name}` | {kind(name)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def formats_table(figures: dict[str, Any]) -> str:
    """By format: the worst value that is called ok, and how values were marked."""
    lines = [
        "| input | values | ok | worst error of these | metric | marked | worst error of these |",
        "|---" * 7 + "|",
    ]
    for format in FORMATS:
        cells = [(name, column, one) for name, by in figures.items() for column, one in by[format].items()]
        ok = max(((one["ok"], name, column) for name, column, one in cells if one["ok"] is not None))
        marked = max(((one["marked"], name) for name, _, one in cells if one["marked"] is not None))
        counts: dict[str, int] = defaultdict(int)
        for _, _, one in cells:
            for status, number in one["statuses"].items():
                counts[status] += number
        others = ", ".join(f"{number} {status}" for status, number in counts.items() if status != Status.OK)
        lines.append(
            f"| {format} | {sum(counts.values()):,} | {counts[str(Status.OK)]:,} | {ok[0]:.0e} | `{ok[1]}` at {ok[2]} "
            f"| {others} | {marked[0]:.0e} (`{marked[1]}`) |"
        )
    return "\n".join(lines) + "\n"


def large_effective_rank(side: int, format: str, residual: float) -> dict[str, Any]:
    """Effective rank of a matrix too large for many digits, compared with LAPACK's SVD of it in float64.

    The rounding of small singular values in a Gram matrix adds up over the side, and shows only here.
    """
    x = alike(0, side, side, residual).to(FORMATS[format])
    s = np.linalg.svd(x.double().numpy(), compute_uv=False)
    p = s[s > 0] / s.sum()
    want = float(np.exp(-(p * np.log(p)).sum()))
    got = METRICS["effective_rank"].function(x).item()
    return {
        "side": side,
        "format": format,
        "residual": residual,
        "value": got,
        "by_svd": want,
        "error": abs(got / want - 1),
    }


def large_table(rows: list[dict[str, Any]]) -> str:
    """Sides and formats by residual."""
    residuals = list(dict.fromkeys(row["residual"] for row in rows))
    lines = [f"| side | input | {' | '.join(f'{r:g}' for r in residuals)} |", "|---:|---|" + "---|" * len(residuals)]
    for side, format in dict.fromkeys((row["side"], row["format"]) for row in rows):
        cells = [f"{row['error']:.0e}" for row in rows if (row["side"], row["format"]) == (side, format)]
        lines.append(f"| {side} | {format} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure everything, write the tables, and say what breaks the promise."""
    missing = sorted(set(METRICS) - set(REFERENCE))
    if missing:
        raise SystemExit(f"no independent definition in tests/reference of {', '.join(missing)}")
    metrics.singular_values = cached_singular_values  # a dozen metrics of one matrix share them
    attention.singular_values = cached_singular_values
    values = []
    with mp.workdps(DIGITS):
        for side in CASES:
            for format in FORMATS:
                values += measured(side, format)
                print(side, format, len(values), flush=True)
    figures = summary(values)
    broken = [one for one in values if one["status"] == Status.OK and (one["error"] or 0.0) > PROMISE]
    odd = [one for one in values if one["error"] is None and not one["both_undefined"]]
    for one in (broken + odd)[:20]:
        print({key: one[key] for key in ("metric", "format", "conditioning", "shape", "value", "exact", "status")})
    print(
        f"{len(broken)} of {len(values)} with the status ok have fewer than six digits, {len(odd)} are undefined in one"
    )
    large = [large_effective_rank(n, f, r) for n in (64, 256, 512) for f in FORMATS for r in STEPS.values()]
    broken += [row for row in large if row["error"] > GRAM_ERROR * row["side"]]
    record = {
        "date": date.today().isoformat(),
        "versions": {name: installed_versions().get(name) for name in ("rankscope", "torch", "numpy", "python")},
        "digits": DIGITS,
        "promise": PROMISE,
        "values": len(values),
        "below_promise": len(broken),
        "undefined_in_one_only": len(odd),
        "conditioning": MEANING,
        "large_effective_rank": large,
        "metrics": figures,
    }
    DATA.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for side in CASES:
        DATA.with_name(f"metric_errors_{side}.inc").write_text(table(figures, side), encoding="utf-8")
    DATA.with_name("metric_errors_large.inc").write_text(large_table(large), encoding="utf-8")
    DATA.with_suffix(".inc").write_text(formats_table(figures), encoding="utf-8")
    return int(bool(broken or odd))


_singular_values = metrics.singular_values


@lru_cache(maxsize=64)
def _of_rows(rows: tuple[tuple[mpf, ...], ...]) -> list[mpf]:
    return _singular_values([list(row) for row in rows])


def cached_singular_values(rows: metrics.Rows) -> list[mpf]:
    """``tests.reference.metrics.singular_values``, computed once per matrix."""
    return _of_rows(tuple(map(tuple, rows)))


if __name__ == "__main__":
    sys.exit(main())

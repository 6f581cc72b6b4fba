"""Evaluate every theorem on trained models, whole and cut to attention alone.

Writes figures to ``docs/_static/figures/bound``, numbers to ``docs/data/bound.json`` and, from these, the tables of the
page on theorems to ``docs/data/bound_tables.inc``::

    python scripts/bound_gallery.py
    python scripts/bound_gallery.py --tables
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import rankscope as rs
from rankscope.ext.theory.bound.judge import TheoremGrid, grid_of, theorems_in
from rankscope.models.loading import load
from rankscope.models.pretrained import PRETRAINED, pretrained_folder

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "_static" / "figures" / "bound"
NUMBERS_FILE = ROOT / "docs" / "data" / "bound.json"
TABLES_FILE = ROOT / "docs" / "data" / "bound_tables.inc"
MODELS = ("minilm", "reaction-albert", "smollm2-135m")
CUTS: dict[str, dict[str, object]] = {"whole": {}, "attention alone": {"skip": 0.0, "mlp": "drop", "norm": "identity"}}
SEQUENCES, TOKENS = 2, 64


def run_one(name: str, cut: dict[str, object]) -> rs.Run:
    """One model under one cut, in float64, on two texts of its own kind."""
    loaded = load(str(pretrained_folder(name)), dtype="float64")
    texts = list(PRETRAINED[name].texts) or None
    with rs.operate(loaded.model, rs.Surgery(**cut)) if cut else nullcontext():  # type: ignore[arg-type]
        return rs.bound(loaded, rs.Inputs(texts, sequences=SEQUENCES, tokens=TOKENS))  # type: ignore[arg-type]


def columns(grid: TheoremGrid) -> dict[str, object]:
    """Mean, least and largest over sequences of every number, by layer; rounding left out."""
    found: dict[str, object] = {"layers": grid.layers.tolist()}
    for metric, values in grid.values.items():
        if np.isnan(values).all():
            continue
        kept = np.where(grid.floor, np.nan, values) if metric in ("log10_measured", "log10_slack") else values
        found[metric] = [_summary(row) for row in kept]
    found["at_floor"] = grid.floor.any(axis=1).tolist()
    found["least_margin"] = [None if np.isnan(m) else float(f"{m:.6g}") for m in grid.least_margin]
    found["of_hypothesis"] = list(grid.worst)
    return found


def _summary(row: np.ndarray) -> list[float | str] | None:
    """Least and largest; null where nothing was measured, and words for what is not finite."""
    known = row[~np.isnan(row)]
    return None if not known.size else [_word(known.min()), _word(known.max())]


def _word(value: float) -> float | str:
    return float(f"{value:.6g}") if np.isfinite(value) else ("inf" if value > 0 else "-inf")


def facts(run: rs.Run) -> dict[str, object]:
    """Everything the page quotes, by theorem."""
    return {
        "verdict": run.verdict,
        "date": date.today().isoformat(),
        "seconds": run.provenance.wall_seconds,
        "lengths": list(run.provenance.lengths),
        "applies": dict(run.extra["applies"]),
        "failed": {name: list(words) for name, words in run.extra["failed_hypotheses"].items()},
        "sentences": dict(run.extra["sentences"]),
        "theorems": {
            name: {scope: columns(grid_of(run.table, name, scope)) for scope in ("layer", "depth")}
            for name in theorems_in(run.table)
        },
    }


def tables(numbers: dict[str, Any]) -> str:
    """For each model and cut: a row per theorem, then a row per layer for the published bound and for ours."""
    parts = []
    for title, found in numbers.items():
        lengths = found["lengths"]
        parts += [
            f"### {title}",
            f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} tokens, float64.",
            "\n".join(_by_theorem(found)),
            "\n".join(_by_layer(found)),
        ]
    return "\n\n".join(parts) + "\n"


def _by_theorem(found: dict[str, Any]) -> list[str]:
    lines = [
        "| theorem | all met | slack per layer, log10 | slack over depth, log10 | not met |",
        "|" + "---|" * 5,
    ]
    for name, scopes in found["theorems"].items():
        cells = [_range(scopes[scope].get("log10_slack")) for scope in ("layer", "depth")]
        failed = "; ".join(found["failed"][name])
        lines.append(f"| `{name}` | {'yes' if found['applies'][name] else 'no'} | {cells[0]} | {cells[1]} | {failed} |")
    return lines


def _by_layer(found: dict[str, Any]) -> list[str]:
    published, ours = (found["theorems"][name]["layer"] for name in ("dong_2021_multi_head", "contraction_interval"))
    lines = [
        "| layer | cor. 2.3: margin | bound | measured | slack | ours: lower | measured | upper | slack | width |",
        "|" + "---|" * 10,
    ]
    for number, layer in enumerate(published["layers"]):
        cells = [_range([published[key][number]]) for key in ("log10_bound", "log10_measured", "log10_slack")]
        keys = ("log10_lower_bound", "log10_measured", "log10_bound", "log10_slack", "log10_width")
        cells += [_range([ours[key][number]]) for key in keys]
        lines.append(f"| {layer} | {published['least_margin'][number]:.3g} | " + " | ".join(cells) + " |")
    return lines


def _range(pairs: list[Any] | None) -> str:
    """Least to largest of pairs of them; a dash where nothing was measured above rounding."""
    words = [word for pair in pairs or [] if pair for word in pair]
    if not words:
        return "-"
    low, high = min(map(float, words)), max(map(float, words))
    short = [f"{value:.4g}" if abs(value) >= 100 else f"{value:.2f}" for value in (low, high)]
    return short[0] if short[0] == short[1] else f"{short[0]} to {short[1]}"


def main() -> None:
    """Run, draw, and write the numbers down after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    parser.add_argument("--tables", action="store_true", help="write the tables again from the numbers there are")
    given = parser.parse_args()
    FIGURES.mkdir(parents=True, exist_ok=True)
    numbers = json.loads(NUMBERS_FILE.read_text()) if NUMBERS_FILE.exists() else {}
    for name in () if given.tables else given.names:
        for title, cut in CUTS.items():
            run = run_one(name, cut)
            run.plot().savefig(FIGURES / f"{name}-{title.replace(' ', '-')}.png", dpi=110)
            numbers[f"{name}, {title}"] = facts(run)
            NUMBERS_FILE.write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
            print(f"{name}, {title}: {run.verdict}", flush=True)
    TABLES_FILE.write_text(tables(numbers))


if __name__ == "__main__":
    main()

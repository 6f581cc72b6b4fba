"""Run the models of the documentation page "Below the float floor" in exact arithmetic.

Writes figures to ``docs/_static/figures/exact`` and numbers to ``docs/data/exact.json``::

    python scripts/exact_gallery.py
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path

import rankscope as rs
from rankscope.models.pretrained import PRETRAINED, pretrained_folder
from rankscope.verbs.exact.judge import exact_curves

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "_static" / "figures" / "exact"
NUMBERS = ROOT / "docs" / "data" / "exact.json"
CUTS: dict[str, dict[str, object]] = {
    "full": {},
    "no skips": {"skip": 0.0},
    "no skips, no MLPs": {"skip": 0.0, "mlp": "drop"},
    "pure attention": {"skip": 0.0, "mlp": "drop", "norm": "identity"},
}
INITIAL = ("bert-base", "albert-base", "xlnet-base", "gpt2")
DRAWN = {
    ("bert-base", "no skips"),
    ("bert-base", "pure attention"),
    ("antiberty", "no skips"),
    ("minilm", "full"),
    ("gpt2", "no skips"),
    ("xlnet-base", "no skips"),
}
TRAINED = ("minilm", "antiberty", "reaction-bert", "reaction-albert")


def run_one(name: str, cut: dict[str, object]) -> rs.Run:
    """One model under one cut: two sequences, or the first two texts of its own kind."""
    if name in INITIAL:
        return rs.exact(f"init:{name}", rs.Inputs(sequences=2, tokens=128), cut)
    texts = list(PRETRAINED[name].texts) or None
    return rs.exact(str(pretrained_folder(name)), rs.Inputs(texts, sequences=2, tokens=128), cut, stability=True)


def facts(run: rs.Run) -> dict[str, object]:
    """Everything the page quotes, by arithmetic and block."""
    found: dict[str, object] = {"verdict": run.verdict, "date": date.today().isoformat()}
    for metric in ("log10_residual", "log10_relative_residual", "order", "factor", "linear_factor"):
        lines = exact_curves(run.table, metric, None)
        found[metric] = {name: [round(float(v), 6) for v in line.mean] for name, line in lines.items()}
    return found


def main() -> None:
    """Run, draw, and write the numbers down after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*INITIAL, *TRAINED])
    FIGURES.mkdir(parents=True, exist_ok=True)
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name in parser.parse_args().names:
        for title, cut in CUTS.items():
            run = run_one(name, cut)
            if (name, title) in DRAWN:
                run.plot().savefig(FIGURES / f"{name}-{title.replace(' ', '-')}.png", dpi=110)
            numbers[f"{name}, {title}"] = facts(run)
            NUMBERS.write_text(json.dumps(numbers, indent=1).replace("NaN", "null") + "\n")
            print(f"{name}, {title}: {run.verdict}", flush=True)


if __name__ == "__main__":
    main()

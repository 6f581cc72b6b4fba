"""Measure the models of the documentation page "Real models" and draw their figures.

Random initialisations at real size, and the pretrained models fetched by ``./dev fetch``. Writes figures to
``docs/_static/figures/models`` and the numbers the page quotes to ``docs/data/models.json``::

    python scripts/model_gallery.py
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path

import torch

import rankscope as rs
from rankscope.models.pretrained import PRETRAINED, pretrained_folder
from rankscope.runs.curves import names_in

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "_static" / "figures" / "models"
NUMBERS = ROOT / "docs" / "data" / "models.json"
INITIAL = ("bert-base", "albert-base", "xlnet-base", "gpt2", "vit-base")
TRAINED = ("minilm", "smollm2-135m", "reaction-albert", "reaction-bert", "antiberty")
QUOTED = ("relative_residual", "mean_cosine", "stable_rank", "effective_rank", "largest_token_share")


def measured(name: str) -> rs.Run:
    """One model on eight sequences: the sample text, or texts of the kind it was trained on."""
    if name in INITIAL:
        return rs.measure(f"init:{name}", rs.Inputs(sequences=8, tokens=128), null=True)
    texts = list(PRETRAINED[name].texts) or None
    return rs.measure(str(pretrained_folder(name)), rs.Inputs(texts, sequences=8, tokens=128), null=True)


def facts(run: rs.Run) -> dict[str, object]:
    """What the page quotes."""
    curves = {
        metric: [round(float(value), 6) for value in run.curve(metric, "block.out").mean]
        for metric in QUOTED
        if metric in names_in(run.table, "metric")
    }
    seen = run.provenance
    return {
        "verdict": run.verdict,
        "sequences": seen.sequences,
        "lengths": sorted(set(seen.lengths)),
        "parameters": seen.parameters,
        "seconds": seen.wall_seconds,
        "versions": dict(seen.versions),
        "date": date.today().isoformat(),
        "curves": curves,
    }


def main() -> None:
    """Measure, draw, and write the numbers down after each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*INITIAL, *TRAINED])
    torch.set_grad_enabled(False)
    FIGURES.mkdir(parents=True, exist_ok=True)
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name in parser.parse_args().names:
        run = measured(name)
        run.plot().savefig(FIGURES / f"{name}.png", dpi=110)
        numbers[name] = facts(run)
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
        print(f"{name}: {run.verdict}\n")


if __name__ == "__main__":
    main()

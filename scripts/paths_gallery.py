"""Draw the figures of ``docs/gallery/ensembles.md``: trained models by path length, each beside its random twin.

Usage: python scripts/paths_gallery.py [FOLDER]; the models are fetched by ``python scripts/fetch_pretrained.py``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import rankscope as rs
from rankscope.models.loading import load, load_initialised_twin
from rankscope.models.pretrained import PRETRAINED, pretrained_folder
from rankscope.results.decomposition import SHARE, by_length
from rankscope.results.decomposition_figure import draw_decompositions
from rankscope.results.run import Run

MODELS = ("minilm", "reaction-albert", "smollm2-135m")
HOME = Path(__file__).parents[1] / "docs" / "_static" / "figures" / "paths"


def summary(run: Run) -> dict[str, object]:
    """The numbers the page quotes."""
    shares, residual = by_length(run.table, SHARE), by_length(run.table, "relative_residual")
    return {
        "share": [round(float(value), 5) for value in shares.mean],
        "residual": [round(float(value), 5) for value in residual.mean],
        "sum_error": run.extra["sum_error"],
        "seconds": run.provenance.wall_seconds,
    }


def main(folder: Path) -> None:
    """Decompose each model and its twin, draw them together, and keep the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers: dict[str, object] = {}
    for name in MODELS:
        started = time.perf_counter()
        trained = load(pretrained_folder(name))
        texts = list(PRETRAINED[name].texts) or None
        options = {"sequences": 4, "tokens": 64, "batch": 2}
        runs = {
            name: rs.decompose(trained, texts, **options),
            "random initialisation": rs.decompose(load_initialised_twin(trained, seed=0), texts, **options),
        }
        draw_decompositions(runs).savefig(folder / f"{name}.svg")
        numbers[name] = {which: summary(run) for which, run in runs.items()}
        print(name, f"{time.perf_counter() - started:.1f} s", flush=True)
    (folder / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HOME)

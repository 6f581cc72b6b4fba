"""Draw the figures of ``docs/gallery/ensembles.md``: trained models by path length, each beside its random twin.

Usage: python scripts/paths_gallery.py [NAME ...]; the models are fetched by ``python scripts/fetch_pretrained.py``, the
small GPT-2 is trained by ``python scripts/train_small_gpt2.py``. Models that are not named keep the numbers they have.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rankscope as rs
from rankscope.ext.paths.decompose.judge import SHARE, by_length
from rankscope.ext.paths.decompose.show import plot_side_by_side
from rankscope.models.loading import load, load_initialised_twin
from rankscope.models.pretrained import PRETRAINED, cache_folder, pretrained_folder
from rankscope.runs.run import Run
from rankscope.views.figures import draw

TRAINED_HERE = "gpt2-moby-dick"
MODELS = ("minilm", "reaction-albert", "smollm2-135m", TRAINED_HERE)
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


def folder_and_texts(name: str) -> tuple[Path, list[str] | None]:
    """Where a model lies, and what it reads; the built-in sample text for English ones."""
    if name == TRAINED_HERE:
        return cache_folder() / name, None
    return pretrained_folder(name), list(PRETRAINED[name].texts) or None


def main(folder: Path, names: Sequence[str]) -> None:
    """Decompose each model and its twin, draw them together, and keep the numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / "numbers.json"
    numbers: dict[str, object] = json.loads(place.read_text()) if place.is_file() else {}
    for name in names:
        started = time.perf_counter()
        home, texts = folder_and_texts(name)
        trained = load(home)
        options = {"sequences": 4, "tokens": 64, "batch": 2}
        runs = {
            name: rs.decompose(trained, rs.Inputs(texts, **options)),
            "random initialisation": rs.decompose(load_initialised_twin(trained, seed=0), rs.Inputs(texts, **options)),
        }
        draw(plot_side_by_side(runs)).savefig(folder / f"{name}.svg")
        numbers[name] = {which: summary(run) for which, run in runs.items()}
        print(name, f"{time.perf_counter() - started:.1f} s", flush=True)
        if name == TRAINED_HERE:
            numbers["training"] = json.loads((home / "training.json").read_text())
    place.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main(HOME, sys.argv[1:] or MODELS)

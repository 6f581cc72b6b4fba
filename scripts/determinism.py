"""How far the same measurement moves when threads, batch size or the attention implementation change.

``python scripts/determinism.py`` measures each model once per setting, all else equal, and writes the largest relative
difference of each metric from the first setting to ``docs/data/determinism.json``. Two runs in one setting are compared
as well: these must be equal to the bit. A table goes to ``docs/data/determinism.inc``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rankscope as rs
from rankscope._types import Status
from rankscope.runs.provenance import installed_versions
from rankscope.runs.run import Run

PLACE = ("metric", "site", "stack", "layer", "head", "sequence")
DATA = Path(__file__).resolve().parents[1] / "docs" / "data" / "determinism.json"


@dataclass(frozen=True)
class Setting:
    """What is varied, one at a time."""

    threads: int = 1
    batch: int = 8
    attention: str = "sdpa"


BASE = Setting()
SETTINGS: Mapping[str, Setting] = {
    "again": BASE,
    "2 threads": Setting(threads=2),
    "batch 1": Setting(batch=1),
    "batch 2": Setting(batch=2),
    "eager attention": Setting(attention="eager"),
}
MODELS: Mapping[str, tuple[int, int]] = {"tiny-bert": (8, 64), "tiny-llama": (8, 64), "bert-base": (8, 64)}


def measured(model: Any, setting: Setting, sequences: int, tokens: int) -> Run:
    """One run of a model that is already there."""
    torch.set_num_threads(setting.threads)
    model.set_attn_implementation(setting.attention)
    return rs.measure(model, rs.Inputs(sequences=sequences, tokens=tokens, batch=setting.batch))


def differences(base: Run, other: Run) -> dict[str, Any]:
    """Largest relative difference by metric, over values that are sound in both; statuses that changed are counted."""
    one, two = _by_place(base), _by_place(other)
    if one.keys() != two.keys():
        raise SystemExit("the two runs have different rows")
    largest = dict.fromkeys((place[0] for place in one), 0.0)
    changed = 0
    for place, (before, status) in one.items():
        after, now = two[place]
        changed += status != now
        if status == now == Status.OK and before != after:
            size = abs(after - before) / max(abs(before), abs(after))
            largest[place[0]] = max(largest[place[0]], size)
    bits = [np.array([found[place][0] for place in one]).view(np.int64) for found in (one, two)]
    same = not changed and bool(np.array_equal(*bits))
    return {"bit_equal": same, "statuses_changed": changed, "largest": largest}


def _by_place(run: Run) -> dict[tuple[Any, ...], tuple[float, str]]:
    return {tuple(row[name] for name in PLACE): (row["value"], row["status"]) for row in run.table.to_pylist()}


def table(models: Mapping[str, Any]) -> str:
    """A Markdown table: the metric that moves most in each setting, and how far."""
    lines = ["| model | changed | largest relative difference | metric | statuses changed |", "|---|---|---|---|---|"]
    for name, model in models.items():
        for words, row in model["settings"].items():
            metric = max(row["largest"], key=row["largest"].get)
            shown = "none: equal to the bit | " if row["bit_equal"] else f"{row['largest'][metric]:.1e} | `{metric}`"
            lines.append(f"| `{name}` | {words} | {shown} | {row['statuses_changed']} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure all of it and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help="presets")
    options = parser.parse_args()
    found: dict[str, Any] = {"versions": installed_versions(), "base": asdict(BASE), "models": {}}
    for name in options.models:
        sequences, tokens = MODELS[name]
        model = rs.load(f"init:{name}").model
        base = measured(model, BASE, sequences, tokens)
        rows = {
            words: differences(base, measured(model, setting, sequences, tokens)) for words, setting in SETTINGS.items()
        }
        found["models"][name] = {"sequences": sequences, "tokens": tokens, "dtype": "float32", "settings": rows}
        for words, row in rows.items():
            print(name, words, "bit-equal" if row["bit_equal"] else f"{max(row['largest'].values()):.2e}", flush=True)
    DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    DATA.with_suffix(".inc").write_text(table(found["models"]), encoding="utf-8")
    return int(not all(model["settings"]["again"]["bit_equal"] for model in found["models"].values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Predicted against real: BERT designs of 12, 48 and 128 blocks at width 768, and random-init models of the same size.

    python scripts/predict_check.py                # writes docs/data/predict.json, several minutes on one core

For each depth and each way of cutting the model, the depth at which tokens agree (relative residual, Frobenius norm)
is read from real `transformers` models with random weights, under `rankscope.operate`, and from `rankscope.predict`,
which sees the configuration only. Where 1e-3 is not reached inside the depth, the deepest of 0.7, 0.5, 0.3, 0.1, 0.03,
0.01, 0.003 that every real model reaches is compared instead.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rankscope as rs
from rankscope.ext.theory.oracles._spec import ORACLES, answer_of
from rankscope.ext.theory.predict.sampled_design import crossing, follow
from rankscope.models.design import Design

LEVELS = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7)
WIDTH, HEADS = 768, 12
VOCABULARY = 2000
DESIGNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "skip gain 0.7": ({"skip": 0.7}, {"skip_gain": 0.7}),
    "skips cut": ({"skip": 0.0}, {"skip_gain": 0.0}),
    "pure attention": (
        {"skip": 0.0, "mlp": "drop", "norm": "identity"},
        {"skip_gain": 0.0, "mlp": "none", "norm": "none", "norm_place": "none"},
    ),
    "skips cut, causal": ({"skip": 0.0, "mask": "causal"}, {"skip_gain": 0.0, "mask": "causal"}),
}
"""Name, surgery on the real model, change of the design."""


def built(depth: int, seed: int) -> Any:
    """A random-init BERT of this depth."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=depth,
        num_attention_heads=HEADS,
        intermediate_size=3072,
    )
    return BertModel(config, add_pooling_layer=False).eval()


def real_curve(model: Any, ids: torch.Tensor, surgery: dict[str, Any]) -> list[float]:
    """Log10 of the relative residual of its hidden states under surgery."""
    with torch.no_grad(), rs.operate(model, rs.Surgery(**surgery)):
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
    wide = [state.double() for state in states]
    # equal rows in float32 have no logarithm; far below every level that is looked for
    return [math.log10(max(1e-30, float((x - x.mean(1, keepdim=True)).norm() / x.norm()))) for x in wide]


def compared(real: list[list[float]], predicted: list[list[float]]) -> dict[str, Any]:
    """Depths of agreement, real and predicted, at the deepest level that all real models reach."""

    def depths(curves: list[list[float]], level: float) -> list[float]:
        return [crossing(np.array(curve), math.log10(level)) for curve in curves]

    level = next(level for level in LEVELS if all(math.isfinite(d) for d in depths(real, level)))
    seen, foretold = depths(real, level), depths(predicted, level)
    mean_seen, mean_foretold = statistics.mean(seen), statistics.mean(foretold)
    return {
        "level": level,
        "real_depth": mean_seen,
        "real_depths": seen,
        "predicted_depth": mean_foretold,
        "predicted_spread": statistics.stdev(foretold) if len(foretold) > 1 else None,
        "relative_error": mean_foretold / mean_seen - 1,
        "real_last": statistics.mean(curve[-1] for curve in real),
        "predicted_last": statistics.mean(curve[min(len(real[0]), len(curve)) - 1] for curve in predicted),
    }


def checked(depth: int, models: int, seeds: int, tokens: int) -> list[dict[str, Any]]:
    """One row for each design at this depth."""
    real: dict[str, list[list[float]]] = {name: [] for name in DESIGNS}
    for seed in range(models):
        model = built(depth, seed)
        ids = (
            torch.randperm(VOCABULARY - 200, generator=torch.Generator().manual_seed(seed))[:tokens].unsqueeze(0) + 200
        )
        for name, (surgery, _) in DESIGNS.items():
            real[name].append(real_curve(model, ids, surgery))
        del model
    rows = []
    for name, (_, changes) in DESIGNS.items():
        base = Design(depth=depth, width=WIDTH, heads=HEADS, tokens=tokens, positions="learned", initial_cosine=1 / 3)
        started = time.perf_counter()
        curves = [
            follow(base.changed(**changes), 1000 + s, tokens, min(depth, 24), depth + max(8, depth // 2)).log10_relative
            for s in range(seeds)
        ]
        seconds = time.perf_counter() - started
        row = {"depth": depth, "design": name, **compared(real[name], [list(curve) for curve in curves])}
        field = answer_of(ORACLES["mean_field"], base.changed(**changes), tokens, 2 * depth)
        mean_field = crossing(np.array(field.log10_relative), math.log10(row["level"])) if field.applies else None
        row["mean_field_depth"] = mean_field if mean_field is not None and math.isfinite(mean_field) else None
        rows.append({**row, "models": models, "seeds": seeds, "tokens": tokens, "predict_seconds": round(seconds, 1)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Run the plan and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/data/predict.json"))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--plan", default="12:4,48:2,128:2", help="depth:models, with commas")
    asked = parser.parse_args()
    plan = [tuple(int(word) for word in part.split(":")) for part in asked.plan.split(",")]
    rows = [row for depth, models in plan for row in checked(depth, models, asked.seeds, asked.tokens)]
    facts = {"width": WIDTH, "heads": HEADS, "torch": torch.__version__, "rankscope": rs.__version__, "rows": rows}
    asked.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Masks slow collapse; does LayerNorm stop it? (Wu, Ajorlou, Wang, Jegelka and Jadbabaie 2024, figure 2).

mu(X), the distance of the tokens from their mean, over depth, in BERT-base at initialisation: five networks under four
masks, in float32 and float64, then the effect of the attention temperature and of depth. The paper draws mu and prints
no numbers beside its curves, so there is nothing to overlay. It reads 3000 excerpts of 128 tokens with
bert-base-uncased, this script a few of a sample text. Without norms the tokens shrink, and mu with them, so mu over the
norm of the tokens is shown too. With `--bert SPEC`, a trained model is measured as well.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from output import COLOURS, MARKERS, options, panels, table, write
from transformers import BertConfig

import rankscope as rs

METRICS = ("mu", "mu_over_norm")
MASKS = ("complete", "causal", "window(1)", "causal_window(1)")
NO_SKIP, NO_MLP, NO_NORM = {"skip": 0.0}, {"mlp": "drop"}, {"norm": "identity"}
NETWORKS: dict[str, dict[str, Any]] = {
    "SAN": {**NO_SKIP, **NO_MLP, **NO_NORM},
    "SAN+skip": {**NO_MLP, **NO_NORM},
    "SAN+LN": {**NO_SKIP, **NO_MLP},
    "SAN+LN+skip": {**NO_MLP},
    "transformer": {},
}
# The theorems use a LayerNorm that only scales each token to unit length.
SCALED = {"SAN+row scaling": {**NO_SKIP, **NO_MLP, "norm": "scale"}}
FLOORS = {name: 4 * float(np.finfo(name).eps) for name in ("float32", "float64")}
FULL = {"model": "init:bert-base", "sequences": 8, "tokens": 128, "seeds": 2, "masks": MASKS, "deep": 128}
SMALL = {"model": "init:tiny-bert", "sequences": 2, "tokens": 16, "seeds": 1, "masks": MASKS[:2], "deep": 8}
TEMPERATURES = {False: (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), True: (0.1, 1.0)}
LEAST = 1e-19
"""Smaller values are drawn here."""

Curves = dict[str, np.ndarray]


def over_depth(model: Any, inputs: rs.Inputs, surgery: dict[str, Any]) -> Curves:
    """Both metrics before the first block and after each block, mean over sequences."""
    run = rs.measure(model, inputs, surgery, metrics=METRICS, sites=["block.in@0", "block.out"])
    return {
        name: np.concatenate([run.curve(name, site).mean for site in ("block.in", "block.out")]) for name in METRICS
    }


def grid(model: Any, inputs: rs.Inputs, masks: tuple[str, ...], networks: dict[str, Any]) -> dict[str, Curves]:
    """Every network under every mask, by "network, mask"."""
    return {
        f"{name}, {mask}": over_depth(model, inputs, {**surgery, "mask": mask})
        for name, surgery in networks.items()
        for mask in masks
    }


def mean_of(grids: list[dict[str, Curves]]) -> dict[str, Curves]:
    """Mean over initialisations."""
    return {key: {name: np.mean([each[key][name] for each in grids], axis=0) for name in METRICS} for key in grids[0]}


def deeper(spec: str, blocks: int, folder: str) -> rs.Model:
    """The same architecture with more blocks, at random initialisation."""
    config = rs.load(spec).loaded.config
    assert isinstance(config, BertConfig)
    facts = {**config.to_dict(), "num_hidden_layers": blocks}
    path = Path(folder, "config.json")
    path.write_text(json.dumps(facts), encoding="utf-8")
    return rs.load(f"init:{path}")


def draw_grid(title: str, by_dtype: dict[str, dict[str, Curves]], networks: list[str], masks: tuple[str, ...]) -> Any:
    """A column per network; mu above, mu over the norm of the tokens below. Solid: float64; dotted: float32."""
    figure, rows = panels(2, len(networks), title=title, size=(2.4, 2.3))
    for row, metric in zip(rows, METRICS, strict=True):
        for axes, network in zip(row, networks, strict=True):
            for mask, colour, marker in zip(masks, COLOURS, MARKERS, strict=False):
                for dtype, look in (("float64", {"marker": marker, "markersize": 2.5}), ("float32", {"ls": ":"})):
                    lines = by_dtype[dtype].get(f"{network}, {mask}")
                    if lines is not None:
                        values = np.maximum(lines[metric][1:], LEAST)
                        label = mask if dtype == "float64" else None
                        axes.loglog(np.arange(1, values.size + 1), values, color=colour, label=label, **look)
            if metric == "mu":
                axes.set_title(network)
            else:
                axes.set(xlabel="block", ylim=(LEAST, 3.0))
                for floor in FLOORS.values():
                    axes.axhline(floor, color="#777777", linewidth=0.7, linestyle=":")
        row[0].set_ylabel({"mu": "μ(X)", "mu_over_norm": "μ(X) / ‖X‖"}[metric])
    rows[0][0].legend(fontsize=6)
    return figure


def main() -> None:
    """Measure every network under every mask, print the table, draw."""
    parser = options(__doc__)
    parser.add_argument("--bert", metavar="SPEC", help="also measure this trained BERT")
    given = parser.parse_args()
    size = SMALL if given.small else FULL
    masks, inputs = size["masks"], rs.Inputs(sequences=size["sequences"], tokens=size["tokens"])

    by_dtype = {}
    for dtype in FLOORS:
        models = [rs.load(size["model"], seed=seed, dtype=dtype) for seed in range(size["seeds"])]
        by_dtype[dtype] = mean_of([grid(model, inputs, masks, NETWORKS) for model in models])
    model = rs.load(size["model"], dtype="float64")
    by_dtype["float64"] |= grid(model, inputs, masks, SCALED)

    heated = {
        f"{name}, {mask}, T = {temperature:g}": over_depth(
            model, inputs, {**NETWORKS[name], "mask": mask, "temperature": temperature}
        )["mu_over_norm"]
        for name in ("SAN", "SAN+LN")
        for mask in masks[:3]
        for temperature in TEMPERATURES[given.small]
    }

    # Attention without norms runs in float64 only: its tokens shrink in every block, and become subnormal in float32.
    # The weights are drawn once, in float32, and then widened.
    with tempfile.TemporaryDirectory() as folder:
        deep_model, few = deeper(size["model"], size["deep"], folder), rs.Inputs(sequences=2, tokens=size["tokens"])
        names = ("SAN+LN", "transformer")
        deep = {"float32": grid(deep_model, few, masks, {name: NETWORKS[name] for name in names})}
        deep_model.loaded.model.double()
        deep["float64"] = grid(deep_model, few, masks, {name: NETWORKS[name] for name in ("SAN", *names)})

    ends = {key: lines["mu_over_norm"][-1] for key, lines in by_dtype["float64"].items()}
    print("Residual relative to the tokens after the last block, float64:")
    rows = [[name, *(f"{ends[f'{name}, {mask}']:.3g}" for mask in masks)] for name in (*NETWORKS, *SCALED)]
    print(table(["network", *masks], rows))
    norm = ", ".join(f"{by_dtype[dtype]['SAN+LN, complete']['mu'][-1]:.3g} in {dtype}" for dtype in FLOORS)
    print(f"LayerNorm alone, complete mask: mu ends at {norm}.")

    numbers: dict[str, Any] = {
        "curves": by_dtype,
        "temperature": heated,
        "deep": {
            dtype: {key: lines["mu_over_norm"][-1] for key, lines in each.items()} for dtype, each in deep.items()
        },
    }
    title = f"Networks and masks: {size['model'].removeprefix('init:')}"
    write("wu2024_figure2", numbers, draw_grid(f"{title} at initialisation", by_dtype, list(NETWORKS), masks), given)
    write_more = {"deep": draw_grid(f"{title}, {size['deep']} blocks", deep, ["SAN", *names], masks)}
    if given.bert:
        trained = {dtype: grid(rs.load(given.bert, dtype=dtype), inputs, masks, NETWORKS) for dtype in FLOORS}
        write_more["trained"] = draw_grid(f"Networks and masks: {given.bert}", trained, list(NETWORKS), masks)
    for name, figure in write_more.items():
        figure.savefig(given.out / f"wu2024_figure2_{name}.png", dpi=130)


if __name__ == "__main__":
    main()

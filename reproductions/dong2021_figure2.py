"""Attention alone loses rank; skips keep it (Dong, Cordonnier and Loukas 2021, figure 2).

The residual of the tokens relative to their size, over depth, in BERT, ALBERT and XLNet at base size, at random
initialisation: with attention only, with MLPs, with skips, and whole. Each network is run twice: as the authors ran it
(their SAN keeps LayerNorm, their SAN+MLP the MLP's own skip) and as the theorem states it. Hollow markers are the
published values. With `--bert`, `--albert` or `--xlnet SPEC`, a trained model is measured too.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from output import COLOURS, MARKERS, options, panels, table, write
from torch import Tensor, nn

import rankscope as rs
from rankscope.models import sample_text

METRIC = "relative_composite_residual"
FAMILIES = {"BERT": "bert", "ALBERT": "albert", "XLNet": "xlnet"}
# What differs from the library's configuration of each family: at base size, and at tiny size.
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_TINY = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BASE: dict[str, dict[str, Any]] = {
    "bert": _BASE,
    "albert": {**_BASE, "embedding_size": 128, "hidden_act": "gelu_new", **_NO_DROPOUT},
    "xlnet": {"vocab_size": 32000, "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072},
}
TINY: dict[str, dict[str, Any]] = {
    "bert": _TINY,
    "albert": {**_TINY, "embedding_size": 16, "bos_token_id": 2, "eos_token_id": 3},
    "xlnet": {"vocab_size": 100, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64, "pad_token_id": 5},
}
SEEDS, THEOREM_SEEDS = 6, 2
CURVES = ("SAN", "SAN+MLP", "SAN+skip", "transformer")
NO_SKIP = {"skip": 0.0}
# Name of the curve, whose version it is, the surgery, and whether the MLP is also taken out as the authors did it.
NETWORKS: tuple[tuple[str, str, dict[str, Any], bool], ...] = (
    ("SAN", "authors", {"attention_skip": 0.0}, True),
    ("SAN+MLP", "authors", {"attention_skip": 0.0}, False),
    ("SAN+skip", "authors", {}, True),
    ("transformer", "authors", {}, False),
    ("SAN", "theorem", {**NO_SKIP, "mlp": "drop", "norm": "identity"}, False),
    ("SAN+MLP", "theorem", {**NO_SKIP, "norm": "identity"}, False),
    ("SAN+skip", "theorem", {"mlp": "drop", "norm": "identity"}, False),
)
PUBLISHED = json.loads(Path(__file__).with_name("dong2021_figure2.published.json").read_text(encoding="utf-8"))


class Bypass(nn.Module):
    """Returns its second argument: BERT's MLP output, its skip and its norm are one module, and all of it goes."""

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """``input_tensor``, unchanged."""
        return input_tensor


# Which modules of a layer the authors replace, and by what. In BERT and XLNet the MLP, its skip and its norm go
# together. In ALBERT both matrices go, and what stays of the block ends in LN(x + gelu(x)).
MLP_SWAPS: dict[str, dict[str, type[nn.Module]]] = {
    "bert": {"intermediate": nn.Identity, "output": Bypass},
    "albert": {"ffn": nn.Identity, "ffn_output": nn.Identity},
    "xlnet": {"ff": nn.Identity},
}


@contextmanager
def mlp_taken_out(model: nn.Module, family: str) -> Iterator[None]:
    """Remove the MLPs as the authors did, inside the ``with`` block."""
    with ExitStack() as restoring:
        for layer in model.modules():
            if type(layer).__name__ in ("BertLayer", "AlbertLayer", "XLNetLayer"):
                for name, replacement in MLP_SWAPS[family].items():
                    restoring.callback(setattr, layer, name, getattr(layer, name))
                    setattr(layer, name, replacement())
        yield


def initialised(family: str, seed: int, *, small: bool) -> rs.Model:
    """A random initialisation of the family."""
    with tempfile.TemporaryDirectory() as folder:
        facts = {"model_type": family, **(TINY if small else BASE)[family]}
        path = Path(folder, "config.json")
        path.write_text(json.dumps(facts), encoding="utf-8")
        return rs.load(f"init:{path}", seed=seed)


def texts(family: str, sequences: int, tokens: int) -> list[str]:
    """Windows of the sample text of as many words as a sequence has room for; the text is repeated, shifted.

    The published curves read wiki_bio, where spaces surround punctuation. WordPiece (BERT) makes one token of a mark,
    SentencePiece (ALBERT, XLNet) two: a word boundary and the mark. This matters for XLNet, which has neither position
    embeddings nor a norm before its first block, so that its residual depends on how often tokens repeat.
    """
    text = sample_text() if family == "bert" else re.sub(r"([^\w\s])", r" wordboundary \1 ", sample_text())
    words = re.findall(r"\w+|[^\w\s]", text)
    room = tokens - SPECIAL_TOKENS[family]
    windows = []
    for index in range(sequences):
        cycle, start = divmod(index * room, len(words))
        windows.append(" ".join(words[(start + 37 * cycle + i) % len(words)] for i in range(room)))
    return windows


SPECIAL_TOKENS = {"bert": 0, "albert": 1, "xlnet": 1}
"""How many tokens that mark start and end a sequence of the configuration has."""


def residuals(model: rs.Model, inputs: rs.Inputs, surgery: dict[str, Any]) -> np.ndarray:
    """The metric before the first block and after each block: (depth, sequences)."""
    run = rs.measure(model, inputs, surgery, metrics=[METRIC], sites=["block.in@0", "block.out"])
    before, after = (run.select(metric=METRIC, site=site)["value"].to_numpy() for site in ("block.in", "block.out"))
    return np.concatenate([before, after]).reshape(-1, before.size)


def curves(model: rs.Model, inputs: rs.Inputs, family: str, readings: set[str]) -> dict[tuple[str, str], np.ndarray]:
    """Every network derived from one model, by reading and curve."""
    found = {}
    for name, reading, surgery, without_mlp in NETWORKS:
        if reading in readings:
            with ExitStack() as open_:
                if without_mlp:
                    open_.enter_context(mlp_taken_out(model.loaded.model, family))
                found[reading, name] = residuals(model, inputs, surgery)
    return found


def summary(seeds: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Mean over initialisations and sequences, and the standard deviation of a sequence of an initialisation."""
    values = np.stack(seeds)
    within = values.std(axis=2, ddof=1).mean(axis=0) if values.shape[2] > 1 else np.zeros(values.shape[1])
    between = values.mean(axis=2).std(axis=0, ddof=1) if len(seeds) > 1 else np.zeros(values.shape[1])
    return {"mean": values.mean(axis=(0, 2)), "spread": np.hypot(within, between)}


def published(model: str, curve: str, weights: str = "init") -> tuple[np.ndarray, np.ndarray]:
    """A published curve, and where it shows neither zero nor rounding."""
    wanted = {"model": model, "weights": weights, "curve": curve}
    entry = next(each for each in PUBLISHED["curves"] if wanted.items() <= each.items())
    values = np.array([np.nan if value is None else value for value in entry["values"]])
    return values, np.isfinite(values) & (np.arange(values.size) < (entry.get("floor_from") or values.size))


def agreement(model: str, curve: str, ours: dict[str, np.ndarray]) -> dict[str, Any]:
    """How many depths agree within the stated spread (its low and its high end) plus ours, and the largest factor."""
    theirs, known = published(model, curve)
    away, low, high = np.abs(ours["mean"] - theirs)[known], PUBLISHED["spread"]["low"], PUBLISHED["spread"]["high"]
    ratio = (ours["mean"] / theirs)[known & (theirs > 1e-3)]
    return {
        "compared": int(known.sum()),
        "within_low_end": int((away <= low + ours["spread"][known]).sum()),
        "within_high_end": int((away <= high + ours["spread"][known]).sum()),
        "largest_factor": float(np.exp(np.abs(np.log(ratio))).max()),
    }


def draw(axes: Any, ours: dict[str, np.ndarray], curve: str, theirs: np.ndarray | None, *, log: bool) -> None:
    """One curve with its band, and hollow markers where the paper has a value."""
    place = CURVES.index(curve)
    look = {"color": COLOURS[place], "marker": MARKERS[place], "markersize": 3}
    mean, spread, depth = ours["mean"], ours["spread"], np.arange(len(ours["mean"]))
    least = 1e-9 if log else 0.0
    axes.plot(depth, np.maximum(mean, least), label=curve, **look)
    axes.fill_between(
        depth, np.maximum(mean - spread, least), mean + spread, color=look["color"], alpha=0.15, linewidth=0
    )
    if theirs is not None:
        axes.plot(depth, theirs, linestyle="none", markerfacecolor="none", **{**look, "markersize": 6})


def main() -> None:
    """Measure every network, compare with the paper, draw."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, metavar="N", help="initialisations of each model")
    for family in FAMILIES.values():
        parser.add_argument(f"--{family}", metavar="SPEC", help="also measure this trained model")
    given = parser.parse_args()
    sequences, tokens = (4, 32) if given.small else (32, 128)
    seeds = given.seeds or (1 if given.small else SEEDS)
    found: dict[str, dict[tuple[str, str], dict[str, np.ndarray]]] = {}
    for name, family in FAMILIES.items():
        inputs = rs.Inputs(texts(family, sequences, tokens), tokens=tokens)
        by_seed = []
        for seed in range(seeds):
            model = initialised(family, seed, small=given.small)
            readings = {"authors", "theorem"} if seed < THEOREM_SEEDS else {"authors"}
            by_seed.append(curves(model, inputs, family, readings))
        found[name] = {key: summary([one[key] for one in by_seed if key in one]) for key in by_seed[0]}
    trained = {name: spec for name, family in FAMILIES.items() if (spec := getattr(given, family))}
    for name, spec in trained.items():
        inputs = rs.Inputs(sequences=sequences, tokens=tokens)
        values = curves(rs.load(spec), inputs, FAMILIES[name], {"authors", "theorem"})
        found[f"{name}, trained"] = {key: summary([one]) for key, one in values.items()}

    numbers: dict[str, Any] = {}
    for name, lines in found.items():
        numbers[name] = {", ".join(key): ours["mean"] for key, ours in lines.items()}
    if not given.small:
        compared = {(name, curve): agreement(name, curve, found[name]["authors", curve])
                    for name in FAMILIES for curve in CURVES}  # fmt: skip
        numbers["agreement with the paper"] = {", ".join(key): entry for key, entry in compared.items()}
        lines = [[*key, *(f"{value:.3g}" for value in entry.values())] for key, entry in compared.items()]
        print(table(["model", "curve", *next(iter(compared.values()))], lines))

    rows = [("authors", False), ("authors", True), ("theorem", True)]
    title = "Relative residual over depth. Lines: ours; hollow: Dong et al. 2021, figure 2; bands: one deviation"
    figure, grid = panels(len(rows), len(found), title=title)
    for line, (reading, log) in zip(grid, rows, strict=True):
        for axes, name in zip(line, found, strict=True):
            for curve in CURVES:
                # The whole model is the same network in both versions.
                ours = found[name]["authors" if curve == "transformer" else reading, curve]
                weights = "trained" if name.endswith("trained") else "init"
                shows = reading == "authors" and not given.small and len(ours["mean"]) == 13
                theirs = published(name.split(",")[0], curve, weights)[0] if shows else None
                draw(axes, ours, curve, theirs, log=log)
            axes.set(title=f"{name}, {'as run by the authors' if reading == 'authors' else 'as in the theorem'}")
            axes.set(yscale="log", ylim=(1e-9, 3.0)) if log else axes.set(ylim=(-0.02, 1.08))
    grid[0][0].legend(fontsize=6)
    write("dong2021_figure2", numbers, figure, given)


if __name__ == "__main__":
    main()

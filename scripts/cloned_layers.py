"""What does it cost that ``nn.TransformerEncoder`` clones one layer?

Encoders of 6 to 48 layers, with norms before or after the branches, as the class builds them (every layer a copy of
one) and with an initialisation of its own for each layer. How much tokens differ after each layer, at initialisation
and after a short training on the next character of the sample text, and the loss; five seeds each. Writes
``docs/data/cloned_layers.json`` and a figure.

    python scripts/cloned_layers.py             # measure and draw, about ten minutes on one core
    python scripts/cloned_layers.py --draw      # draw from the recorded values
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.metrics.residual import relative_residual
from rankscope.models.inputs.text import sample_text

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/data/cloned_layers.json"
TABLE = ROOT / "docs/data/cloned_layers.inc"
FIGURE = ROOT / "docs/_static/figures/cloned_layers.png"
WIDTH, HEADS, TOKENS, BATCH = 32, 4, 16, 8
DEPTHS = (6, 12, 24, 48)
CURVES = 24
"""Number of layers whose residuals are drawn one by one."""


class Network(nn.Module):
    """A causal language model of characters around ``nn.TransformerEncoder``."""

    def __init__(self, words: int, depth: int, *, pre: bool, own: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True, norm_first=pre)
        norm = nn.LayerNorm(WIDTH) if pre else None
        self.encoder = nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False)
        if own:
            for module in self.encoder.layers.modules():  # the fix
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
        self.head = nn.Linear(WIDTH, words)
        self.register_buffer("hidden", nn.Transformer.generate_square_subsequent_mask(TOKENS))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next character."""
        return self.head(self.encoder(self.tokens(ids) + self.places.weight, self.hidden, is_causal=True))


def residuals(model: Network, ids: Tensor) -> list[float]:
    """Relative residual after each layer, the mean over sequences."""
    found: list[float] = []
    hooks = [
        layer.register_forward_hook(lambda *seen: found.append(float(relative_residual(seen[2].double()).mean())))
        for layer in model.encoder.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found


def trained(model: Network, text: Tensor, steps: int, seed: int) -> list[float]:
    """Losses of a short training on random windows of the text."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        at = torch.randint(len(text) - TOKENS - 1, (BATCH,), generator=generator)
        windows = torch.stack([text[i : i + TOKENS + 1] for i in at.tolist()])
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def measure_all(steps: int, seeds: int, kept: list[dict[str, Any]]) -> dict[str, Any]:
    """Every encoder, measured, trained, and measured again; what an interrupted call has stored is not repeated."""
    letters = sorted(set(sample_text()))
    text = torch.tensor([letters.index(letter) for letter in sample_text()])
    ids = torch.stack([text[i : i + TOKENS] for i in range(0, 4 * 200, 200)])
    counts = torch.bincount(text).double()
    unigram = float(-(counts / counts.sum() * (counts / counts.sum()).log()).sum())
    setting = {"width": WIDTH, "heads": HEADS, "tokens": TOKENS, "batch": BATCH, "steps": steps, "unigram": unigram}
    stored = {"date": date.today().isoformat(), "torch": torch.__version__, "setting": setting, "runs": kept}
    for seed, depth, pre, own in product(range(seeds), DEPTHS, (True, False), (False, True)):
        if any(run["seed"] == seed for run in of(stored, pre=pre, own=own, depth=depth)):
            continue
        began = time.process_time()
        torch.manual_seed(seed)
        model = Network(len(letters), depth, pre=pre, own=own)
        start = residuals(model, ids)
        losses = trained(model, text, steps, seed)
        run = {"depth": depth, "pre": pre, "own": own, "seed": seed, "start": start, "end": residuals(model, ids)[-1],
               "loss": [losses[0], float(np.mean(losses[-10:]))]}  # fmt: skip
        stored["runs"].append(run)
        DATA.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        seconds = round(time.process_time() - began, 1)
        print(depth, pre, own, seed, start[-1], run["end"], run["loss"], seconds, flush=True)
    return stored


def of(stored: dict[str, Any], *, pre: bool, own: bool, depth: int) -> list[dict[str, Any]]:
    """The runs of one encoder."""
    return [run for run in stored["runs"] if (run["pre"], run["own"], run["depth"]) == (pre, own, depth)]


def draw(stored: dict[str, Any]) -> None:
    """The figure: residuals by layer at one depth, by depth at both times, and the loss."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15.5, 4.3), layout="constrained")
    arms = {
        (False, False): ("post-norm, cloned", "#d55e00", "-"),
        (False, True): ("post-norm, own initialisation", "#d55e00", "--"),
        (True, False): ("pre-norm, cloned", "#0072b2", "-"),
        (True, True): ("pre-norm, own initialisation", "#0072b2", "--"),
    }
    for (pre, own), (name, colour, style) in arms.items():
        curves = np.array([run["start"] for run in of(stored, pre=pre, own=own, depth=CURVES)])
        layers = np.arange(1, CURVES + 1)
        axes[0].semilogy(layers, np.exp(np.log(curves).mean(0)), style, color=colour, label=name)
        axes[0].fill_between(layers, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
        for axis, pick in (
            (axes[1], lambda run: run["start"][-1]),
            (axes[2], lambda run: run["end"]),
            (axes[3], lambda run: run["loss"][1]),
        ):
            found = {
                depth: np.array([pick(run) for run in runs])
                for depth in DEPTHS
                if (runs := of(stored, pre=pre, own=own, depth=depth))
            }
            middle = [v.mean() if axis is axes[3] else np.exp(np.log(v).mean()) for v in found.values()]
            axis.plot(list(found), middle, style, color=colour, marker="o", markersize=4)
            least, most = [v.min() for v in found.values()], [v.max() for v in found.values()]
            axis.fill_between(list(found), least, most, color=colour, alpha=0.15, linewidth=0)
    steps = stored["setting"]["steps"]
    titles = (
        f"{CURVES} layers, at initialisation", "after the last layer, at initialisation",
        f"after the last layer, {steps} steps later", f"loss after {steps} steps",
    )  # fmt: skip
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="layer" if axis is axes[0] else "number of layers")
    for axis in axes[:3]:
        axis.set(yscale="log")
    axes[0].set_ylabel("how much tokens differ (relative residual)")
    axes[3].set_ylabel("cross-entropy per character")
    axes[3].axhline(stored["setting"]["unigram"], color="0.5", linewidth=0.8, linestyle=":")
    axes[3].annotate("frequencies alone", (DEPTHS[-1], stored["setting"]["unigram"]), ha="right", va="bottom",
                     fontsize=8, color="0.4")  # fmt: skip
    for axis in axes[1:]:
        axis.set(xscale="log", xticks=DEPTHS, xticklabels=[str(depth) for depth in DEPTHS])
        axis.minorticks_off()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=120)


def table(stored: dict[str, Any]) -> str:
    """Means over seeds in Markdown, geometric for residuals; in brackets the smallest and the largest."""
    lines = [
        "| norms | layers | initialisation | seeds | tokens differ | after training | loss |",
        "|---|---:|---|---:|---|---|---|",
    ]
    for pre in (False, True):
        for depth in DEPTHS:
            for own in (False, True):
                runs = of(stored, pre=pre, own=own, depth=depth)
                if not runs:
                    continue
                start, end = np.array([run["start"][-1] for run in runs]), np.array([run["end"] for run in runs])
                loss = np.array([run["loss"][1] for run in runs])
                told = [f"{np.exp(np.log(v).mean()):.2g} ({v.min():.2g} to {v.max():.2g})" for v in (start, end)]
                told.append(f"{loss.mean():.2f} ({loss.min():.2f} to {loss.max():.2f})")
                arm = "one for each layer" if own else "cloned"
                lines.append(f"| {'pre' if pre else 'post'} | {depth} | {arm} | {len(runs)} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--resume", action="store_true", help="measure only what the recorded values lack")
    parser.add_argument("--draw", action="store_true", help="draw the recorded values")
    chosen = parser.parse_args()
    if not chosen.draw:
        kept = json.loads(DATA.read_text(encoding="utf-8"))["runs"] if chosen.resume else []
        measure_all(chosen.steps, chosen.seeds, kept)
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    TABLE.write_text(table(stored), encoding="utf-8")
    draw(stored)


if __name__ == "__main__":
    main()

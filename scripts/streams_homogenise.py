"""Do mixing matrices make the residual streams of a token alike, and as fast as the spectral law says?

Four small language models with 24 blocks and 4 streams per token, at initialisation and after a short training:
hyper-connections with static and with input-dependent mixing, and doubly stochastic ones (mHC) that start near the
identity or uniform. Writes ``docs/data/streams.json`` and a figure.

    python scripts/streams_homogenise.py            # measure and draw, a few minutes on one core
    python scripts/streams_homogenise.py --draw     # draw from the recorded values
"""

from __future__ import annotations

import argparse
import json
import math
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rankscope as rs
from rankscope.models.inputs import Batch
from rankscope.models.inputs.text import sample_text
from rankscope.stream.mixing import mixing_matrices
from rankscope.stream.viewing import known_view

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/data/streams.json"
FIGURE = ROOT / "docs/_static/figures/streams.png"
STREAMS, WIDTH, HEADS, DEPTH, TOKENS = 4, 32, 4, 24, 32
ARMS = {
    "static": "hyper-connections, static",
    "dynamic": "hyper-connections, dynamic",
    "near identity": "doubly stochastic, from near the identity",
    "uniform": "doubly stochastic, from uniform",
}


class Connection(nn.Module):
    """Reads one stream for a branch, mixes the streams, and writes the branch's output to each of them."""

    def __init__(self, arm: str, number: int) -> None:
        super().__init__()
        self.arm = arm
        self.read = nn.Parameter(F.one_hot(torch.tensor(number % STREAMS), STREAMS).float())
        self.write = nn.Parameter(torch.ones(STREAMS))
        start = torch.eye(STREAMS)
        if arm == "near identity":
            start = 4.0 * start
        elif arm == "uniform":
            start = torch.zeros(STREAMS, STREAMS)
        self.mix = nn.Parameter(start)
        if arm != "static":
            self.norm = nn.LayerNorm(WIDTH * STREAMS, elementwise_affine=False)
            self.moved = nn.Linear(WIDTH * STREAMS, STREAMS * STREAMS, bias=False)
            self.gain = nn.Parameter(torch.tensor(0.01))
            nn.init.normal_(self.moved.weight, std=1 / math.sqrt(WIDTH * STREAMS))

    def matrix(self, x: Tensor) -> Tensor:
        """How the streams of each token are mixed."""
        if self.arm == "static":
            return self.mix
        moved = self.moved(self.norm(x.flatten(2))).unflatten(-1, (STREAMS, STREAMS))
        if self.arm == "dynamic":
            return self.mix + self.gain * moved.tanh()
        scores = (self.mix + self.gain * moved).exp()
        for _ in range(5):
            scores = scores / scores.sum(-1, keepdim=True)
            scores = scores / scores.sum(-2, keepdim=True)
        return scores

    def forward(self, x: Tensor, branch: nn.Module) -> Tensor:
        """Streams ``batch tokens streams dim`` after one branch."""
        out = branch(torch.einsum("btsd,s->btd", x, self.read))
        mixed = torch.matmul(self.matrix(x), x)
        return mixed + out[:, :, None] * self.write[:, None]


class Attention(nn.Module):
    """Causal attention with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """What it adds."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Sequential):
    """An MLP with a norm before it."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Block(nn.Module):
    """Attention and MLP, each with its own connection."""

    def __init__(self, arm: str, number: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.first, self.second = Connection(arm, 2 * number), Connection(arm, 2 * number + 1)

    def forward(self, x: Tensor) -> Tensor:
        """The streams after the block."""
        return self.second(self.first(x, self.attention), self.mlp)


class Network(nn.Module):
    """A character model whose streams start as the same embedding plus a vector of their own."""

    def __init__(self, arm: str, words: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.starts = nn.Parameter(torch.randn(STREAMS, WIDTH))
        self.blocks = nn.ModuleList(Block(arm, number) for number in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words)
        for name, weight in self.named_parameters():
            # The usual scaling of output projections with depth keeps the stream's size from growing with it.
            if name.endswith(("attention.out.weight", "mlp.3.weight")):
                weight.data /= math.sqrt(2 * DEPTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next character."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        x = x[:, :, None] + self.starts
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.sum(2)))


def measured(model: Network, ids: Tensor) -> dict[str, object]:
    """What ``measure`` says, and what mixing alone would leave of the differences at the start."""
    model.eval()
    run = rs.measure(model, rs.Inputs(ids, batch=len(ids)), metrics=["relative_residual"])
    (found,) = run.extra["streams"]
    batch = Batch({}, None, 0, len(ids), (ids,))
    view = known_view(model)
    assert view is not None
    inside: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, args: inside.append(args[0])) for block in model.blocks]
    hooks.append(model.blocks[-1].register_forward_hook(lambda *given: inside.append(given[2])))
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    predicted, apart = [], inside[0].double() - inside[0].double().mean(2, keepdim=True)
    for H, left in zip(mixing_matrices(view, view.stacks[0], batch).values(), inside[1:], strict=True):
        apart = H @ apart
        apart = apart - apart.mean(2, keepdim=True)
        predicted.append(float((apart.norm(dim=(2, 3)) / left.double().norm(dim=(2, 3))).mean()))
    return {
        "residual": [float(v) for v in run.curve("relative_residual", "streams.out").mean],
        "entry": float(run.curve("relative_residual", "streams.in").mean[0]),
        "from the start": predicted,
        "kind": found["kind"],
        "contraction": list(found["contraction"]),
        "second eigenvalue": list(found["second_eigenvalue"]),
        "log10 product": list(found["log10_product_contraction"]),
        "verdict": run.verdict,
    }


def trained(model: Network, text: Tensor, steps: int, seed: int) -> list[float]:
    """Losses of a short training on random windows of the text."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    losses = []
    for _ in range(steps):
        at = torch.randint(len(text) - TOKENS - 1, (8,), generator=generator)
        windows = torch.stack([text[i : i + TOKENS + 1] for i in at.tolist()])
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


def measure_all(steps: int, seeds: int) -> dict[str, object]:
    """Every arm, measured, trained, and measured again."""
    letters = sorted(set(sample_text()))
    text = torch.tensor([letters.index(letter) for letter in sample_text()])
    ids = torch.stack([text[i : i + TOKENS] for i in range(0, 2 * 200, 200)])
    runs = []
    for arm in ARMS:
        for seed in range(seeds):
            began = time.perf_counter()
            torch.manual_seed(seed)
            model = Network(arm, len(letters))
            start = measured(model, ids)
            losses = trained(model, text, steps, seed)
            end = measured(model, ids)
            writes = torch.stack([c.write.detach() for b in model.blocks for c in (b.first, b.second)])
            spread = ((writes - writes.mean(1, keepdim=True)).norm(dim=1) / writes.norm(dim=1)).mean()
            runs.append({"arm": arm, "seed": seed, "start": start, "end": end, "loss": [losses[0], losses[-1]],
                         "spread of writes": float(spread)})  # fmt: skip
            print(f"{arm} {seed}: loss {losses[0]:.2f} to {losses[-1]:.2f}, streams {start['residual'][-1]:.2g} to "
                  f"{end['residual'][-1]:.2g}, {time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip
    setting = {"streams": STREAMS, "width": WIDTH, "heads": HEADS, "blocks": DEPTH, "tokens": TOKENS, "steps": steps}
    return {"date": date.today().isoformat(), "torch": torch.__version__, "setting": setting, "runs": runs}


def draw(stored: dict[str, object]) -> None:
    """The figure."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13.5, 4.6), layout="constrained")
    colours = dict(zip(ARMS, ("#0072b2", "#56b4e9", "#d55e00", "#009e73"), strict=True))
    blocks = np.arange(DEPTH)
    for arm, colour in colours.items():
        runs = [run for run in stored["runs"] if run["arm"] == arm]
        for axis, when in zip(axes, ("start", "end"), strict=False):
            solid = np.exp(np.mean([np.log(run[when]["residual"]) for run in runs], axis=0))
            dashed = np.exp(np.mean([np.log(np.maximum(run[when]["from the start"], 1e-30)) for run in runs], axis=0))
            axis.semilogy(blocks, solid, color=colour, label=ARMS[arm])
            axis.semilogy(blocks, dashed, color=colour, linestyle=(0, (2, 2)))
        for when, style in (("start", "--"), ("end", "-")):
            product = np.mean([run[when]["log10 product"] for run in runs], axis=0)
            axes[2].plot(blocks, product, style, color=colour)
    for axis, title in zip(
        axes[:2],
        ("at initialisation", f"after {stored['setting']['steps']} steps of training"),
        strict=True,
    ):
        axis.set(title=title, xlabel="block", ylabel="relative residual over streams", ylim=(1e-9, 2))
        axis.axhline(0.03, color="0.6", linewidth=0.8)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    axes[0].text(0.3, 0.03, "solid: measured\ndotted: by mixing alone", transform=axes[0].transAxes, fontsize=8)
    uniform = [run for run in stored["runs"] if run["arm"] == "uniform"]
    ends = [run[when]["log10 product"][-1] for when in ("start", "end") for run in uniform]
    said = f"dashed: at initialisation\nsolid: after training\nfrom uniform: to {min(ends):.0f} and {max(ends):.0f}"
    axes[2].text(0.1, 0.03, said, transform=axes[2].transAxes, fontsize=8)
    axes[2].set(title="product of the mixing matrices", xlabel="block", ylim=(-3, 1))
    axes[2].set_ylabel("log10 of its largest factor on differences")
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=120)


def main() -> None:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--draw", action="store_true", help="draw the recorded values")
    chosen = parser.parse_args()
    if not chosen.draw:
        DATA.write_text(json.dumps(measure_all(chosen.steps, chosen.seeds), indent=1) + "\n", encoding="utf-8")
    draw(json.loads(DATA.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()

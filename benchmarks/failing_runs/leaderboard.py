"""What rescues what: designs that fail to train, each trained again with each remedy.

::

    python -m benchmarks.failing_runs.leaderboard train   # continues where it stopped
    python -m benchmarks.failing_runs.leaderboard write

Every run of a design and a seed starts from the same weights and sees the same batches for the same number of steps;
only the remedy differs. Two runs frame it: the design as it is, and its sound sibling, in which the one fault is
repaired (``Design.sound``).

**Rescued**: weights and loss are finite; the loss on held-out data closes at least half of the gap between the design
as it is and its sound sibling; and the alarms in which the design ends without a remedy, with every seed, are below
their thresholds after the last step. A seed counts only if the design fails without a remedy: its held-out loss is at
least 5% above that of its sibling. All of this was fixed before any remedy was trained, except for which alarms have to
be over. That was all of ``COLLAPSES`` at first. The results showed that attention as a mixture of matrices
(``MIXTURES``) is not a distribution, so that its entropy means nothing: these are not judged by ``entropy_collapse``.

Remedies are applied by ``rankscope.remedies.applied`` at their default strength; what a paper learns is learned. Two
"remedies" change the training instead of the network, for comparison (``RECIPES``).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.failing_runs.nets import HEADS, TOKENS, cross_entropy, text_ids, windows
from rankscope import Inputs, Model
from rankscope.errors import UnsupportedOperationError
from rankscope.monitor.alarms import ALARMS
from rankscope.monitor.probing import ProbeBattery, Prober, chosen_metrics
from rankscope.monitor.watching import References, worst_of
from rankscope.remedies import REMEDIES, Treatment, applied

WIDTH, BATCH, STEPS, SEEDS, HELD_OUT, PROBE = 32, 8, 60, (0, 1, 2), 64, 8
CLOSES, FAILS = 0.5, 1.05
"""The share of the gap that a remedy has to close, and the ratio of losses from which on a design fails."""
ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "data" / "leaderboard.json"
EVIDENCE = ROOT / "src" / "rankscope" / "remedies" / "evidence.json"
FIGURE = ROOT / "docs" / "_static" / "figures" / "leaderboard.png"
COLLAPSES = ("token_collapse", "input_collapse", "entropy_collapse")
MIXTURES = frozenset({"centred_attention", "shaped_attention", "value_skipinit"})
AS_IS, SOUND = "none", "sound sibling"

Kind = Literal["post-norm", "pre-norm", "no skips"]


@dataclass(frozen=True)
class Design:
    """A small network and how it is trained.

    Attributes:
        name: its name.
        kind: how its norms and skips are arranged.
        fault: what is wrong with it, in words.
        layers: number of blocks.
        rate: learning rate.
        warmup: steps over which the rate rises.
        decay: weight decay.
        gain: standard deviation of the weights times the square root of the width they read.
        growth: factor on query and key weights at every step.
        sound: what the sound sibling has instead.
    """

    name: str
    kind: Kind
    fault: str = ""
    layers: int = 4
    rate: float = 3e-3
    warmup: int = 0
    decay: float = 0.01
    gain: float = 1.0
    growth: float = 1.0
    sound: Mapping[str, Any] = field(default_factory=dict)


DESIGNS: tuple[Design, ...] = (
    Design("deep post-norm", "post-norm", "8 blocks, no warm-up", layers=8, sound={"kind": "pre-norm"}),
    Design("post-norm, high rate", "post-norm", "learning rate 10 times too high", gain=0.6, rate=3e-2,
           sound={"rate": 3e-3, "warmup": 15}),
    Design("no skips", "no skips", "6 blocks without residual connections", layers=6, sound={"kind": "pre-norm"}),
    Design("queries and keys grow", "pre-norm", "query and key weights grow by 8% at every step", growth=1.08,
           sound={"growth": 1.0}),
    Design("weight decay", "pre-norm", "weight decay 20, that is 6% of every weight at every step", decay=20.0,
           sound={"decay": 0.01}),
)  # fmt: skip

RECIPES: dict[str, Mapping[str, Any]] = {
    "a tenth of the rate": {"rate": 1 / 10},
    "warm-up": {"warmup": STEPS // 2},
}
"""Changes of the training: factors on the rate, steps of warm-up."""


class Attention(nn.Module):
    """Causal softmax attention, written so that every remedy can find its parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attention of all heads, and the output weights."""
        batch, tokens, width = x.shape
        q, k, v = (
            proj(x).view(batch, tokens, HEADS, -1).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention and an MLP, with norms before the branches, after the sums, or before parts without skips."""

    def __init__(self, kind: Kind, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block."""
        if self.kind == "post-norm":
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        if self.kind == "pre-norm":
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        return self.mlp(self.norm2(self.attention(self.norm1(x))))


class Net(nn.Module):
    """Embeddings, the blocks of a design, and a head."""

    def __init__(self, design: Design, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(design.kind, WIDTH) for _ in range(design.layers))
        self.norm = nn.Identity() if design.kind == "post-norm" else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=design.gain / math.sqrt(linear.in_features))
                nn.init.zeros_(linear.bias)

    def encode(self, input_ids: Tensor) -> Tensor:
        """The stream after the last block and norm."""
        x = self.embed(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.encode(input_ids))


class Training:
    """A network, its data and its loss, the same for every remedy."""

    def __init__(self, design: Design, seed: int) -> None:
        torch.manual_seed(seed)
        self.design, self.generator = design, torch.Generator().manual_seed(seed)
        text, self.vocabulary = text_ids()
        self.text, self.unseen = text[: -len(text) // 5], text[-len(text) // 5 :]
        self.model = Net(design, self.vocabulary)

    def held_out(self, count: int) -> Tensor:
        """Sequences of the part of the text that is not trained on."""
        return windows(self.unseen, count, torch.Generator().manual_seed(10_000))

    def loss(self) -> Tensor:
        """The loss of the next batch."""
        return self._loss_of(windows(self.text, BATCH, self.generator))

    @torch.no_grad()
    def quality(self) -> float:
        """The loss on held-out data."""
        return float(self._loss_of(self.held_out(HELD_OUT)))

    def _loss_of(self, ids: Tensor) -> Tensor:
        return cross_entropy(self.model(ids)[:, :-1], ids[:, 1:])


def recipe_of(design: Design, remedy: str) -> Design:
    """The design as it is trained under a name that is not a remedy of the network."""
    if remedy == SOUND:
        return replace(design, **design.sound)
    change = RECIPES.get(remedy, {})
    return replace(
        design, rate=design.rate * change.get("rate", 1.0), warmup=max(design.warmup, change.get("warmup", 0))
    )


def train(design: Design, remedy: str, seed: int) -> dict[str, Any]:
    """One training: the loss on held-out data, and the state of the gauge's collapse alarms after the last step.

    Raises:
        UnsupportedOperationError: the remedy cannot be applied to the design; the message gives the reason.
    """
    started = time.process_time()
    training = Training(recipe_of(design, remedy), seed)
    model, probe = training.model, {"input_ids": training.held_out(PROBE)}
    under: Any = nullcontext()
    if remedy in REMEDIES:
        under = applied(model, remedy, learnable=REMEDIES[remedy].learnable, inputs=probe)
    with under as given:
        specs = chosen_metrics(None)
        prober = Prober(Model(model), Inputs(probe, sequences=PROBE, tokens=TOKENS), ProbeBattery(specs, "content"))
        references = References()
        references.take(prober.look())  # also creates what a remedy learns
        descend(training, given)
        last = prober.look()
        references.take(last)
        states = references.states(last)
        quality = training.quality()
    severity = {}
    for name in COLLAPSES:
        found = worst_of(ALARMS[name], None, states)
        severity[name] = None if found is None else found[0]
    ends = {row.metric: row.mean for row in last if row.layer == design.layers - 1}
    finite = math.isfinite(quality) and all(bool(p.isfinite().all()) for p in model.parameters())
    return {
        "design": design.name,
        "remedy": remedy,
        "seed": seed,
        "loss": quality if math.isfinite(quality) else None,
        "finite": finite,
        "collapsed": [name for name, value in severity.items() if value is not None and value >= 1.0],
        **{name: _plain(ends.get(name)) for name in ("relative_residual", "attention_entropy", "stable_rank")},
        "inputs_relative_residual": _plain(ends.get("inputs_relative_residual")),
        "seconds": round(time.process_time() - started, 2),
    }


def descend(training: Training, given: Treatment | None) -> None:
    """All steps of a training; parameters of the remedy learn without weight decay."""
    design, model = training.design, training.model
    groups = [{"params": list(model.parameters())}]
    if given is not None and any(True for _ in given.parameters()):
        groups.append({"params": list(given.parameters()), "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=design.rate, weight_decay=design.decay, fused=True)
    learned = [parameter for group in groups for parameter in group["params"]]
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = design.rate * min(1.0, (step + 1) / max(1, design.warmup))
        optimizer.zero_grad()
        training.loss().backward()
        nn.utils.clip_grad_norm_([p for p in learned if p.grad is not None], 1.0)
        optimizer.step()
        if design.growth != 1.0:
            with torch.no_grad():
                for module in model.modules():
                    if isinstance(module, Attention):
                        module.q_proj.weight.mul_(design.growth)
                        module.k_proj.weight.mul_(design.growth)


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def missing(
    told: Mapping[str, Any], designs: Sequence[Design], seeds: Sequence[int], remedies: Sequence[str]
) -> list[tuple[Design, str, int]]:
    """What has not been trained yet: the frame of every design first, then seed by seed."""
    done = {(run["design"], run["remedy"], run["seed"]) for run in told["runs"]}
    frame = [(design, name, seed) for seed in seeds for name in (AS_IS, SOUND) for design in designs]
    rest = [(design, name, seed) for seed in seeds for name in remedies for design in designs]
    return [
        (design, name, seed)
        for design, name, seed in (*frame, *rest)
        if (design.name, name, seed) not in done and name not in told["refused"].get(design.name, {})
    ]


def train_missing(out: Path, designs: Sequence[Design], seeds: Sequence[int], remedies: Sequence[str]) -> None:
    """Train what is missing, and store each run as soon as it is done."""
    told: dict[str, Any] = {"date": "", "steps": STEPS, "refused": {}, "runs": []}
    if out.exists():
        told = json.loads(out.read_text())
    for design, name, seed in missing(told, designs, seeds, remedies):
        if name in told["refused"].get(design.name, {}):
            continue
        try:
            told["runs"].append(train(design, name, seed))
        except UnsupportedOperationError as error:
            told["refused"].setdefault(design.name, {})[name] = str(error)
        told["date"] = date.today().isoformat()
        part = out.with_suffix(".part")
        part.write_text(json.dumps(told, indent=1) + "\n")
        part.replace(out)


def failing(told: Mapping[str, Any]) -> dict[tuple[str, int], tuple[dict[str, Any], dict[str, Any]]]:
    """The run as it is and that of the sound sibling, by design and seed, where the former fails."""
    runs = {(run["design"], run["remedy"], run["seed"]): run for run in told["runs"]}
    found = {}
    for (design, remedy, seed), sound in runs.items():
        as_is = runs.get((design, AS_IS, seed))
        if remedy == SOUND and as_is is not None and (as_is["loss"] is None or as_is["loss"] >= FAILS * sound["loss"]):
            found[design, seed] = as_is, sound
    return found


def alarms_of(told: Mapping[str, Any], design: str) -> set[str]:
    """The alarms in which a design ends without a remedy, with every seed with which it fails."""
    ends = [set(as_is["collapsed"]) for (name, _), (as_is, _) in failing(told).items() if name == design]
    return set.intersection(*ends) if ends else set()


def outcomes(told: Mapping[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """For each design and remedy the seeds that count: the share of the gap that was closed, and whether it rescued."""
    frame, alarms = failing(told), {design.name: alarms_of(told, design.name) for design in DESIGNS}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in told["runs"]:
        design, seed = run["design"], run["seed"]
        if (design, seed) not in frame:
            continue
        as_is, sound = frame[design, seed]
        worst = math.inf if as_is["loss"] is None else as_is["loss"]
        closed = -math.inf if run["loss"] is None else (worst - run["loss"]) / (worst - sound["loss"])
        on = alarms[design] & set(run["collapsed"]) - ({"entropy_collapse"} if run["remedy"] in MIXTURES else set())
        rescued = run["finite"] and closed >= CLOSES and not on
        facts = {"seed": seed, "closed": closed, "rescued": rescued, "run": run}
        found.setdefault((design, run["remedy"]), []).append(facts)
    return found


def evidence(told: Mapping[str, Any]) -> dict[str, Any]:
    """What ships with the package: how many trainings each remedy rescued, for each design that fails without one."""
    found, designs = outcomes(told), []
    for design in DESIGNS:
        if (design.name, AS_IS) not in found:
            continue
        tried = {name: found[design.name, name] for name in REMEDIES if (design.name, name) in found}
        counts = {name: [sum(one["rescued"] for one in ones), len(ones)] for name, ones in tried.items()}
        facts = {
            "name": design.name,
            "arrangement": design.kind,
            "alarms": sorted(alarms_of(told, design.name)),
            "remedies": counts,
        }
        designs.append(facts)
    return {"date": told["date"], "source": "benchmarks/failing_runs/leaderboard.py", "designs": designs}


def order(told: Mapping[str, Any]) -> list[str]:
    """Names of remedies and recipes, the largest share of rescued trainings first, then the share of the gap closed."""
    found = outcomes(told)
    ones = {
        name: [one for design in DESIGNS for one in found.get((design.name, name), [])]
        for name in (*REMEDIES, *RECIPES)
    }

    def place(name: str) -> tuple[float, float]:
        rescued = sum(one["rescued"] for one in ones[name]) / len(ones[name])
        return -rescued, -sum(min(1.0, max(0.0, one["closed"])) for one in ones[name]) / len(ones[name])

    return sorted((name for name in ones if ones[name]), key=place)


def table(told: Mapping[str, Any]) -> str:
    """The leaderboard in Markdown: rescued trainings, and the median share of the gap that was closed."""
    found = outcomes(told)
    lines = [
        "| remedy | " + " | ".join(design.name for design in DESIGNS) + " | all |",
        "|---" * (len(DESIGNS) + 2) + "|",
    ]
    for name in order(told):
        ones = [found.get((design.name, name), []) for design in DESIGNS]
        flat = [one for some in ones for one in some]
        shown = f"`{name}`" if name in REMEDIES else f"*{name}*"
        cells = [_cell(told, design, name, some) for design, some in zip(DESIGNS, ones, strict=True)]
        total = f"{sum(one['rescued'] for one in flat)} of {len(flat)}"
        lines.append(f"| {shown} | " + " | ".join(cells) + f" | {total} |")
    return "\n".join(lines) + "\n"


def _cell(told: Mapping[str, Any], design: Design, name: str, ones: Sequence[Mapping[str, Any]]) -> str:
    if not ones:
        return "n/a" if name in told["refused"].get(design.name, {}) else "not run"
    return f"{sum(one['rescued'] for one in ones)} of {len(ones)} ({_closed(ones):+.0%})"


def _closed(ones: Sequence[Mapping[str, Any]]) -> float:
    return max(-9.99, median(one["closed"] for one in ones))


def frames(told: Mapping[str, Any]) -> str:
    """The designs in Markdown: fault, the losses that frame them, alarms at the end, and what cannot be applied."""
    found = outcomes(told)
    lines = ["| design | fault | loss as it is | loss of the sound sibling | alarms at the end | not applicable |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for design in DESIGNS:
        as_is, sound = found.get((design.name, AS_IS), []), found.get((design.name, SOUND), [])
        losses = [", ".join(f"{one['run']['loss']:.2f}" for one in ones) or "does not fail" for ones in (as_is, sound)]
        alarms = sorted(alarms_of(told, design.name))
        reasons: dict[str, list[str]] = {}
        for name, why in told["refused"].get(design.name, {}).items():
            need = re.search(r"needs ([\w-]+(?: blocks)?)", why)
            reasons.setdefault(f"needs {need[1]}" if need else "refused", []).append(f"`{name}`")
        words = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
        lines.append(f"| {design.name} | {design.fault} | {losses[0]} | {losses[1]} | {', '.join(alarms)} | {words} |")
    return "\n".join(lines) + "\n"


def draw(told: Mapping[str, Any], path: Path) -> None:
    """A heatmap of remedies by designs: colour for the share of the gap that was closed, text for rescued trainings."""
    import matplotlib.pyplot as plt
    import numpy as np

    found, names = outcomes(told), order(told)
    ones = [[found.get((design.name, name), []) for design in DESIGNS] for name in names]
    shares = np.array([[_closed(some) if some else np.nan for some in row] for row in ones])
    figure, axes = plt.subplots(figsize=(8.6, 0.33 * len(names) + 1.7), layout="constrained")
    colours = plt.get_cmap("RdYlBu").with_extremes(bad="#e4e4e4")
    image = axes.imshow(np.clip(shares, -0.5, 1.5), cmap=colours, vmin=-0.5, vmax=1.5, aspect="auto")
    for row, of_name in enumerate(ones):
        for column, some in enumerate(of_name):
            rescued = sum(one["rescued"] for one in some)
            text = f"{rescued} of {len(some)}" if some else _cell(told, DESIGNS[column], names[row], some)
            bold = bool(some) and rescued == len(some)
            dark = bool(some) and abs(shares[row, column] - 0.5) > 0.75
            axes.text(column, row, text, ha="center", va="center", fontsize=8.5, weight="bold" if bold else "normal",
                      color="#888888" if not some else "white" if dark else "black")  # fmt: skip
    axes.set_xticks(
        range(len(DESIGNS)), [design.name.replace(", ", ",\n").replace(" and ", "\nand ") for design in DESIGNS]
    )
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, labelsize=9)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.6, ticks=[-0.5, 0, 0.5, 1, 1.5])
    bar.ax.set_yticklabels(["-50% or worse", "0: no remedy", "50%", "100%: sound", "150%"], fontsize=8)
    bar.set_label("share of the loss gap closed (median of seeds)", fontsize=8.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write(out: Path) -> None:
    """Write what follows from the record: the evidence of the package, the tables and the figure of the page."""
    told = json.loads(out.read_text())
    EVIDENCE.write_text(json.dumps(evidence(told), indent=1) + "\n")
    out.with_suffix(".inc").write_text(table(told))
    out.with_name("leaderboard_designs.inc").write_text(frames(told))
    draw(told, FIGURE)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=("train", "write"))
    parser.add_argument("--out", type=Path, default=RECORD, help="file of the runs")
    parser.add_argument("--designs", nargs="+", default=[design.name for design in DESIGNS])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--remedies", nargs="+", default=(*RECIPES, *REMEDIES), help="in this order")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.act == "train":
        designs = [design for design in DESIGNS if design.name in options.designs]
        train_missing(options.out, designs, options.seeds, options.remedies)
    write(options.out)


if __name__ == "__main__":
    main()

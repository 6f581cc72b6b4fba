"""One trained example of each axis along which a model can collapse, beside its healthy twin.

    python -m scripts.which_collapse             # train, measure and draw, some minutes on one core
    python -m scripts.which_collapse --draw      # draw the recorded values

Writes ``docs/data/which_collapse.json``, what the page includes, and a figure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from examples.same_vector import same_from
from scripts import streams_homogenise
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4Model, GPT2Config, GPT2Model, OlmoeConfig, OlmoeForCausalLM

import rankscope as rs
from rankscope.models.inputs.rows import hash_tokenizer
from rankscope.models.inputs.text import sample_text
from rankscope.models.pretrained import pretrained_folder
from rankscope.runs.rows import only
from rankscope.verdicts.states import COLLAPSED_RESIDUAL
from rankscope.views.palette import BLUE, VERMILION

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "which_collapse.json"
TABLE = ROOT / "docs" / "data" / "which_collapse.inc"
VERDICT = ROOT / "docs" / "data" / "which_collapse_one.inc"
FIGURE = ROOT / "docs" / "_static" / "figures" / "which_collapse.png"
LETTERS = sorted(set(sample_text()))
TEXT = torch.tensor([LETTERS.index(letter) for letter in sample_text()])
TOKENS, BATCH = 48, 16
LENGTHS = [32, 128, 512]
PROMPTED = [32, 128, 512, 2048]
COUNTED = [8, 32, 128, 512, 2048]
PROBE = torch.stack([TEXT[start : start + TOKENS] for start in range(0, 16 * 150, 150)])


def windows(generator: torch.Generator) -> Tensor:
    """Random windows of the text."""
    starts = torch.randint(len(TEXT) - TOKENS, (BATCH,), generator=generator).tolist()
    return torch.stack([TEXT[start : start + TOKENS] for start in starts])


def trained(model: nn.Module, loss: Callable[[Tensor], Tensor], steps: int, rate: float) -> list[float]:
    """The losses of a training with AdamW."""
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    losses = []
    for _ in range(steps):
        value = loss(windows(generator))
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        losses.append(value.item())
    model.eval()
    return losses


def decoder(blocks: int, positions: int = TOKENS) -> GPT2Model:
    """A small GPT-2 without dropout."""
    config = GPT2Config(
        vocab_size=len(LETTERS),
        n_embd=64,
        n_layer=blocks,
        n_head=4,
        n_positions=positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2Model(config)


def next_letter(model: nn.Module, head: nn.Linear, ids: Tensor) -> Tensor:
    """How well the letters that follow are predicted."""
    states = model(input_ids=ids[:, :-1]).last_hidden_state
    return F.cross_entropy(head(states).flatten(0, 1), ids[:, 1:].flatten())


def tokens(collapsed: bool) -> tuple[nn.Module, list[float]]:
    """The next letter, with skip connections and without."""
    model, head = decoder(12), nn.Linear(64, len(LETTERS))
    with rs.operate(model, rs.Surgery(skip=0)) if collapsed else nullcontext():
        losses = trained(nn.ModuleList([model, head]), lambda ids: next_letter(model, head, ids), 150, 1e-3)
    return model, losses


def inputs(collapsed: bool) -> tuple[nn.Module, list[float]]:
    """The next letter, and one embedding for both halves of a text, with other texts to tell it from and without."""
    model, head = decoder(6), nn.Linear(64, len(LETTERS))

    def loss(ids: Tensor) -> Tensor:
        one, two = (model(input_ids=part).last_hidden_state.mean(1) for part in ids.chunk(2, dim=1))
        if collapsed:
            apart = -300.0 * F.cosine_similarity(one, two).mean()
        else:
            similar = F.normalize(one, dim=1) @ F.normalize(two, dim=1).T / 0.1
            apart = F.cross_entropy(similar, torch.arange(BATCH))
        return next_letter(model, head, ids) + apart

    return model, trained(nn.ModuleList([model, head]), loss, 200, 1e-3)


def experts(collapsed: bool) -> tuple[nn.Module, list[float]]:
    """A mixture of eight experts, with a loss that balances them and without."""
    config = OlmoeConfig(
        vocab_size=len(LETTERS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=1,
        norm_topk_prob=False,
        max_position_embeddings=TOKENS,
        output_router_logits=True,
        router_aux_loss_coef=0.0 if collapsed else 0.1,
        pad_token_id=None,
    )
    model = OlmoeForCausalLM(config)
    return model, trained(model, lambda ids: model(input_ids=ids, labels=ids).loss, 300, 2e-2)


def streams(collapsed: bool) -> tuple[nn.Module, list[float]]:
    """Four residual streams per token, mixed by matrices that start uniform, or near the identity."""
    model = streams_homogenise.Network("uniform" if collapsed else "static", len(LETTERS))

    def loss(ids: Tensor) -> Tensor:
        ids = ids[:, : streams_homogenise.TOKENS + 1]
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return model, trained(model, loss, 100, 1e-3)


AXES: dict[str, tuple[Callable[[bool], tuple[nn.Module, list[float]]], str, str, str, str]] = {
    "tokens": (tokens, "trained without skips", "trained with skips", "relative_residual", "block.out"),
    "inputs": (inputs, "nothing to tell it from", "told from other texts", "relative_residual", "inputs.mean"),
    "streams": (streams, "mixing starts uniform", "mixing starts as identity", "relative_residual", "streams.out"),
    "experts": (experts, "no balancing loss", "balancing loss", "effective_experts", "mlp.router"),
}
"""Axis: its training, what is wrong, what is right, and the number that tells them apart, with its site."""


def measured(axis: str, collapsed: bool) -> dict[str, Any]:
    """Train one example and measure it."""
    train, wrong, right, metric, site = AXES[axis]
    torch.manual_seed(0)
    began = time.perf_counter()
    model, losses = train(collapsed)
    probe = PROBE[:, : streams_homogenise.TOKENS] if axis == "streams" else {"input_ids": PROBE}
    with rs.operate(model, rs.Surgery(skip=0)) if axis == "tokens" and collapsed else nullcontext():
        run = rs.measure(model, probe)
    line = run.curve(metric, site)
    print(f"{axis}, {'wrong' if collapsed else 'right'}: {time.perf_counter() - began:.0f} s", flush=True)
    return {
        "axis": axis,
        "collapsed": collapsed,
        "what": wrong if collapsed else right,
        "loss": [losses[0], losses[-1]],
        "metric": metric,
        "site": site,
        "layers": line.layers.tolist(),
        "values": line.mean.tolist(),
        "verdict": run.verdict,
        "codes": {"tokens": run.code, **{entry["axis"]: entry["code"] for entry in run.extra.get("axes", ())}},
    }


def every_axis() -> dict[str, Any]:
    """All axes of one model: a small DeepSeek-V4, trained for a while, with four streams and eight experts."""
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=len(LETTERS),
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=16,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        hc_mult=4,
    )
    model, head = DeepseekV4Model(config), nn.Linear(64, len(LETTERS))
    losses = trained(nn.ModuleList([model, head]), lambda ids: next_letter(model, head, ids), 100, 1e-3)
    run = rs.measure(model, {"input_ids": PROBE})
    lines = {name: run.curve(metric, site) for name, (metric, site) in PANELS.items()}
    return {
        "loss": [losses[0], losses[-1]],
        "verdict": run.verdict,
        "lines": {name: [line.layers.tolist(), line.mean.tolist()] for name, line in lines.items()},
    }


PANELS = {
    "tokens": ("relative_residual", "block.out"),
    "inputs": ("relative_residual", "inputs.mean"),
    "streams": ("relative_residual", "streams.out"),
    "experts": ("effective_experts", "mlp.router"),
    "depth": ("write_ratio", "block.update"),
}


def lengths() -> dict[str, Any]:
    """A pretrained model at three lengths."""
    run = rs.measure_lengths(str(pretrained_folder("smollm2-135m")), rs.Inputs(sequences=4), lengths=LENGTHS)
    finding = next(entry for entry in run.extra["axes"] if entry["axis"] == "length")
    by_length = {}
    for length in LENGTHS:
        rows = only(run.table, metric="effective_rank", site="block.out", length=length)
        layers, values = rows["layer"].to_numpy(), rows["value"].to_numpy() / length
        by_length[str(length)] = [float(values[layers == layer].mean()) for layer in sorted(set(layers.tolist()))]
    return {
        "sentence": finding["sentence"],
        "code": finding["code"],
        "rank": by_length,
        "pair": [two_prompts(collapsed) for collapsed in (True, False)],
        "examples": [share_of_vowels(collapsed) for collapsed in (True, False)],
    }


def share_of_vowels(collapsed: bool) -> dict[str, Any]:
    """The share of vowels among the letters read so far, by one block without positions.

    With skip connections each token keeps its own letter beside the average. If ``collapsed`` there are none, and all
    that is left of a token is an average over what came before it, which changes less and less.
    """
    torch.manual_seed(0)
    model, head = decoder(1, positions=COUNTED[-1]), nn.Linear(64, 1)
    model.wpe.weight.requires_grad_(False).zero_()
    vowels = torch.tensor([letter.lower() in "aeiou" for letter in LETTERS])

    def loss(ids: Tensor) -> Tensor:
        share = vowels[ids].float().cumsum(1) / torch.arange(1, TOKENS + 1)
        return 30 * F.mse_loss(head(model(input_ids=ids).last_hidden_state)[..., 0], share)

    with rs.operate(model, rs.Surgery(skip=0)) if collapsed else nullcontext():
        losses = trained(nn.ModuleList([model, head]), loss, 250, 2e-3)
        texts = torch.stack([TEXT[start : start + COUNTED[-1]] for start in range(0, len(TEXT) - COUNTED[-1], 740)])
        run = rs.measure_lengths(model, {"input_ids": texts}, lengths=COUNTED)
    finding = next(entry for entry in run.extra["axes"] if entry["axis"] == "length")
    slopes = run.extra["lengths"]["slopes"]
    means = next(one["means"] for one in slopes if (one["metric"], one["site"]) == ("relative_residual", "block.out"))
    return {
        "collapsed": collapsed,
        "what": "trained without skips" if collapsed else "trained with skips",
        "loss": [losses[0], losses[-1]],
        "residual": dict(zip(map(str, COUNTED), means, strict=True)),
        "tokens": run.code,
        "code": finding["code"],
        "sentence": finding["sentence"],
    }


def two_prompts(collapsed: bool) -> dict[str, Any]:
    """How far two prompts are apart after the same text, for a decoder without positions.

    It learns the next letter from windows of 48, and unless ``collapsed`` also the first letter of the window. Measured
    in bfloat16, as models are served.
    """
    torch.manual_seed(0)
    model, head, first = decoder(4, positions=PROMPTED[-1]), nn.Linear(64, len(LETTERS)), nn.Linear(64, len(LETTERS))
    model.wpe.weight.requires_grad_(False).zero_()

    def loss(ids: Tensor) -> Tensor:
        states = model(input_ids=ids[:, :-1]).last_hidden_state
        value = F.cross_entropy(head(states).flatten(0, 1), ids[:, 1:].flatten())
        if not collapsed:
            wanted = ids[:, :1].expand(-1, TOKENS - 2).flatten()
            value = value + F.cross_entropy(first(states[:, 1:]).flatten(0, 1), wanted)
        return value

    losses = trained(nn.ModuleList([model, head, first]), loss, 250, 2e-3)
    model.bfloat16()
    run = rs.measure_lengths(model, rs.Inputs(sequences=1), lengths=PROMPTED)
    finding = next(entry for entry in run.extra["axes"] if entry["axis"] == "length")
    encoder = hash_tokenizer(model.config)
    cat, dog = (encoder.encode(word) for word in ("cat", "dog"))
    shared = encoder.encode(sample_text())
    most = PROMPTED[-1] - max(len(cat), len(dog))
    same, distances = same_from(model, cat, dog, (shared * (most // len(shared) + 1))[:most])
    return {
        "collapsed": collapsed,
        "what": "next letter only" if collapsed else "and the first letter",
        "loss": [losses[0], losses[-1]],
        "distances": {str(n): distances[n] for n in sorted(distances)},
        "code": finding["code"] if same is None else "floor",
        "sentence": finding["sentence"],
    }


def draw(stored: dict[str, Any]) -> None:
    """The examples in the first row, all axes of one model in the second."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 5, figsize=(15, 6), layout="constrained")
    for panel, axis in zip(axes[0], AXES, strict=False):
        for example in (one for one in stored["examples"] if one["axis"] == axis):
            colour, marker = (VERMILION, "s") if example["collapsed"] else (BLUE, "o")
            panel.plot(example["layers"], example["values"], color=colour, marker=marker, ms=3, label=example["what"])
        panel.set_title(f"{axis}: {NAMES[axis]}", fontsize=10)
        _axes_of(panel, axis)
        panel.legend(fontsize=8, loc="best")
    panel = axes[0, 4]
    for example in stored["length"]["examples"]:
        colour, marker = (VERMILION, "s") if example["collapsed"] else (BLUE, "o")
        counts, values = [int(count) for count in example["residual"]], list(example["residual"].values())
        panel.loglog(counts, values, color=colour, marker=marker, ms=3, label=example["what"])
    panel.axhline(COLLAPSED_RESIDUAL, color="0.6", linewidth=0.8)
    panel.set_title("length: relative residual", fontsize=10)
    panel.legend(fontsize=8, loc="best")
    for panel, axis in zip(axes[1], PANELS, strict=True):
        layers, values = stored["one model"]["lines"][axis]
        panel.plot(layers, values, color=BLUE, marker="o", ms=3)
        panel.set_title(f"{axis}: {NAMES[axis]}", fontsize=10)
        _axes_of(panel, axis)
    axes[0, 0].set_ylabel("one example of each\nvalue by block")
    axes[1, 0].set_ylabel("all axes of one model\nvalue by block")
    for panel in axes.flat:
        if panel is axes[0, 4]:
            panel.set_xlabel("tokens of the input")
            continue
        panel.set_xlabel("block")
        panel.xaxis.get_major_locator().set_params(integer=True)
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FIGURE, dpi=120)


NAMES = {
    "tokens": "relative residual",
    "inputs": "relative residual",
    "streams": "relative residual",
    "experts": "effective experts of 8",
    "depth": "change by a block",
}


def _axes_of(panel: Any, axis: str) -> None:
    if axis in ("tokens", "inputs", "streams"):
        panel.set_yscale("log")
        panel.set_ylim(1e-8 if axis != "inputs" else 1e-3, 2)
        panel.axhline(COLLAPSED_RESIDUAL, color="0.6", linewidth=0.8)
    elif axis == "experts":
        panel.set_ylim(0, 8)
    else:
        panel.set_yscale("log")


def table(stored: dict[str, Any]) -> str:
    """What the page includes: the examples with their verdicts along each axis."""
    rows = ["| axis | example | loss | " + " | ".join(SHOWN) + " |", "|---" * (3 + len(SHOWN)) + "|"]
    by_length = [{**one, "axis": "length", "codes": {"tokens": one["tokens"], "length": one["code"]}}
                 for one in stored["length"]["examples"]]  # fmt: skip
    for one in [*stored["examples"], *by_length]:
        codes = [one["codes"].get(axis, "") for axis in SHOWN]
        marked = [f"**{code}**" if code in ("collapsed", "collapsing", "floor") else code for code in codes]
        loss = f"{one['loss'][0]:.2f} to {one['loss'][1]:.2f}"
        rows.append(f"| {one['axis']} | {one['what']} | {loss} | " + " | ".join(marked) + " |")
    return "\n".join(rows) + "\n"


SHOWN = ("tokens", "inputs", "streams", "experts", "length")


def main() -> None:
    """All of it, or only the drawing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the recorded values")
    if not parser.parse_args().draw:
        torch.set_num_threads(1)
        stored = {
            "date": date.today().isoformat(),
            "examples": [measured(axis, collapsed) for axis in AXES for collapsed in (True, False)],
            "one model": every_axis(),
            "length": lengths(),
        }
        DATA.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    TABLE.write_text(table(stored), encoding="utf-8")
    lines = stored["one model"]["verdict"].split("\n")
    VERDICT.write_text("\n>\n".join(f"> {line}" for line in lines) + "\n", encoding="utf-8")
    draw(stored)


if __name__ == "__main__":
    main()

"""Train a 24-layer transformer with and without its skips, both under a gauge, and write down what was alarmed when.

Writes numbers to ``docs/data/monitor/gallery.json`` and a figure to ``docs/_static/figures/monitor``::

    python scripts/monitor_gallery.py            # five seeds with skips, three without; some minutes on one core
    python scripts/monitor_gallery.py --quick    # one seed of each, few steps
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope import Surgery
from rankscope.models.inputs.text import sample_text
from rankscope.monitor import Gauge, Record, read_record
from rankscope.surgery.operating import operate

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data" / "monitor"
FIGURES = ROOT / "docs" / "_static" / "figures" / "monitor"
LAYERS, WIDTH, HEADS, TOKENS, BATCH = 24, 32, 2, 32, 16
RATE = 3e-4
FORMS: dict[str, dict[str, Any]] = {"with skips": {}, "cut": {"skip": 0.0}}
WINDOW = 20
"""Steps over which the loss is averaged before it is looked at."""
RISE = 0.05
"""A smoothed loss this much above its lowest so far, or one that is not finite, is a sign."""


def text_ids() -> tuple[Tensor, int]:
    """The built-in sample text, character by character."""
    text = sample_text()
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    return torch.tensor([number[letter] for letter in text]), len(letters)


def build(vocabulary: int, seed: int) -> Any:
    """A GPT-2 of 24 layers and width 32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    shape = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, use_cache=False, **shape))
    return model.train()


def windows(ids: Tensor, seed: int) -> Iterator[Tensor]:
    """Random stretches of the text, for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - TOKENS, (BATCH,), generator=generator)
        yield torch.stack([ids[start : start + TOKENS] for start in starts.tolist()])


def train(form: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run; losses of every step and what the gauge had to say."""
    ids, vocabulary = text_ids()
    model = build(vocabulary, seed)
    data = windows(ids, seed)
    probe = {"input_ids": next(windows(ids, seed=10_000))[:8]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    started, losses = time.perf_counter(), []
    cut = operate(model, Surgery(**FORMS[form])) if FORMS[form] else nullcontext()
    with cut, Gauge(model, probe, schedule=10, record=folder, actions=(), strict=True) as gauge:
        for step in range(steps):
            batch = next(data)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            gauge.after_backward(step)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            gauge.step(step, loss=loss)
    record = read_record(folder)
    return facts(form, seed, losses, record, time.perf_counter() - started)


def facts(form: str, seed: int, losses: list[float], record: Record, seconds: float) -> dict[str, Any]:
    """What a page may quote of one run."""
    raised = [alarm for alarm in record.alarms if alarm.state == "raised"]
    last = record.readings[-1].values("relative_residual")
    return {
        "form": form,
        "seed": seed,
        "steps": len(losses),
        "readings": len(record.readings),
        "alarms": [{"step": a.step, "name": a.name, "layer": a.layer, "sentence": a.sentence} for a in raised],
        "first_alarm": raised[0].step if raised else None,
        "first_sign_in_loss": sign_in_loss(losses),
        "loss": {str(step): round(value, 4) for step, value in smoothed(losses).items() if step % 10 == 9},
        "residual_at_end": {str(layer): float(f"{last[layer]:.3g}") for layer in (0, 11, 23)},
        "seconds": round(seconds, 1),
    }


def smoothed(losses: list[float]) -> dict[int, float]:
    """Mean over the last ``WINDOW`` steps, by step."""
    return {step: math.fsum(losses[step + 1 - WINDOW : step + 1]) / WINDOW for step in range(WINDOW - 1, len(losses))}


def sign_in_loss(losses: list[float]) -> int | None:
    """The first step at which the loss alone would make somebody look; None when none does."""
    lowest = math.inf
    for step, value in smoothed(losses).items():
        if not math.isfinite(value) or value > lowest * (1.0 + RISE):
            return step
        lowest = min(lowest, value)
    return None


def behind_twin(run: dict[str, Any], runs: list[dict[str, Any]]) -> int | None:
    """The first step (of those kept) at which the loss is ``RISE`` above that of the run with skips and the same seed.

    A sign for somebody who has that run to compare with, which is not the case of a run in progress.
    """
    for twin in runs:
        if twin["form"] == "with skips" and twin["seed"] == run["seed"]:
            for step, value in run["loss"].items():
                if value > twin["loss"][step] * (1.0 + RISE):
                    return int(step)
    return None


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Both forms side by side."""
    found: dict[str, Any] = {}
    for form in FORMS:
        mine = [run for run in runs if run["form"] == form]
        found[form] = {
            "seeds": len(mine),
            "runs_alarmed": sum(run["first_alarm"] is not None for run in mine),
            "alarms": sum(len(run["alarms"]) for run in mine),
            "first_alarms": [run["first_alarm"] for run in mine],
            "first_signs_in_loss": [run["first_sign_in_loss"] for run in mine],
            "first_steps_behind_twin": [behind_twin(run, runs) for run in mine],
        }
    return found


def draw(folder: Path, runs: list[dict[str, Any]], target: Path) -> None:
    """Loss and relative residual of the first seed, both forms."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 6), layout="constrained", sharex=True)
    for column, form in enumerate(FORMS):
        run = next(run for run in runs if run["form"] == form)
        record = read_record(folder / f"{form.replace(' ', '-')}-{run['seed']}")
        axes[0, column].plot([int(step) for step in run["loss"]], list(run["loss"].values()), color="#444444", lw=1.5)
        axes[0, column].set_title(f"{form}, seed {run['seed']}")
        for layer in (0, 5, 11, 17, 23):
            steps, values = record.curve("relative_residual", layer)
            color = plt.colormaps["viridis"](layer / LAYERS)
            axes[1, column].plot(steps, values, label=f"layer {layer}", color=color, lw=1.5)
        axes[1, column].set_yscale("log")
        axes[1, column].set_xlabel("step")
        for name, step in first_of_each(run).items():
            axes[1, column].axvline(step, color="#c0392b", lw=1, ls="--")
            axes[0, column].axvline(
                step, color="#c0392b", lw=1, ls="--", label=f"{name.replace('_', ' ')}, step {step}"
            )
        if run["alarms"]:
            axes[0, column].legend(frameon=False, fontsize=8, title="alarms", title_fontsize=8)
    axes[0, 0].set_ylabel("loss (mean of 20 steps)")
    axes[1, 0].set_ylabel("relative residual")
    axes[1, 0].legend(frameon=False, fontsize=8, ncols=2)
    for row in axes:
        low, high = min(axis.get_ylim()[0] for axis in row), max(axis.get_ylim()[1] for axis in row)
        for axis in row:
            axis.set_ylim(low, high)
    target.mkdir(parents=True, exist_ok=True)
    figure.savefig(target / "gallery.png", dpi=120)
    plt.close(figure)


def first_of_each(run: dict[str, Any]) -> dict[str, int]:
    """The step at which each kind of alarm was first raised."""
    found: dict[str, int] = {}
    for alarm in run["alarms"]:
        found.setdefault(alarm["name"], alarm["step"])
    return found


def main() -> None:
    """Train every form with every seed, writing down each run as it ends, then sum up and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="runs with skips")
    parser.add_argument("--cut-seeds", type=int, default=3, help="runs without")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--quick", action="store_true", help="one seed of each, 60 steps")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    parser.add_argument("--records", type=Path, help="keep the records of the gauges in this folder")
    options = parser.parse_args()
    steps = 60 if options.quick else options.steps
    counts = {"with skips": options.seeds, "cut": options.cut_seeds}
    with tempfile.TemporaryDirectory() as temporary:
        records = options.records or Path(temporary)
        runs: list[dict[str, Any]] = []
        for form, count in counts.items():
            for seed in range(1 if options.quick else count):
                runs.append(train(form, seed, steps, records / f"{form.replace(' ', '-')}-{seed}"))
                write(options.out, steps, runs)
                shown = {key: runs[-1][key] for key in ("form", "seed", "first_alarm", "first_sign_in_loss", "seconds")}
                print(json.dumps(shown), flush=True)
        draw(records, runs, options.figures)
    print(json.dumps(summary(runs), indent=1))


def write(folder: Path, steps: int, runs: list[dict[str, Any]]) -> None:
    """All runs so far."""
    shape = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "tokens": TOKENS, "batch": BATCH, "steps": steps}
    rule = {"window": WINDOW, "rise": RISE}
    numbers = {"date": date.today().isoformat(), **shape, "sign": rule, "summary": summary(runs), "runs": runs}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gallery.json").write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Does ``predict`` tell which designs train? 27 small designs, trained with two seeds each.

::

    python -m benchmarks.failing_runs.predicted train   # continues where it stopped
    python -m benchmarks.failing_runs.predicted write
    python -m benchmarks.failing_runs.predicted ranges --keep RUNS   # do stored healthy runs stay in what it predicts?

Fixed before the runs: a network trains if its loss on held-out text after 60 steps is at least 5% below that of the
frequencies of single characters, which is all that a network with equal tokens can learn. The score of a design is the
relative residual that ``predict`` gives after its last block, before training; the depth alone is the baseline. The
interval is from 4000 bootstrap samples of designs, so that the seeds of a design stay together.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.failing_runs.evaluating import stored
from benchmarks.failing_runs.leaderboard import HELD_OUT, ROOT, STEPS, WIDTH, Design, Kind, Training, descend
from benchmarks.failing_runs.nets import HEADS, TOKENS
from benchmarks.failing_runs.training import SIZES
from rankscope.ext.theory.predict.run import predict
from rankscope.models.design import Design as Predicted

RECORD = ROOT / "docs" / "data" / "predict_training.json"
FIGURE = ROOT / "docs" / "_static" / "figures" / "predict" / "training.png"
SEEDS, SAMPLES, BELOW = (0, 1), 4000, 0.95
KINDS: tuple[Kind, ...] = ("pre-norm", "post-norm", "no skips")
DESIGNS = tuple(
    Design(f"{kind}, {layers} blocks, gain {gain:g}", kind, layers=layers, gain=gain)
    for kind in KINDS
    for layers in (2, 4, 8)
    for gain in (0.5, 1.0, 2.0)
)


def prediction(design: Design) -> dict[str, Any]:
    """What ``predict`` says about a design: the relative residual after its last block, and the state."""
    skip = 0.0 if design.kind == "no skips" else 1.0
    place = "post" if design.kind == "post-norm" else "pre"
    std = design.gain / math.sqrt(WIDTH)
    told = predict(
        _initialised(design.layers, WIDTH, std, norm_place=place, mask="causal", attention_skip=skip, mlp_skip=skip),
        most_blocks=design.layers,
    )
    return {"log10_residual": told.extra["final"]["mean"], "state": told.code}


def _initialised(layers: int, width: int, std: float, **others: Any) -> Predicted:
    """A design of our own blocks: ``std`` for all matrices but the last of the MLP, which has four times the inputs."""
    names = ("query_std", "key_std", "value_std", "output_std", "mlp_in_std")
    return Predicted(
        depth=layers,
        width=width,
        heads=HEADS,
        tokens=TOKENS,
        norm_eps=1e-5,
        mlp_out_std=std / 2,
        embedding_std=math.sqrt(2.0),
        embedding_norm=False,
        **dict.fromkeys(names, std),
        **others,
    )


def train_missing(out: Path) -> None:
    """Train and predict what is missing, and store it as soon as it is done."""
    told: dict[str, Any] = {"date": "", "steps": STEPS, "designs": {}}
    if out.exists():
        told = json.loads(out.read_text())
    for seed in SEEDS:
        for design in DESIGNS:
            facts = told["designs"].setdefault(design.name, {"losses": {}, **vars_of(design)})
            if "predicted" not in facts:
                facts["predicted"] = prediction(design)
            if str(seed) in facts["losses"]:
                continue
            training = Training(design, seed)
            descend(training, None)
            facts["losses"][str(seed)] = training.quality()
            told["date"], told["single_characters"] = date.today().isoformat(), frequencies_loss(training)
            part = out.with_suffix(".part")
            part.write_text(json.dumps(told, indent=1) + "\n")
            part.replace(out)


def vars_of(design: Design) -> dict[str, Any]:
    """What the designs differ in."""
    return {"kind": design.kind, "layers": design.layers, "gain": design.gain}


def frequencies_loss(training: Training) -> float:
    """Loss of the frequencies of characters in the training text, on the held-out sequences."""
    counts = torch.bincount(training.text, minlength=training.vocabulary) + 1.0
    return float(-(counts / counts.sum()).log()[training.held_out(HELD_OUT)[:, 1:]].mean())


def ranges(keep: Path) -> dict[str, Any]:
    """Whether healthy runs of our own blocks start, and stay, in the 95% range that ``predict`` gives for their design.

    Last block, size ``tiny``; the design has the initialisation of ``nn.Linear``, and tokens that repeat characters.
    """
    found, known = {}, {}
    for run in stored(keep, "tiny", None):
        place, _, masked = run.declared.family.partition("-")
        if run.declared.fault is not None or place not in ("pre", "post"):
            continue
        layers, width = run.declared.layers, SIZES["tiny"]["width"]
        if (place, masked, layers) not in known:
            mask = "complete" if masked else "causal"
            std = 1.0 / math.sqrt(3.0 * width)
            design = _initialised(layers, width, std, norm_place=place, mask=mask, initial_cosine=0.03)
            final = predict(design, seeds=8, most_blocks=layers).extra["final"]
            known[place, masked, layers] = [10.0 ** final["low"], 10.0 ** final["high"]]
        low, high = known[place, masked, layers]
        last = [reading.values("relative_residual")[layers - 1] for reading in run.record.readings]
        found[f"{run.declared.name}, seed {run.seed}"] = {
            "predicted": [low, high],
            "start": last[0],
            "least": min(last),
            "most": max(last),
            "inside": sum(low <= value <= high for value in last) / len(last),
        }
    return {
        "runs": len(found),
        "start_inside": sum(one["predicted"][0] <= one["start"] <= one["predicted"][1] for one in found.values()),
        "always_inside": sum(one["inside"] == 1.0 for one in found.values()),
        "each": found,
    }


def area(scores: Sequence[float], trains: Sequence[bool]) -> float:
    """Area under the ROC curve; NaN if all belong to one class."""
    good = np.array([score for score, yes in zip(scores, trains, strict=True) if yes])
    bad = np.array([score for score, yes in zip(scores, trains, strict=True) if not yes])
    if not len(good) or not len(bad):
        return math.nan
    return float(((good[:, None] > bad).mean() + (good[:, None] >= bad).mean()) / 2)


def evaluated(told: dict[str, Any]) -> dict[str, Any]:
    """AUC of the prediction and of depth alone, each with its 95% interval."""
    designs = list(told["designs"].values())
    limit = BELOW * told["single_characters"]
    trains = [[loss < limit for loss in facts["losses"].values()] for facts in designs]
    scores = {
        "predicted residual": [facts["predicted"]["log10_residual"] for facts in designs],
        "fewer blocks": [-facts["layers"] for facts in designs],
    }
    found: dict[str, Any] = {
        "runs": sum(len(one) for one in trains),
        "trained": sum(sum(one) for one in trains),
        "limit": limit,
    }
    for name, values in scores.items():

        def of(chosen: Sequence[int], values: Sequence[float] = values) -> float:
            pairs = [(values[one], yes) for one in chosen for yes in trains[one]]
            return area([score for score, _ in pairs], [yes for _, yes in pairs])

        draws = np.random.default_rng(0).integers(len(designs), size=(SAMPLES, len(designs)))
        samples = [of(chosen.tolist()) for chosen in draws]
        low, high = np.nanpercentile(samples, [2.5, 97.5])
        found[name] = {"auc": of(range(len(designs))), "low": float(low), "high": float(high)}
    return found


def draw(told: dict[str, Any], path: Path) -> None:
    """Loss after training against the predicted residual, one point per run."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    looks = {"pre-norm": ("#0072B2", "o"), "post-norm": ("#D55E00", "s"), "no skips": ("#555555", "^")}
    for kind, (colour, marker) in looks.items():
        points = [
            (10.0 ** facts["predicted"]["log10_residual"], loss)
            for facts in told["designs"].values()
            if facts["kind"] == kind
            for loss in facts["losses"].values()
        ]
        axes.scatter(
            *zip(*points, strict=True), color=colour, marker=marker, s=36, alpha=0.75, label=kind, linewidths=0
        )
    limit = BELOW * told["single_characters"]
    axes.axhline(limit, color="black", linewidth=0.9, linestyle="--")
    axes.text(0.01, limit - 0.008, "trains below this line", transform=axes.get_yaxis_transform(), va="top", fontsize=9)
    axes.set(xscale="log", xlabel="relative residual after the last block, predicted before training")
    axes.set_ylabel(f"held-out loss after {STEPS} steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("act", choices=("train", "write", "ranges"))
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--keep", type=Path, help="folder of the runs of ``benchmarks.failing_runs train``")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.act == "ranges":
        print(json.dumps(ranges(options.keep), indent=1))
        return
    if options.act == "train":
        train_missing(options.out)
    told = json.loads(options.out.read_text())
    told["evaluated"] = evaluated(told)
    options.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told["evaluated"], indent=1))
    draw(told, FIGURE)


if __name__ == "__main__":
    main()

"""Does the prediction at initialisation tell which designs train?

Dong, Cordonnier and Loukas (2021) describe a tug-of-war: attention pulls tokens together, skips and MLPs keep them
apart. What this means for the choice of width and depth is left open. Here BERTs over a map of depth, width, heads,
weights and skip gain are predicted from their configuration (`rs.predict`), measured before training in exact
arithmetic (`rs.exact`), and trained to sort for the same number of steps. A network has learned if its accuracy comes a
quarter of the way from the best answer per position to 1. There are no published numbers to overlay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from output import BLUE, COLOURS, options, panels, table, write
from scipy.stats import mannwhitneyu, spearmanr
from training import Plan, encoder, fit, share_right, sort_task

import rankscope as rs

RESIDUAL = "log10_relative_residual"
DRAWS, QUARTER, DEEPEST = 2000, 0.25, -4.0


@dataclass(frozen=True)
class Design:
    """A BERT with MLPs four times as wide as the stream and its skips scaled by ``gain``, in training too."""

    depth: int
    width: int
    heads: int
    gain: float
    std: float | None = None
    """Standard deviation of a weight; None for 1/sqrt(width), which keeps the size of a token."""

    @property
    def weight_std(self) -> float:
        """Standard deviation of a weight at initialisation."""
        return float(self.width**-0.5) if self.std is None else self.std

    @property
    def name(self) -> str:
        """For tables."""
        words = f"{self.depth} blocks, width {self.width}, {self.heads} heads, gain {self.gain:g}"
        return words if self.std is None else f"{words}, std {self.std:g}"


GAINS = (0.0, 0.25, 0.5, 1.0, 2.0)
FULL = {"seeds": 2, "steps": 120, "drawn": 3, "probed": 2, "train": 1000, "held": 200}
SMALL = {"seeds": 1, "steps": 30, "drawn": 2, "probed": 1, "train": 200, "held": 50}


def designs(*, small: bool) -> Iterator[Design]:
    """All widths and gains at three depths; other weights, heads and a greater depth at the middle width."""
    if small:
        yield from (Design(depth, 16, 2, gain) for depth in (1, 4) for gain in (0.0, 1.0))
        return
    yield from (Design(depth, width, 4, gain) for depth in (2, 4, 8) for width in (32, 64, 128) for gain in GAINS)
    for depth in (2, 4):
        yield from (Design(depth, 64, 4, gain, 0.02) for gain in GAINS)
        yield from (Design(depth, 64, 2, gain) for gain in GAINS)
    yield from (Design(16, 64, 4, gain) for gain in GAINS)


def one_design(design: Design, size: dict[str, Any]) -> dict[str, Any]:
    """Predicted, measured before training, and what training reaches; the last two by seed."""
    found: dict[str, Any] = {"measured": [], "accuracy": [], "loss": []}
    last = {"metric": RESIDUAL, "site": "block.out", "layer": design.depth - 1}
    for seed in range(size["seeds"]):
        task = sort_task(seed, train=size["train"], held=size["held"], fresh=True)
        shape = {"layers": design.depth, "heads": design.heads, "width": design.width, "mlp_width": 4 * design.width}
        model = encoder(task, **shape, std=design.weight_std, seed=seed)
        if seed == 0:
            with tempfile.TemporaryDirectory() as folder:
                model.config.save_pretrained(folder)
                run = rs.predict(folder, {"skip_gain": design.gain}, seeds=size["drawn"], most_blocks=design.depth)
            found["predicted"] = mean(run.select(**last, curve="sampled"))
        surgery = {"skip": design.gain}
        before = rs.exact(model, task.held.inputs["input_ids"][: size["probed"]], surgery, plain=False)
        found["measured"].append(mean(before.select(**last, arithmetic="exact")))
        losses = fit(model, task, Plan(steps=size["steps"], warmup=0.1), seed=seed, surgery=surgery)
        with rs.operate(model, surgery):
            found["accuracy"].append(share_right(model, task.held))
        found["loss"].append(float(np.mean(losses[-10:])))
    return found


def mean(rows: Any) -> float:
    """Mean of the values that are finite."""
    values = rows["value"].to_numpy()
    return float(values[np.isfinite(values)].mean())


def blind_answers(size: dict[str, Any]) -> dict[str, float]:
    """Accuracy of the commonest symbol, of the commonest per position, and of the best answer per sequence."""
    found: dict[str, list[float]] = {"symbol": [], "position": [], "sequence": []}
    for seed in range(size["seeds"]):
        task = sort_task(seed, train=size["train"], held=size["held"], fresh=True)
        learned, held = task.train.labels, task.held.labels
        found["symbol"].append(float((held == learned.flatten().mode().values).double().mean()))
        found["position"].append(float((held == learned.mode(dim=0).values).double().mean()))
        # No network whose tokens are all equal after the last block can do better than one answer per sequence.
        found["sequence"].append(sum(int(row.bincount().max()) for row in held) / held.numel())
    return {name: float(np.mean(values)) for name, values in found.items()}


def area(score: np.ndarray, learned: np.ndarray) -> float:
    """Probability that a network that learned has a higher score than one that did not; ties count half."""
    yes, no = score[learned], score[~learned]
    return float(mannwhitneyu(yes, no).statistic / (yes.size * no.size)) if yes.size and no.size else float("nan")


def correlation(score: np.ndarray, accuracy: np.ndarray) -> float:
    """Spearman's rank correlation."""
    return float(spearmanr(score, accuracy).statistic) if np.ptp(score) and np.ptp(accuracy) else float("nan")


def interval(statistic: Callable[..., float], score: np.ndarray, outcome: np.ndarray, seeds: int) -> list[float]:
    """The statistic and its 95% bootstrap interval; all seeds of a design are drawn together."""
    groups, random = np.arange(score.size).reshape(-1, seeds), np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        rows = groups[random.integers(0, len(groups), len(groups))].ravel()
        draws.append(statistic(score[rows], outcome[rows]))
    known = [value for value in draws if np.isfinite(value)]
    ends = np.quantile(known, (0.025, 0.975)) if known else (float("nan"), float("nan"))
    return [statistic(score, outcome), *map(float, ends)]


def main() -> None:
    """Predict, measure and train every design, print what the prediction is worth, draw."""
    given = options(__doc__).parse_args()
    size = SMALL if given.small else FULL
    found = {design: one_design(design, size) for design in designs(small=given.small)}
    blind, seeds = blind_answers(size), size["seeds"]
    threshold = blind["position"] + QUARTER * (1.0 - blind["position"])

    accuracy = np.concatenate([one["accuracy"] for one in found.values()])
    learned = accuracy >= threshold
    scores = {
        "predict": np.repeat([one["predicted"] for one in found.values()], seeds),
        "measured before training": np.concatenate([one["measured"] for one in found.values()]),
        "fewer blocks": np.repeat([-float(design.depth) for design in found], seeds),
        "larger gain": np.repeat([design.gain for design in found], seeds),
    }
    skill = {
        name: {
            "area": interval(area, score, learned, seeds),
            "correlation": interval(correlation, score, accuracy, seeds),
        }
        for name, score in scores.items()
    }
    print(f"{int(learned.sum())} of {learned.size} networks learned (accuracy of at least {threshold:.2f}).")
    rows = [
        [name, *("{:.2f} ({:.2f} to {:.2f})".format(*one[each]) for each in ("area", "correlation"))]
        for name, one in skill.items()
    ]
    print(table(["known before training", "area under the ROC curve", "rank correlation with accuracy"], rows))

    widths = sorted({design.width for design in found})
    figure, grid = panels(2, len(widths) + 1, title="Does the prediction at initialisation tell which designs train?")
    for column, width in enumerate(widths):
        heads = 2 if given.small else 4
        plain = {d: one for d, one in found.items() if (d.width, d.heads, d.std) == (width, heads, None)}
        for axes, name, limits, form in (
            (grid[0][column], "accuracy", (0.0, 1.0), "{:.2f}"),
            (grid[1][column], "predicted", (DEEPEST, 0.0), "{:.1f}"),
        ):
            heat(axes, {d: float(np.mean(one[name])) for d, one in plain.items()}, limits, form)
        grid[0][column].set_title(f"width {width}: accuracy")
        grid[1][column].set_title("log10 of the predicted residual")
    for width, colour in zip(widths, COLOURS[1:], strict=False):
        own = np.repeat([design.width == width for design in found], seeds)
        shown = -np.log10(np.maximum(-scores["predict"][own], 0.03))
        grid[0][-1].scatter(shown, accuracy[own], s=10, color=colour, label=f"width {width}")
    grid[0][-1].axhline(threshold, color="#7f7f7f", linestyle="--", linewidth=0.8)
    grid[0][-1].set(xlabel="-log10(-log10 of the predicted residual)", ylabel="accuracy", ylim=(0, 1))
    grid[0][-1].legend(fontsize=6)
    for place, (name, one) in enumerate(skill.items()):
        value, low, high = one["area"]
        grid[1][-1].plot([low, high], [place, place], color="#333333")
        grid[1][-1].plot(value, place, "o", color=BLUE)
        grid[1][-1].annotate(name, (0.32, place), fontsize=6, va="bottom")
    grid[1][-1].set(xlim=(0.3, 1.03), yticks=[], xlabel="area under the ROC curve", ylim=(len(skill) - 0.5, -0.7))
    numbers = {"designs": {design.name: one for design, one in found.items()}, "blind": blind, "skill": skill}
    write("width_depth", {**numbers, "learned": int(learned.sum())}, figure, given)


def heat(axes: Any, values: dict[Design, float], limits: tuple[float, float], form: str) -> None:
    """Depth by gain."""
    depths, gains = (sorted({asdict(design)[name] for design in values}) for name in ("depth", "gain"))
    cells = np.full((len(depths), len(gains)), np.nan)
    for design, value in values.items():
        row, column = depths.index(design.depth), gains.index(design.gain)
        cells[row, column] = value
        dark = value < sum(limits) / 2
        axes.text(column, row, form.format(value), ha="center", va="center", color="w" if dark else "k", fontsize=6)
    axes.imshow(np.clip(cells, *limits), aspect="auto", vmin=limits[0], vmax=limits[1])
    axes.set_xticks(range(len(gains)), [f"{gain:g}" for gain in gains])
    axes.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set(xlabel="skip gain", ylabel="blocks")
    axes.grid(visible=False)


if __name__ == "__main__":
    main()

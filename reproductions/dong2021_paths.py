"""Do short paths carry the signal? (Dong, Cordonnier and Loukas 2021, section 4.2).

Networks of six attention layers with skips and LayerNorm and without MLPs learn three tasks: to sort, to find the
corners of a convex hull, and to memorise random bits. Then only the paths of one length are kept. The paper finds that
short paths keep most of the accuracy and that paths through all layers barely beat chance. "Frozen" keeps the attention
matrices of the whole network, as theorem 2.1 does; "recomputed" recomputes them from what the path itself carries, as
the authors' experiment does. The paper's 500 sentences are not available; random ones with Zipf's law stand in.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from output import BLACK, BLUE, GREY, ORANGE, SKY, VERMILION, options, panels, table, write
from torch import Tensor
from training import IGNORED, NO_MLP, Examples, Plan, Task, accuracy, encoder, fit, share_right, sort_task

import rankscope as rs
from rankscope.ext.paths import freeze_network, length_sums, path_effectiveness
from rankscope.models import prepare_inputs
from rankscope.stream import view_of

AT_ONCE = 300
# What the paper says: accuracy of the whole network, chance, and paths of length 1 (read off its figure).
PUBLISHED = {"sort": (0.98, 0.1, 0.6), "hull": (0.9, 0.54, 0.65), "memory": (0.85, 0.5, 0.8)}
LINES = {
    ("recomputed", "5"): (ORANGE, "v", ":"),
    ("recomputed", "20"): (VERMILION, "s", "-"),
    ("frozen", "5"): (SKY, "^", ":"),
    ("frozen", "20"): (BLUE, "o", "-"),
    ("frozen", "all"): (BLACK, "D", "--"),
    ("recalibrated", "all"): (GREY, "P", "-."),
}


def on_hull(clouds: np.ndarray) -> np.ndarray:
    """Whether each point is a corner of its cloud: the directions to the others leave a gap of over a half turn."""
    found = np.empty(clouds.shape[:2], dtype=np.int64)
    for point in range(clouds.shape[1]):
        others = np.delete(clouds, point, axis=1) - clouds[:, point, None]
        angles = np.sort(np.arctan2(others[..., 1], others[..., 0]), axis=1)
        gaps = np.diff(angles, axis=1, append=angles[:, :1] + 2 * math.pi)
        found[:, point] = gaps.max(axis=1) > math.pi
    return found


def hull_task(seed: int, *, train: int, held: int, points: int = 10) -> Task:
    """Clouds uniform in a square, each shifted as a whole: which points are corners of the convex hull?"""
    generator = np.random.default_rng([seed, 2])
    clouds = generator.uniform(0.0, 10.0, size=(train + held, points, 2))
    clouds += generator.normal(0.0, 3.3, size=(train + held, 1, 2))
    whole = Examples({"points": torch.from_numpy(clouds).float()}, torch.from_numpy(on_hull(clouds)))
    return Task(whole.take(slice(train)), whole.take(slice(train, None)), 2, 0, positions=False)


def memory_task(seed: int, *, sentences: int, vocabulary: int, mean: float, longest: int = 128) -> Task:
    """One random bit for each token of some sentences, judged on the same sentences; id 0 is padding."""
    generator = np.random.default_rng([seed, 3])
    lengths = np.clip(np.rint(generator.lognormal(math.log(mean) - 0.125, 0.5, size=sentences)), 3, longest)
    width = int(lengths.max())
    law = 1.0 / (np.arange(1, vocabulary) + 2.7)
    ids = generator.choice(np.arange(1, vocabulary), size=(sentences, width), p=law / law.sum())
    labels = generator.integers(0, 2, size=(sentences, width))
    mask = np.arange(width) < lengths[:, None]
    inputs = {"input_ids": np.where(mask, ids, 0), "attention_mask": mask.astype(np.int64)}
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    whole = Examples(tensors, torch.from_numpy(np.where(mask, labels, IGNORED)))
    return Task(whole, whole, 2, vocabulary, positions=False)


@dataclass(frozen=True)
class Case:
    """A task with its network and training, the sequences that paths are evaluated on, and how often they are drawn."""

    make: Callable[[int], Task]
    layers: int
    heads: int
    width: int
    plan: Plan
    seeds: int
    judged: int | None = None
    repeats: int = 5


FULL = {
    "sort": Case(lambda s: sort_task(s, train=1000, held=200), 6, 2, 48, Plan(steps=500, batch=100), 6),
    "hull": Case(lambda s: hull_task(s, train=10_000, held=300), 6, 3, 84, Plan(steps=300, batch=100), 3),
    "memory": Case(
        lambda s: memory_task(s, sentences=500, vocabulary=5000, mean=24), 6, 2, 250, Plan(steps=250, batch=16), 3, 50
    ),
}
SMALL = {
    "sort": Case(lambda s: sort_task(s, train=60, held=20), 3, 2, 16, Plan(steps=30, batch=20), 1, repeats=1),
    "hull": Case(lambda s: hull_task(s, train=60, held=20), 3, 2, 16, Plan(steps=20, batch=20), 1, repeats=1),
    "memory": Case(
        lambda s: memory_task(s, sentences=12, vocabulary=40, mean=8), 3, 2, 16, Plan(steps=20, batch=6), 1, repeats=1
    ),
}


def baselines(examples: Examples, *, positions: bool) -> dict[str, float]:
    """Accuracies of the best answers that use little, each the best on these very examples."""
    labels, ids = examples.labels.tolist(), examples.inputs.get("input_ids")
    cells = [(row, place) for row, line in enumerate(labels) for place, label in enumerate(line) if label >= 0]

    def best(known: Iterable[Hashable]) -> float:
        groups: dict[Hashable, Counter[int]] = defaultdict(Counter)
        for (row, place), key in zip(cells, known, strict=True):
            groups[key][labels[row][place]] += 1
        return sum(max(answers.values()) for answers in groups.values()) / len(cells)

    found = {"constant": best(0 for _ in cells)}
    if positions:
        found["per position"] = best(place for _, place in cells)
    if ids is not None:
        found["per token"] = best((int(ids[row, place]), place if positions else None) for row, place in cells)
        if not positions:
            found["possible without positions"] = best((row, int(ids[row, place])) for row, place in cells)
    return found


def recalibrated(scores: list[Tensor], like: list[Tensor], labels: list[Tensor]) -> list[Tensor]:
    """Scores moved by one constant per class and scaled by one factor, to the mean and spread of other scores.

    A constant is what theorem 2.1 adds to its sum over paths; it says nothing about any token.
    """
    counted = [label >= 0 for label in labels]
    own, other = (
        torch.cat([part[keep] for part, keep in zip(parts, counted, strict=True)]).double() for parts in (scores, like)
    )
    factor = other.std(dim=0).mean() / own.std(dim=0).mean()
    return [(part.double() - own.mean(dim=0)) * factor + other.mean(dim=0) for part in scores]


@torch.no_grad()
def judge_paths(case: Case, seed: int) -> dict[str, Any]:
    """Train one network; accuracy of the whole and of every path length, size and residual of the sums of paths."""
    task = case.make(seed)
    model = encoder(task, layers=case.layers, heads=case.heads, width=case.width, seed=seed)
    with torch.enable_grad():
        fit(model, task, case.plan, seed=seed, surgery=NO_MLP)
    held = task.held.take(slice(case.judged)) if case.judged else task.held
    parts = [held.take(slice(start, start + AT_ONCE)) for start in range(0, len(held), AT_ONCE)]
    labels = [part.labels for part in parts]
    loaded = rs.load(model).loaded
    data = [
        (batch, part.labels)
        for part in parts
        for batch in prepare_inputs(loaded, part.inputs, batch=len(part))
    ]  # fmt: skip
    head, found = model.classifier, dict[str, Any](baselines(task.held, positions=task.positions))
    view = view_of(model, data[0][0])

    def drawn(count: int, meaning: str) -> np.ndarray:
        """Mean accuracy of ``count`` random paths of each length; the same paths for both meanings."""
        draws = [
            path_effectiveness(
                view, model.config, data, head, paths=count, meaning=meaning, repeats=1, seed=1000 * repeat + count
            )
            for repeat in range(case.repeats)
        ]
        # The first entry of each draw is the whole network.
        return np.mean([[one.accuracy[0] for one in draw[1:]] for draw in draws], axis=0)

    with rs.operate(model, NO_MLP, inputs=rs.Inputs(held.take(slice(2)).inputs, padding="none")):
        found["whole network"] = share_right(model, task.held)
        networks = [next(iter(freeze_network(view, model.config, batch).values())) for batch, _ in data]
        found |= {f"frozen, {count}": drawn(count, "frozen") for count in (5, 20)}
    # Along a recomputed path the MLPs are left out by itself.
    found |= {f"recomputed, {count}": drawn(count, "recomputed") for count in (5, 20)}
    sums = [length_sums(network, by_origin=True).sums["embedding"] for network in networks]
    out = [head(network.out) for network in networks]
    right, whole = torch.cat(labels), range(sums[0].shape[0])
    scores = [[head(total[length]) for total in sums] for length in whole]
    found["frozen, all"] = np.array([accuracy(torch.cat(each), right) for each in scores])
    again = [torch.cat(recalibrated(each, out, labels)) for each in scores]
    found["recalibrated, all"] = np.array([accuracy(each, right) for each in again])
    found["size over output"], found["relative residual"] = np.array(
        [sizes([total[length] for total in sums], [network.out for network in networks], parts) for length in whole]
    ).T
    return found


def sizes(sums: list[Tensor], outs: list[Tensor], parts: list[Examples]) -> tuple[float, float]:
    """Norm of the sum over that of the output, and the relative residual of the sum, both means over sequences."""
    ratios, residuals = [], []
    for total, out, part in zip(sums, outs, parts, strict=True):
        mask = part.inputs.get("attention_mask")
        for row in range(len(part)):
            tokens = slice(None) if mask is None else slice(int(mask[row].sum()))
            one = total[row, tokens].double()
            ratios.append(float(one.norm() / out[row, tokens].double().norm()))
            residuals.append(float((one - one.mean(dim=0)).norm() / one.norm()))
    return math.fsum(ratios) / len(ratios), math.fsum(residuals) / len(residuals)


def main() -> None:
    """Train the networks of each task, print the table, draw."""
    parser = options(__doc__)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(FULL)}; all by default")
    given = parser.parse_args()
    cases = SMALL if given.small else FULL
    numbers: dict[str, Any] = {}
    for task in given.tasks or FULL:
        networks = [judge_paths(cases[task], seed) for seed in range(cases[task].seeds)]
        numbers[task] = {name: np.mean([one[name] for one in networks], axis=0) for name in networks[0]}

    figure, grid = panels(len(numbers), 2, title="Accuracy with paths of one length only", size=(4.0, 3.0))
    for (task, means), (left, right) in zip(numbers.items(), grid, strict=True):
        columns = [", ".join(key) for key in LINES] + ["size over output", "relative residual"]
        rows = [[str(length), *(f"{means[name][length]:.3f}" for name in columns)]
                for length in range(len(means[columns[0]]))]  # fmt: skip
        single = {name: value for name, value in means.items() if name not in columns}
        print(f"{task}: {', '.join(f'{name} {value:.3f}' for name, value in single.items())}")
        print(table(["length", *columns], rows))
        for key, (colour, marker, dash) in LINES.items():
            name = ", ".join(key)
            left.plot(means[name], color=colour, marker=marker, linestyle=dash, markersize=3, label=f"{name} paths")
        for name, value in single.items():
            left.axhline(value, color=GREY, linewidth=0.7)
            left.text(0.98, value, name, transform=left.get_yaxis_transform(), ha="right", va="bottom", fontsize=5)
        whole, chance, first = PUBLISHED[task]
        left.scatter([1], [first], marker="*", s=60, facecolors="none", edgecolors=BLACK, label="published, length 1")
        left.set(title=f"{task} (published: whole {whole}, chance {chance})", ylabel="accuracy", ylim=(0, 1.1))
        for name in ("size over output", "relative residual"):
            right.semilogy(np.maximum(means[name], 1e-12), marker="o", markersize=3, label=name)
        right.set(title="sum of all paths of a length")
        right.legend(fontsize=6)
    grid[0][0].legend(fontsize=5, loc="upper right")
    for axes in grid[-1]:
        axes.set_xlabel("path length (attention layers passed through)")
    write("dong2021_paths", numbers, figure, given)


if __name__ == "__main__":
    main()

"""Can a network be made to use its long paths?

Dong, Cordonnier and Loukas (2021, section 5) find that networks with skips behave like ensembles of shallow networks,
in which short paths carry the signal, and leave open whether a network can be made to use its long paths. Here networks
learn to sort while their skips are scaled by a gain g, from the first step on or falling from 1 over 60% of training.
Then `rs.decompose` gives the share of the output that the paths of each length carry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from output import COLOURS, options, panels, table, write
from training import Plan, encoder, final_loss, fit, share_right, sort_task

import rankscope as rs

FULL = {"gains": (1.0, 0.3, 0.1, 0.03, 0.01, 0.0), "seeds": 3, "layers": 6, "width": 48, "train": 1000, "held": 200}
SMALL = {"gains": (1.0, 0.25, 0.0), "seeds": 1, "layers": 3, "width": 16, "train": 60, "held": 20}
FULL_PLAN, SMALL_PLAN = Plan(steps=300, batch=100), Plan(steps=20, batch=20)
FALLING, FIXED = "falling", "from the start"
FALLS_UNTIL = 0.6
"""Share of the training after which the gain has reached its end."""


def gain_at(step: int, steps: int, end: float) -> float:
    """The gain while it falls: 1 at first, linear down to ``end`` at 60% of the steps, then ``end``."""
    return 1.0 + (end - 1.0) * min(1.0, step / (FALLS_UNTIL * steps))


def one_network(size: dict[str, Any], plan: Plan, schedule: str, gain: float, seed: int) -> dict[str, Any]:
    """Train one network; its accuracy, its loss, and the share of every path length, mean over sequences."""
    task = sort_task(seed, train=size["train"], held=size["held"])
    model = encoder(task, layers=size["layers"], heads=2, width=size["width"], seed=seed)
    end = {"attention_skip": gain, "mlp": "drop"}

    def falling(step: int) -> dict[str, Any]:
        return {"attention_skip": gain_at(step, plan.steps, gain), "mlp": "drop"}

    losses = fit(model, task, plan, seed=seed, surgery=falling if schedule == FALLING else end)
    with rs.operate(model, end, inputs=task.held.inputs):
        right = share_right(model, task.held)
    run = rs.decompose(model, rs.Inputs(task.held.inputs, batch=len(task.held)), end, origins=True)
    # Paths start at the embedding; what biases contribute on the way is one share of its own.
    lengths = np.arange(size["layers"] + 1)
    shares = by_length(run, "embedding", lengths)
    return {
        "accuracy": right,
        "loss": final_loss(losses),
        "mean_length": float((np.abs(shares) * lengths).sum() / np.abs(shares).sum()),
        "shares": shares,
        "biases": float(np.nansum(by_length(run, "bias", lengths))),
    }


def by_length(run: rs.Run, origin: str, lengths: np.ndarray) -> np.ndarray:
    """Share of the output by path length, mean over sequences, for one origin."""
    rows = run.select(metric="projection_share", origin=origin, length=lengths.tolist())
    length, value = rows["length"].to_numpy(), rows["value"].to_numpy()
    return np.array([np.nanmean(value[length == one]) for one in lengths])


def main() -> None:
    """Train every arm, print the table, draw."""
    given = options(__doc__).parse_args()
    size, plan = (SMALL, SMALL_PLAN) if given.small else (FULL, FULL_PLAN)
    arms = [(how, gain) for gain in size["gains"] for how in (FIXED, FALLING) if gain != 1.0 or how == FIXED]
    found = {arm: [one_network(size, plan, *arm, seed) for seed in range(size["seeds"])] for arm in arms}
    means = {
        arm: {name: np.mean([each[name] for each in networks], axis=0) for name in networks[0]}
        for arm, networks in found.items()
    }
    head = ["gain", "accuracy", "loss", "mean length", *(f"length {n}" for n in range(size["layers"] + 1)), "biases"]
    rows = [
        [f"{gain:g}, {how}", *(f"{m[name]:.3f}" for name in ("accuracy", "loss", "mean_length"))]
        + [f"{share:.3f}" for share in (*m["shares"], m["biases"])]
        for (how, gain), m in means.items()
    ]
    print(table(head, rows))

    figure, ((left, middle, right),) = panels(1, 3, title="Can a network be made to use its long paths?")
    for (how, gain), networks in found.items():
        colour = COLOURS[size["gains"].index(gain)]
        hollow = how == FIXED and gain != 1.0
        name = None if hollow else f"g = {gain:g}"
        left.plot(means[how, gain]["shares"], color=colour, linestyle="--" if hollow else "-", label=name)
        for axes, metric in ((middle, "accuracy"), (right, "loss")):
            dots = {"s": 14, "color": colour, "facecolors": "none" if hollow else colour}
            axes.scatter([each["mean_length"] for each in networks], [each[metric] for each in networks], **dots)
    left.set(xlabel="path length", ylabel="share of the output")
    left.legend(title="filled, solid: falling; hollow, dashed: from the start", title_fontsize=5, fontsize=6)
    middle.set(xlabel="mean path length", ylabel="accuracy on unseen sequences", ylim=(0, 1.04))
    right.set(xlabel="mean path length", ylabel="loss at the end of training")
    write("long_paths", {"gains": {f"{gain:g}, {how}": m for (how, gain), m in means.items()}}, figure, given)


if __name__ == "__main__":
    main()

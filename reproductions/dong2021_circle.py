"""One attention layer, applied repeatedly, loses the circle (Dong, Cordonnier and Loukas 2021, section 4.3).

A block is trained to move two opposing points on a circle one step of a full turn in 1000 further, then applied to its
own output. The paper's claim: with attention alone the points meet; a skip or an MLP delays or prevents it. For
opposing points near the centre, attention without skip and biases is cubic in the radius, so a circle that such a block
maps to itself has a radial factor of 3: every step triples an error in the radius, inward or outward. The authors' run
left one skip in place in the variant labelled as having none; here all are removed, and no block has norms.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from output import BLUE, COLOURS, MARKERS, VERMILION, options, panels, table, write
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from training import Examples, Plan, Task, final_loss, fit
from transformers import BertConfig, BertPreTrainedModel
from transformers.modeling_outputs import ModelOutput
from transformers.models.bert.modeling_bert import BertLayer

import rankscope as rs
from rankscope.exact_arithmetic import Deviation

VARIANTS: dict[str, dict[str, Any]] = {
    "attention": {"skip": 0.0, "mlp": "drop", "norm": "identity"},
    "attention + skip": {"mlp": "drop", "norm": "identity"},
    "attention + MLP": {"skip": 0.0, "norm": "identity"},
    "attention + skip + MLP": {"norm": "identity"},
}
RADIUS, ANGLES, FAR = 0.3, 1000, 1e6
MET, APART = 0.01, 10.0
"""Multiples of the first distance: below the one, two points have met; above the other, they diverged."""
FULL = {"widths": (32, 128), "seeds": 3, "steps": 300, "plan": Plan(steps=400, batch=100, rate=3e-3)}
SMALL = {"widths": (8,), "seeds": 1, "steps": 6, "plan": Plan(steps=40, batch=100, rate=3e-3)}


def circle_task() -> Task:
    """Two opposing points at every angle; the answer is the pair one step further on."""
    turn = 2 * math.pi * torch.arange(ANGLES + 1, dtype=torch.float64) / ANGLES
    one = RADIUS * torch.stack([turn.cos(), turn.sin()], dim=-1)
    pair = torch.stack([one, -one], dim=1)
    whole = Examples({"points": pair[:-1]}, pair[1:])
    return Task(whole, whole, 0, 0, positions=False)


class RecurrentBlock(BertPreTrainedModel):
    """Points to width, one BERT block, width to points; repeated at every further step."""

    main_input_name = "points"

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.reading = nn.Linear(2, config.hidden_size)
        self.layer = nn.ModuleList([BertLayer(config)])
        self.writing = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, points: Tensor, labels: Tensor | None = None, steps: int = 1) -> ModelOutput:
        """``steps`` steps from ``points`` (batch, 2, 2), and the loss if labels are given."""
        for _ in range(steps):
            points = self.writing(self.layer[0](self.reading(points)))
        return ModelOutput(points=points, loss=None if labels is None else mse_loss(points, labels))


def recurrent_block(width: int, seed: int) -> RecurrentBlock:
    """A block in float64, its MLP four times as wide."""
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=(3 * width) ** -0.5,
        vocab_size=2,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    return RecurrentBlock(config).double().train()


def free_run(model: RecurrentBlock, start: Tensor, steps: int) -> np.ndarray:
    """The two points after 0, 1, ... steps, each from the previous one; ends early beyond FAR."""
    states = [start]
    with torch.no_grad():
        for _ in range(steps):
            points = model(states[-1]).points
            if not float(points.abs().max()) < FAR:
                break
            states.append(points)
    return torch.cat(states).numpy()


def radial_factor(model: RecurrentBlock, points: Tensor) -> float:
    """Geometric mean over the circle of the factor by which one step changes a small change of radius."""
    points = points.clone().requires_grad_()
    radii = model(points).points.norm(dim=-1).mean(dim=-1)
    (gradient,) = torch.autograd.grad(radii.sum(), points)
    outward = (points / points.norm(dim=-1, keepdim=True)).detach()
    return float((gradient * outward).sum(dim=(-2, -1)).abs().log().mean().exp())


def exact_distances(model: RecurrentBlock, surgery: dict[str, Any], start: Tensor, steps: int) -> list[float]:
    """Decimal logarithm of the distance between the points after 0, 1, ... steps, in exact arithmetic."""
    logs = [math.log10(float((start[0, 0] - start[0, 1]).norm()))]

    def note(module: nn.Module, args: Any, out: Any) -> None:
        # In exact arithmetic a tensor knows by how little its tokens differ from their mean.
        if isinstance(out, Deviation):
            logs.append((out.log_residual() + 0.5 * math.log(2.0)) / math.log(10.0))

    # The pass ends with the last block, before its output is written as points: one further step shows them all.
    handle = model.writing.register_forward_hook(note)
    try:
        whole = rs.Model(model, blocks="layer.0")
        rs.exact(whole, rs.Inputs({"points": start, "steps": steps + 1}, padding="none"), surgery, plain=False)
    finally:
        handle.remove()
    return logs[: steps + 1]


def ending(path: np.ndarray, steps: int) -> str:
    """Whether the points met, diverged, drifted off the circle, or stayed on it."""
    distance = np.linalg.norm(path[:, 0] - path[:, 1], axis=-1)
    if distance[-1] < MET * distance[0]:
        return "met"
    if distance.max() > APART * distance[0] or len(path) <= steps:
        return "diverged"
    off = max(abs(distance[-1] / distance[0] - 1.0), float(np.linalg.norm(path[-1].mean(axis=0))) / RADIUS)
    return "stayed" if off < 0.1 else "drifted off"


def one_block(size: dict[str, Any], variant: str, width: int, seed: int) -> dict[str, Any]:
    """Train one block and apply it to its own output."""
    task, surgery, model = circle_task(), VARIANTS[variant], recurrent_block(width, seed)
    points = task.train.inputs["points"]
    losses = fit(model, task, size["plan"], seed=seed, surgery=surgery, blocks="layer.0")
    with rs.operate(rs.Model(model, blocks="layer.0"), surgery, inputs={"points": points[:2]}):
        factor = radial_factor(model, points[:: ANGLES // 20])
        path = free_run(model, points[:1], size["steps"])
    return {
        "loss": final_loss(losses),
        "radial_factor": factor,
        "ends": ending(path, size["steps"]),
        "path": path,
        "log10_distance": exact_distances(model, surgery, points[:1], len(path) - 1),
    }


def draw(axes: Any, path: np.ndarray, name: str) -> None:
    """A trajectory; the grey circle is the target."""
    turn = np.linspace(0, 2 * np.pi, 200)
    axes.plot(RADIUS * np.cos(turn), RADIUS * np.sin(turn), color="#cccccc", linewidth=3)
    for point, colour in ((0, VERMILION), (1, BLUE)):
        axes.plot(*path[:, point].T, color=colour, marker=".", markersize=2, linewidth=1)
    axes.set(xlim=(-0.62, 0.62), ylim=(-0.62, 0.62), aspect="equal", xticks=[], yticks=[], title=name)


def main() -> None:
    """Train every block, let it run, print the table, draw."""
    given = options(__doc__).parse_args()
    size = SMALL if given.small else FULL
    found = {
        (width, name): [one_block(size, name, width, seed) for seed in range(size["seeds"])]
        for width in size["widths"]
        for name in VARIANTS
    }
    rows = []
    for (width, name), blocks in found.items():
        radial = math.exp(np.mean([math.log(block["radial_factor"]) for block in blocks]))
        lasts = ", ".join(f"{block['log10_distance'][-1]:.3g}" for block in blocks)
        rows.append([str(width), name, f"{radial:.3f}", ", ".join(block["ends"] for block in blocks), lasts])
    print(table(["width", "block", "radial factor", "ends", "log10 of the last distance, exact"], rows))

    title = "Two points moved around a circle by one trained block applied to its own output"
    figure, grid = panels(len(size["widths"]), len(VARIANTS) + 1, title=title, size=(2.1, 2.2))
    for line, width in zip(grid, size["widths"], strict=True):
        for axes, name, colour, marker in zip(line, VARIANTS, COLOURS, MARKERS, strict=False):
            draw(axes, found[width, name][0]["path"], f"{name}, width {width}")
            for block in found[width, name]:
                # Lines: exact arithmetic. Dots: float64, in which a distance below its rounding is zero.
                line[-1].plot(np.maximum(block["log10_distance"], -30.0), color=colour, linewidth=1)
                distance = np.linalg.norm(block["path"][:, 0] - block["path"][:, 1], axis=-1)
                seen = np.unique(np.geomspace(1, len(distance), 12).astype(int)) - 1
                seen = seen[distance[seen] > 0]
                line[-1].plot(seen, np.log10(distance[seen]), linestyle="none", marker=marker, ms=2.5, color=colour)
        line[-1].set(title="log10 of the distance", ylim=(-24, 6.5), xlabel="steps")
        line[-1].set_xscale("symlog", linthresh=1)
    numbers = {
        f"{name}, width {width}": [
            {**{key: value for key, value in block.items() if key not in ("path", "log10_distance")},
             "distance": np.linalg.norm(block["path"][:, 0] - block["path"][:, 1], axis=-1)[-1],
             "log10_distance": block["log10_distance"][-1]}
            for block in blocks
        ]
        for (width, name), blocks in found.items()
    }  # fmt: skip
    write("dong2021_circle", numbers, figure, given)


if __name__ == "__main__":
    main()

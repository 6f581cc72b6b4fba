"""Does training fight collapse?

Dong, Cordonnier and Loukas (2021, section 4.1) find doubly exponential collapse in networks whose skips and MLPs were
removed after training, or that were never trained, and expect slower collapse in networks trained in that form. Noci et
al. (2022) show that the gradients of queries and keys vanish at collapse, so that training could not undo it. Here an
encoder (BERT) and a causal model (GPT-2) learn to sort with parts removed, in training too, and are read at some steps
in exact arithmetic: the residual after the last block, the order of a block (3: cubic) and its factor on a small
residual. There are no published numbers to overlay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from output import COLOURS, GREY, MARKERS, options, panels, table, write
from torch import Tensor, nn
from training import IGNORED, Examples, Plan, Task, encoder, fit, share_right, sort_task
from transformers import GPT2Config, GPT2ForTokenClassification

import rankscope as rs

VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "no MLP": {"mlp": "drop"},
    "no norm": {"norm": "identity"},
    "no skip": {"skip": 0.0},
    "no skip, no norm": {"skip": 0.0, "norm": "identity"},
    "no skip, no MLP": {"skip": 0.0, "mlp": "drop"},
    "attention alone": {"skip": 0.0, "mlp": "drop", "norm": "identity"},
}
FULL = {"width": 64, "heads": 4, "depth": 4, "seeds": 3, "steps": 128, "looks": (0, 10, 50), "probed": 2,
        "train": 1000, "held": 200}  # fmt: skip
SMALL = {"width": 16, "heads": 2, "depth": 3, "seeds": 1, "steps": 12, "looks": (0,), "probed": 1,
         "train": 100, "held": 50}  # fmt: skip
TINY, LONG = -3.0, 128
"""log10 of the residual below which an order is that of the limit; step from which only powers of two are read."""


@dataclass(frozen=True)
class Arm:
    """One network; whatever is removed is removed during training too."""

    family: str
    variant: str
    depth: int
    mask: str | None = None
    longer: int = 1

    @property
    def surgery(self) -> dict[str, Any]:
        """What is removed."""
        return VARIANTS[self.variant] | ({} if self.mask is None else {"mask": self.mask})

    @property
    def name(self) -> str:
        """For tables."""
        more = "" if self.mask is None else f", {self.mask}"
        return f"{self.family} {self.depth}, {self.variant}{more}" + (f", {self.longer}x" if self.longer > 1 else "")


def arms(size: dict[str, Any], *, small: bool) -> Iterator[Arm]:
    """Every network, without its seeds."""
    depth, few = size["depth"], ("whole", "no skip", "attention alone")
    if small:
        yield from (Arm("encoder", "whole", depth), Arm("encoder", "no skip", depth, "window(2)"))
        yield Arm("causal", "attention alone", depth)
        return
    yield from (Arm("encoder", name, depth) for name in VARIANTS)
    yield from (Arm("causal", name, depth) for name in ("whole", "no MLP", "no norm", "no skip", "attention alone"))
    yield from (Arm("encoder", name, depth, "window(2)") for name in few)
    yield from (Arm("encoder", name, 2) for name in few[1:])
    yield from (Arm("encoder", name, depth, longer=16) for name in few[1:])


def causal_sort_task(seed: int, *, train: int, held: int) -> Task:
    """Read the sequence and a mark, then answer the sorted symbols one after the other."""
    task = sort_task(seed, train=train, held=held, fresh=True)

    def spoken(examples: Examples) -> Examples:
        ids, labels = examples.inputs["input_ids"], examples.labels
        mark = torch.full_like(ids[:, :1], task.vocabulary)
        told = torch.cat([ids, mark, labels[:, :-1]], dim=1)
        return Examples({"input_ids": told}, torch.cat([torch.full_like(labels, IGNORED), labels], dim=1))

    return Task(spoken(task.train), spoken(task.held), task.classes, task.vocabulary + 1, positions=True)


def network(arm: Arm, size: dict[str, Any], task: Task, seed: int) -> nn.Module:
    """The whole network before training, with weights of standard deviation 1/sqrt(width)."""
    width, heads, std = size["width"], size["heads"], float(size["width"] ** -0.5)
    if arm.family == "encoder":
        shape = {"layers": arm.depth, "heads": heads, "width": width, "mlp_width": 4 * width}
        return encoder(task, **shape, std=std, seed=seed)
    config = GPT2Config(
        vocab_size=task.vocabulary,
        n_positions=task.train.labels.shape[1],
        n_embd=width,
        n_layer=arm.depth,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        classifier_dropout=0.0,
        num_labels=task.classes,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(seed)
    return GPT2ForTokenClassification(config).train()


def projections(model: nn.Module, *, gradient: bool) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Query, key and value maps of every block, or their gradients."""

    def of(weight: nn.Parameter) -> Tensor:
        return (weight.grad if gradient else weight).detach().double().clone()

    if hasattr(model, "bert"):
        layers = [layer.attention.self for layer in model.bert.encoder.layer]
        return [(of(own.query.weight), of(own.key.weight), of(own.value.weight)) for own in layers]
    return [of(block.attn.c_attn.weight).chunk(3, dim=1) for block in model.transformer.h]


def steps_read(steps: int, looks: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """Steps at which losses and gradients are read, and those at which exact arithmetic is run."""
    doubling = {2**power for power in range(steps.bit_length()) if 2**power < steps}
    return {0, steps - 1, *doubling, *looks}, {*looks, steps - 1, *(step for step in doubling if step >= LONG)}


def exactly(model: nn.Module, ids: Tensor, surgery: dict[str, Any], depth: int) -> dict[str, float]:
    """Residual after the last block, median order of the blocks and geometric mean of their factors."""
    run = rs.exact(model, ids, surgery, plain=False, stability=True)
    rows = {
        name: np.array(run.select(metric=name, site="block.out", arithmetic="exact")["value"].to_pylist(), float)
        for name in ("log10_relative_residual", "order", "factor", "linear_factor")
    }
    residual = rows["log10_relative_residual"].reshape(depth, -1)
    order = rows["order"].reshape(depth, -1)
    near = order[(residual < TINY) & np.isfinite(order)]
    found = {"residual": finite_mean(residual[-1]), "order": float(np.median(near if near.size else order))}
    for name in ("factor", "linear_factor"):
        positive = rows[name][rows[name] > 0]
        found[name] = float(np.exp(finite_mean(np.log(positive))))
    return found


def finite_mean(values: np.ndarray) -> float:
    """Mean of what is finite."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def train(arm: Arm, seed: int, size: dict[str, Any]) -> dict[str, Any]:
    """Train one network, read it on the way, and judge it on held-out sequences."""
    steps = size["steps"] * arm.longer
    make = causal_sort_task if arm.family == "causal" else lambda s, **n: sort_task(s, fresh=True, **n)
    task = make(seed, train=size["train"], held=size["held"])
    model = network(arm, size, task, seed)
    probe = task.held.inputs["input_ids"][: size["probed"]]
    read, looked = steps_read(steps, size["looks"])
    start, course = projections(model, gradient=False), dict[str, dict[int, Any]](exact={}, ratio={}, loss={})

    def before(step: int) -> None:
        if step in looked:
            course["exact"][step] = exactly(model, probe, {}, arm.depth)

    def after(step: int, loss: float) -> None:
        if step in read:
            query, key, value = (float(part.norm()) for part in projections(model, gradient=True)[-1])
            course["ratio"][step] = math.hypot(query, key) / value if value else float("nan")
            course["loss"][step] = loss

    losses = fit(model, task, Plan(steps=steps, warmup=0.1), seed=seed, surgery=arm.surgery, before=before, after=after)
    moved = [
        [float((now - then).norm() / then.norm()) for now, then in zip(*layers, strict=True)]
        for layers in zip(projections(model, gradient=False), start, strict=True)
    ]
    with rs.operate(model, arm.surgery):
        right = share_right(model, task.held)
    # The paper removes parts only after training, and only from whole networks.
    cuts = [name for name, surgery in VARIANTS.items() if "skip" in surgery]
    cut = {name: exactly(model, probe, VARIANTS[name], arm.depth)["residual"] for name in cuts}
    query, _, value = np.mean(moved, axis=0)
    return {
        **course,
        "accuracy": right,
        "final_loss": float(np.mean(losses[-10:])),
        "query_moved": query,
        "value_moved": value,
        "cut_after": cut if arm.variant == "whole" and arm.mask is None else {},
    }


def main() -> None:
    """Train every arm, print the table, draw."""
    given = options(__doc__).parse_args()
    size = SMALL if given.small else FULL
    found = {arm: [train(arm, seed, size) for seed in range(size["seeds"])] for arm in arms(size, small=given.small)}
    rows = []
    for arm, networks in found.items():
        ends = [
            f"{np.mean([list(one['exact'].values())[place]['residual'] for one in networks]):.2f}" for place in (0, -1)
        ]
        orders = [
            f"{np.mean([list(one['exact'].values())[place]['order'] for one in networks]):.2f}" for place in (0, -1)
        ]
        ratios = [f"{np.mean([list(one['ratio'].values())[place] for one in networks]):.2g}" for place in (0, -1)]
        right = f"{np.mean([one['accuracy'] for one in networks]):.2f}"
        rows.append([arm.name, right, *(" -> ".join(pair) for pair in (ends, orders, ratios))])
    print(table(["network", "accuracy", "log10 residual", "order", "Q, K over V gradient"], rows))

    groups: dict[str, list[Arm]] = {}
    for arm in found:
        plain = arm.mask is None and arm.longer == 1 and arm.depth == size["depth"]
        groups.setdefault(f"{arm.family}, {arm.depth} blocks" if plain else "encoder, other", []).append(arm)
    figure, grid = panels(len(groups), 3, title="Does training fight collapse?", size=(3.0, 2.2))
    for line, (group, members) in zip(grid, groups.items(), strict=True):
        for number, arm in enumerate(members):
            look = {"color": COLOURS[number % 8], "marker": MARKERS[number % 8], "markersize": 3}
            courses = [
                {step: [one["exact"][step]["residual"] for one in found[arm]] for step in found[arm][0]["exact"]},
                *({step: [one[name][step] for one in found[arm]] for step in found[arm][0][name]}
                  for name in ("ratio", "loss")),
            ]  # fmt: skip
            for axes, course in zip(line, courses, strict=True):
                values, at = np.array(list(course.values())), np.array(list(course)) + 1
                axes.plot(at, values.mean(axis=1), label=arm.name, **look)
                axes.fill_between(at, values.min(axis=1), values.max(axis=1), color=look["color"], alpha=0.15)
        for axes, label in zip(line, ("log10 residual", "gradient: Q, K over V", "loss"), strict=True):
            axes.set(xscale="log", xlabel="step + 1", ylabel=label, title=group)
        line[0].set_yscale("symlog", linthresh=1.0)
        line[1].set_yscale("log")
        line[2].axhline(np.log(10), color=GREY, linewidth=0.8, linestyle=":")
        line[2].legend(fontsize=5)
    write("training_against_collapse", {arm.name: networks for arm, networks in found.items()}, figure, given)


if __name__ == "__main__":
    main()

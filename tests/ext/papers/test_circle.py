"""The recurrent block: free runs, exact distances, the cubic law on the circle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rankscope.ext.papers.dong2021_circle.run import (
    COORDINATES,
    VARIANTS,
    RecurrentBlock,
    exact_distances,
    free_run,
    radial_factor,
    recurrent_block,
)
from rankscope.ext.papers.dong2021_circle.show import PLACES, FreeRun, describe
from rankscope.ext.papers.measuring.parts import write_rows
from rankscope.ext.papers.training.tasks import circle_task
from rankscope.runs.provenance import Provenance
from rankscope.runs.rows import RowWriter
from rankscope.runs.run import Run

START = circle_task(angles=12).train.inputs["points"]


def by_hand(model: RecurrentBlock, points: torch.Tensor, variant: str) -> torch.Tensor:
    """One step, written out: attention, the skip and the MLP as the variant says, no norm."""
    layer, skip, mlp = model.layer[0], "skip" in variant, "MLP" in variant
    x = model.reading(points)
    own = layer.attention.self
    query, key, value = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (own.query, own.key, own.value))
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    mixed = layer.attention.output.dense((scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(-2))
    x = mixed + x if skip else mixed
    if mlp:
        branch = layer.output.dense(layer.intermediate(x))
        x = branch + x if skip else branch
    return model.writing(x)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_truly_without_what_it_leaves_out(variant: str) -> None:
    model = recurrent_block(8, seed=1)
    path = free_run(model, VARIANTS[variant], START[:1], 3)
    points = START[:1]
    with torch.no_grad():
        for found in path:
            torch.testing.assert_close(found, points[0], rtol=1e-10, atol=1e-14)
            points = by_hand(model, points, variant)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", VARIANTS)
def test_exact_distances_are_those_of_float64_while_it_sees_them(variant: str) -> None:
    model = recurrent_block(8, seed=2)
    path = free_run(model, VARIANTS[variant], START[:1], 8)
    plain = np.array([float((pair[0] - pair[1]).norm()) for pair in path])
    exact = np.array(exact_distances(model, VARIANTS[variant], START[:1], len(path) - 1))
    assert exact.size == plain.size
    seen = plain > 1e-9
    np.testing.assert_allclose(exact[seen], np.log10(plain[seen]), rtol=0, atol=1e-6)
    if variant in ("attention", "attention + MLP"):
        assert exact[-1] < -1000, "order 3 has long left float64"


def test_the_radial_factor_is_a_derivative() -> None:
    model, operation = recurrent_block(8, seed=3), VARIANTS["attention + skip + MLP"]
    step = 1e-6
    with torch.no_grad():
        radii = [
            free_run(model, operation, (1 + sign * step) * START[:1], 1)[1].norm(dim=-1).mean() for sign in (1, -1)
        ]
    expected = float(radii[0] - radii[1]) / (2 * step * 0.3)
    assert radial_factor(model, operation, START[:1]) == pytest.approx(abs(expected), rel=1e-6)


def test_cubic_law_a_step_of_pure_attention_triples_a_small_change_of_radius() -> None:
    """Without biases and for small scores the step is a cubic form, so that by Euler r f'(r) = 3 f(r)."""
    model = recurrent_block(8, seed=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    points = 1e-3 * START
    operation = VARIANTS["attention"]
    sizes = [float(free_run(model, operation, one[None], 1)[1].norm(dim=-1).mean()) for one in points]
    mean = math.exp(sum(math.log(size / 3e-4) for size in sizes) / len(sizes))
    assert radial_factor(model, operation, points) / mean == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize(
    ("distance", "centre", "steps", "end"),
    [
        ([0.6, 0.1, 1e-3], [0.0, 0.0, 0.0], 2, "met"),
        ([0.6, 2.0, 9.0], [0.0, 0.0, 0.0], 2, "apart"),
        ([0.6, 2.0], [0.0, 0.0], 5, "apart"),
        ([0.6, 0.6, 0.59], [0.0, 0.0, 0.01], 2, "kept"),
        ([0.6, 0.6, 0.59], [0.0, 0.0, 0.2], 2, "drifted"),
        ([0.6, 0.5, 0.3], [0.0, 0.0, 0.0], 2, "drifted"),
    ],
)
def test_how_a_run_ends(distance, centre, steps: int, end: str) -> None:
    free = FreeRun(np.array(distance), np.array(centre), np.log10(distance), np.empty((0, 4)), 0.0, 1.0, steps)
    assert free.end == end


def circle_run(ends: dict[str, list[float]], loss: float = 1e-6, widths: tuple[int, ...] = (8,)) -> Run:
    """A run of one seed whose distances are written by hand, by variant."""
    writer = RowWriter(coordinates=COORDINATES)
    rows = [
        {"metric": metric, "site": "points", "layer": step, "value": value, "variant": name, "width": width, "seed": 0}
        for width in widths
        for name in VARIANTS
        for metric, values in (
            ("final_loss", [loss]),
            ("radial_factor", [1.0]),
            ("distance", ends[name]),
            ("centre", [0.0] * len(ends[name])),
            ("log10_distance_exact", [math.log10(value) for value in ends[name]]),
            *((place, [0.0] * len(ends[name])) for place in PLACES),
        )
        for step, value in enumerate(values)
    ]
    write_rows(writer, rows)
    steps = len(ends["attention"]) - 1
    extra = {"widths": widths, "steps": steps, "seeds": 1, "angles": 4, "plan": {"steps": 1, "batch": 1, "rate": 1}}
    return Run("reproduce:dong2021-circle", Provenance("m"), {}, "", writer.table(), extra=extra)


MEETS_FIRST, MEETS_LATER, STAYS = [0.6, 0.001, 0.001], [0.6, 0.3, 0.001], [0.6, 0.6, 0.6]
AS_CLAIMED = {"attention": MEETS_FIRST, "attention + skip": STAYS, "attention + MLP": MEETS_LATER,
              "attention + skip + MLP": STAYS}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "loss", "answer"),
    [
        ({}, 1e-6, "Yes."),
        ({"attention": STAYS}, 1e-6, "In part: 1 of 3 outcomes"),
        ({"attention + skip": MEETS_FIRST}, 1e-6, "In part: 2 of 3 outcomes"),
        ({"attention + skip": MEETS_FIRST, "attention + MLP": MEETS_FIRST}, 1e-6, "In part: 1 of 3 outcomes"),
        ({"attention": STAYS, "attention + skip": MEETS_FIRST, "attention + MLP": MEETS_FIRST}, 1e-6, "No."),
        ({}, 0.04, "Not tested: 4 of 4 blocks have not learned the circle"),
    ],
)
def test_item_11_yes_only_if_every_claimed_outcome_happened(
    changes: dict[str, list[float]], loss: float, answer: str
) -> None:
    text = describe(circle_run({**AS_CLAIMED, **changes}, loss))
    assert f"**Does the claim hold?** {answer}" in text

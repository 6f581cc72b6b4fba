"""The look-alikes again, from tokens through the real metrics to the verdict."""

from __future__ import annotations

import pytest
import torch

from rankscope.linalg.precision import float_floor
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import DEFAULT_TOKEN_METRICS, METRICS, evaluate
from rankscope.runs.rows import RowWriter
from rankscope.verdicts import judge_rows

TOKENS, DIM = 128, 64


def tokens_of(kind: str) -> torch.Tensor:
    """The rows of the table in which no single number is enough, and the same at the float floor."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64)
    common = torch.randn(DIM, generator=generator, dtype=torch.float64)
    if kind == "offset":
        return x + 3 * common
    if kind == "token":
        x[0] *= 1000
    if kind == "channel":
        x[:, 0] *= 300
    if kind == "collapsed":
        return common + 1e-3 * x
    if kind == "equal":
        return common.expand(TOKENS, DIM).clone()
    if kind == "float32":
        return (common + 1e-7 * x).float()
    return x


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("iid", "healthy"),
        ("offset", "mean offset"),
        ("token", "huge token"),
        ("channel", "huge channel"),
        ("collapsed", "collapsed"),
        ("equal", "floor"),
        ("float32", "floor"),
    ],
)
@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 2.0**60])
def test_each_kind_is_recognised_at_every_scale(kind: str, code: str, scale: float) -> None:
    x = tokens_of(kind) * scale
    floor = float_floor(x.dtype)
    specs = [METRICS[name] for name in DEFAULT_TOKEN_METRICS]
    reading = evaluate(specs, Tokens(x[None]), floor)
    writer = RowWriter()
    for spec, values, statuses in zip(specs, reading.values, reading.statuses, strict=True):
        place = {"metric": spec.name, "site": "block.out", "stack": None, "layer": 0, "first_sequence": 0}
        writer.add(values=values.numpy(), statuses=statuses.numpy(), head_axis=False, **place)
    assert judge_rows(writer.table(), floor_relative=floor).code == code

"""Norms read inside the graph of a compiled training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from rankscope._types import Status
from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.monitor import Gauge
from rankscope.monitor.block_statistics import GRAPH_METRICS


class Block(nn.Module):
    """A pre-norm block whose output the tests keep themselves."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, depth: int = 2, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _streams(net: Net, x: Tensor) -> list[Tensor]:
    """The streams after each block, without the gauge: an independent run in float64."""
    found = []
    for block in net.blocks:
        x = block(x)
        found.append(x.detach().double())
    return found


def _train(steps: int, *, watched: bool) -> tuple[list[float], list[Any], list[list[Tensor]], Gauge | None]:
    torch._dynamo.reset()
    net = Net().train()
    batches = torch.randn(steps, 4, 6, 8, generator=torch.Generator().manual_seed(1)) + 0.5
    gauge = None
    if watched:
        gauge = Gauge(net, batches[0, :2], where="graph", schedule=2, alarms=(), strict=True)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)  # fullgraph: a graph break is an error
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses, readings, streams = [], [], []
    for step, batch in enumerate(batches):
        streams.append(_streams(net, batch))
        loss = compiled(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        reading = None if gauge is None else gauge.step(step)
        if reading is not None:
            readings.append((step, reading))
    return losses, readings, streams, gauge


@pytest.fixture(scope="module")
def trainings() -> tuple[Any, Any]:
    return _train(4, watched=False), _train(4, watched=True)


@pytest.mark.slow
def test_losses_are_the_same_bits_without_a_graph_break(trainings: tuple[Any, Any]) -> None:
    bare, watched = trainings
    assert bare[0] == watched[0]


@pytest.mark.slow
def test_a_reading_covers_every_forward_since_the_last(trainings: tuple[Any, Any]) -> None:
    _, (_, readings, streams, _) = trainings
    # Streams of the plain loop, which the gauge's hooks saw too: half of what was read is that loop.
    assert [step for step, _ in readings] == [0, 2]
    parts = streams[1] + streams[2]
    for layer in range(2):
        seen = torch.cat([parts[layer], parts[2 + layer]])
        relative = (seen - seen.mean(1, keepdim=True)).norm() / seen.norm()
        for metric, value in (("relative_residual", relative), ("stream_rms", seen.square().mean().sqrt())):
            row = next(r for r in readings[1][1].table if r.metric == metric and r.layer == layer)
            assert (row.mean, row.least, row.most) == (pytest.approx(float(value), rel=1e-5),) * 3


def test_a_gauge_created_after_the_compiled_step_says_so() -> None:
    torch._dynamo.reset()
    net = Net().train()
    x = torch.randn(2, 6, 8)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    compiled(x)
    gauge = Gauge(net, x, where="graph", schedule=1, alarms=(), strict=True)
    compiled(x)
    with pytest.raises(UnsupportedOperationError, match="before the first step"):
        gauge.step(0)


def test_evaluation_passes_and_the_probe_are_not_read() -> None:
    net = Net().train()
    x = torch.randn(2, 6, 8)
    gauge = Gauge(net, x, where="graph", schedule=1, alarms=(), strict=True)
    net.eval()(x)
    with pytest.raises(UnsupportedOperationError, match="evaluation mode"):
        gauge.step(0)
    net.train()(x)
    reading = gauge.step(1)
    assert reading is not None
    assert {row.metric for row in reading.table} == {*GRAPH_METRICS, "layers_read"}
    gauge.close()
    assert not any(module._forward_hooks for module in net.modules())


def test_values_that_are_not_finite_and_single_tokens_have_a_status() -> None:
    net = Net().train()
    gauge = Gauge(net, torch.randn(2, 6, 8), where="graph", schedule=1, alarms=(), strict=True)
    net(torch.full((2, 6, 8), torch.nan))
    net(torch.randn(2, 6, 8))
    both = gauge.step(0)
    net(torch.full((2, 6, 8), torch.inf))
    bad = gauge.step(1)
    net(torch.randn(2, 1, 8))
    single = gauge.step(2)
    assert both is not None
    assert bad is not None
    assert single is not None
    statuses = [{row.metric: row.status for row in one.table if row.layer == 1} for one in (both, bad, single)]
    assert [one["relative_residual"] for one in statuses] == ["ok", str(Status.NOT_FINITE), str(Status.UNDEFINED)]
    assert [one["stream_rms"] for one in statuses] == ["ok", str(Status.NOT_FINITE), "ok"]


def test_alarms_bring_the_readings_they_need() -> None:
    net = Net().train()
    x = torch.randn(2, 6, 8)
    with Gauge(net, x, where="graph", schedule=1, alarms=("not_finite", "shown_faults"), strict=True) as gauge:
        net(x)
        with torch.no_grad():
            net.blocks[1].out.bias[0] = torch.inf  # type: ignore[union-attr]
        reading = gauge.step(0)
    assert reading is not None
    assert "weight_norm" in {row.metric for row in reading.table}
    assert [alarm.name for alarm in reading.alarms] == ["not_finite"]


def test_what_a_graph_cannot_show_is_refused() -> None:
    net = Net()
    with pytest.raises(InputError, match="relative_residual and stream_rms only, not stable_rank"):
        Gauge(net, torch.randn(2, 6, 8), where="graph", metrics=["stable_rank"])
    shared = Net()
    shared.blocks[1] = shared.blocks[0]
    with pytest.raises(UnsupportedOperationError, match="share one module"):
        Gauge(shared, torch.randn(2, 6, 8), where="graph", strict=True)
    assert GRAPH_METRICS == ("relative_residual", "stream_rms")

"""What a training step does because of the statistics: no host read, no collective, nothing that stays."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope import blockstats
from tests.blockstats.nets import DEPTH, WIDTH, Decoder, attached, batches, decoder, loss_of

HOST = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::masked_select")
NO_KERNEL = (
    "promote_types",
    "view",
    "reshape",
    "unflatten",
    "unsqueeze",
    "squeeze",
    "select",
    "as_strided",
    "expand",
    "empty",
    "detach",
)


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def step(model: Decoder, ids: Tensor) -> None:
    loss_of(model(ids), ids).backward()
    model.zero_grad()


def profiled(model: Decoder, ids: Tensor) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step(model, ids)
    return Counter({event.key: event.count for event in seen.key_averages()})


def living() -> list[Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]


def test_a_step_reads_nothing_on_the_host_and_sends_nothing() -> None:
    model, (ids,) = decoder(), batches(1)
    step(model, ids)
    bare = profiled(model, ids)
    stats = attached(model)
    step(model, ids)
    watched = profiled(model, ids)
    added = watched - bare
    assert {name: added[name] for name in HOST} == dict.fromkeys(HOST, 0)
    assert not [name for name in added if "c10d" in name or "gloo" in name or "nccl" in name]
    with Dispatched() as seen:
        step(model, ids)
    operators = {name for name in seen.names if "blockstats" in name}
    assert {name: seen.names[name] for name in operators} == {"rankscope_blockstats.add.default": DEPTH}
    assert not [name for name in seen.names if "_local_scalar_dense" in name or "c10d" in name]
    stats.flush()
    reads = profiled_flush(stats)
    assert reads["aten::_local_scalar_dense"] == 0


def profiled_flush(stats: blockstats.BlockStats) -> Counter[str]:
    for tap in stats.taps.values():
        tap(torch.ones(1, 2, WIDTH), torch.ones(1, 2, WIDTH))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        stats.flush()
    return Counter({event.key: event.count for event in seen.key_averages()})


def test_nothing_outlives_a_step() -> None:
    model, (ids,) = decoder(), batches(1)
    attached(model)
    step(model, ids)
    once = living()  # held, so that no later tensor has the address of one of these
    known = set(map(id, once))
    for _ in range(5):
        step(model, ids)
    assert [tensor.shape for tensor in living() if id(tensor) not in known] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_one_block(dtype: torch.dtype) -> None:
    """Eager kernels per block, which the page gives; none while counting is off."""
    x = torch.randn(2, 16, WIDTH).to(dtype)
    stats = blockstats.attach([torch.nn.Identity()], WIDTH)
    launched = {}
    for on in (False, True):
        stats.count(on)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            stats.taps[0](x, x)
        names = Counter({event.key.removeprefix("aten::"): event.count for event in seen.key_averages()})
        launched[on] = names
    assert not [name for name in launched[False] if "sum" in name or "norm" in name or "sub" in name]
    with Dispatched() as inner, torch.no_grad():
        tap = stats.taps[0]
        blockstats._add._init_fn(x, x, None, tap.totals, tap.largest, tap.gate, 0)
    kernels = {name: count for name, count in inner.names.items() if not any(word in name for word in NO_KERNEL)}
    assert sum(kernels.values()) <= 41, kernels

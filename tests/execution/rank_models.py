"""Models spread over processes by hand, as a user would spread them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Attention(nn.Module):
    """Works with however many heads its projections give."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape[:2]
        query, key, value = (
            layer(x).view(batch, tokens, -1, self.size).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        probs = (query @ key.transpose(-1, -2) / self.size**0.5).softmax(dim=-1)
        return self.out((probs @ value).transpose(1, 2).contiguous().view(batch, tokens, -1))


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention = Attention(dim, 4)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def own_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(Block(16) for _ in range(2))).double()


def fully_sharded(model: Any) -> nn.Module:
    """Every block and the model itself under ``fully_shard``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    sharded: nn.Module = fully_shard(model, mesh=mesh)
    return sharded


def tensor_parallel(model: nn.Module, *, distributed: bool) -> nn.Module:
    """Heads and hidden units dealt out; queries, keys and values are a rank's own, or distributed tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = not distributed
    plan = {name: ColwiseParallel(use_local_output=local) for name in ("attention.query", "attention.key")}
    plan |= {"attention.value": ColwiseParallel(use_local_output=local), "up": ColwiseParallel()}
    rows = {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
    for block in model.children():
        parallelize_module(block, mesh, {**plan, **rows})
    return model

"""What a handler is asked, in which order, and that one which does nothing changes nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope.models.view import Label, Stack
from rankscope.stream.block_call import ActiveBlock
from rankscope.stream.mode import AttentionPlace, Handler, Perform, StreamMode
from rankscope.surgery.session import structure_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(self.norm(x)).unsqueeze(1).chunk(3, -1)
        return x + F.scaled_dot_product_attention(query, key, value).squeeze(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Asked(Handler):
    """Writes down what it is asked."""

    reads_attention = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def begin_pass(self) -> None:
        self.asked.append("begin_pass")

    def enter(self, call: ActiveBlock, entry: Tensor) -> None:
        self.asked.append("enter")

    def norm(self, call: ActiveBlock, norm: tuple[str, int], x: Tensor, out: Tensor, *, of_stream: bool) -> Tensor:
        self.asked.append(f"norm {norm[0]} {of_stream}")
        return super().norm(call, norm, x, out, of_stream=of_stream)

    def attention(self, place: AttentionPlace) -> Any:
        self.asked.append(f"attention {place.kind}")
        return super().attention(place)

    def add(self, call: ActiveBlock, label: Label | None, stream: Tensor, branch: Tensor, perform: Perform) -> Tensor:
        self.asked.append(f"add {label}")
        return super().add(call, label, stream, branch, perform)

    def added(self, call: ActiveBlock, label: Label | None, total: Tensor) -> None:
        self.asked.append(f"added {label}")

    def leave(self, call: ActiveBlock, module: nn.Module, output: Any, left: Tensor) -> None:
        self.asked.append("leave")

    def final(self, stack: Stack, x: Tensor, out: Tensor) -> Tensor:
        self.asked.append("final")
        return out

    def end_pass(self, *, is_complete: bool) -> None:
        self.asked.append(f"end_pass {is_complete}")


def test_a_handler_is_asked_in_the_order_that_the_mode_draws() -> None:
    torch.manual_seed(0)
    model, ids, handler = Model().eval(), torch.arange(10).view(2, 5), Asked()
    view, bare = structure_of(model, ids), model(ids)
    with StreamMode(view, handler).active():
        seen = model(ids)
    assert torch.equal(seen, bare)
    blocks = [
        ["enter", f"norm blocks.{n}.norm True", "attention fused", "add attention", "added attention", "leave"]
        for n in range(2)
    ]
    assert handler.asked == ["begin_pass", *blocks[0], *blocks[1], "final", "end_pass True"]
    model(ids)
    assert handler.asked.count("begin_pass") == 1  # nothing of it is left on the model

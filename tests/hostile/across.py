"""Skips that are not inside a block: written in the model's loop, around several blocks, back to the input."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rankscope as rs
from tests.hostile import twin as plain
from tests.hostile.case import ALL, READS, case
from tests.hostile.parts import DIM, Attention, Block, Mlp, Net, ids
from tests.hostile.skips import NoSkip
from tests.hostile.twin import Cut, Twin

CORE = {"doctor", "skip0", "exact", "ablate"}
put = partial(case, core=CORE, skips="between blocks")
LONG = ALL - {"one_block", "exact"}
"""Long skips can be scaled with all of the blocks they go around, and not in exact arithmetic."""


class LongSkips(Net):
    """A U-Net: the blocks behind the middle read again what those before it gave, in reverse order."""

    def __init__(self) -> None:
        super().__init__(Block, depth=5)

    def forward(self, ids: Tensor) -> Tensor:
        x, saved = self.start(ids), []
        for layer, block in enumerate(self.blocks):
            if layer > 2:
                x = self.meet(x, saved.pop(), layer)
            x = block(x)
            if layer < 2:
                saved.append(x)
        return self.close(x)

    def meet(self, x: Tensor, old: Tensor, layer: int) -> Tensor:
        return x + old

    def met(self, x: Tensor, old: Tensor, layer: int, gain: float) -> Tensor:
        return x + gain * old

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            now = cut.at(layer)
            if layer > 2:
                x = self.met(x, states[4 - layer], layer, now.skip)
            x = block.twin(x, now)
            states.append(x)
        return Twin(self.close_twin(x), states)


class LongSkipsByCat(LongSkips):
    """Side by side with what is there, and projected."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(2 * DIM, DIM) for _ in range(2))

    def meet(self, x: Tensor, old: Tensor, layer: int) -> Tensor:
        return self.project[layer - 3](torch.cat([x, old], dim=-1))

    def met(self, x: Tensor, old: Tensor, layer: int, gain: float) -> Tensor:
        return plain.linear(self.project[layer - 3], torch.cat([x, gain * old], dim=-1))


class LongSkipsWeighted(LongSkips):
    """One learned weight for each, as the fastest trainers of small language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(2))

    def meet(self, x: Tensor, old: Tensor, layer: int) -> Tensor:
        return x + self.weights[layer - 3] * old

    def met(self, x: Tensor, old: Tensor, layer: int, gain: float) -> Tensor:
        return x + gain * self.weights[layer - 3] * old


class LongSkipsNormed(LongSkips):
    """What is brought back is normalised first, and interpolated with what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))

    def meet(self, x: Tensor, old: Tensor, layer: int) -> Tensor:
        return torch.lerp(x, self.norms[layer - 3](old), 0.3)

    def met(self, x: Tensor, old: Tensor, layer: int, gain: float) -> Tensor:
        return 0.7 * x + gain * 0.3 * plain.norm(self.norms[layer - 3], old)


class LongSkipsInPlace(LongSkips):
    """The sum is written over the state that is brought back."""

    def meet(self, x: Tensor, old: Tensor, layer: int) -> Tensor:
        old += x
        return old


class LongSkipsStacked(LongSkips):
    """A sum of a stack of both."""

    def meet(self, x: Tensor, old: Tensor, layer: int) -> Tensor:
        return torch.stack([old, x]).sum(0)


class LongSkipsAsGate(LongSkips):
    """What is brought back only controls a gate, and is not carried."""

    def meet(self, x: Tensor, old: Tensor, layer: int) -> Tensor:
        return x * torch.sigmoid(x + old)

    def met(self, x: Tensor, old: Tensor, layer: int, gain: float) -> Tensor:
        return x / (1 + (-x - old).exp())


class LongSkipsProjected(LongSkips):
    """What is brought back goes through a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(2))

    def meet(self, x: Tensor, old: Tensor, layer: int) -> Tensor:
        return x + self.project[layer - 3](old)

    def met(self, x: Tensor, old: Tensor, layer: int, gain: float) -> Tensor:
        return x + gain * plain.linear(self.project[layer - 3], old)


class _TakesASkip(Block):
    """As in U-ViT: a block behind the middle takes the state that is brought back as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.skip_linear = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if skip is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        return super().forward(x)

    def twin(self, x: Tensor, cut: Cut, skip: Tensor | None = None) -> Tensor:
        if skip is not None:
            x = plain.linear(self.skip_linear, torch.cat([x, cut.skip * skip], dim=-1))
        return super().twin(x, cut)


class LongSkipsAsArguments(Net):
    """As in U-ViT: the blocks behind the middle take it as an argument, concatenate and project."""

    def __init__(self) -> None:
        super().__init__(_TakesASkip, depth=5)

    def forward(self, ids: Tensor) -> Tensor:
        x, saved = self.start(ids), []
        for layer, block in enumerate(self.blocks):
            x = block(x, saved.pop() if layer > 2 else None)
            if layer < 2:
                saved.append(x)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), states[4 - layer] if layer > 2 else None)
            states.append(x)
        return Twin(self.close_twin(x), states)


class BesideAnAdapter(Net):
    """A skip around a matrix between the blocks, outside of any."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = block(x)
            x = x + torch.tanh(adapter(x))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, (block, adapter) in enumerate(zip(self.blocks, self.adapters, strict=True)):
            x = block.twin(x, cut.at(layer))
            states.append(x)
            x = cut.at(layer).skip * x + torch.tanh(plain.linear(adapter, x))
        return Twin(self.close_twin(x), states)


class BackToTheInput(Net):
    """``l0 * x + l1 * x0`` in front of every block."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(3, 2))

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.start(ids)
        for layer, block in enumerate(self.blocks):
            x = block(self.mix[layer, 0] * x + self.mix[layer, 1] * first)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x = first = self.start_twin(ids)
        states = []
        for layer, block in enumerate(self.blocks):
            now = cut.at(layer)
            gain = 1.0 if layer == 0 else now.skip
            x = block.twin(self.mix[layer, 0] * x + gain * self.mix[layer, 1] * first, now)
            states.append(x)
        return Twin(self.close_twin(x), states)


class _ReadsTheInput(Block):
    """The same inside the block, which takes the first stream as a second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(2))

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return super().forward(self.mix[0] * x + self.mix[1] * first)

    def twin(self, x: Tensor, cut: Cut, first: Tensor) -> Tensor:
        # In the first block both terms are its own stream, which goes around nothing there.
        gain = 1.0 if x is first else cut.skip
        return super().twin(self.mix[0] * x + gain * self.mix[1] * first, cut)


class InputAsArgument(Net):
    """`l0 * x + l1 * x0` inside of every block, which takes the first stream as an argument."""

    def __init__(self) -> None:
        super().__init__(_ReadsTheInput)

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.start(ids)
        for block in self.blocks:
            x = block(x, first)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x = first = self.start_twin(ids)
        states = []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer), first)
            states.append(x)
        return Twin(self.close_twin(x), states)


class Injected(Net):
    """One block called over and over, the input added again in every round."""

    def __init__(self) -> None:
        super().__init__(Block, depth=1)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.start(ids)
        x = torch.zeros_like(first)
        for _ in range(3):
            x = self.blocks[0](x + first)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        first, states = self.start_twin(ids), []
        x = self.blocks[0].twin(first, cut.at(0))
        states.append(x)
        for layer in (1, 2):
            now = cut.at(layer)
            x = self.blocks[0].twin(x + now.skip * first, now)
            states.append(x)
        return Twin(self.close_twin(x), states)


class InjectedByCat(Net):
    """An adapter reads stream and input side by side, as recurrent-depth models do."""

    def __init__(self) -> None:
        super().__init__(Block, depth=1)
        self.adapter = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.start(ids)
        for _ in range(3):
            x = self.blocks[0](self.adapter(torch.cat([x, first], dim=-1)))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x = first = self.start_twin(ids)
        states = []
        for layer in range(3):
            now = cut.at(layer)
            gain = 1.0 if layer == 0 else now.skip
            x = self.blocks[0].twin(plain.linear(self.adapter, torch.cat([x, gain * first], dim=-1)), now)
            states.append(x)
        return Twin(self.close_twin(x), states)


class _Bottleneck(nn.Module):
    """As in MobileBERT: a narrow block inside, and a wide skip around all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shrink, self.widen = nn.Linear(DIM, DIM // 2), nn.Linear(DIM // 2, DIM)
        self.attention, self.mlp = Attention(DIM // 2), Mlp(DIM // 2)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(DIM // 2), nn.LayerNorm(DIM // 2), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.shrink(x)
        narrow = self.norm1(narrow + self.attention(narrow))
        narrow = self.norm2(narrow + self.mlp(narrow))
        return self.norm3(self.widen(narrow) + x)

    def twin(self, x: Tensor, cut: Cut) -> Tensor:
        narrow = plain.linear(self.shrink, x)
        narrow = plain.norm(self.norm1, cut.skip * narrow + self.attention.by_hand(narrow, cut), cut)
        branch = cut.skip * narrow + self.mlp.by_hand(narrow) if cut.mlp else narrow
        narrow = plain.norm(self.norm2, branch, cut)
        return plain.norm(self.norm3, plain.linear(self.widen, narrow) + cut.skip * x, cut)


class Bottleneck(Net):
    """A narrow block with skips of its own inside a wide skip (MobileBERT)."""

    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.blocks = nn.ModuleList(_Bottleneck() for _ in range(3))


class LoopSkip(Net):
    """The blocks are branches; the model's loop adds them."""

    def __init__(self) -> None:
        super().__init__(NoSkip)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            now = cut.at(layer)
            x = now.skip * x + block.twin(x, now)
            states.append(x)
        return Twin(self.close_twin(x), states)


class LoopSkips(Net):
    """Attentions and MLPs in two lists, walked by one loop that adds both."""

    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.attentions = nn.ModuleList(Attention() for _ in range(3))
        self.mlps = nn.ModuleList(Mlp() for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(6))

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for layer in range(3):
            x = self.join(x, self.attentions[layer](self.norms[2 * layer](x)))
            x = self.join(x, self.mlps[layer](self.norms[2 * layer + 1](x)))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer in range(3):
            now = cut.at(layer)
            read = plain.norm(self.norms[2 * layer], x, now)
            x = now.skip * x + self.attentions[layer].by_hand(read, now)
            if now.mlp:
                x = now.skip * x + self.mlps[layer].by_hand(plain.norm(self.norms[2 * layer + 1], x, now))
            states.append(x)
        return Twin(self.close_twin(x), states)


class LoopSkipsAlpha(LoopSkips):
    """The same with `torch.add` and `alpha`."""

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, branch, alpha=1)


class AroundTwo(Net):
    """A skip around two blocks that have none of their own."""

    def __init__(self) -> None:
        super().__init__(NoSkip, depth=4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = x + second(first(x))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer in (0, 2):
            inner = self.blocks[layer].twin(x, cut.at(layer))
            states.append(inner)
            x = cut.at(layer + 1).skip * x + self.blocks[layer + 1].twin(inner, cut.at(layer + 1))
            states.append(x)
        return Twin(self.close_twin(x), states)


class AroundTwoWithOwn(Net):
    """A second skip around two blocks that have their own."""

    def __init__(self) -> None:
        super().__init__(Block, depth=4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = second(first(x)) + x
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer in (0, 2):
            inner = self.blocks[layer].twin(x, cut.at(layer))
            last = self.blocks[layer + 1].twin(inner, cut.at(layer + 1))
            x = last + cut.at(layer + 1).skip * x
            states += [inner, last]
        return Twin(self.close_twin(x), states)


class EmbeddingAtTheEnd(Net):
    """One skip from the embedding to the head, around everything."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.start(ids)
        for block in self.blocks:
            x = block(x)
        return self.close(x + first)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        found = super().twin(cut, ids)
        last = found.states[-1] + (cut.skip if cut.layers is None else 1.0) * self.start_twin(ids)
        return Twin(self.close_twin(last), found.states)


class SumOfAllBlocks(Net):
    """Every block's output is in the end added up (dense connections)."""

    def forward(self, ids: Tensor) -> Tensor:
        x, seen = self.start(ids), []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        return self.close(torch.stack(seen).mean(0))

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        found = super().twin(cut, ids)
        gain = cut.skip if cut.layers is None else 1.0
        total = gain * found.states[0] + gain * found.states[1] + found.states[2]
        return Twin(self.close_twin(total / 3), found.states)


class ValueResidual(Net):
    """Later attentions mix the values of the first into their own: a way past the stream, through a matrix."""

    def __init__(self) -> None:
        super().__init__(_FirstValues)

    def forward(self, ids: Tensor) -> Tensor:
        x, first = self.start(ids), None
        for block in self.blocks:
            x, first = block(x, first)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, first, states = self.start_twin(ids), None, []
        for layer, block in enumerate(self.blocks):
            x, first = block.twin(x, cut.at(layer), first)
            states.append(x)
        return Twin(self.close_twin(x), states)


class _FirstValueAttention(Attention):
    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x)
        own, v = v, v if first is None else 0.5 * v + 0.5 * first
        mixed = self.mix(q, k, v, None)
        return self.out(mixed.transpose(1, 2).reshape(x.shape)), own if first is None else first

    def by_hand(self, x: Tensor, cut: Cut, first: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (plain.split(part, self.heads) for part in plain.linear(self.qkv, x).chunk(3, dim=-1))
        mixed = self.mix_by_hand(q, k, v if first is None else (v + first) / 2, None, cut)
        return plain.linear(self.out, plain.merge(mixed)), v if first is None else first


class _FirstValues(Block):
    def make_attention(self) -> nn.Module:
        return _FirstValueAttention()

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        branch, first = self.attention(self.norm1(x), first)
        x = x + branch
        return x + self.mlp(self.norm2(x)), first

    def twin(self, x: Tensor, cut: Cut, first: Tensor | None) -> tuple[Tensor, Tensor]:
        branch, first = self.attention.by_hand(plain.norm(self.norm1, x, cut), cut, first)
        return self.mlp_twin(cut.skip * x + branch, cut), first


class Checkpointed(Net):
    """Blocks run through gradient checkpointing."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.close(x)


class AttributeOfTheModel(LongSkips):
    """A long skip that goes through an attribute of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for layer, block in enumerate(self.blocks):
            if layer > 2:
                x = x + self.saved.pop()
            x = block(x)
            if layer < 2:
                self.saved.append(x)
        return self.close(x)


class SumOfBranches(Net):
    """No stream is ever added to: what a branch reads is the sum of the list of all branches before it."""

    def __init__(self) -> None:
        super().__init__(Block, depth=3)

    def forward(self, ids: Tensor) -> Tensor:
        seen = [self.start(ids)]
        for block in self.blocks:
            seen.append(block.attention(block.norm1(torch.stack(seen).sum(0))))
            seen.append(block.mlp(block.norm2(torch.stack(seen).sum(0))))
        return self.close(torch.stack(seen).sum(0))


class DepthWeighted(Net):
    """Each block reads a weighted mean of all outputs before it (DenseFormer)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(3, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        seen = [x]
        for layer, block in enumerate(self.blocks):
            seen.append(block(x))
            x = torch.einsum("s,sbtd->btd", self.weights[layer, : layer + 2], torch.stack(seen))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x = self.start_twin(ids)
        seen = [x]
        for layer, block in enumerate(self.blocks):
            gain = cut.at(layer).skip
            seen.append(block.twin(x, cut.at(layer)))
            x = self.weights[layer, layer + 1] * seen[-1]
            for number, old in enumerate(seen[:-1]):
                x = x + gain * self.weights[layer, number] * old
        return Twin(self.close_twin(x), seen[1:])


class Reversible(Net):
    """Two streams that are each other's branch (Reformer)."""

    def __init__(self) -> None:
        super().__init__(_Reversible)

    def forward(self, ids: Tensor) -> Tensor:
        x = y = self.start(ids)
        for block in self.blocks:
            x, y = block(x, y)
        return self.close((x + y) / 2)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x = y = self.start_twin(ids)
        states = []
        for layer, block in enumerate(self.blocks):
            now = cut.at(layer)
            x = now.skip * x + block.attention.by_hand(plain.norm(block.norm1, y, now), now)
            if now.mlp:
                y = now.skip * y + block.mlp.by_hand(plain.norm(block.norm2, x, now))
            states.append(torch.cat([x, y], dim=-1))
        return Twin(self.close_twin((x + y) / 2), states)


class _Reversible(Block):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(y))
        return x, y + self.mlp(self.norm2(x))


class OnlyWhenLong(Net):
    """A skip that a short input does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(24, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.start(ids)
        for block in self.blocks:
            x = block(x)
            if ids.shape[1] > 16:
                x = x + first
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x = first = self.start_twin(ids)
        states = []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x, cut.at(layer))
            states.append(x)
            x = x + cut.at(layer).skip * first
        return Twin(self.close_twin(x), states)


class _Walker(nn.Module):
    """Pairs of attention and MLP in a list of lists, added by the loop, as many vision models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(DIM), Attention(), nn.LayerNorm(DIM), Mlp()]) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm1, attention, norm2, mlp in self.layers:
            x = attention(norm1(x)) + x
            x = mlp(norm2(x)) + x
        return x


class PairsInAList(Net):
    """Pairs of attention and MLP in a list of lists, added by a loop in a module of their own."""

    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.transformer = _Walker()

    def forward(self, ids: Tensor) -> Tensor:
        return self.close(self.transformer(self.start(ids)))

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, (norm1, attention, norm2, mlp) in enumerate(self.transformer.layers):
            now = cut.at(layer)
            x = now.skip * x + attention.by_hand(plain.norm(norm1, x, now), now)
            if now.mlp:
                x = now.skip * x + mlp.by_hand(plain.norm(norm2, x, now))
            states.append(x)
        return Twin(self.close_twin(x), states)


class ByHook(LoopSkip):
    """The skip around a block is a hook on it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(_add_what_went_in)

    forward = Net.forward


def _add_what_went_in(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out + args[0]


class UnderVmap(Net):
    """Each sequence by itself, all at once."""

    def __init__(self) -> None:
        super().__init__(_OneSequence)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = torch.vmap(block)(x)
        return self.close(x)


class _OneSequence(Block):
    def to_tokens(self, x: Tensor) -> Tensor:
        return x[None]

    def from_tokens(self, x: Tensor) -> Tensor:
        return x[0]


class StackedWeights(Net):
    """One module runs with the weights of one layer after the other."""

    def __init__(self) -> None:
        super().__init__(Block, depth=1)
        shapes = {name: parameter.shape for name, parameter in self.blocks[0].named_parameters()}
        self.stacked = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(torch.empty(3, *shape)) for name, shape in shapes.items()}
        )

    def _of(self, layer: int) -> dict[str, Tensor]:
        return {name.replace("/", "."): rows[layer] for name, rows in self.stacked.items()}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for layer in range(3):
            x = torch.func.functional_call(self.blocks[0], self._of(layer), (x,))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states, block = self.start_twin(ids), [], Block().to(self.embed.weight.dtype)
        for layer in range(3):
            block.load_state_dict(self._of(layer))
            x = block.twin(x, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


class InInferenceMode(Net):
    """The whole pass in inference mode."""

    def forward(self, ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return super().forward(ids)


def around() -> object:
    return rs.Stream(skips="around")


put("long_skips", LongSkips, equal=LONG)
put("long_skips_by_cat", LongSkipsByCat, equal=LONG)
put("long_skips_weighted", LongSkipsWeighted, equal=LONG, core={"skip0"})
put("long_skips_normed", LongSkipsNormed, equal=LONG - {"exact_whole"}, core={"skip0"})
put("long_skips_in_place", LongSkipsInPlace, equal=frozenset(), core={"skip0"})
put("long_skips_stacked", LongSkipsStacked, equal=LONG, core={"skip0"})
put("long_skips_as_gate", LongSkipsAsGate, equal=READS, core={"skip0"})
put("long_skips_projected", LongSkipsProjected, equal=READS, core={"skip0"})
put("long_skips_as_arguments", LongSkipsAsArguments, equal=LONG, core={"skip0"})
put("beside_an_adapter", BesideAnAdapter, equal=READS, core={"skip0"})
put("back_to_the_input", BackToTheInput, equal=LONG)
put("input_as_argument", InputAsArgument, equal=LONG)
put("injected", Injected, equal=LONG)
put("injected_by_cat", InjectedByCat, equal=LONG)
put("bottleneck", Bottleneck, equal=READS)
put("loop_skip", LoopSkip, equal=frozenset(), declared={"stream": around, "blocks": "blocks.*"})
put("loop_skips", LoopSkips, equal=frozenset())
put("loop_skips_alpha", LoopSkipsAlpha, equal=frozenset())
put("around_two", AroundTwo, equal=frozenset())
put("around_two_with_own", AroundTwoWithOwn, equal=LONG)
put("embedding_at_the_end", EmbeddingAtTheEnd, equal=LONG)
put("sum_of_all_blocks", SumOfAllBlocks, equal=READS)
put("value_residual", ValueResidual, equal=READS)
put("checkpointed", Checkpointed)
put("attribute_of_the_model", AttributeOfTheModel, equal=LONG)
put("sum_of_branches", SumOfBranches, equal=frozenset())
put("depth_weighted", DepthWeighted, equal=READS)
put("reversible", Reversible, equal=frozenset())
put("only_when_long", OnlyWhenLong, equal=READS, inputs=lambda: ids(2, 20))
put("pairs_in_a_list", PairsInAList, equal=ALL - {"norm", "ablate"})
put("by_hook", ByHook, equal=frozenset())
put("under_vmap", UnderVmap, equal=frozenset())
put("stacked_weights", StackedWeights)
put("in_inference_mode", InInferenceMode, equal=ALL - {"exact", "exact_whole"})

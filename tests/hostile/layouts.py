"""Every layout of the stream: order of axes, folded axes, several streams, and what a block takes and gives back."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import rankscope as rs
from tests.hostile import twin as plain
from tests.hostile.case import READS, case
from tests.hostile.parts import DIM, TOKENS, Attention, Block, Mlp, Net, ids
from tests.hostile.twin import Cut, Twin

CORE = {"doctor", "measure", "exact"}
put = partial(case, core=CORE)

NONE: frozenset[str] = frozenset()


def declared(*axes: str, **facts: object) -> dict[str, object]:
    """The declaration as the user would write it; made when the test runs."""
    return {"stream": lambda: rs.Stream(*axes, **facts)}


class Turned(Net):
    """A stream in another order of axes: ``turn`` leads there from (batch, tokens, dim) and ``back`` returns."""

    def turn(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def back(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __init__(self, block: type[Block] = Block, depth: int = 3) -> None:
        super().__init__(block, depth)
        for block in self.blocks:
            block.to_tokens, block.from_tokens = self.back, self.turn

    def start(self, ids: Tensor) -> Tensor:
        return self.turn(super().start(ids))

    def close(self, x: Tensor) -> Tensor:
        return super().close(self.back(x))


class TokensFirst(Turned):
    def turn(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def back(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class ChannelsFirst(Turned):
    def turn(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def back(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Image(Turned):
    """(batch, channels, height, width)."""

    def turn(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).unflatten(2, (2, -1))

    def back(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class ImageChannelsLast(Turned):
    def turn(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, -1))

    def back(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)


class Packed(Turned):
    """All tokens of all sequences in one row."""

    rows = 0

    def start(self, ids: Tensor) -> Tensor:
        type(self).rows = ids.shape[0]
        return super().start(ids)

    def turn(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)

    def back(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.rows, -1))


class HeadsApart(Turned):
    """Channels in two groups, an axis each."""

    def turn(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (2, -1))

    def back(self, x: Tensor) -> Tensor:
        return x.flatten(2)


class IdleAxis(Turned):
    def turn(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1)

    def back(self, x: Tensor) -> Tensor:
        return x.squeeze(1)


class _InWindows(Attention):
    """Attention among the tokens of each window alone."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        windows = x.unflatten(1, (2, -1)).flatten(0, 1)
        return super().forward(windows).unflatten(0, (-1, 2)).flatten(1, 2)

    def by_hand(self, x: Tensor, cut: Cut, hidden: Tensor | None = None) -> Tensor:
        half = x.shape[1] // 2
        return torch.cat([super().by_hand(x[:, :half], cut), super().by_hand(x[:, half:], cut)], dim=1)


class WindowedBlock(Block):
    def make_attention(self) -> nn.Module:
        return _InWindows()


class Windows(Turned):
    """Windows are counted as sequences from the first block to the last."""

    def turn(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, -1)).flatten(0, 1)

    def back(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, 2)).flatten(1, 2)


class Unbatched(Net):
    """One sequence without an axis for it: ids (tokens,), stream (tokens, dim)."""

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.positions[: ids.shape[0]]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = x + block.attention(block.norm1(x)[None])[0]
            x = x + block.mlp(block.norm2(x))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        found = super().twin(cut, ids[None])
        return Twin(found.output[0], found.states)


class _UnbatchedBlock(Block):
    def to_tokens(self, x: Tensor) -> Tensor:
        return x[None]

    def from_tokens(self, x: Tensor) -> Tensor:
        return x[0]


class UnbatchedBlocks(Unbatched):
    def __init__(self) -> None:
        super().__init__(_UnbatchedBlock)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = block(x)
        return self.close(x)


class CuSeqlens(Net):
    """Sequences of different length in one row, their ends beside them, as variable-length kernels want it."""

    def forward(self, ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        sequence = torch.bucketize(torch.arange(ids.shape[0]), cu_seqlens[1:], right=True)
        others = sequence[:, None] != sequence[None, :]
        x = self.embed(ids) + self.positions[torch.arange(ids.shape[0]) - cu_seqlens[sequence]]
        for block in self.blocks:
            x = block(x, others)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor, cu_seqlens: Tensor) -> Twin:
        parts = [ids[a:b] for a, b in zip(cu_seqlens.tolist(), cu_seqlens.tolist()[1:], strict=False)]
        found = [super(CuSeqlens, self).twin(cut, part[None]) for part in parts]
        output = torch.cat([one.output[0] for one in found])
        # Sequences of one length, so that the states stack.
        return Twin(output, [torch.cat(states) for states in zip(*(one.states for one in found), strict=True)])


class CuSeqlensNet(CuSeqlens):
    def __init__(self) -> None:
        super().__init__(_UnbatchedBlock)


def packed_ids() -> dict[str, Tensor]:
    return {"ids": ids().flatten(), "cu_seqlens": torch.tensor([0, TOKENS, 2 * TOKENS])}


class TwoStreams(Net):
    """Two streams per token: a block reads their mixture and writes into both."""

    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.blocks = nn.ModuleList(_StreamsBlock() for _ in range(3))

    def start(self, ids: Tensor) -> Tensor:
        x = super().start(ids)
        return torch.stack([x, 0.5 * x], dim=2)

    def close(self, x: Tensor) -> Tensor:
        return super().close(x.sum(2))

    def start_twin(self, ids: Tensor) -> Tensor:
        x = super().start_twin(ids)
        return torch.cat([x, x / 2], dim=-1)

    def close_twin(self, x: Tensor) -> Tensor:
        return super().close_twin(x[..., :DIM] + x[..., DIM:])


class _StreamsBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Parameter(torch.empty(2)), nn.Parameter(torch.empty(2))
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        read = torch.einsum("btsd,s->btd", x, self.read)
        x = x + self.attention(self.norm1(read))[:, :, None] * self.write[:, None]
        read = torch.einsum("btsd,s->btd", x, self.read)
        return x + self.mlp(self.norm2(read))[:, :, None] * self.write[:, None]

    def twin(self, x: Tensor, cut: Cut) -> Tensor:
        read = self.read[0] * x[..., :DIM] + self.read[1] * x[..., DIM:]
        branch = self.attention.by_hand(plain.norm(self.norm1, read, cut), cut)
        x = cut.skip * x + torch.cat([self.write[0] * branch, self.write[1] * branch], dim=-1)
        if not cut.mlp:
            return x
        read = self.read[0] * x[..., :DIM] + self.read[1] * x[..., DIM:]
        branch = self.mlp.by_hand(plain.norm(self.norm2, read, cut))
        return cut.skip * x + torch.cat([self.write[0] * branch, self.write[1] * branch], dim=-1)


class FoldedStreams(TwoStreams):
    """The same with the streams folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_FoldedBlock() for _ in range(3))

    def start(self, ids: Tensor) -> Tensor:
        return super().start(ids).permute(0, 2, 1, 3).flatten(0, 1)

    def close(self, x: Tensor) -> Tensor:
        return super().close(x.unflatten(0, (-1, 2)).permute(0, 2, 1, 3))


class _FoldedBlock(_StreamsBlock):
    def _read(self, x: Tensor) -> Tensor:
        return torch.einsum("bstd,s->btd", x.unflatten(0, (-1, 2)), self.read)

    def _write(self, branch: Tensor) -> Tensor:
        return (branch[:, None] * self.write[:, None, None]).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._write(self.attention(self.norm1(self._read(x))))
        return x + self._write(self.mlp(self.norm2(self._read(x))))


class HiddenAndResidual(Net):
    """Blocks hand on what they made and what they were given apart, as fused-norm code does."""

    def __init__(self) -> None:
        super().__init__(_HiddenAndResidual)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, residual = self.start(ids), None
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
        return self.close(hidden + residual)


class _HiddenAndResidual(Block):
    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        hidden = self.attention(self.norm1(residual))
        residual = hidden + residual
        return self.mlp(self.norm2(residual)), residual


class ResidualLast(Net):
    """Blocks give back the norm that the next one reads, and the stream behind it."""

    def __init__(self) -> None:
        super().__init__(_ResidualLast)
        self.first = nn.LayerNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        stream = self.start(ids)
        read = self.first(stream)
        for block in self.blocks:
            read, stream = block(read, stream)
        return self.head(read)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        stream, states = self.start_twin(ids), []
        read = plain.norm(self.first, stream)
        for layer, block in enumerate(self.blocks):
            now = cut.at(layer)
            stream = now.skip * stream + block.attention.by_hand(read, now)
            if now.mlp:
                stream = now.skip * stream + block.mlp.by_hand(plain.norm(block.norm1, stream, now))
            read = plain.norm(block.norm2, stream, now)
            states.append(stream)
        return Twin(plain.linear(self.head, read), states)


class _ResidualLast(Block):
    def forward(self, read: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        stream = stream + self.attention(read)
        stream = stream + self.mlp(self.norm1(stream))
        return self.norm2(stream), stream


class Wrapped(Net):
    """Blocks that give back more than a tensor."""

    def __init__(self, block: type[Block]) -> None:
        super().__init__(block)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = block.unwrap(block(x))
        return self.close(x)


class TupleOut(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None

    def unwrap(self, out: tuple[Tensor, None]) -> Tensor:
        return out[0]


class ListOut(TupleOut):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [Block.forward(self, x)]


class DictOut(Block):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": super().forward(x), "length": torch.tensor(x.shape[1])}

    def unwrap(self, out: dict[str, Tensor]) -> Tensor:
        return out["hidden"]


class StreamSecondInDict(DictOut):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"read": self.norm1(x), "hidden": Block.forward(self, x)}


_Named = namedtuple("_Named", ["hidden", "cache"])


class NamedTupleOut(DictOut):
    def forward(self, x: Tensor) -> _Named:
        return _Named(Block.forward(self, x), None)

    def unwrap(self, out: _Named) -> Tensor:
        return out.hidden


@dataclass
class _Given:
    hidden: Tensor
    extra: Tensor | None = None


class DataclassOut(DictOut):
    def forward(self, x: Tensor) -> _Given:
        return _Given(Block.forward(self, x))

    def unwrap(self, out: _Given) -> Tensor:
        return out.hidden


class StreamSecondOut(TupleOut):
    """What attention gave comes first, of the stream's own shape."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch = self.attention(self.norm1(x))
        x = x + branch
        return branch, x + self.mlp(self.norm2(x))

    def unwrap(self, out: tuple[Tensor, Tensor]) -> Tensor:
        return out[1]


class ByKeyword(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = block(hidden=None, x=x)
        return self.close(x)


class BiasFirst(Net):
    """A position bias, a float matrix, comes before the stream among a block's arguments."""

    def __init__(self) -> None:
        super().__init__(_BiasFirst)
        self.bias = nn.Parameter(torch.empty(TOKENS, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = block(self.bias, x)
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            x = block.twin(self.bias, x, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


class _BiasFirst(Block):
    def forward(self, bias: Tensor, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x) + bias)
        return x + self.mlp(self.norm2(x))

    def twin(self, bias: Tensor, x: Tensor, cut: Cut) -> Tensor:
        x = cut.skip * x + self.attention.by_hand(plain.norm(self.norm1, x, cut) + bias, cut)
        return self.mlp_twin(x, cut)


class Shrinking(Net):
    """Pairs of tokens are averaged between the blocks."""

    def pool(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).mean(2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for layer, block in enumerate(self.blocks):
            x = block(x if layer == 0 else self.pool(x))
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            x = block.twin(x if layer == 0 else (x[:, ::2] + x[:, 1::2]) / 2, cut.at(layer))
            states.append(x)
        return Twin(self.close_twin(x), states)


class ClassToken(Net):
    """A token of the model's own in front of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(1, 1, DIM))

    def start(self, ids: Tensor) -> Tensor:
        return torch.cat([self.own.expand(ids.shape[0], -1, -1), super().start(ids)], dim=1)

    def start_twin(self, ids: Tensor) -> Tensor:
        return torch.cat([self.own.repeat(ids.shape[0], 1, 1), super().start_twin(ids)], dim=1)


class MixtureOfDepths(Net):
    """Blocks run on every second token; the others go around them."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            chosen = block(x[:, ::2])
            x = x.clone()
            x[:, ::2] = chosen
        return self.close(x)

    def twin(self, cut: Cut, ids: Tensor) -> Twin:
        x, states = self.start_twin(ids), []
        for layer, block in enumerate(self.blocks):
            chosen = block.twin(x[:, ::2], cut.at(layer))
            rows = [chosen[:, t // 2] if t % 2 == 0 else x[:, t] for t in range(x.shape[1])]
            x = torch.stack(rows, dim=1)
            states.append(x)
        return Twin(self.close_twin(x), states)


class OneByOne(Net):
    """Each sequence goes through all blocks by itself."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([super(OneByOne, self).forward(row) for row in ids.split(1)])


class LayerByLayerOneByOne(Net):
    """Each block is called once for every sequence."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x = torch.cat([block(row) for row in x.split(1)])
        return self.close(x)


class Embedded(Net):
    """Takes the stream itself, in floats."""

    def start(self, x: Tensor) -> Tensor:
        return x

    def start_twin(self, x: Tensor) -> Tensor:
        return x


class EmbeddedTokensFirst(TokensFirst):
    """Takes (tokens, batch, dim), and nothing but the attention says so."""

    def start(self, x: Tensor) -> Tensor:
        return x

    def close(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def start_twin(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def close_twin(self, x: Tensor) -> Tensor:
        return super().close_twin(x).transpose(0, 1)


class Patches(Net):
    """An image model: patches by a convolution, no token ids anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, DIM, kernel_size=2, stride=2)

    def start(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        return x + self.positions[: x.shape[1]]

    def start_twin(self, pixels: Tensor) -> Tensor:
        rows = [
            pixels[:, :, i : i + 2, j : j + 2].flatten(1)
            for i in range(0, pixels.shape[2], 2)
            for j in range(0, pixels.shape[3], 2)
        ]
        x = torch.stack(rows, dim=1) @ self.patch.weight.flatten(1).T + self.patch.bias
        return x + self.positions[: x.shape[1]]


class Audio(Net):
    """A sound model: frames of raw samples."""

    def __init__(self) -> None:
        super().__init__()
        self.frame = nn.Linear(4, DIM)

    def start(self, samples: Tensor) -> Tensor:
        x = self.frame(samples.unflatten(1, (-1, 4)))
        return x + self.positions[: x.shape[1]]

    def start_twin(self, samples: Tensor) -> Tensor:
        x = plain.linear(self.frame, torch.stack(samples.split(4, dim=1), dim=1))
        return x + self.positions[: x.shape[1]]


class Staged(Net):
    """Blocks in stages, a list of lists."""

    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def calls(self) -> list[Block]:
        return [block for stage in self.stages for block in stage]


class Sequence(Net):
    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.close(self.blocks(self.start(ids)))


class ByName(Net):
    """No container: every block is an attribute."""

    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.one, self.two, self.three = Block(), Block(), Block()

    def calls(self) -> list[Block]:
        return [self.one, self.two, self.three]


class InADict(Net):
    def __init__(self) -> None:
        super().__init__(Block, depth=0)
        self.blocks = nn.ModuleDict({name: Block() for name in ("low", "middle", "high")})

    def calls(self) -> list[Block]:
        return list(self.blocks.values())


class GivesADict(Net):
    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(ids)}


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


put("tokens_first", TokensFirst)
put("tokens_first_square", TokensFirst, inputs=lambda: ids(5, 5))
put("tokens_first_long_batch", TokensFirst, inputs=lambda: ids(6, 3))
put("channels_first", ChannelsFirst, equal=NONE, declared=declared("batch dim tokens"))
put(
    "channels_first_square",
    ChannelsFirst,
    equal=NONE,
    inputs=lambda: ids(2, DIM),
    declared=declared("batch dim tokens"),
)
put("image", Image, equal=NONE, inputs=lambda: ids(2, 6), declared=declared("batch dim tokens"))
put(
    "image_channels_last",
    ImageChannelsLast,
    equal=NONE,
    inputs=lambda: ids(2, 6),
    declared=declared("batch tokens dim"),
)
put("packed", Packed, equal=NONE, declared=declared("(batch tokens) dim"))
put("heads_apart", HeadsApart, equal=NONE, declared=declared("batch tokens streams dim"))
put("idle_axis", IdleAxis, equal=NONE, declared=declared("batch streams tokens dim"))
put("windowed_attention", lambda: Net(WindowedBlock), equal=READS, inputs=lambda: ids(2, 6))
put("windows", Windows, equal=NONE, inputs=lambda: ids(2, 6))
put("unbatched", Unbatched, equal=NONE, inputs=lambda: ids(1, 12)[0])
put("unbatched_blocks", UnbatchedBlocks, equal=NONE, inputs=lambda: ids(1, 12)[0])
put("cu_seqlens", CuSeqlensNet, equal=NONE, inputs=packed_ids)
put("two_streams", TwoStreams, equal=NONE, declared=declared("batch tokens streams dim"))
put("folded_streams", FoldedStreams, equal=NONE, declared=declared("(batch streams) tokens dim"))
put("hidden_and_residual", HiddenAndResidual, equal=NONE, declared=declared(slot="sum"))
put("residual_last", ResidualLast, equal=NONE, declared=declared(slot=1))
put("tuple_out", lambda: Wrapped(TupleOut))
put("list_out", lambda: Wrapped(ListOut))
put("named_tuple_out", lambda: Wrapped(NamedTupleOut), equal=READS)
put("dict_out", lambda: Wrapped(DictOut), equal=READS)
put("dataclass_out", lambda: Wrapped(DataclassOut), equal=NONE)
put("stream_second_out", lambda: Wrapped(StreamSecondOut), equal=NONE, declared=declared(slot=1))
put("stream_second_in_dict", lambda: Wrapped(StreamSecondInDict), equal=NONE, declared=declared(slot="hidden"))
put("by_keyword", ByKeyword)
put("bias_first", BiasFirst, equal=NONE)
put("square", Net, inputs=lambda: ids(5, 5))
put("cube", Net, inputs=lambda: ids(DIM, DIM))
put("one_sequence", Net, inputs=lambda: ids(1, 7))
put("two_tokens", Net, inputs=lambda: ids(2, 2))
put("shrinking", Shrinking, equal=READS, inputs=lambda: ids(2, 12))
put("class_token", ClassToken)
put("mixture_of_depths", MixtureOfDepths, equal=NONE)
put("one_by_one", OneByOne, equal=NONE)
put("layer_by_layer_one_by_one", LayerByLayerOneByOne, equal=NONE)
put("embedded", Embedded, inputs=lambda: floats(2, TOKENS, DIM))
put("embedded_tokens_first", EmbeddedTokensFirst, equal=NONE, inputs=lambda: floats(TOKENS, 2, DIM))
put("patches", Patches, inputs=lambda: floats(2, 3, 4, 6))
put("patches_float32", Patches, inputs=lambda: floats(2, 3, 4, 6), dtype=torch.float32)
put("audio_float32", Audio, inputs=lambda: floats(2, 28), dtype=torch.float32)
put("staged", Staged)
put("sequential", Sequence)
put("by_name", ByName, equal=READS)
put("in_a_dict", InADict, equal=READS)
put("tokens_equal_dim", Net, inputs=lambda: ids(2, DIM))
put("tokens_first_batch_equals_dim", TokensFirst, inputs=lambda: ids(DIM, 3))
put("same_sequence_twice", Net, inputs=lambda: ids(1, TOKENS).repeat(2, 1))
put("tokens_first_same_sequence_twice", TokensFirst, inputs=lambda: ids(1, TOKENS).repeat(2, 1))
put("gives_a_dict", GivesADict)

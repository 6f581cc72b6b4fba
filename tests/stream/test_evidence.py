"""A stream that does not lie as it would be read is refused, and read right once it is declared.

Each network is run a second time with hooks placed by hand, which know where the stream is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankscope import Inputs, Model, Stream, ablate, decompose, doctor, exact, measure, operate
from rankscope.errors import InputError, LayoutError, RankscopeError, UnsupportedConfigError, UnsupportedOperationError
from rankscope.models.loading import load
from rankscope.monitor.gauge import Gauge
from tests.flat_calls import flat
from tests.own_models import GPT
from tests.own_models import ids as own_ids

DIM, HEADS, DEPTH, WORDS = 16, 2, 3, 50


class Attention(nn.Module):
    """Fused attention on (batch, tokens, dim)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Windowed(Attention):
    """The same among four tokens at a time."""

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unflatten(1, (-1, 4)).flatten(0, 1)
        return super().forward(windows).unflatten(0, (x.shape[0], -1)).flatten(1, 2)


class Block(nn.Module):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.attention = attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Channels(Block):
    """(batch, dim, tokens): 1x1 convolutions, and norms over the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project = nn.Conv1d(DIM, 3 * DIM, 1), nn.Conv1d(DIM, DIM, 1)
        self.up, self.down = nn.Conv1d(DIM, 2 * DIM, 1), nn.Conv1d(2 * DIM, DIM, 1)
        self.group1, self.group2 = nn.GroupNorm(1, DIM), nn.GroupNorm(1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(1, (HEADS, -1)).transpose(2, 3) for part in self.qkv(self.group1(x)).chunk(3, 1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(2, 3).flatten(1, 2)
        x = x + self.project(mixed)
        return x + self.down(F.gelu(self.up(self.group2(x))))


class Image(Channels):
    """(batch, dim, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2)).unflatten(2, x.shape[2:])


class Packed(Block):
    """(batch * tokens, dim), three sequences or two: told from outside."""

    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x).unflatten(0, (Packed.rows, -1))).flatten(0, 1)
        return x + self.mlp(self.norm2(x))


class Streams(Block):
    """(batch, tokens, 2, dim): reads one stream, writes both."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x[:, :, 0])).unsqueeze(2) * x.new_tensor([1.0, 0.5])[:, None]
        return x + self.mlp(self.norm2(x[:, :, 1])).unsqueeze(2) * x.new_tensor([0.25, 1.0])[:, None]


class Folded(Block):
    """(batch * 2, tokens, dim)."""

    def forward(self, x: Tensor) -> Tensor:
        pair = x.unflatten(0, (-1, 2))
        pair = pair + self.attention(self.norm1(pair[:, 0])).unsqueeze(1)
        return (pair + self.mlp(self.norm2(pair[:, 1])).unsqueeze(1)).flatten(0, 1)


class HiddenResidual(Block):
    """What fused-norm code hands on: the last branch, and the stream without it."""

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        residual = self.attention(self.norm1(residual)) + residual
        return self.mlp(self.norm2(residual)), residual


class Second(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        branch = self.attention(self.norm1(x))
        x = x + branch
        return branch, x + self.mlp(self.norm2(x))


class Branch(Block):
    """Without skips: the model's own loop has them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm2(self.attention(self.norm1(x))))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], *, positions: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(block() for _ in range(DEPTH))
        self.eval().double()

    def loop(self, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            keep(x)
        return x

    def start(self, x: Tensor) -> Tensor:
        return x

    def forward(self, ids: Tensor, keep: Callable[[Tensor], None] = lambda x: None) -> Tensor:
        Packed.rows = ids.shape[0]
        return self.loop(self.start(self.embed(ids)), keep)


class ChannelNet(Net):
    def start(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class ImageNet(Net):
    def start(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).unflatten(2, (3, -1))


class PackedNet(Net):
    def start(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)


class StreamsNet(Net):
    def start(self, x: Tensor) -> Tensor:
        return torch.stack([x, -x], dim=2)


class FoldedNet(Net):
    def start(self, x: Tensor) -> Tensor:
        return torch.stack([x, -x], dim=1).flatten(0, 1)


class PairNet(Net):
    def loop(self, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        hidden, residual = x, None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
            keep(hidden + residual)
        return hidden + residual


class SecondNet(Net):
    def loop(self, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        for layer in self.layers:
            _, x = layer(x)
            keep(x)
        return x


class LoopNet(Net):
    def loop(self, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
            keep(x)
        return x


@dataclass(frozen=True)
class Case:
    """A network, its declaration, and how by hand a stream becomes (batch, tokens, dim)."""

    net: Callable[[], Net]
    stream: Stream
    told: str
    turn: Callable[[Tensor], Tensor] = lambda x: x
    blocks: str | None = None
    tokens: int = 12


def _joined(x: Tensor) -> Tensor:
    return torch.cat([x[:, :, 0], x[:, :, 1]], dim=-1)


def _unfolded(x: Tensor) -> Tensor:
    return torch.cat([x[0::2], x[1::2]], dim=-1)


CASES = {
    "channels first": Case(
        lambda: ChannelNet(Channels),
        Stream("batch dim tokens"),
        "Stream('batch dim tokens')",
        lambda x: x.transpose(1, 2),
    ),
    "channels first, as many as tokens": Case(
        lambda: ChannelNet(Channels),
        Stream("batch dim tokens"),
        "Stream('batch dim tokens')",
        lambda x: x.transpose(1, 2),
        tokens=DIM,
    ),
    "an image": Case(
        lambda: ImageNet(Image),
        Stream("batch dim tokens"),
        "Stream('batch dim tokens')",
        lambda x: x.flatten(2).transpose(1, 2),
    ),
    "packed": Case(
        lambda: PackedNet(Packed),
        Stream("(batch tokens) dim"),
        r"Stream('(batch tokens) dim')",
        lambda x: x.unflatten(0, (Packed.rows, -1)),
    ),
    "two streams": Case(
        lambda: StreamsNet(Streams), Stream("batch tokens streams dim"), "Stream('batch tokens streams dim')", _joined
    ),
    "two streams in the batch": Case(
        lambda: FoldedNet(Folded),
        Stream("(batch streams) tokens dim"),
        "Stream('(batch streams) tokens dim')",
        _unfolded,
    ),
    "hidden and residual": Case(lambda: PairNet(HiddenResidual), Stream(slot="sum"), "Stream(slot='sum')"),
    "the second slot": Case(lambda: SecondNet(Second), Stream(slot=1), "Stream(slot=1)"),
    "skips in the loop": Case(
        lambda: LoopNet(Branch), Stream(skips="around"), "Stream(skips='around')", blocks="layers.*"
    ),
}


def given(tokens: int, rows: int = 3) -> Tensor:
    return torch.randint(WORDS, (rows, tokens), generator=torch.Generator().manual_seed(1))


def by_hand(case: Case, model: Net, ids: Tensor) -> list[list[float]]:
    """Relative residual of each sequence behind each block, from the definition."""
    found: list[list[float]] = []

    def keep(x: Tensor) -> None:
        x = case.turn(x)
        found.append(((x - x.mean(1, keepdim=True)).norm(dim=(1, 2)) / x.norm(dim=(1, 2))).tolist())

    with torch.no_grad():
        model(ids, keep)
    return found


@pytest.mark.parametrize("name", CASES)
def test_refused_until_declared_and_then_equal_to_hooks_by_hand(name: str) -> None:
    case = CASES[name]
    model, ids = case.net(), given(case.tokens)
    if not case.stream.has_streams:  # several streams need no declaration
        with pytest.raises(LayoutError, match=r"layers\.[01]") as refused:
            measure(Model(model, blocks=case.blocks), ids)
        assert case.told in str(refused.value)
        report = doctor(Model(model, blocks=case.blocks), ids)
        assert report["shape"].status == "fail"
        assert not report.passed
        assert case.told in report["shape"].detail
    run = measure(Model(model, blocks=case.blocks, stream=case.stream), ids, metrics=["relative_residual"])
    expected = by_hand(case, model, ids)
    found = {
        (row["layer"], row["sequence"]): row["value"]
        for row in run.select(metric="relative_residual", site="block.out").to_pylist()
    }
    assert found == pytest.approx(
        {(layer, n): value for layer, row in enumerate(expected) for n, value in enumerate(row)}, rel=1e-6
    )
    assert run.provenance.layout == str(case.stream)
    assert doctor(Model(model, blocks=case.blocks, stream=str(case.stream)), ids).trusted


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_verbs_that_cannot_honour_a_declaration_refuse_it_by_name(name: str) -> None:
    case = CASES[name]
    model, ids = case.net(), given(case.tokens)
    options: dict[str, Any] = {"blocks": case.blocks, "stream": case.stream}
    with pytest.raises(UnsupportedConfigError, match=r"exact reads .*layers\.0"):
        flat(exact, model, ids, **options)
    with pytest.raises(RankscopeError):
        flat(decompose, model, ids, **options)
    if not case.stream.has_plain_blocks:
        with (
            pytest.raises(UnsupportedOperationError, match=r"layers\.0 was declared as"),
            flat(operate, model, skip=0.0, inputs=ids, **options),
        ):
            pass
        with pytest.raises(InputError, match=r"layers\.0 was declared as"):
            flat(ablate, model, ids, variants=["pure"], **options)
    for call in (exact, ablate) if not case.stream.has_streams else (exact,):
        with pytest.raises(UnsupportedConfigError if case.stream.has_streams else LayoutError):
            call(Model(model, blocks=case.blocks), ids)


def test_the_gauge_reads_a_declared_stream_and_refuses_it_undeclared() -> None:
    case = CASES["channels first"]
    model, ids = case.net(), given(12)
    gauge = Gauge(Model(model, stream="batch dim tokens"), ids, schedule=1, metrics=["relative_residual"], strict=True)
    values = gauge._prober.look()
    expected = by_hand(case, model, ids)
    assert [value.mean for value in values] == pytest.approx([sum(row) / 3 for row in expected], rel=1e-6)
    with pytest.raises(LayoutError):
        Gauge(model, ids, schedule=1, strict=True)._prober.look()


def test_a_wrong_declaration_is_refused_too() -> None:
    model, ids = Net(Block), given(12)
    for wrong in ("batch dim tokens", "tokens batch dim", "dim batch tokens"):
        with pytest.raises(LayoutError, match=r"Stream\('batch tokens dim'\)"):
            measure(Model(model, stream=wrong), ids)
    with pytest.raises(LayoutError, match=r"layers.1 takes is the sum"):
        measure(Model(model, stream=Stream(skips="around")), ids)
    with pytest.raises(RankscopeError, match=r"without the tensors that stream=Stream\(slot='sum'\) asks for"):
        measure(Model(model, stream=Stream(slot="sum")), ids)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("size", [2, 3, DIM])
def test_as_many_sequences_as_tokens_and_channels(first: bool, size: int) -> None:
    """The two orders that need no declaration are told apart whatever the sizes."""

    class Turned(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1)
            return super().forward(x).transpose(0, 1)

    class TurnedNet(Net):
        def start(self, x: Tensor) -> Tensor:
            return x if first else x.transpose(0, 1)

    model, ids = TurnedNet(Block if first else Turned), given(size, rows=size)
    run = measure(model, Inputs(ids, batch=size), metrics=["relative_residual"])
    case = Case(lambda: model, Stream(), "", (lambda x: x) if first else (lambda x: x.transpose(0, 1)))
    rows = run.select(metric="relative_residual", site="block.out").to_pylist()
    assert [row["value"] for row in rows if row["layer"] == DEPTH - 1] == pytest.approx(
        by_hand(case, model, ids)[-1], rel=1e-6
    )


def test_as_many_global_tokens_as_tokens_are_no_second_stream() -> None:
    run = measure("init:tiny-pegasus-x", Inputs(sequences=4, tokens=4), metrics=["relative_residual"])
    assert run.provenance.layout is None


def test_a_skip_around_two_blocks_is_refused() -> None:
    class Around(Net):
        def loop(self, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
            for first, second in zip(self.layers[0::2], self.layers[1::2], strict=False):
                x = x + second(first(x))
            return self.layers[-1](x)

    with pytest.raises(LayoutError, match="no declaration describes"):
        measure(Model(Around(Branch), blocks="layers.*"), given(12))


def test_a_loop_that_adds_something_else_is_refused_without_a_declaration_to_offer() -> None:
    class Scaled(Net):
        def loop(self, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
            for layer in self.layers:
                x = 0.5 * x + layer(x)
            return x

    for declared in (None, Stream(skips="around")):
        with pytest.raises(LayoutError, match=r"not their plain sum|and it is not"):
            measure(Model(Scaled(Branch), blocks="layers.*", stream=declared), given(12))


def test_blocks_that_see_some_of_the_tokens_are_refused_unless_declared() -> None:
    class Some(Net):
        def start(self, x: Tensor) -> Tensor:
            return x[:, ::2]

    with pytest.raises(LayoutError, match="the input has 12 tokens, and only 6 go through the blocks"):
        measure(Some(Block), given(12))
    run = measure(Model(Some(Block), stream="batch tokens dim"), given(12), metrics=["relative_residual"])
    assert run.provenance.lengths == (6, 6, 6)


def test_attention_in_windows_is_not_read_as_attention_of_sequences() -> None:
    model, ids = Net(lambda: Block(Windowed)), given(12)
    assert doctor(model, ids).passed
    run = measure(model, ids)
    assert {row["sequence"] for row in run.table.to_pylist()} == {0, 1, 2}
    assert "attention.probs" not in run.table["site"].to_pylist()
    assert any("9 matrices of 4 queries per head for 3 sequences" in note for note in run.notes)


class Masked(Attention):
    """Attention that does not look at padding."""

    content = torch.ones(1, 1, dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=Masked.content[:, None, None])
        return self.out(mixed.transpose(1, 2).flatten(2))


class Pooled(Net):
    """Pairs of tokens become one behind each block."""

    def loop(self, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
        for layer in self.layers:
            x = layer(x).unflatten(1, (-1, 2)).mean(2)
            Masked.content = Masked.content[:, ::2]
        return x

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        Masked.content = attention_mask == 1
        return super().forward(ids)


def test_padding_that_cannot_be_placed_is_refused() -> None:
    whole = torch.ones(2, 16, dtype=torch.long)
    model = Pooled(lambda: Block(Masked))
    run = measure(model, {"ids": given(16, 2), "attention_mask": whole}, metrics=["relative_residual"])
    assert run.provenance.lengths == (16, 16)
    padded = whole.clone()
    padded[1, 8:] = 0
    with pytest.raises(InputError, match="padding cannot be left out"):
        measure(model, {"ids": given(16, 2), "attention_mask": padded})


@pytest.mark.parametrize("padded", [False, True])
def test_padding_behind_a_token_that_the_model_puts_first(padded: bool) -> None:
    class Class(Net):
        def start(self, x: Tensor) -> Tensor:
            return torch.cat([self.embed.weight[:1].expand(x.shape[0], 1, -1), x], dim=1)

        def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(ids)

    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 1 - int(padded)
    inputs = {"ids": given(12, 2), "attention_mask": mask}
    if padded:
        with pytest.raises(InputError, match=r"Token 4 of the input is token 5 of what layers\.0 takes"):
            measure(Class(Block), inputs)
    else:
        assert measure(Class(Block), inputs, metrics=["relative_residual"]).provenance.lengths == (13, 13)


def test_padding_of_an_encoder_is_not_taken_for_that_of_a_longer_decoder() -> None:
    model = load("init:tiny-t5").model
    inputs = {"input_ids": given(10, 2), "decoder_input_ids": given(14, 2)}
    assert measure(model, inputs, metrics=["relative_residual"]).table.num_rows > 0
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    with pytest.raises(InputError, match=r"ids of several lengths \(10, 14\)"):
        measure(model, {**inputs, "attention_mask": mask})


def test_operating_on_a_declared_stream_is_the_cut_by_hand_or_refused() -> None:
    class Cut(Channels):
        def forward(self, x: Tensor) -> Tensor:
            query, key, value = (
                part.unflatten(1, (HEADS, -1)).transpose(2, 3) for part in self.qkv(self.group1(x)).chunk(3, 1)
            )
            x = self.project(F.scaled_dot_product_attention(query, key, value).transpose(2, 3).flatten(1, 2))
            return self.down(F.gelu(self.up(self.group2(x))))

    whole, cut, ids = ChannelNet(Channels), ChannelNet(Cut), given(12)
    cut.load_state_dict(whole.state_dict())
    options: dict[str, Any] = {"inputs": ids, "stream": "batch dim tokens"}
    with torch.no_grad(), flat(operate, whole, skip=0.0, **options):
        torch.testing.assert_close(whole(ids), cut(ids), rtol=1e-12, atol=1e-12)
    with (
        pytest.raises(UnsupportedOperationError, match=r"channels of layers\.0"),
        flat(operate, whole, norm="rms", **options),
    ):
        pass


def test_shape_of_an_ordinary_model_in_words() -> None:
    check = doctor(GPT("pre"), own_ids())["shape"]
    assert check.status == "pass"
    assert check.detail.endswith("channels, as the input, the attention and the blocks' own maps have it")


class WindowBlock(Block):
    """(batch, height, width, dim): attention in windows of two by two, an MLP on the flattened stream, as in Swin."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        windows = self.norm1(x).view(batch, height // 2, 2, width // 2, 2, dim).permute(0, 1, 3, 2, 4, 5)
        mixed = self.attention(windows.reshape(-1, 4, dim)).view(windows.shape).permute(0, 1, 3, 2, 4, 5)
        x = (x + mixed.reshape(x.shape)).reshape(batch, -1, dim)
        return (x + self.mlp(self.norm2(x))).reshape(batch, height, width, dim)


class Swin(nn.Module):
    """Tokens are merged between the blocks, and the final norm sees (batch, height, width, dim)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, DIM, 2, 2)
        self.layers = nn.ModuleList(WindowBlock() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(DIM)
        self.eval().double()

    def forward(self, image: Tensor, keep: Callable[[Tensor], None] = lambda x: None) -> Tensor:
        x = self.patches(image).permute(0, 2, 3, 1)
        for number, layer in enumerate(self.layers):
            x = layer(x if number == 0 else x.unflatten(1, (-1, 2)).mean(2).unflatten(2, (-1, 2)).mean(3))
            keep(x)
        return self.norm(x).mean((1, 2))


def test_windows_on_an_image_and_tokens_that_are_merged_need_no_declaration() -> None:
    model, images = Swin(), torch.randn(3, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    report = doctor(model, images)
    assert report.passed, str(report)
    assert report["shape"].detail.startswith("2 sequences x 256 tokens x 16 channels")
    run = measure(model, Inputs(images, batch=2))
    case = Case(lambda: model, Stream(), "", lambda x: x.flatten(1, 2))  # type: ignore[arg-type, return-value]
    expected = by_hand(case, model, images)  # type: ignore[arg-type]
    found = run.select(metric="relative_residual", site="block.out").to_pylist()
    assert {(row["layer"], row["sequence"]): row["value"] for row in found} == pytest.approx(
        {(layer, n): value for layer, row in enumerate(expected) for n, value in enumerate(row)}, rel=1e-6
    )
    final = run.select(metric="relative_residual", site="final").to_pylist()
    assert [row["sequence"] for row in final] == [0, 1, 2]


class Joint(nn.Module):
    """Two streams of different length in one attention (MM-DiT)."""

    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        self.image, self.text, self.swapped = Block(), Block(), swapped
        self.attention = Attention()

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        both = self.attention(torch.cat([self.image.norm1(image), self.text.norm1(text)], 1))
        image, text = image + both[:, : image.shape[1]], text + both[:, image.shape[1] :]
        image, text = image + self.image.mlp(self.image.norm2(image)), text + self.text.mlp(self.text.norm2(text))
        return (text, image) if self.swapped else (image, text)


class JointNet(Net):
    """``swapped``: blocks take the image first and return it last, by name, as in diffusers."""

    def __init__(self, *, swapped: bool = False, depth: int = DEPTH) -> None:
        super().__init__(lambda: Joint(swapped=swapped))
        self.layers, self.swapped = self.layers[:depth], swapped
        self.seen: dict[str, list[Tensor]] = {"image": [], "text": []}

    def forward(self, ids: Tensor) -> Tensor:
        image, text = self.embed(ids), self.embed(ids.flip(1)[:, :4])
        for layer in self.layers:
            self.seen["image"].append(image)
            self.seen["text"].append(text)
            if self.swapped:
                text, image = layer(image=image, text=text)
            else:
                image, text = layer(image, text)
        return image + text.mean(1, keepdim=True)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("which", ["image", "text"])
def test_each_of_two_streams_of_different_length(swapped: bool, which: str) -> None:
    model, ids = JointNet(swapped=swapped), given(7)
    slot = ["image", "text"].index(which) ^ swapped
    if swapped and which == "text":
        with pytest.raises(LayoutError, match=r"continues with slot 1 of the output of layers\.0"):
            measure(model, ids)
        stream = Stream(argument="text")
    else:
        stream = Stream(slot=slot)
    model.seen = {"image": [], "text": []}
    run = measure(Model(model, stream=stream), ids, metrics=["relative_residual"], sites=["block.in"])
    entered = model.seen[which][-DEPTH:]
    expected = [one.sub(one.mean(1, keepdim=True)).norm(dim=(1, 2)) / one.norm(dim=(1, 2)) for one in entered]
    rows = [row for row in run.table.to_pylist() if row["site"] == "block.in"]
    assert [row["value"] for row in rows] == pytest.approx(torch.stack(expected).flatten().tolist(), rel=1e-12)
    out = measure(Model(model, stream=stream), ids, metrics=["relative_residual"], sites=["block.out"])
    rest = [row["value"] for row in out.table.to_pylist() if row["site"] == "block.out"]
    assert rest[: len(rows) - 3] == pytest.approx([row["value"] for row in rows][3:], rel=1e-12)


def test_a_second_stream_is_named_in_a_note() -> None:
    model, ids = JointNet(), given(7)
    (note,) = (note for note in measure(model, ids).notes if "second stream" in note)
    assert "of 4 tokens" in note
    assert "Stream(slot=1)" in note
    assert doctor(model, ids)["second stream"].detail == note
    assert not [note for note in measure(Model(model, stream=Stream(slot=1)), ids).notes if "second stream" in note]


@pytest.mark.parametrize("depth", [1, DEPTH])
def test_an_argument_that_is_not_the_slot_is_refused(depth: int) -> None:
    model, ids = JointNet(depth=depth), given(7)
    with pytest.raises(LayoutError, match="is not what a block returns in slot 1"):
        measure(Model(model, stream=Stream(slot=1, argument=0)), ids)
    with pytest.raises(RankscopeError, match="got no tensor as the argument 'words'"):
        measure(Model(model, stream=Stream(slot=1, argument="words")), ids)


class WithWeights(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, (x @ x.transpose(1, 2)).softmax(-1)


class WeightsNet(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x)
        return x


def test_a_slot_that_no_block_takes_is_refused() -> None:
    with pytest.raises(LayoutError, match="is not what a block returns in slot 1"):
        measure(Model(WeightsNet(WithWeights), stream=Stream(slot=1)), given(7))

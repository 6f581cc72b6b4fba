"""A stream that does not lie as it would be read is refused with the declaration to write; verbs honour it or refuse.

That a declared stream is measured right is tested in ``tests/hostile``, on the same networks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope import Inputs, Model, Stream, ablate, decompose, doctor, exact, measure, operate
from rankscope.errors import InputError, LayoutError, RankscopeError, UnsupportedConfigError, UnsupportedOperationError
from rankscope.models.loading import load
from rankscope.monitor.gauge import Gauge
from tests.flat_calls import flat
from tests.hostile.attentions import Kernel
from tests.hostile.harness import assert_close
from tests.hostile.parts import Attention, Block, Net, drawn
from tests.hostile.parts import ids as given
from tests.hostile.suite import CASES
from tests.hostile.twin import WHOLE, Cut
from tests.own_models import GPT
from tests.own_models import ids as own_ids

NAMES = ("channels_first", "channels_first_square", "image", "packed", "two_streams", "folded_streams",
         "hidden_and_residual", "residual_last", "stream_second_out", "loop_skip")  # fmt: skip
DECLARED = {name: CASES[name] for name in NAMES}


def net(kind: type[Net] = Net, *words: Any) -> Net:
    return drawn(kind(*words).double(), 0).eval()


def declared_on(name: str) -> tuple[nn.Module, Any, str | None, Stream]:
    """A network of the hostile suite, its inputs, its blocks and its declaration."""
    case = DECLARED[name]
    assert case.declared is not None
    return case.model(), case.given(), case.declared.get("blocks"), case.declared["stream"]()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DECLARED)
def test_the_refusal_and_the_doctor_name_the_declaration(name: str) -> None:
    model, inputs, blocks, stream = declared_on(name)
    if not stream.has_streams:  # several streams need no declaration
        with pytest.raises(LayoutError, match=r"blocks\.[01]") as refused:
            measure(Model(model, blocks=blocks), inputs)
        report = doctor(Model(model, blocks=blocks), inputs)
        assert report["shape"].status == "fail"
        assert not report.passed
        assert repr(stream) in str(refused.value)
        assert repr(stream) in report["shape"].detail
    run = measure(Model(model, blocks=blocks, stream=stream), inputs, metrics=["relative_residual"])
    assert run.provenance.layout == str(stream)
    assert doctor(Model(model, blocks=blocks, stream=str(stream)), inputs).trusted


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DECLARED)
def test_verbs_that_cannot_honour_a_declaration_refuse_it_by_name(name: str) -> None:
    model, inputs, blocks, stream = declared_on(name)
    options: dict[str, Any] = {"blocks": blocks, "stream": stream}
    with pytest.raises(UnsupportedConfigError, match=r"exact reads .*blocks\.0"):
        flat(exact, model, inputs, **options)
    with pytest.raises(RankscopeError):
        flat(decompose, model, inputs, **options)
    if not stream.has_plain_blocks:
        with (
            pytest.raises(UnsupportedOperationError, match=r"blocks\.0 was declared as"),
            flat(operate, model, skip=0.0, inputs=inputs, **options),
        ):
            pass
        with pytest.raises(InputError, match=r"blocks\.0 was declared as"):
            flat(ablate, model, inputs, variants=["pure"], **options)


def test_the_gauge_reads_a_declared_stream_and_refuses_it_undeclared() -> None:
    model, inputs, _, stream = declared_on("channels_first")
    gauge = Gauge(Model(model, stream=stream), inputs, schedule=1, metrics=["relative_residual"], strict=True)
    reading = gauge.step(0)
    assert reading is not None
    expected = DECLARED["channels_first"].twin(model, inputs, WHOLE).relative_residuals()
    assert list(reading.values("relative_residual").values()) == pytest.approx(
        [sum(row) / len(row) for row in expected], rel=1e-6
    )
    with pytest.raises(LayoutError):
        Gauge(model, inputs, schedule=1, strict=True).step(0)


def test_a_wrong_declaration_is_refused_too() -> None:
    model, ids = net(), given(3, 12)
    for wrong in ("batch dim tokens", "tokens batch dim", "dim batch tokens"):
        with pytest.raises(LayoutError, match=r"Stream\('batch tokens dim'\)"):
            measure(Model(model, blocks="blocks.*", stream=wrong), ids)
    with pytest.raises(LayoutError, match=r"blocks.1 takes is the sum"):
        measure(Model(model, stream=Stream(skips="around")), ids)
    with pytest.raises(RankscopeError, match=r"without the tensors that stream=Stream\(slot='sum'\) asks for"):
        measure(Model(model, blocks="blocks.*", stream=Stream(slot="sum")), ids)


def test_as_many_global_tokens_as_tokens_are_no_second_stream() -> None:
    run = measure("init:tiny-pegasus-x", Inputs(sequences=4, tokens=4), metrics=["relative_residual"])
    assert run.provenance.layout is None


def test_blocks_that_see_some_of_the_tokens_are_refused_unless_declared() -> None:
    class Some(Net):
        def start(self, ids: Tensor) -> Tensor:
            return super().start(ids)[:, ::2]

    with pytest.raises(LayoutError, match="the input has 12 tokens, and only 6 go through the blocks"):
        measure(net(Some), given(3, 12))
    run = measure(Model(net(Some), stream="batch tokens dim"), given(3, 12), metrics=["relative_residual"])
    assert run.provenance.lengths == (6, 6, 6)


class Windowed(Kernel):
    """Among four tokens at a time."""

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        windows = x.unflatten(1, (-1, 4)).flatten(0, 1)
        return super().forward(windows).unflatten(0, (x.shape[0], -1)).flatten(1, 2)


class WindowedBlock(Block):
    def make_attention(self) -> nn.Module:
        return Windowed()


def test_attention_in_windows_is_not_read_as_attention_of_sequences() -> None:
    model, ids = net(Net, WindowedBlock), given(3, 12)
    assert doctor(model, ids).passed
    run = measure(model, ids)
    assert {row["sequence"] for row in run.table.to_pylist()} == {0, 1, 2}
    assert "attention.probs" not in run.table["site"].to_pylist()
    assert any("9 matrices of 4 queries per head for 3 sequences" in note for note in run.notes)


class Pooled(Net):
    """Pairs of tokens become one behind each block; attention does not look at padding."""

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        x, hidden = self.start(ids), attention_mask == 0
        for block in self.blocks:
            x = block(x, hidden[:, None, None]).unflatten(1, (-1, 2)).mean(2)
            hidden = hidden[:, ::2]
        return self.close(x)


def test_padding_that_cannot_be_placed_is_refused() -> None:
    model, whole = net(Pooled), torch.ones(2, 16, dtype=torch.long)
    run = measure(model, {"ids": given(2, 16), "attention_mask": whole}, metrics=["relative_residual"])
    assert run.provenance.lengths == (16, 16)
    padded = whole.clone()
    padded[1, 8:] = 0
    with pytest.raises(InputError, match="padding cannot be left out"):
        measure(model, {"ids": given(2, 16), "attention_mask": padded})


class Class(Net):
    """Puts a token of its own first."""

    def start(self, ids: Tensor) -> Tensor:
        x = super().start(ids)
        return torch.cat([self.embed.weight[:1].expand(x.shape[0], 1, -1), x], dim=1)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(ids)


@pytest.mark.parametrize("padded", [False, True])
def test_padding_behind_a_token_that_the_model_puts_first(padded: bool) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 1 - int(padded)
    inputs = {"ids": given(2, 12), "attention_mask": mask}
    if padded:
        with pytest.raises(InputError, match=r"Token 4 of the input is token 5 of what blocks\.0 takes"):
            measure(net(Class), inputs)
    else:
        assert measure(net(Class), inputs, metrics=["relative_residual"]).provenance.lengths == (13, 13)


def test_padding_of_an_encoder_is_not_taken_for_that_of_a_longer_decoder() -> None:
    model = load("init:tiny-t5").model
    inputs = {"input_ids": given(2, 10), "decoder_input_ids": given(2, 14)}
    assert measure(model, inputs, metrics=["relative_residual"]).table.num_rows > 0
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    with pytest.raises(InputError, match=r"ids of several lengths \(10, 14\)"):
        measure(model, {**inputs, "attention_mask": mask})


def test_operating_on_a_declared_stream_is_the_cut_by_hand_or_refused() -> None:
    model, inputs, _, stream = declared_on("channels_first")
    options: dict[str, Any] = {"inputs": inputs, "stream": stream}
    with torch.no_grad(), flat(operate, model, skip=0.0, **options):
        assert_close(model(inputs), DECLARED["channels_first"].twin(model, inputs, Cut(skip=0.0)).output)
    with (
        pytest.raises(UnsupportedOperationError, match=r"channels of blocks\.0"),
        flat(operate, model, norm="rms", **options),
    ):
        pass


def test_shape_of_an_ordinary_model_in_words() -> None:
    axes = next(claim for claim in doctor(GPT("pre"), own_ids()).claims if claim.about == "axes")
    assert axes.proven_by == "the input, the attention, the blocks' own maps"


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


class JointNet(nn.Module):
    """``swapped``: blocks take the image first and return it last, by name, as in diffusers."""

    def __init__(self, *, swapped: bool = False, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.swapped = nn.Embedding(40, Block.dim), swapped
        self.layers = nn.ModuleList(Joint(swapped=swapped) for _ in range(depth))
        self.seen: dict[str, list[Tensor]] = {"image": [], "text": []}
        drawn(self.double(), 0).eval()

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
    model, ids = JointNet(swapped=swapped), given(3, 7)
    slot = ["image", "text"].index(which) ^ swapped
    if swapped and which == "text":
        with pytest.raises(LayoutError, match=r"continues with slot 1 of the output of layers\.0"):
            measure(model, ids)
        stream = Stream(argument="text")
    else:
        stream = Stream(slot=slot)
    model.seen = {"image": [], "text": []}
    run = measure(Model(model, stream=stream), ids, metrics=["relative_residual"], sites=["block.in", "block.out"])
    entered = model.seen[which][-3:]
    expected = [one.sub(one.mean(1, keepdim=True)).norm(dim=(1, 2)) / one.norm(dim=(1, 2)) for one in entered]
    rows = [row["value"] for row in run.table.to_pylist() if row["site"] == "block.in"]
    assert rows == pytest.approx(torch.stack(expected).flatten().tolist(), rel=1e-12)
    left = [row["value"] for row in run.table.to_pylist() if row["site"] == "block.out"]
    assert left[: len(rows) - 3] == pytest.approx(rows[3:], rel=1e-12)


def test_a_second_stream_is_named_in_a_note() -> None:
    model, ids = JointNet(), given(3, 7)
    (note,) = (note for note in measure(model, ids).notes if "second stream" in note)
    assert "of 4 tokens" in note
    assert "Stream(slot=1)" in note
    assert doctor(model, ids)["second stream"].detail == note
    assert not [note for note in measure(Model(model, stream=Stream(slot=1)), ids).notes if "second stream" in note]


@pytest.mark.parametrize("depth", [1, 3])
def test_an_argument_that_is_not_the_slot_is_refused(depth: int) -> None:
    model, ids = JointNet(depth=depth), given(3, 7)
    with pytest.raises(LayoutError, match="is not what a block returns in slot 1"):
        measure(Model(model, stream=Stream(slot=1, argument=0)), ids)
    with pytest.raises(RankscopeError, match="got no tensor as the argument 'words'"):
        measure(Model(model, stream=Stream(slot=1, argument="words")), ids)


class WithWeights(Block):
    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = super().forward(x)
        return x, (x @ x.transpose(1, 2)).softmax(-1)


class WeightsNet(Net):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        for block in self.blocks:
            x, _ = block(x)
        return x


def test_a_slot_that_no_block_takes_is_refused() -> None:
    with pytest.raises(LayoutError, match="is not what a block returns in slot 1"):
        measure(Model(net(WeightsNet, WithWeights), stream=Stream(slot=1)), given(3, 7))

"""The declaration of a stream: words to axes and back, and what is no declaration."""

from __future__ import annotations

import pytest
import torch

from rankscope.errors import InputError, SiteError
from rankscope.models.stream import Stream, stream_of

PLAIN = torch.arange(2 * 6 * 5.0).reshape(2, 6, 5)
"""Two sequences of six tokens with five channels."""

LAID = {
    "batch tokens dim": PLAIN,
    "tokens batch dim": PLAIN.permute(1, 0, 2),
    "batch dim tokens": PLAIN.permute(0, 2, 1),
    "dim batch tokens": PLAIN.permute(2, 0, 1),
    "(batch tokens) dim": PLAIN.reshape(12, 5),
    "(tokens batch) dim": PLAIN.permute(1, 0, 2).reshape(12, 5),
    "(batch tokens) tokens dim": PLAIN.reshape(2, 3, 2, 5).reshape(6, 2, 5),
}


@pytest.mark.parametrize("axes", LAID)
def test_every_order_of_axes_is_read_and_written_back(axes: str) -> None:
    stream, laid = Stream(axes), LAID[axes]
    assert torch.equal(stream.canonical(laid, 2), PLAIN)
    assert stream.sizes(laid.shape, 2) == (2, 6, 5)
    assert torch.equal(stream.native(PLAIN, laid.shape, 2), laid)


def test_tokens_stand_for_as_many_axes_as_are_left() -> None:
    image = PLAIN.permute(0, 2, 1).reshape(2, 5, 3, 2)
    assert torch.equal(Stream("batch dim tokens").canonical(image), PLAIN)
    assert torch.equal(Stream("batch tokens dim").canonical(PLAIN.reshape(2, 3, 2, 5)), PLAIN)
    assert Stream("batch dim tokens").axis_of("dim", 4) == 1
    assert Stream("batch tokens dim").axis_of("dim", 4) == 3
    assert torch.equal(Stream("batch dim tokens").native(PLAIN, image.shape), image)


@pytest.mark.parametrize(
    ("how", "dim"),
    [("join", torch.cat([PLAIN, 2 * PLAIN], -1)), ("sum", 3 * PLAIN), ("mean", 1.5 * PLAIN), (1, 2 * PLAIN)],
)
def test_several_streams_of_a_token(how: str | int, dim: torch.Tensor) -> None:
    apart = torch.stack([PLAIN, 2 * PLAIN], dim=2)
    assert torch.equal(Stream("batch tokens streams dim", streams=how).canonical(apart), dim)  # type: ignore[arg-type]
    folded = apart.permute(0, 2, 1, 3).reshape(4, 6, 5)
    found = Stream("(batch streams) tokens dim", streams=how)  # type: ignore[arg-type]
    assert torch.equal(found.canonical(folded, 2), dim)
    assert found.sizes(folded.shape, 2) == tuple(dim.shape)


@pytest.mark.parametrize(
    "stream",
    [
        Stream(),
        Stream("batch dim tokens"),
        Stream("( batch   tokens ) dim"),
        Stream(slot="sum"),
        Stream(slot="hidden", skips="around"),
        Stream("batch tokens streams dim", slot=1, streams="mean"),
        Stream("batch tokens streams dim", streams=1),
    ],
)
def test_what_is_written_is_read(stream: Stream) -> None:
    assert Stream.parse(str(stream)) == stream
    assert stream_of(str(stream)) == stream


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("batch channels tokens", "'channels' is not one of batch, tokens, dim, streams"),
        ("batch tokens", "batch and dim once each"),
        ("batch batch tokens dim", "batch and dim once each"),
        ("batch dim", "batch and dim once each"),
        ("batch (tokens dim)", "only batch can share an axis"),
        ("batch-tokens-dim", "expected words such as"),
        ("batch tokens dim place=2", "'place=2' in 'batch tokens dim place=2'"),
        ("batch tokens dim slot=-1", "expected the number of a tensor, from 0"),
        ("batch tokens dim skips=outside", "expected 'inside' or 'around'"),
        ("batch tokens dim streams=sum", "needs an axis of that name"),
        ("batch tokens streams dim streams=max", "expected 'join', 'sum', 'mean'"),
    ],
)
def test_what_is_no_declaration(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Stream.parse(words)


def test_a_declaration_is_a_stream_or_its_text() -> None:
    with pytest.raises(InputError, match=r"stream=3: expected .* rankscope.Stream"):
        stream_of(3)  # type: ignore[arg-type]


def test_a_tensor_of_other_axes_is_refused() -> None:
    with pytest.raises(SiteError, match="2 axes cannot be read as 'batch dim tokens'"):
        Stream("batch dim tokens").canonical(torch.zeros(12, 5))
    with pytest.raises(SiteError, match="streams=2: a token has 2 streams"):
        Stream("batch tokens streams dim", streams=2).canonical(torch.zeros(2, 6, 2, 5))
    with pytest.raises(SiteError, match="in a pass of an unknown number of sequences"):
        Stream("(batch tokens) dim").canonical(torch.zeros(12, 5))
    with pytest.raises(SiteError, match=r"An axis of 12 cannot be read as '\(batch tokens\)' in a pass of 5 sequences"):
        Stream("(batch tokens) dim").canonical(torch.zeros(12, 5), 5)

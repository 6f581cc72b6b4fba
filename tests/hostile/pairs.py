"""Two hostile things at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import rankscope as rs
from tests.hostile.across import Injected, LongSkips, LoopSkip
from tests.hostile.attentions import Kernel, Linear, Sink, Torch, block_with
from tests.hostile.case import ALL, READS, case
from tests.hostile.layouts import ChannelsFirst, Image, Packed, TokensFirst, TupleOut, Wrapped, declared
from tests.hostile.masks import SrcKeyPaddingMask, given, padding
from tests.hostile.norms import Functional, HandWritten, RmsEpsNone, Scaled
from tests.hostile.parts import Block, Net, ids
from tests.hostile.sharing import OneBlock
from tests.hostile.skips import (
    AddcmulOnto,
    Alpha,
    AlphaOne,
    ChannelGain,
    Gated,
    Highway,
    InPlace,
    LearnedScalar,
    Lerp,
    NormAfterBranch,
    ParallelAlpha,
    PositionsBefore,
    PostNorm,
    Sandwich,
    ScalarGain,
    StackSum,
    SubNegative,
)

KernelBlock, TorchBlock, SinkBlock, LinearBlock = (block_with(form) for form in (Kernel, Torch, Sink, Linear))


def both(*blocks: type[Block]) -> type[Block]:
    """One block with the hostile methods of all."""
    return type("And".join(block.__name__ for block in blocks), blocks, {})


def pair(name: str, *blocks: type[Block], **facts: object) -> None:
    case(name, lambda: Net(both(*blocks)), **facts)


class AlphaTuple(TupleOut):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, branch, alpha=1.0)


class MaskedAndTokensFirst(SrcKeyPaddingMask):
    """A padding mask (batch, tokens) beside a stream (tokens, batch, dim)."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.to_tokens = block.from_tokens = self._turn

    def _turn(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)

    def start(self, ids: Tensor) -> Tensor:
        return super().start(ids).transpose(0, 1)

    def close(self, x: Tensor) -> Tensor:
        return super().close(x.transpose(0, 1))


class MaskedAndAlpha(SrcKeyPaddingMask):
    def __init__(self) -> None:
        super().__init__(AlphaOne)


class LongSkipsAlpha(LongSkips):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AlphaOne() for _ in range(4))


class InjectedPostNorm(Injected):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PostNorm()])


class LoopSkipTokensFirst(LoopSkip):
    def start(self, ids: Tensor) -> Tensor:
        return super().start(ids).transpose(0, 1)

    def close(self, x: Tensor) -> Tensor:
        return super().close(x.transpose(0, 1))

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            attention = block.attention
            block.attention = _TurnedAttention(attention)


class _TurnedAttention(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)

    def by_hand(self, *args: object) -> Tensor:
        return self.inner.by_hand(*args)


pair("alpha_and_post_norm", Alpha, PostNorm)
pair("channel_gain_and_post_norm", ChannelGain, PostNorm)
pair("learned_scalar_and_post_norm", LearnedScalar, PostNorm)
pair("gated_and_post_norm", Gated, PostNorm, equal=READS)
pair("sub_negative_and_post_norm", SubNegative, PostNorm)
pair("alpha_and_sandwich", Alpha, Sandwich)
pair("scalar_gain_and_norm_after_branch", ScalarGain, NormAfterBranch)
pair("alpha_and_kernel", AlphaOne, KernelBlock)
pair("gain_and_torch_attention", ChannelGain, TorchBlock)
pair("in_place_and_torch_attention", InPlace, TorchBlock)
pair("alpha_and_hand_written_norm", AlphaOne, HandWritten)
pair("gain_and_rms_eps_none", ScalarGain, RmsEpsNone)
pair("positions_before_and_alpha", PositionsBefore, AlphaOne)
pair("highway_and_sink", Highway, SinkBlock, equal=READS)
pair("lerp_and_linear_attention", Lerp, LinearBlock, equal=frozenset())
pair("stack_sum_and_scale_norm", StackSum, Scaled, equal=frozenset({"doctor", "measure"}))
pair("addcmul_and_kernel", AddcmulOnto, KernelBlock, equal=READS)
pair("functional_norm_and_sink", Functional, SinkBlock, equal=ALL - {"uniform"})
case("alpha_and_tokens_first", lambda: TokensFirst(AlphaOne))
case("gain_and_tokens_first", lambda: TokensFirst(ChannelGain))
case("in_place_and_tokens_first", lambda: TokensFirst(InPlace))
case("parallel_alpha_and_one_block", lambda: OneBlock(ParallelAlpha))
case("gain_and_one_block", lambda: OneBlock(ChannelGain))
case("alpha_and_tuple", lambda: Wrapped(AlphaTuple))
case(
    "alpha_and_channels_first",
    lambda: ChannelsFirst(AlphaOne),
    equal=frozenset(),
    declared=declared("batch dim tokens"),
)
case(
    "scalar_gain_and_image",
    lambda: Image(ScalarGain),
    equal=frozenset(),
    inputs=lambda: ids(2, 6),
    declared=declared("batch dim tokens"),
)
case("lerp_and_packed", lambda: Packed(Lerp), equal=frozenset(), declared=declared("(batch tokens) dim"))
case("masked_and_tokens_first", MaskedAndTokensFirst, equal=READS, inputs=given("src_key_padding_mask", padding))
case("masked_and_alpha", MaskedAndAlpha, inputs=given("src_key_padding_mask", padding))
case("long_skips_and_alpha", LongSkipsAlpha, equal=READS)
case("injected_and_post_norm", InjectedPostNorm, equal=READS)
case(
    "loop_skip_and_tokens_first",
    LoopSkipTokensFirst,
    equal=frozenset(),
    declared={"stream": lambda: rs.Stream("tokens batch dim", skips="around"), "blocks": "blocks.*"},
)

"""Two hostile things at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import rankscope as rs
from tests.hostile.across import Injected, LongSkips, LoopSkip
from tests.hostile.attentions import Kernel, Linear, Sink, Torch, block_with
from tests.hostile.case import ALL, READS, block_case, case
from tests.hostile.layouts import ChannelsFirst, Image, Packed, TokensFirst, TupleOut, Wrapped, declared
from tests.hostile.masks import SrcKeyPaddingMask, given, padding
from tests.hostile.norms import Functional, HandWritten, RmsEpsNone, Scaled
from tests.hostile.parts import Block, ids
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

CORE = {"skip0", "exact"}
put = partial(case, core=CORE)
put_block = partial(block_case, core=CORE)

KernelBlock, TorchBlock, SinkBlock, LinearBlock = (block_with(form) for form in (Kernel, Torch, Sink, Linear))


def both(*blocks: type[Block]) -> type[Block]:
    """One block with the hostile methods of all."""
    return type("And".join(block.__name__ for block in blocks), blocks, {})


def put_pair(name: str, *blocks: type[Block], **facts: object) -> None:
    put_block(name, both(*blocks), **facts)


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


put_pair("alpha_and_post_norm", Alpha, PostNorm)
put_pair("channel_gain_and_post_norm", ChannelGain, PostNorm, equal=READS | {"norm", "uniform"})
put_pair("learned_scalar_and_post_norm", LearnedScalar, PostNorm, equal=READS | {"norm", "uniform"})
put_pair("gated_and_post_norm", Gated, PostNorm, equal=READS)
put_pair("sub_negative_and_post_norm", SubNegative, PostNorm)
put_pair("alpha_and_sandwich", Alpha, Sandwich)
put_pair("scalar_gain_and_norm_after_branch", ScalarGain, NormAfterBranch)
put_pair("alpha_and_kernel", AlphaOne, KernelBlock)
put_pair("gain_and_torch_attention", ChannelGain, TorchBlock)
put_pair("in_place_and_torch_attention", InPlace, TorchBlock)
put_pair("alpha_and_hand_written_norm", AlphaOne, HandWritten)
put_pair("gain_and_rms_eps_none", ScalarGain, RmsEpsNone)
put_pair("positions_before_and_alpha", PositionsBefore, AlphaOne)
put_pair("highway_and_sink", Highway, SinkBlock, equal=READS)
put_pair("lerp_and_linear_attention", Lerp, LinearBlock, equal=frozenset())
put_pair("stack_sum_and_scale_norm", StackSum, Scaled, equal=frozenset({"doctor", "measure"}))
put_pair("addcmul_and_kernel", AddcmulOnto, KernelBlock, equal=READS)
put_pair("functional_norm_and_sink", Functional, SinkBlock, equal=ALL - {"uniform"})
put("alpha_and_tokens_first", lambda: TokensFirst(AlphaOne))
put("gain_and_tokens_first", lambda: TokensFirst(ChannelGain))
put("in_place_and_tokens_first", lambda: TokensFirst(InPlace))
put("parallel_alpha_and_one_block", lambda: OneBlock(ParallelAlpha))
put("gain_and_one_block", lambda: OneBlock(ChannelGain))
put("alpha_and_tuple", lambda: Wrapped(AlphaTuple))
put(
    "alpha_and_channels_first",
    lambda: ChannelsFirst(AlphaOne),
    equal=frozenset(),
    declared=declared("batch dim tokens"),
)
put(
    "scalar_gain_and_image",
    lambda: Image(ScalarGain),
    equal=frozenset(),
    inputs=lambda: ids(2, 6),
    declared=declared("batch dim tokens"),
)
put("lerp_and_packed", lambda: Packed(Lerp), equal=frozenset(), declared=declared("(batch tokens) dim"))
put("masked_and_tokens_first", MaskedAndTokensFirst, equal=READS, inputs=given("src_key_padding_mask", padding))
put("masked_and_alpha", MaskedAndAlpha, inputs=given("src_key_padding_mask", padding))
put("long_skips_and_alpha", LongSkipsAlpha, equal=READS)
put("injected_and_post_norm", InjectedPostNorm, equal=READS)
put(
    "loop_skip_and_tokens_first",
    LoopSkipTokensFirst,
    equal=frozenset(),
    declared={"stream": lambda: rs.Stream("tokens batch dim", skips="around"), "blocks": "blocks.*"},
)

"""The structure of one model: its stacks, blocks and skip adds. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from rankscope.models.stream import Stream

Label = Literal["attention", "cross_attention", "mixer", "mlp", "both"]
Sums = Literal["plain", "any", "joined"]
Response = Literal["alone", "mixes"]


@dataclass(frozen=True)
class BlockPlan:
    """What happens inside one block, in order: its skip adds and its attention calls.

    ``adds`` has one entry for each add onto the stream: the label of its branch, or ``None`` for an add
    that is not a skip (e.g. a position term). ``has_norm`` says whether the stream, or a branch of it, is normalised.
    ``parallel_mlp`` names the module whose output joins the attention branch before both are added at once.
    ``post_norm`` says whether a branch is added to the norm of an earlier sum, instead of to the sum itself.
    ``joins`` marks adds of a parallel branch, one that was not computed from the sum it is added to: the block has one
    skip, where the first of its branches is added.
    ``responses`` says for each add how its branch responded when tokens of the stream were replaced: it changed for
    these tokens ``"alone"``, or it ``"mixes"``; ``None`` if it did not change, so that its label is not proven.
    ``beside`` names a module that acts on tokens alone and is joined with one that mixes them, in a form that is not
    known, before both are added.
    """

    adds: tuple[Label | None, ...]
    attention: tuple[Literal["attention", "cross_attention"], ...]
    has_norm: bool = False
    parallel_mlp: str | None = None
    joins: tuple[bool, ...] = ()
    post_norm: bool = False
    responses: tuple[Response | None, ...] = ()
    beside: str | None = None

    def __post_init__(self) -> None:
        if not self.joins:
            object.__setattr__(self, "joins", (False,) * len(self.adds))

    @property
    def skips(self) -> tuple[Label, ...]:
        """Labels of the genuine skip adds."""
        return tuple(label for label in self.adds if label is not None)

    @property
    def is_proven(self) -> bool:
        """Whether every branch that is not attention was seen to mix tokens, or not to."""
        labelled = zip(self.adds, self.responses, strict=False)
        return not any(label in ("mlp", "both") and response is None for label, response in labelled)


@dataclass(frozen=True)
class BranchParts:
    """What the branches of one block call consist of.

    ``norms`` are the calls of norms that are the block's own though they do not read its stream, in the order of the
    call: the name of the module, or nothing if a function is called, and how many such calls came before. ``inner`` are
    those that are a part of a branch. ``mixing`` names the modules that multiply with weights in branches that mix
    tokens.
    """

    norms: frozenset[tuple[str, int]]
    inner: frozenset[tuple[str, int]]
    mixing: frozenset[str]


@dataclass(frozen=True)
class BlockCall:
    """One call of one module that contains one block, or several in a row if blocks are not modules.

    ``final_norm_inside`` says that the call of a whole stack ends with the stack's final norm. ``softmaxes`` says for
    each softmax over the last axis of its argument whether it is attention. ``parts`` are known once the cuts are
    proven.
    """

    module_name: str
    first_layer: int
    blocks: tuple[BlockPlan, ...]
    final_norm_inside: bool = False
    softmaxes: tuple[bool, ...] = ()
    parts: BranchParts | None = None


@dataclass(frozen=True)
class Carry:
    """An operation that carries the stream around blocks and is not a skip that surgery can edit; or an inline norm.

    Attributes:
        module: qualified name of the module that runs it; empty for the model itself.
        operation: as the author wrote it.
        first: the first block it bypasses, or the block it is in.
        last: the last one.
        calls_begun: for a long skip that surgery can scale, how many block calls have begun when it happens; None for
            everything that it cannot.
    """

    module: str
    operation: str
    first: int
    last: int
    calls_begun: int | None = None

    @property
    def where(self) -> str:
        """Blocks, operation and module in words."""
        blocks = f"block {self.first}" if self.first == self.last else f"blocks {self.first} to {self.last}"
        return f"{blocks}: {self.operation} in {self.module or 'the model itself'}"


@dataclass(frozen=True)
class Stack:
    """A residual stream from its first block to its last.

    Attributes:
        name: ``None`` for the only stack of a model; else ``encoder``, ``decoder``, ``vision``, ...
        calls: the block calls in the order of the forward pass. A module that is shared by all layers
            appears once per call.
        stream: the layout of the stream in the inputs and outputs of the blocks.
        final_norm: qualified name of the norm after the last block, if there is one.
        agrees_with: the evidence that confirms the shape of the stream, in words.
        is_declared: whether the user declared the order of its axes.
        carries: what else carries the stream around its blocks; removing the skips would leave it in place.
        own_norms: norms of the stream that are written out instead of being a norm module or function.
        reads_earlier: blocks that take a combination of what several earlier blocks returned.
        sums: ``"any"`` if its skips are not all written as ``x + f(x)``: computed gains, differences, ...;
            ``"joined"`` if the stream is also concatenated with a branch: ``proj(cat([x, f(x)]))``.
        operators: operators the model called that are not PyTorch's own (``flash_attn::forward``).
        second_streams: what blocks pass on in addition to the stream, with another number of tokens: slot and tokens.
        idle: modules next to its blocks that did not run when the model was probed, as after an early exit.
        reach: to which tokens the first block passes on a change of one token; None if that was not seen.
        cuts_proven: whether it was tested that the known skips and ``carries`` are all there is.
        noise: how two passes in evaluation mode differ, in words, if the model draws random numbers there.
    """

    name: str | None
    calls: tuple[BlockCall, ...]
    stream: Stream
    final_norm: str | None
    agrees_with: tuple[str, ...] = ()
    is_declared: bool = False
    carries: tuple[Carry, ...] = field(default=(), kw_only=True)
    own_norms: tuple[Carry, ...] = field(default=(), kw_only=True)
    reads_earlier: tuple[int, ...] = field(default=(), kw_only=True)
    sums: Sums = field(default="plain", kw_only=True)
    operators: tuple[str, ...] = field(default=(), kw_only=True)
    second_streams: tuple[tuple[int | str, int], ...] = field(default=(), kw_only=True)
    idle: tuple[str, ...] = field(default=(), kw_only=True)
    reach: Literal["later", "earlier", "both", "none"] | None = field(default=None, kw_only=True)
    cuts_proven: bool = field(default=False, kw_only=True)
    noise: str | None = field(default=None, kw_only=True)

    @property
    def depth(self) -> int:
        """Number of blocks, counted by call."""
        return sum(len(call.blocks) for call in self.calls)

    @property
    def layout(self) -> str:
        """The order of axes inside the blocks."""
        return self.stream.axes or "batch tokens dim"

    @property
    def hidden_attention(self) -> tuple[int, ...]:
        """Blocks that show no probabilities where they mix tokens by attention, or in an operator that may be it."""
        mixing = {"attention", "mixer", "both"} if self.operators else {"attention"}
        return tuple(n for n, plan in enumerate(self.plans) if mixing & set(plan.skips) and not plan.attention)

    @property
    def long_skips(self) -> tuple[Carry, ...]:
        """The long skips that surgery can scale, in the order of the forward pass."""
        return tuple(carry for carry in self.carries if carry.calls_begun is not None)

    @property
    def plans(self) -> tuple[BlockPlan, ...]:
        """One plan per block."""
        return tuple(plan for call in self.calls for plan in call.blocks)


@dataclass(frozen=True)
class ModelView:
    """A model and the structure found in it."""

    model: nn.Module
    stacks: tuple[Stack, ...]

    @property
    def depth(self) -> int:
        """Total number of blocks in all stacks."""
        return sum(stack.depth for stack in self.stacks)

    def modules(self) -> Mapping[str, nn.Module]:
        """Every named submodule of the model."""
        return dict(self.model.named_modules())
